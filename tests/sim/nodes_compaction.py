"""Stage ``nodes-compaction``: the stage ``nodes`` with compacted topics, cleaned as they ship.

The cleaner, manifests on leaders and followers, and what a start reads of them are the product's
own. What a node has a worker process do runs on its loop as a job of a thread
(:mod:`tests.sim.passes`): whole, but for a death in the middle of a disk call. Producers write few
keys and delete a lot. :mod:`tests.sim.compaction_checks` judges what replicas show at every step.

Each history has some of these: records that are deleted, by an operator and by
``retention.bytes``, while passes compute and manifests are put into place; manifests that rot on
disk, also under a process that needs them; unclean elections. With one of the last two there are
two replicas, so that one node more than the other replica of a partition can be away.

What works in a directory whose device fails must end (``device-in-pass``). In some the device is
there again at once, as one whose cable is loose: the process that has taken its directory offline
goes on without it, and puts nothing into place there any more (``offline-written``).

At the end of half of the histories one node stays down, once all else is well: the others must lose
every tombstone that there was, and go on; then it returns with its old log (``tombstones``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest import mock
from uuid import UUID

from kept.compaction.manifest.follow_worker import run_here
from kept.node.replicas.manifests.replica import ReplicaManifests
from kept.node.replicas.manifests.workers import ManifestWork
from kept.replication.manifests_events import ApplyAborted, ManifestRef
from kept.storage import layout
from kept.storage.types import TopicPartition
from tests.sim import passes
from tests.sim.compaction_checks import CompactionChecks
from tests.sim.nodes_history import NodesHistory
from tests.sim.nodes_machine import VOTERS, Machine, WatchedProcess
from tests.sim.world import Violation

if TYPE_CHECKING:
    from kept.node.compaction.lazy_cleaner import LazyCleaner
    from kept.node.replicas.local_replica import LocalReplica

KEYS: Final = 8
RETAINED_BYTES: Final = ("6000", "12000", "-1")
ALONE_S: Final = 6.0
"""Longer than a session of a broker."""
ROT_TIMES: Final = 60
BUILD_S: Final = (0.2, 2.0)
"""What the build of a large log takes."""
BEHIND_S: Final = 4.0
"""How long a follower is kept behind the other one, at most."""
BEHIND_TIMES: Final = 3
PASS_FAILS: Final = "device in a pass"
PASS_ENDS_S: Final = 5.0
"""A pass, and work on a manifest, end so soon with the device that they use."""
OFFLINE_S: Final = 3.0
"""How long a directory is looked at that is offline."""
SETTLES_S: Final = 0.5
"""What threads are at when it goes offline ends so soon."""
UNPLACED: Final = (layout.CLEANED, layout.TEMPORARY)
"""Names of what is not in place."""
FORSAKEN_S: Final = 40.0
"""How long the tombstones of a cluster that misses a node may take to go."""


class NodesCompactionHistory(NodesHistory):
    """One seed of stage ``nodes-compaction``."""

    checks: CompactionChecks
    consumers = False
    changes_voters = False
    more = False

    def __init__(
        self,
        seed: int,
        *,
        moves: bool | None = None,
        rots: bool | None = None,
        unclean: bool | None = None,
        forsakes: bool | None = None,
        large: bool | None = None,
        devices: bool | None = None,
        loose: bool | None = None,
        **options: Any,
    ) -> None:
        """``moves`` (log starts do), ``rots``, ``unclean``, ``forsakes``, ``large`` (manifests are
        built as slowly as for large logs), ``devices`` (fail while manifests are worked on),
        ``loose`` (those are there again at once): drawn if None.
        """
        self.devices = devices
        self.loose = Random(f"devices {seed}").random() < 0.5 if loose is None else loose
        super().__init__(seed, **options)
        self.large = False
        self._cuts: dict[tuple[int, TopicPartition], tuple[int, int]] = {}
        if (self.jobs.random() < 0.3) if large is None else large:
            self.loop.job_times |= dict.fromkeys(
                (run_here, passes.do_pass, passes.do_follow), BUILD_S
            )
            self.loop.early_share = 0.5
            self.world.counts["slow builds"] += 1
            self.topic_configs["segment.ms"] = "500"  # each replica rolls in its own time
            self.large = True
        random = self.random
        drawn = random.random() < 0.4, random.random() < 0.3, random.random() < 0.3
        moves = drawn[0] if moves is None else moves
        self.rots = drawn[1] if rots is None else rots
        self.checks.unclean = drawn[2] if unclean is None else unclean
        if self.rots or self.checks.unclean:
            self.replication = 2
            self.topic_configs["min.insync.replicas"] = "1"
        self.settings |= {
            "log.cleaner.backoff.ms": "300",
            "log.retention.check.interval.ms": "700",
        }
        self.topic_configs |= {
            "cleanup.policy": "compact,delete" if moves else "compact",
            "retention.ms": "-1",
            "retention.bytes": random.choice(RETAINED_BYTES) if moves else "-1",
            "unclean.leader.election.enable": str(self.checks.unclean).lower(),
            "segment.bytes": "1024",
            "min.cleanable.dirty.ratio": "0.01",
            "delete.retention.ms": random.choice(("0", "1500")),
            "file.delete.delay.ms": "1000",
        }
        deletes = ["delete records"] if moves else []
        self.operator.kinds = [k for k in self.operator.kinds if k != "delete records"] + deletes
        if self.rots:
            self.faults.kinds += ["rot"] * len(self.faults.kinds)
            self.faults.others["rot"] = self._rot
        if self.devices:
            self.faults.kinds += [PASS_FAILS] * len(self.faults.kinds)
            self.faults.others[PASS_FAILS] = self._break_in_pass
        self.forsakes = random.random() < 0.5 if forsakes is None else forsakes

    def draw_log_dirs(self, trial: str | None) -> int:
        """See :meth:`NodesHistory.draw_log_dirs`."""
        if self.devices is None:
            self.devices = self.jobs.random() < 0.3
        return 2 if self.devices else super().draw_log_dirs(trial)

    def make_checks(self) -> CompactionChecks:
        """See :meth:`NodesHistory.make_checks`."""
        return CompactionChecks(self.world, durable=self.durable)

    def make_records(self, now_ms: int) -> list[tuple[int, bytes | None, bytes | None, Any]]:
        """A few keys, and many that are written in one second and never again."""
        random = self.random
        found: list[tuple[int, bytes | None, bytes | None, Any]] = []
        for _ in range(random.choice((1, 1, 2, 4))):
            self._number += 1
            key = b"%d" % random.randrange(KEYS)
            if random.random() < 0.5:
                key = b"%d at %d" % (random.randrange(KEYS), int(self.loop.time()))
            value = None if random.random() < 0.45 else (b"%d" % self._number).ljust(60, b".")
            found.append((now_ms, key, value, ()))
        return found

    # What the checkers see.

    def state(self, replica: LocalReplica) -> tuple[Any, ...]:
        """See :meth:`NodesHistory.state`."""
        applied = replica.compaction
        return super().state(replica), replica.manifests.busy, id(applied)

    def observe(self, machine: Machine, tp: TopicPartition, replica: LocalReplica | None) -> None:
        """See :meth:`NodesHistory.observe`."""
        if replica is None:
            super().observe(machine, tp, replica)
            return
        observe_compacted(self, self.checks, machine, replica)
        self._check_cut(machine, tp, replica)

    def _check_cut(self, machine: Machine, tp: TopicPartition, replica: LocalReplica) -> None:
        """No log is cut while somebody works on the files of a manifest. Raises Violation."""
        log, manifests = replica.partition.log, replica.manifests
        assert isinstance(manifests, ReplicaManifests)
        key, before = (machine.node_id, tp), self._cuts.get((machine.node_id, tp))
        self._cuts[key] = id(log), log.truncations
        if before is None or before[0] != id(log) or before[1] == log.truncations:
            return
        self.world.counts["logs cut"] += 1
        if any(work.has_turn for work in manifests._works):
            raise Violation(
                "cut-in-use",
                f"n{machine.node_id} {tp} is cut to {log.log_end_offset} while generation "
                f"{manifests.core.applying} is built or put into place",
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See :meth:`NodesHistory.watched`."""
        counts, step, make_base = (
            self.world.counts,
            ReplicaManifests.step,
            ReplicaManifests._make_base,
        )

        def stepped(manifests: ReplicaManifests, event: Any) -> None:
            if isinstance(event, ApplyAborted) and event.missing is not None:
                partition = manifests._partition
                tp, topic_id = partition.topic_partition, partition.topic_id
                self.judge(self.missing, tp, topic_id, event.manifest, event.missing)
            counts[f"manifests: {type(event).__name__}"] += 1
            step(manifests, event)

        async def made_base(manifests: ReplicaManifests, effect: Any, work: ManifestWork) -> None:
            counts["base generations"] += 1
            partition = manifests._partition
            self.checks.bases.setdefault(partition.topic_partition, partition.leader_epoch)
            await make_base(manifests, effect, work)

        with (
            super().watched(),
            passes.passes_run_here(self),
            mock.patch.object(ReplicaManifests, "step", stepped),
            mock.patch.object(ReplicaManifests, "_make_base", made_base),
        ):
            yield

    def missing(self, tp: TopicPartition, topic_id: UUID, ref: ManifestRef, offset: int) -> None:
        """A survivor is not here: only what was given up explains it. Raises Violation."""
        self.world.counts["survivors missing"] += 1
        self.note("checks", "is missing", tp, offset, ref)
        if self.checks.there(tp.topic) and not (
            self.checks.may_miss(tp) or self.checks.had_dropped(tp, topic_id, ref, offset)
        ):
            raise Violation("survivor-missing", f"{tp}: {offset} of generation {ref}")

    # Faults.

    async def suffer(self) -> None:
        """As :meth:`NodesHistory.suffer`; then what takes too many things in a row to be drawn."""
        await super().suffer()
        if self.large and self.replication == VOTERS:
            self.faults.heal()
            await self._undisturbed(self._behind)
        if self.rots or self.checks.unclean:
            self.faults.heal()
            await self._undisturbed(self._alone)

    async def _undisturbed(self, act: Callable[[TopicPartition], Awaitable[None]]) -> None:
        """A partition with a full ISR that no operator moves."""
        kinds, self.operator.kinds = self.operator.kinds, []
        tp = self.random.choice(self.partitions)
        await self.until(
            lambda: not self.operator.busy and self._in_isr(tp, self.replication),
            f"a full ISR of {tp}",
        )
        await act(tp)
        self.operator.kinds = kinds

    async def _behind(self, tp: TopicPartition) -> None:
        """A leader dies while one follower has records that the other one, which leads next, does
        not have, and builds the segments of a manifest: it must cut its log first.
        """
        for _ in range(BEHIND_TIMES):
            state = self.checks.register(tp).state
            assert state is not None
            leader = self.machines[state.leader]
            behind, ahead = (self.machines[i] for i in state.replicas if i != state.leader)
            self.faults.cut(leader, behind, "followers kept behind")
            if await self._applies_ahead(tp, ahead, behind):
                self.world.counts["leaders that died while a follower applied"] += 1
                leader.kill()
            self.loop.network.cuts.clear()
            leader.start()
            await self.until(
                lambda: self._in_isr(tp, self.replication) and all(m.ready for m in self.machines),
                f"a full ISR of {tp} again",
            )

    async def _applies_ahead(self, tp: TopicPartition, ahead: Machine, behind: Machine) -> bool:
        """Whether it soon works on a manifest, and has more than the other one."""
        deadline = self.loop.time() + BEHIND_S
        while self.loop.time() < deadline:
            await asyncio.sleep(0.02)
            self.check()
            if not (tp in ahead.replicas and tp in behind.replicas):
                continue
            mine, theirs = ahead.replicas[tp], behind.replicas[tp]
            longer = mine.partition.log_end_offset > theirs.partition.log_end_offset
            if longer and mine.manifests.core.applying is not None:  # type: ignore[attr-defined]
                return True
        return False

    async def _alone(self, tp: TopicPartition) -> None:
        """A leader is left alone, and goes on cleaning. Then it dies as the other replica returns;
        or it loses what it held, begins anew, and its manifests rot as the other one returns.
        """
        state = self.checks.register(tp).state
        assert state is not None
        leader = self.machines[state.leader]
        (away,) = (self.machines[node_id] for node_id in state.replicas if node_id != state.leader)
        away.kill()
        await asyncio.sleep(ALONE_S)
        self.check()
        if not self._in_isr(tp, 1) or not self._led_by(tp, leader):
            return  # it had lost what it held, and gave up leadership as the other one died
        self.world.counts["leaders left alone"] += 1
        if self.checks.unclean:
            leader.kill()
            away.start()
            await self.until(lambda: self._led_by(tp, away), f"n{away.node_id} leads {tp}")
            return
        await self.until(lambda: self._rot(leader), f"n{leader.node_id} is at rest")
        leader.kill()
        leader.start()
        away.start()
        for _ in range(ROT_TIMES):
            await asyncio.sleep(0.03)
            self._rot(leader)

    def _in_isr(self, tp: TopicPartition, count: int) -> bool:
        state = self.checks.register(tp).state
        moves = state is None or state.adding or state.removing
        return state is not None and not moves and state.leader >= 0 and len(state.isr) == count

    def _led_by(self, tp: TopicPartition, machine: Machine) -> bool:
        state = self.checks.register(tp).state
        return state is not None and state.leader == machine.node_id

    def _break_in_pass(self, _: Machine) -> None:
        """The device of a log directory is gone in which a pass computes, or a manifest is built or
        put into place.
        """
        found = [
            (machine, replica)
            for machine in self.machines
            if machine.ready and not machine.troubled
            for replica in machine.replicas.values()
            if works_on_manifest(replica)
        ]
        if found and not any(machine.troubled for machine in self.machines):
            machine, replica = self.random.choice(found)
            machine.break_device(replica.directory.directory.path)
            self.note("faults", f"n{machine.node_id} loses a device in a pass")
            self.world.counts["devices that failed in a pass"] += 1
            if machine.process is not None and machine.node is not None:
                cleaner = machine.node.parts.cleaner
                self.watch(self._ends_with_its_device(machine, machine.process, cleaner, replica))

    async def _ends_with_its_device(
        self, machine: Machine, process: WatchedProcess, passes: LazyCleaner, replica: LocalReplica
    ) -> None:
        """Nothing goes on for ever that works in a directory whose device is gone: a pass that did
        would have one of the cleaner's threads for itself. Nor is anything put into place there
        once the directory is offline, though the device is back. Raises Violation.
        """
        tp, directory = replica.partition.topic_partition, replica.directory
        in_place = InPlace(machine, directory.directory.path)
        deadline, ended = self.loop.time() + PASS_ENDS_S, False
        machine.watched = True
        try:
            while process.alive and machine.troubled:
                now_s, offline = self.loop.time(), directory.offline is not None
                if self.loose and offline:
                    machine.disk.broken.discard(in_place.path)
                    if changed := in_place.changed(now_s):
                        raise Violation("offline-written", f"n{machine.node_id} {tp}: {changed}")
                cleaner = passes._cleaner
                runs = cleaner is not None and tp in cleaner.running
                if not ended and not runs and not works_on_manifest(replica):
                    self.world.counts["passes that ended with their device"] += 1
                    ended = True
                if ended and (not (self.loose and offline) or in_place.was_seen(now_s)):
                    return
                waits = waits_for_others(replica) and not offline
                if ended or waits or process.stopped:
                    deadline = now_s + PASS_ENDS_S
                if now_s > deadline:
                    raise Violation(
                        "device-in-pass", f"n{machine.node_id} {tp}: a pass outlives its device"
                    )
                await asyncio.sleep(0.05)
        finally:
            machine.watched = False
            self.world.counts["directories that stayed offline"] += in_place.names is not None

    def _rot(self, machine: Machine) -> bool:
        """Manifests are damaged, but for those that a swap needs; False: there may be one."""
        kinds = [layout.HELD_MANIFEST]
        if machine.ready:
            kinds += [layout.PUBLISHED_MANIFEST, layout.MANIFEST_PREFIX]
            for replica in machine.replicas.values():
                core = replica.manifests.core
                if core.applying or core.storing or core.making_base:
                    return False
        self.note("disks", f"manifests of {machine.node_id} rot")
        for path, inode in list(machine.disk.files()):
            used = any(kind in path for kind in kinds) and not path.endswith(layout.TEMPORARY)
            if used and len(inode.data) > 20:
                self.world.counts["manifests damaged"] += 1
                machine.disk.flip_bit(path, self.random.randrange(20, len(inode.data)))
        return True

    # The end.

    async def try_last(self) -> None:
        """One node stays away: tombstones go all the same."""
        if not self.forsakes:
            return
        gone = self.random.choice(self.machines)
        below = {tp: self.checks.register(tp).end for tp in self.partitions}
        self.note("links", f"{gone.node_id} is forsaken")
        gone.kill()
        self.world.counts["nodes forsaken"] += 1
        deadline = self.loop.time() + FORSAKEN_S
        while left := self._tombstones(below):
            self.check()
            if self.loop.time() > deadline:
                raise Violation("tombstones", f"without n{gone.node_id}: {left[:3]}")
            await asyncio.sleep(0.25)
        gone.start()
        since = self.loop.time()
        await self.until(lambda: self.led(since), "all well after the return of one")

    def _tombstones(self, below: dict[TopicPartition, int]) -> list[Any]:
        found: list[Any] = []
        for tp in self.partitions:
            state = self.checks.register(tp).state
            if state is None or state.leader < 0:
                return [f"{tp} is not led"]
            for node_id in state.isr:
                found += self.checks.tombstones(tp, node_id, below[tp])
        return found

    def _in_sync(self) -> bool:
        """The replicas have caught up, and are at one generation."""
        if not super()._in_sync():
            return False
        for tp, register in self.checks.registers.items():
            state = register.state
            if state is None:
                continue
            held = [self.machines[node_id].replicas[tp].compaction for node_id in state.replicas]
            if len({one and one.applied for one in held}) != 1:
                return False
        return True

    async def verify(self) -> None:
        """The checkers have compared all of it."""
        self.world.counts["generations applied"] = self.world.counts["manifests: ApplyCompleted"]


