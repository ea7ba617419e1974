"""One replica's manifests in a simulated node: the twin of ``node/manifests``.

The real :class:`kept.replication.manifests.ManifestCore`, real passes, files and swaps on the
simulated disk. What takes long is a generator that yields where other things may happen, each step
some virtual time after the last: a process may die, the role may change, or the log may be cut
between any two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kept.cluster.metadata.records import NO_LEADER, PartitionRecord
from kept.compaction.cleaner.cleaner_run import Result, discard, run_pass
from kept.compaction.cleaner.log_snapshot import base_job, job_for, view
from kept.compaction.cleaner.planner import Limits, NotNow, next_generation, plan
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import follow, follow_worker, manifest, manifest_store
from kept.compaction.manifest.apply import CompactionState
from kept.compaction.manifest.follow import LogsDiffer
from kept.compaction.manifest.manifest import Manifest
from kept.node.replicas.manifests.status import (
    base_name,
    is_alone,
    leads,
    others_apply,
)
from kept.replication import manifests_events as ev
from kept.replication.events import ManifestPublished
from kept.replication.manifests import Role
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition import Partition
from kept.replication.partition_core import PartitionCore
from kept.replication.progress import Follower
from kept.storage import layout
from kept.storage.directory import Checkpoint
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    ReplicaNotAvailable,
)
from kept.storage.types import MAX_INT64
from tests.sim.replicas import CHECKPOINTS, Reply
from tests.sim.world import Violation

if TYPE_CHECKING:
    from tests.sim.compaction import CompactingReplicas

NEVER = MAX_INT64
TOLD_OF = (ev.Stored, ev.PassDone, ev.Applied, ev.BaseMade, ev.Damaged)
"""What a trace shows."""
MANIFEST = "manifest"
"""In the names of all their files."""
RETRY_MS, RETRY_MAX_MS = 100, 2000
REFUSED_MS, BACKOFF_MS = 200, 100
CALL_MS = 1500
GIVE_MS = 3000
Steps = Generator[None, None, Any]


class Withdrawn(KeptError):
    """It is not wanted any more."""


@dataclass
class Work:
    """An apply, or a base, that is under way."""

    steps: Steps
    cancelled: bool = False


@dataclass
class Pass:
    """One that computes."""

    leader_epoch: int
    truncations: int
    begins_at: int
    cancelled: bool = False


@dataclass
class Made:
    """What a pass has left in the directory."""

    ref: ManifestRef
    result: Result
    truncations: int
    begins_at: int


def ref_of(found: Manifest) -> ManifestRef:
    return ManifestRef(found.generation, found.end_offset)


def lacks(core: PartitionCore, replica: int, follower: Follower) -> bool:
    """As ``node/replicas/manifests/news``."""
    known = core.broker_epochs.get(replica, -1)
    about = (follower.held, follower.applied, follower.broker_epoch)
    return about != (core.offered, core.published, known)


class SimManifests:
    """See the module."""

    def __init__(
        self, replicas: CompactingReplicas, partition: Partition, state: CompactionState | None
    ) -> None:
        self.replicas = replicas
        self.node = replicas.node
        self.machine = replicas.machine
        self.world = replicas.world
        self.disk = replicas.machine.disk
        self.partition = partition
        self.tp = partition.topic_partition
        self.state = state
        self.core = partition.core.manifests
        self.bodies: dict[ManifestRef, Manifest] = {}
        self.made: Made | None = None
        self.work: Work | None = None
        self.computing: Pass | None = None
        self.placing = False
        """Some segments are swapped, others not: it is at no generation."""
        self.pulling = self.again = self.closed = self.renew = False
        self.gone = False
        """Its log directory failed."""
        self.cleans, self.waits = self.node.history.cleans(self.machine), False
        self.dawdles = False
        """For scripts: it may begin a pass; what is to be put into place waits; a pass that has
        ended is told of later."""
        self.awaited_end = NEVER
        self.published_ms = 0
        self.failures = 0

    @property
    def directory(self) -> str:
        return self.partition.log.directory

    # What happens to it.

    def step(self, event: ev.Event) -> None:
        if not self.closed:
            if isinstance(event, TOLD_OF):
                self.world.note(self.machine.name, f"{self.tp}:", event)
            self.partition.step(event, self.replicas.now_ms())
            if self.node.history.assertions:
                self.core.check_invariants()

    def lead(self, record: PartitionRecord) -> None:
        core = self.core
        if core.role is not Role.LEADER or core.leader_epoch != record.leader_epoch:
            self._begin()
        event = leads(self.node.image, self.partition, record, core, self.node.node_id)
        self.step(event)
        if core.lost and not core.has_offered and not core.making_base and not event.alone:
            self.replicas.resign(self.tp, record)
        self.announce()

    def follow(self, record: PartitionRecord) -> None:
        core = self.core
        if core.role is not Role.FOLLOWER or core.leader_epoch != record.leader_epoch:
            self._begin()
        self.step(ev.Follows(record.leader_epoch, self.node.node_id in record.isr))

    def _begin(self) -> None:
        self.awaited_end = NEVER
        self.renew = False
        self.made = None
        if self.computing is not None:
            self.computing.cancelled = True
        if self.core.making_base and self.work is not None:
            self.work.cancelled = True

    def fetched(self, leader_epoch: int, agreed: bool) -> None:
        core = self.core
        if core.role is not Role.FOLLOWER or leader_epoch != core.leader_epoch:
            return
        if agreed != core.synced:
            self.step(ev.Synced(leader_epoch, agreed))
            if agreed and (core.held is not None or core.lost):
                self.ask()
        elif self.partition.log_end_offset >= self.awaited_end:
            self.awaited_end = NEVER
            self.ask()

    def check_cut(self) -> None:
        if self.core.storing is None and self.work is None and not self.closed:
            return
        self.world.counts["cuts that waited"] += 1
        if self.work is not None:
            self.work.cancelled = True
        raise ReplicaNotAvailable(f"{self.tp}: the cut waits for a manifest's files")

    # Pulls.

    def ask(self) -> None:
        if self.closed or self.core.role is not Role.FOLLOWER:
            return
        if self.pulling:
            self.again = True
        elif self.partition.leader_id not in (NO_LEADER, self.node.node_id):
            self.pulling = True
            self.machine.after_us(0, self._pull)

    def _pull(self) -> None:
        leader = self.partition.leader_id
        request = None
        if not self.closed and leader != NO_LEADER and self.partition.offline is None:
            request = self.core.pull(
                self.partition.log_end_offset, self.node.lifecycle.broker_epoch
            )
        if request is None:
            self.pulling = self.again = False
            return
        self.machine.network.call(
            self.node.node_id, leader, "pull_manifests",
            (self.tp, self.partition.topic_id, request),
            lambda answer: self._answered(request, answer), CALL_MS,
        )  # fmt: skip

    def _answered(self, request: ev.PullRequest, answer: Any) -> None:
        self.pulling = False
        if self.closed:
            return
        if isinstance(answer, tuple):
            told, bodies = answer
            self._pulled(
                request, told, {r: manifest_store.decode("pulled", d) for r, d in bodies.items()}
            )
        else:
            refused = isinstance(answer, KeptError)
            mine = self.core.in_flight == request
            self.step(ev.PullFailed(request))
            if mine and (not refused or self.core.held is not None or self.core.lost):
                self.machine.after_ms(REFUSED_MS if refused else BACKOFF_MS, self.ask)
        if self.again:
            self.again = False
            self.ask()
        self.replicas.settle(self.tp)

    def _pulled(
        self, asked: ev.PullRequest, answer: ev.PullResponse, bodies: dict[ManifestRef, Manifest]
    ) -> None:
        if asked != self.core.in_flight:
            return
        self.bodies.update(bodies)
        self.step(ev.Pulled(asked, answer))
        core, newest = self.core, answer.held
        waits = answer.published is None and newest is not None and newest != core.applied
        if waits and newest is not None and asked.log_end_offset < newest.end_offset:
            self.awaited_end = newest.end_offset
            if self.partition.log_end_offset >= newest.end_offset:
                self.awaited_end = NEVER
                self.ask()

    def serve_pull(self, request: ev.PullRequest, reply: Reply) -> None:
        """Answer a follower."""
        if self.closed or not self.partition.is_leader:
            reply(NotLeaderOrFollower(f"{self.tp}: not led here"))
            return
        try:
            self.step(ev.PullReceived(request))
        except KeptError as error:
            reply(error)
            return
        answer = self.core.pull_response(request)
        bodies = {}
        for ref in answer.bodies:
            try:
                bodies[ref] = manifest_store.encode(self.body(ref))
            except FileNotFoundError as error:
                raise Violation(
                    "older-needed", f"{self.machine.name} {self.tp}: {ref} is asked for: {error}"
                ) from error
            except MachineError as error:
                self.replicas.give_up(error)
                reply(NotLeaderOrFollower(str(error)))
                return
            except DamagedData as error:
                self._unreadable(ref)
                reply(NotLeaderOrFollower(str(error)))
                return
        reply((answer, bodies))

    def _unreadable(self, ref: ManifestRef) -> None:
        """A manifest was damaged while this process ran (``node/replicas/manifests/replica``)."""
        core = self.core
        record = self.node.image.partition(self.tp.topic, self.tp.partition)
        self.world.counts["manifests lost while in use"] += 1
        if self.closed or ref not in (core.held, core.leader_published, core.published):
            return
        if core.role is not Role.LEADER:
            self.step(ev.Damaged(ref))
            self.ask()
        elif self.renew or (core.may_compute and ref == core.applied):
            self.renew = True
        elif is_alone(self.partition.core, self.node.node_id):
            self.world.counts["lone leaders that begin anew"] += 1
            self.step(ev.Damaged(ref, alone=True))
        elif record is not None and record.isr != (self.node.node_id,):
            self.replicas.resign(self.tp, record)
        else:
            self.failed("apply", None)

    def announce(self) -> None:
        """Tell followers that lack something to ask."""
        core = self.partition.core
        if self.closed or not core.leading or core.offered is None:
            return
        for replica, follower in core.followers.items():
            known = follower.broker_epoch != -1 and replica in core.eligible
            if known and lacks(core, replica, follower):
                self.machine.network.call(
                    self.node.node_id, replica, "manifest_news", self.tp, lambda _: None, CALL_MS
                )

    # What the core wants done.

    def perform(self, effect: Any) -> None:
        if self.closed:
            return
        match effect:
            case ManifestPublished():
                self.published_ms = self.replicas.now_ms()
                self.world.note(self.machine.name, f"{self.tp}:", effect)
                self.announce()
            case ev.AnnounceManifest():
                self.announce()
            case ev.Store():
                self.go(self._store(effect), self._stored(effect))
            case ev.Apply(ref):
                self._start(self._bring(ref), self._applied(ref))
            case ev.CancelApply():
                if self.work is not None:
                    self.work.cancelled = True
            case ev.MakeBase():
                self._begin_base(effect)
            case ev.Discard(ref):
                self.world.counts["passes thrown away"] += 1
                self.bodies.pop(ref, None)
                self.made = None
            case ev.ClearApplied() | ev.MarkLost() as gone:
                forget = (
                    manifest_store.lose
                    if isinstance(gone, ev.MarkLost)
                    else manifest_store.clear_applied
                )
                self.replicas.attempt(partial(forget, self.directory, self.disk))
                self.state, self.partition.applied_end = None, 0
            case ev.ReportMissing(ref, offset):
                self.replicas.missing(self.tp, ref, offset)
            case ev.CutLog(offset):
                self._cut_log(offset)

    def _cut_log(self, offset: int) -> None:
        if self.closed or self.core.missing != offset or self.core.in_isr:
            return
        try:
            self.partition.follower.truncate_to(offset)
        except ReplicaNotAvailable:
            self.machine.after_ms(100, self._cut_log, offset)
        except KafkaStorageError:
            if not self.gone:
                raise
        self.replicas.settle(self.tp)

    # Steps.

    def go(self, steps: Steps, then: Callable[[Any, Exception | None], None]) -> None:
        """Take the steps one by one; errors of the machine end the process."""

        def step() -> None:
            if self.gone:
                return
            work = self.work
            if self.waits and work is not None and work.steps is steps and not work.cancelled:
                self.machine.after_ms(10, step)
                return
            try:
                next(steps)
            except StopIteration as end:
                then(end.value, None)
            except MachineError as error:
                self.replicas.give_up(error)
            except (KafkaStorageError, InvariantViolation):
                raise
            except (KeptError, OSError) as error:
                then(None, error)
            else:
                self.machine.after_us(self.world.between(*self.machine.disk_us), step)
            if self.replicas.partitions.get(self.tp) is self.partition:
                self.replicas.settle(self.tp)

        self.machine.after_us(self.world.between(*self.machine.disk_us), step)

    def _start(self, steps: Steps, then: Callable[[Any, Exception | None], None]) -> None:
        if self.work is not None:
            raise Violation("invariants", f"{self.machine.name} {self.tp}: two applies at once")
        self.work = Work(steps)
        self.go(self.work.steps, then)

    def _begin_base(self, effect: ev.MakeBase) -> None:
        """Once that of an election just before has ended or was withdrawn (``Files.base``)."""
        if self.closed or not (
            self.core.making_base and self.core.leader_epoch == effect.leader_epoch
        ):
            return
        if self.work is None:
            self._start(self._base(effect), self._base_made(effect))
        else:
            self.work.cancelled = True
            self.machine.after_ms(1, self._begin_base, effect)

    def check(self) -> None:
        if self.work is not None and self.work.cancelled:
            raise Withdrawn(f"{self.tp}: not wanted any more")

    def body(self, ref: ManifestRef | None) -> Manifest | None:
        if ref is None or ref in self.bodies:
            return None if ref is None else self.bodies[ref]
        return manifest_store.body(self.directory, self.disk, ref.generation)

    def _store(self, effect: ev.Store) -> Steps:
        yield
        manifest_store.store(
            self.directory, self.disk, self.body(effect.held), self.body(effect.published)
        )
        self.bodies.clear()
        self.world.counts["manifests stored"] += 1

    def _stored(self, effect: ev.Store) -> Callable[[Any, Exception | None], None]:
        def then(_: Any, error: Exception | None) -> None:
            if error is not None:
                self.failed("store", error)
                self.step(ev.StoreFailed())
                return
            self.step(ev.Stored(effect.held))
            self.ask()

        return then

    def _bring(self, ref: ManifestRef) -> Steps:
        """Bring the log to a manifest (``Files.bring``)."""
        log = self.partition.log
        while True:
            result = yield from self._result(ref)
            begins_at = log.segments[0].base_offset
            try:
                return (yield from self._place(result))
            except InvariantViolation:  # retention took the oldest just before
                if log.segments[0].base_offset == begins_at:
                    raise
                self.world.counts["begun anew behind retention"] += 1

    def _result(self, ref: ManifestRef) -> Steps:
        """Outputs of the segments that there are (``Files._result``)."""
        log = self.partition.log
        while True:
            self.check()
            begins_at, made = log.segments[0].base_offset, self.made
            found = None if made is None else (made.ref, made.truncations, made.begins_at)
            if made is not None and found == (ref, log.truncations, begins_at):
                return made.result
            try:
                result = yield from self._build(ref)
            except MachineError:
                raise
            except (KeptError, OSError):
                if log.segments[0].base_offset == begins_at:
                    raise
            else:
                if log.segments[0].base_offset == begins_at:
                    return result

    def _build(self, ref: ManifestRef) -> Steps:
        self._no_pass()
        discard(self.directory, self.disk)
        found = self.body(ref)
        assert found is not None
        self.check()
        job = follow.job_for(self.partition.log, found, None, self.machine.wall_ms)
        yield
        previous = None if self.state is None else self.state.applied
        result = follow_worker.run_here(job, previous, self.disk)
        self.world.counts["manifests built from"] += 1
        yield
        return result

    def _place(self, result: Result) -> Steps:
        """``node/replicas/manifests/placing``."""
        log = self.partition.log
        yield from self._make_durable(result.end_offset)
        kind, home = Checkpoint.HIGH_WATERMARKS, self.replicas.directories.home(self.tp)
        home.write_checkpoints(kind, self.replicas.collect(CHECKPOINTS[kind], home))
        yield
        expected = applying.read_mark(self.directory, self.disk)
        published = applying.publish(self.directory, self.disk, result, expected)
        self.placing = True
        replacement = None
        try:
            yield
            try:
                self.check()
                replacement = applying.begin(log, published)
                yield
                replacement.prepare()
                yield
                self.check()
                more = replacement.place_next(self.machine.wall_ms)
            except (MachineError, GeneratorExit):
                raise
            except Exception:
                self.world.counts["swaps withdrawn"] += 1
                applying.withdraw(self.directory, self.disk, published, replacement)
                raise
            while more:
                yield
                more = replacement.place_next(self.machine.wall_ms)
            yield
            replacement.finish()
            replacement.end()
            replacement = None
            yield
            state = applying.conclude(self.directory, self.disk, published)
            manifest_store.applied(self.directory, self.disk, published.manifest.generation)
            self.world.counts["generations applied"] += 1
            return state
        finally:
            self.placing = False
            if replacement is not None:
                replacement.end()

    def _make_durable(self, end_offset: int) -> Steps:
        log, home = self.partition.log, self.replicas.directories.home(self.tp)
        while True:
            self.check()
            cuts = log.truncations
            ticket = log.flush_ticket(log.active_segment.base_offset)
            if ticket is not None:
                ticket.run()
                yield
                ticket.done()
            point = log.recovery_point
            home.state_recovery_point(self.tp, point)
            yield
            if log.truncations == cuts:
                break
        if point < end_offset:
            raise InvariantViolation(f"{log}: durable to {point}, not to {end_offset}")
        known = self.partition.high_watermark
        if known < end_offset:
            raise InvariantViolation(f"{log}: high watermark {known}, not {end_offset}")

    def _applied(self, ref: ManifestRef) -> Callable[[Any, Exception | None], None]:
        def then(state: CompactionState | None, error: Exception | None) -> None:
            self.work = None
            if error is not None or state is None:
                missing = error.offset if isinstance(error, LogsDiffer) else None
                unreadable = isinstance(error, DamagedData) and MANIFEST in error.path
                if not isinstance(error, Withdrawn) and not unreadable:
                    self.failed("apply", error)
                self.step(ev.ApplyEnded(ref, missing))
                if unreadable:
                    self._unreadable(ref)
                return
            self._in_place(state)
            self.step(ev.Applied(ref))
            self.made = None
            self.ask()

        return then

    def _in_place(self, state: CompactionState) -> None:
        self.state, self.partition.applied_end = state, state.end_offset
        self.failures, self.renew = 0, False

    def _base(self, effect: ev.MakeBase) -> Steps:
        self.check()
        self._no_pass()
        self.replicas.base_begun(self.tp, effect.leader_epoch)
        manifest_store.lose(self.directory, self.disk)
        self.state, self.partition.applied_end = None, 0
        yield
        self.check()
        log = self.partition.log
        discard(self.directory, self.disk)
        job = base_job(
            log, base_name(effect), now_ms=self.machine.wall_ms, limits=Limits()
        )  # fmt: skip
        yield
        result = run_pass(job, self.disk)
        yield
        self.check()
        self._wanted(effect.leader_epoch)
        self.partition.raise_high_watermark(result.end_offset)
        self.world.counts["base generations"] += 1
        state = yield from self._place(result)
        manifest_store.begun(self.directory, self.disk, state.applied)
        return state

    def _wanted(self, epoch: int) -> None:
        if not (self.core.making_base and self.core.leader_epoch == epoch):
            raise Withdrawn(f"{self.tp}: another leader was elected")

    def _base_made(self, effect: ev.MakeBase) -> Callable[[Any, Exception | None], None]:
        name = base_name(effect)

        def then(state: CompactionState | None, error: Exception | None) -> None:
            self.work = None
            if state is None:
                self.failed("base", error)
                return
            self._in_place(state)
            if self.core.making_base and self.core.leader_epoch == name.leader_epoch:
                self.step(ev.BaseMade(ManifestRef(name, state.end_offset)))

        return then

    # Passes of this leader.

    def clean(self) -> None:
        """Begin a pass if one is due (``node/cleaner``)."""
        partition, core = self.partition, self.core
        busy = self.computing is not None or self.closed or self.work is not None
        if (
            busy
            or not self.cleans
            or not partition.is_leader
            or not core.may_compute
            or (
                others_apply(partition.core)
                and self.replicas.now_ms() - self.published_ms < GIVE_MS
            )
        ):
            return
        log, now_ms = partition.log, self.machine.wall_ms
        state = self.state or CompactionState()
        limits = Limits(free_bytes=self.disk.free_bytes(self.directory))
        seen = view(log, state, partition.last_stable_offset)
        due = plan(seen, now_ms, limits, asked=self.renew, renew=self.renew)
        if isinstance(due, NotNow):
            return
        discard(self.directory, self.disk)
        identity = next_generation(state.applied, partition.leader_epoch)
        job = job_for(log, due, identity, now_ms=now_ms, hash_key=bytes(16), limits=limits)
        begins_at = log.segments[0].base_offset
        running = self.computing = Pass(partition.leader_epoch, log.truncations, begins_at)
        based_on = core.applied

        def then(made: tuple[Result, Manifest] | None, error: Exception | None) -> None:
            self.computing = None
            if error is not None or made is None:
                self.world.note(self.machine.name, f"its pass of {self.tp} ended: {error!r}")
                return
            result, found = made
            ref = ref_of(found)
            begins_at = log.segments[0].base_offset
            self.made = Made(ref, result, running.truncations, begins_at)
            self.bodies = {ref: found}
            self.world.counts["passes"] += 1
            self.step(ev.PassDone(ref, running.leader_epoch, based_on))

        self.go(self._compute(job, running), then)

    def _compute(self, job: Any, running: Pass) -> Steps:
        yield
        self._still(running)
        result = run_pass(job, self.disk)
        yield
        self._still(running)
        path = layout.manifest_file(self.directory, *result.generation) + layout.TEMPORARY
        found = manifest.decode(path, self.disk.read(path))[0]
        while self.dawdles:  # a thread reads it, and nobody asks again before the core does
            yield
        return result, found

    def _still(self, running: Pass) -> None:
        partition = self.partition
        same = partition.is_leader and partition.leader_epoch == running.leader_epoch
        if running.cancelled or not same or partition.log.truncations != running.truncations:
            raise Withdrawn(f"{self.tp}: the pass is not wanted any more")
        if partition.log.segments[0].base_offset > running.begins_at:
            self.world.counts["passes behind retention"] += 1
            raise Withdrawn(f"{self.tp}: what it reads was deleted meanwhile")

    def _no_pass(self) -> None:
        if self.computing is not None:
            self.computing.cancelled = True
            self.computing = None

    # Failure and the end.

    def failed(self, what: str, error: Exception | None) -> None:
        self.world.note(self.machine.name, f"{self.tp}: {what} failed: {error!r}")
        self.made = None
        self.failures += 1
        wait_ms = min(RETRY_MS << min(self.failures, 8), RETRY_MAX_MS)
        self.machine.after_ms(wait_ms, self.retry)

    def retry(self) -> None:
        core = self.core
        if self.closed:
            return
        if core.making_base and self.work is None:
            effect = ev.MakeBase(core.leader_epoch, core.replaces)
            self._start(self._base(effect), self._base_made(effect))
        elif core.role is not Role.NONE:
            self.step(ev.Retried())
            self.ask()

    def abandon(self) -> None:
        """Its log directory failed: it is as if the process had ended for it."""
        self.closed = self.gone = True

    def close(self) -> None:
        """What is being put into place is finished or withdrawn, now; nothing is begun any more."""
        work, self.closed = self.work, True
        self._no_pass()
        if work is not None:
            work.cancelled = True
            try:
                for _ in work.steps:
                    pass
            except (MachineError, KafkaStorageError):
                raise
            except (KeptError, OSError) as error:
                self.world.note(self.machine.name, f"{self.tp}: withdrawn at the end: {error!r}")