def observe_compacted(
    history: NodesHistory, checks: CompactionChecks, machine: Machine, replica: LocalReplica
) -> None:
    """A replica of a topic of which the cleaner makes passes has changed. Raises Violation."""
    history.world.now_us = int(history.loop.time() * 1e6)
    partition, applied = replica.partition, replica.compaction
    generation = None
    broken = replica.directory.directory.path in machine.disk.broken  # perhaps half way in a swap
    moves = broken or replica.manifests.busy
    if applied is not None and applied.applied is not None and not moves:
        generation = applied.applied, applied.end_offset
    checks.look_at(
        machine.node_id,
        machine.life,
        partition.topic_partition,
        partition.topic_id,
        partition.log,
        partition.high_watermark,
        partition.leader_epoch if partition.core.leading else None,
        generation,
        machine.disk.broken,
    )
    history.check_epoch(machine, partition)


def works_on_manifest(replica: LocalReplica) -> bool:
    """A pass of it is not over, or files of a manifest are built or put into place."""
    manifests = replica.manifests
    assert isinstance(manifests, ReplicaManifests)
    files = manifests._opened_files
    computes = files is not None and files.computing is not None
    return bool(manifests._works) or computes or manifests._pass_outputs is not None


def waits_for_others(replica: LocalReplica) -> bool:
    """What a pass of it made waits until others hold it: no file is used meanwhile."""
    manifests = replica.manifests
    assert isinstance(manifests, ReplicaManifests)
    return manifests._pass_outputs is not None and not manifests._works


class InPlace:
    """What is in place below a path, from soon after it went offline on: what threads were at then
    is over. Names that a start would remove are not.
    """

    def __init__(self, machine: Machine, path: str) -> None:
        self.path = path
        self.names: dict[str, int] | None = None
        """Name -> bytes."""
        self._machine = machine
        self._since_s = -1.0

    def changed(self, now_s: float) -> list[str]:
        """Names that came, went, or are of another size than when this was called before."""
        if self._since_s < 0:
            self._since_s = now_s
        if now_s < self._since_s + SETTLES_S:
            return []
        before, self.names = (
            self.names,
            {
                name: len(inode.data)
                for name, inode in self._machine.disk.files()
                if name.startswith(f"{self.path}/") and not name.endswith(UNPLACED)
            },
        )
        if before is None:
            return []
        return sorted({name for name, _ in before.items() ^ self.names.items()})

    def was_seen(self, now_s: float) -> bool:
        """Whether that was for long enough."""
        return 0 <= self._since_s < now_s - OFFLINE_S
