"""One replica's manifests: what :class:`kept.replication.partition_core.PartitionCore` wants done.

All that happens to it goes in by :meth:`ReplicaManifests.step`, on the loop, in the order in which
it happened: roles, fetch answers, pulls, passes. What the core wants comes back by
:meth:`ReplicaManifests.perform`, within the same call. It blocks, so it runs in the directory's
threads and in worker processes, one store and one apply at a time; until both are done no cut of
the log goes ahead (the fetcher tries again), and the core lets elections wait. Work that waits for
that of other logs keeps nobody waiting: a cut, an election and the end cancel it at once.

The leader of a partition applies what its own pass left; everybody else, and a leader that finishes
what it held at a start, builds from the manifest (:mod:`kept.compaction.manifest.follow`). Nothing
of ``kept.compaction`` is imported before there is a manifest.

Long because what is stored, applied and cut for one replica is begun, awaited and given up in one
place: each looks at what the others have under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kept.node.replicas.manifests.errors import ManifestUnreadable, missing_offset
from kept.node.replicas.manifests.retry import RetrySchedule
from kept.node.replicas.manifests.status import (
    APPLY_MS,
    APPLY_PASSES,
    awaited_replicas,
    base_name,
    generation_text,
    is_alone,
    others_apply,
    started_leading,
)
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.replication import manifests_events as ev
from kept.replication.events import ManifestPublished
from kept.replication.follower import NO_LEADER
from kept.replication.manifests import ManifestRole
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import (
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    ReplicaNotAvailable,
    is_bug,
    is_device_error,
)
from kept.storage.types import MAX_INT64

if TYPE_CHECKING:
    from kept.cluster.metadata.records import PartitionRecord
    from kept.compaction.cleaner.cleaner_run import Result
    from kept.compaction.manifest.apply import CompactionState
    from kept.compaction.manifest.manifest import Manifest
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.manifests.context import ManifestContext
    from kept.node.replicas.manifests.store import ManifestFiles, PassOutputs
    from kept.node.replicas.manifests.workers import ManifestWork

NEVER: Final = MAX_INT64
DAMAGED: Final = "what this replica held is damaged: another one is to lead"
LACKS_A_RECORD: Final = "a record that survives is missing here: another one is to lead"


class ReplicaManifests:
    """Performs what the core decides about one replica's manifests. ``retry_schedule`` says what
    fails.
    """

    __slots__ = (
        "_awaited_end",
        "_closed",
        "_context",
        "_hosted",
        "_opened_files",
        "_partition",
        "_pass_began_ms",
        "_pass_ms",
        "_pass_outputs",
        "_published_ms",
        "_tasks",
        "_works",
        "core",
        "renew",
        "retry_schedule",
    )

    def __init__(self, context: ManifestContext, hosted: LocalReplica) -> None:
        self._context = context
        self._hosted = hosted
        self._partition = hosted.partition
        self.core = self._partition.core.manifests
        self.retry_schedule = RetrySchedule(
            context.runtime, context.counters, self._partition.topic_partition, self.retry
        )
        self._published_ms = self._pass_began_ms = self._pass_ms = 0
        """When something was last published here, by the monotonic clock, and how long the pass of
        it took."""
        self.renew = False
        """The manifest that this leader has applied cannot be read: a pass is to make another."""
        self._opened_files: ManifestFiles | None = None
        self._pass_outputs: PassOutputs | None = None
        self._works: set[ManifestWork] = set()
        """What is being built or put into place, or waits for its turn."""
        self._tasks = TaskOwner(context.runtime.loop)
        self._closed = False
        self._awaited_end = NEVER
        """Ask again once the log reaches this: what is published ends there."""

    def __repr__(self) -> str:
        return f"ReplicaManifests({self._partition.topic_partition}, {self.core})"

    @property
    def busy(self) -> bool:
        """Files are being put into place: what is on disk is at no generation."""
        return self._opened_files is not None and self._opened_files.placing

    # What happens to it.

    def step(self, event: ev.Event) -> None:
        """Something happened: step the partition, which has done what follows."""
        if not self._closed:
            self._partition.step(event, monotonic_ms())

    def lead(self, record: PartitionRecord) -> None:
        """This node leads; goes with the election in the same turn."""
        core = self.core
        new = core.role is not ManifestRole.LEADER or core.leader_epoch != record.leader_epoch
        if new:
            self._begin()
        event = started_leading(
            self._context.metadata.image,
            self._partition,
            record,
            core,
            self._context.identity.node_id,
        )
        self.step(event)
        self.resign_if_lost(record)
        if core.held is not None:
            self._announce()

    def resign_if_lost(self, record: PartitionRecord) -> None:
        """Have another one lead, while this leader cannot read what it held and is not alone."""
        core, alone = self.core, record.isr == (self._context.identity.node_id,)
        if core.lost and not core.has_offered and not core.making_base and not alone:
            self._resign(record, DAMAGED)

    def _resign(self, record: PartitionRecord, why: str) -> None:
        """What it held cannot be read, and may have been published, or cannot be applied: another
        one should lead.
        """
        tp = self._partition.topic_partition
        log.error(why, topic=tp.topic, partition=tp.partition)
        self._context.alter_partition.resign(tp, record)

    def follow(self, record: PartitionRecord) -> None:
        """Another node leads, or none; or the ISR changed."""
        core = self.core
        if core.role is not ManifestRole.FOLLOWER or core.leader_epoch != record.leader_epoch:
            self._begin()
        self.step(ev.StartedFollowing(record.leader_epoch))

    def _begin(self) -> None:
        """Another epoch or role: a pass for the old one is thrown away."""
        self._awaited_end = NEVER
        self.renew = False
        self._reject(NotLeaderOrFollower(f"{self._partition}: leadership changed meanwhile"))
        if self._opened_files is not None and self._opened_files.computing is not None:
            self._opened_files.computing.work.cancel()
        if self.core.making_base:
            self._cancel_work()

    def fetched(self, leader_epoch: int, agreed: bool) -> None:
        """An answer to a fetch was acted on."""
        core = self.core
        if core.role is not ManifestRole.FOLLOWER or leader_epoch != core.leader_epoch:
            return
        if agreed != core.synced:
            self.step(ev.DivergenceChecked(leader_epoch, agreed))
            if agreed and (core.held is not None or core.lost):
                self.schedule_pull()
        elif self._partition.log_end_offset >= self._awaited_end:
            self._awaited_end = NEVER
            self.schedule_pull()

    def check_cut(self) -> None:
        """Raises ReplicaNotAvailable while files are worked on that a cut would change, and once
        nothing would take note of the cut any more.
        """
        self._cancel_work()
        in_use = any(work.has_turn for work in self._works)
        if self.core.storing is None and not in_use and not self._closed:
            return
        raise ReplicaNotAvailable(
            f"{self._partition.topic_partition.place}: the cut waits for a manifest's files"
        )

    def schedule_pull(self) -> None:
        """Pull from the leader that is followed."""
        if self.core.role is ManifestRole.FOLLOWER and not self._closed:
            self._context.replicator.schedule(self._hosted)

    def _announce(self) -> None:
        """Tell the followers that there is news."""
        if not self._closed:
            self._context.notifier.announce(self._hosted)

    # Pulls.

    def start_pull(self) -> ev.PullRequest | None:
        """What to ask the leader."""
        partition = self._partition
        if self._closed or partition.leader_id == NO_LEADER or partition.offline is not None:
            return None
        return self.core.start_pull(partition.log_end_offset, self._context.identity.broker_epoch)

    def receive_pull_response(
        self,
        request: ev.PullRequest,
        response: ev.PullResponse,
        bodies: dict[ManifestRef, Manifest],
    ) -> None:
        """The leader responded; ``bodies`` came with it."""
        core, held = self.core, response.held
        if request != core.in_flight:
            return
        if bodies:
            self._files.bodies.update(bodies)
        self.step(ev.PullResponseReceived(request, response))
        if response.published is not None or held is None or held == core.applied:
            return
        if request.log_end_offset < held.end_offset:
            self._awaited_end = held.end_offset
            if self._partition.log_end_offset >= held.end_offset:
                self._awaited_end = NEVER
                self.schedule_pull()

    def receive_pull(self, request: ev.PullRequest) -> ev.PullResponse:
        """Answer a follower. Raises NotLeaderOrFollower, FencedLeaderEpoch, UnknownLeaderEpoch."""
        if self._closed or not self._partition.is_leader:
            raise NotLeaderOrFollower(f"{self._partition}: this node does not lead it")
        self.step(ev.PullRequestReceived(request))
        return self._partition.core.pull_response(request)

    async def encoded(self, ref: ManifestRef) -> bytes:
        """A manifest that is here, as it travels. Raises ManifestUnreadable, MachineError."""
        try:
            return await self._files.encoded(ref)
        except ManifestUnreadable as error:
            self._unreadable(ref, error)
            raise

    def _unreadable(self, ref: ManifestRef, error: ManifestUnreadable) -> None:
        """A manifest is damaged on disk: a follower has it sent once more; a leader makes another
        one, or lets somebody lead who can read it.
        """
        core, tp = self.core, self._partition.topic_partition
        if self._closed or ref not in (core.held, core.leader_published, core.published):
            return  # it was replaced meanwhile
        if not self.renew:
            log.error(
                "manifest given up",
                topic=tp.topic,
                partition=tp.partition,
                generation=generation_text(ref),
                error=str(error),
            )
        record = self._context.metadata.image.partition(tp.topic, tp.partition)
        if core.role is not ManifestRole.LEADER:
            self.step(ev.ManifestDamaged(ref))
            self.schedule_pull()
        elif self.renew or (core.may_compute and ref == core.applied):
            self.renew = True
            self._context.scheduler.renew(tp)
        elif is_alone(self._partition.core, self._context.identity.node_id):
            self.step(ev.ManifestDamaged(ref, alone=True))
        elif record is not None and record.isr != (self._context.identity.node_id,):
            self._resign(record, DAMAGED)
        else:
            self.retry_schedule.failed("manifest not applied", generation_text(ref), error)

    # What the core wants done.

    def perform(self, effect: ManifestPublished | ev.Effect) -> None:
        """Do it, or begin to; nothing once it is closed."""
        if self._closed:
            return
        match effect:
            case ManifestPublished():
                self._published_ms = monotonic_ms()
                self._announce()
            case ev.AnnounceManifest():
                self._announce()
            case ev.StoreManifest():
                self._tasks.spawn(self._store(effect))
            case ev.ApplyManifest(ref):
                self._tasks.spawn(self._apply(ref, self._begin_work()))
            case ev.CancelApply():
                self._cancel_work()
            case ev.CreateBaseGeneration():
                self._tasks.spawn(self._make_base(effect, self._begin_work()))
            case ev.DiscardPass(ref):
                self._discarded(ref)
            case ev.ClearApplied():
                self._forget_applied(self._files.clear_applied)
            case ev.ClearComplete():
                self._change(self._files.clear_complete)
            case ev.MarkManifestLost():
                self._forget_applied(self._files.mark_lost)
            case ev.ReportMissing(ref, offset):
                adopted = self._hosted.directory.directory.adopted
                self.retry_schedule.record_missing(
                    generation_text(ref), offset, epoch=self.core.leader_epoch, adopted=adopted
                )
                self.schedule_pull()
            case ev.TruncateLog(offset):
                self._cut_log(offset)

    def _forget_applied(self, change: Callable[[], None]) -> None:
        """Nothing is applied any more."""
        self._change(change)
        self._hosted.compaction = None
        self._partition.applied_end = 0

    def _change(self, change: Callable[[], None]) -> None:
        """Blocks; no file is in use (:meth:`check_cut`). A want of descriptors fails the directory,
        too: the log is cut, and a start would take what is appended next for what was applied.
        """
        try:
            change()
        except MachineError as error:
            self._context.failures.fail(self._hosted.directory, error.as_failure())

    def _cut_log(self, offset: int) -> None:
        """A cut that has to wait for the log's files is tried again with the next pull, one that
        fails after longer and longer waits.
        """
        if self.retry_schedule.retry_at_ms is not None:
            return
        try:
            self._partition.follower.cut_to_fetch_again(offset)
        except ReplicaNotAvailable as error:
            log.debug("log not cut yet", why=str(error))
        except KeptError as error:
            if is_bug(error):
                raise
            self._failed("log not cut", self.core.held, error)
        else:
            self._context.fetchers.nudge(self._partition.topic_partition)

    # Storing.

    @property
    def _files(self) -> ManifestFiles:
        """The files; with the first manifest they are imported."""
        if self._opened_files is None:
            from kept.node.replicas.manifests.store import ManifestFiles

            self._opened_files = ManifestFiles(self._context, self._hosted)
        return self._opened_files

    async def _store(self, effect: ev.StoreManifest) -> None:
        try:
            await self._files.store(effect.held, effect.published, complete=effect.complete)
        # A bug of ours must not leave the core waiting.
        except Exception as error:  # noqa: BLE001
            if is_bug(error):
                log.exception("manifest not stored", error)
            self._failed("manifest not stored", effect.held, error)
            self.step(ev.ManifestStoreFailed())
            return
        self.step(ev.ManifestStored(effect.held))
        self.schedule_pull()

    # Applying.

    def _begin_work(self) -> ManifestWork:
        from kept.node.replicas.manifests.workers import ManifestWork

        work = ManifestWork()
        self._works.add(work)
        return work

    def _cancel_work(self) -> None:
        for work in self._works:
            work.cancel()

    async def _apply(self, ref: ManifestRef, work: ManifestWork) -> None:
        missing: int | None = None
        superseded = False
        """Newer manifests were stored in its place while it waited for its turn."""
        unreadable: ManifestUnreadable | None = None
        state: CompactionState | None = None
        try:
            state = await self._files.apply(work, ref, self._pass_outputs)
        except ManifestUnreadable as error:
            superseded = ref not in (
                self.core.held,
                self.core.leader_published,
                self.core.published,
            )
            unreadable = None if superseded else error
        # A bug of ours must not leave the core waiting.
        except Exception as error:  # noqa: BLE001
            missing = missing_offset(error)
            self._stopped(work, "manifest not applied", ref, error)
        self._works.discard(work)
        if state is None:
            self.step(ev.ApplyAborted(ref, missing))
            if superseded:
                self.step(ev.RetryTriggered())
            elif unreadable is not None:
                self._unreadable(ref, unreadable)
            elif missing is not None and self.core.role is ManifestRole.LEADER:
                self._leader_lacks(ref, missing)
            return
        self._in_place(state)
        self.step(ev.ApplyCompleted(ref))
        outputs, self._pass_outputs = self._pass_outputs, None
        if outputs is not None and not outputs.outcome.done():
            outputs.outcome.set_result(None)
        self.schedule_pull()
        self._context.scheduler.generation_applied(self._partition.topic_partition)
        try:
            await self._files.checkpoint_cleaned()
        except KeptError as error:
            self._failed("cleaner checkpoint not written", None, error)

    def _leader_lacks(self, ref: ManifestRef, offset: int) -> None:
        """A record that survives is not in this leader's log. Another member has it: that one is to
        lead, and this replica fetches it. Without one it is tried on, for somebody may put the file
        back, or a replica that is away return.
        """
        tp = self._partition.topic_partition
        record = self._context.metadata.image.partition(tp.topic, tp.partition)
        if record is not None and record.isr != (self._context.identity.node_id,):
            self._resign(record, LACKS_A_RECORD)
        else:
            self.retry_schedule.record_missing_everywhere(
                generation_text(ref), offset, epoch=self.core.leader_epoch
            )

    def _stopped(
        self, work: ManifestWork, what: str, ref: ManifestRef | None, error: BaseException
    ) -> None:
        """It was withdrawn, or it failed."""
        if is_bug(error) and not work.cancelled:
            log.exception(what, error)
        if work.cancelled and not isinstance(error, MachineError):
            self._reject(error)
        else:
            self._failed(what, ref, error)

    def _in_place(self, state: CompactionState) -> None:
        self.renew = False
        self._hosted.compaction = state
        self._partition.applied_end = state.end_offset
        self.retry_schedule.reset()

    # A base generation (rule 19).

    async def _make_base(self, effect: ev.CreateBaseGeneration, work: ManifestWork) -> None:
        name = base_name(effect)

        def still_wanted() -> bool:
            core = self.core
            return core.making_base and core.leader_epoch == name.leader_epoch and not self._closed

        state: CompactionState | None = None
        try:
            state = await self._files.create_base(work, name, still_wanted)
        # A bug of ours must not leave the core waiting.
        except Exception as error:  # noqa: BLE001
            self._stopped(work, "base generation not made", None, error)
        self._works.discard(work)
        if state is not None:
            self._in_place(state)
            if still_wanted():
                self.step(ev.BaseGenerationCreated(ManifestRef(name, state.end_offset)))
            self._context.scheduler.generation_applied(self._partition.topic_partition)

    # Passes of this leader.

    @property
    def pass_blocked_by(self) -> str | None:
        """Why no pass may begin; None when one may."""
        core, partition = self.core, self._partition.core
        if core.may_compute:
            return (
                f"it waits for {awaited_replicas(partition)}" if partition.lacks_members else None
            )
        if self.retry_schedule.reason:
            return self.retry_schedule.reason
        if core.role is not ManifestRole.LEADER:
            return "this node does not lead the partition"
        if core.lost:
            return DAMAGED
        if core.making_base:
            return "the base generation after an unclean election is being made"
        if core.applying is not None:
            return f"generation {generation_text(core.applying)} is being applied"
        newest = core.held if core.storing is None else core.storing.held
        return (
            f"generation {generation_text(newest)} is not published yet: it waits for "
            f"{awaited_replicas(partition)}"
        )

    @property
    def pass_expected(self) -> bool:
        """A pass may begin soon: what keeps it is under way here or at the other replicas."""
        core = self.core
        blocked = not core.may_compute or self._partition.core.lacks_members
        return core.role is ManifestRole.LEADER and blocked and not core.lost

    def waits_for_appliers(self, *, overdue: bool = False) -> bool:
        """Replicas that are there still apply what was published last: a newer generation would
        keep those that take longer than a pass out of the ISR. Not for ever; an ``overdue`` pass
        waits no longer than the records of it may (``max.compaction.lag.ms``).
        """
        allowed_ms = max(APPLY_MS, APPLY_PASSES * self._pass_ms)
        if overdue:
            allowed_ms = min(allowed_ms, self._partition.config.max_compaction_lag_ms)
        passed_ms = monotonic_ms() - self._published_ms
        return others_apply(self._partition.core) and passed_ms < allowed_ms

    def begin_pass(self, work: ManifestWork) -> None:
        """A pass computes from now on, in worker ``work``. Raises NotLeaderOrFollower."""
        if not self.core.may_compute or self._closed:
            raise NotLeaderOrFollower(
                f"{self._partition}: {self.pass_blocked_by or 'it is closed'}"
            )
        self._pass_began_ms = monotonic_ms()
        self._files.begin_pass(work)

    def end_pass(self) -> None:
        """It computes no more."""
        self._files.end_pass()

    async def pass_completed(
        self, result: Result, leader_epoch: int, based_on: ManifestRef | None, truncations: int
    ) -> None:
        """A pass left its outputs: offer its manifest; done when it is applied here.

        Raises DamagedData, MachineError, NotLeaderOrFollower, Withdrawn: it came to nothing.
        """
        begins_at = self._partition.log.segments[0].base_offset  # retention may take it meanwhile
        try:
            new = await self._files.read_pass_manifest(result)
        except FileNotFoundError:
            if self._closed:  # its topic was deleted meanwhile
                raise NotLeaderOrFollower(f"{self._partition}: it is closed") from None
            raise
        self.end_pass()
        self._pass_ms = monotonic_ms() - self._pass_began_ms
        if self._closed:
            raise NotLeaderOrFollower(f"{self._partition}: it is closed")
        before = None if based_on is None else based_on.generation
        self._pass_outputs = outputs = self._files.stage_outputs(
            new, result, before, truncations=truncations, begins_at=begins_at
        )
        self.step(ev.PassCompleted(outputs.ref, leader_epoch, based_on))
        await outputs.outcome

    def _discarded(self, ref: ManifestRef) -> None:
        """Its files go with the next pass."""
        self._files.bodies.pop(ref, None)
        self._reject(NotLeaderOrFollower(f"{self._partition}: leadership changed meanwhile"))

    def _reject(self, error: BaseException) -> bool:
        """A pass of this leader came to nothing; False: nobody waits for one."""
        outputs, self._pass_outputs = self._pass_outputs, None
        if outputs is None or outputs.outcome.done():
            return False
        outputs.outcome.set_exception(error)
        return True

    # Failure.

    def _failed(self, what: str, ref: ManifestRef | None, error: BaseException) -> None:
        """Say so, and try again later; a disk that fails takes its directory offline. What a check
        has stopped waits for :meth:`retry`.
        """
        heard = self._reject(error)
        if is_device_error(error):
            if not heard:
                self._context.failures.fail(self._hosted.directory, error)
            return
        if self._closed:
            return
        self.retry_schedule.failed(what, generation_text(ref), error)

    def retry(self) -> bool:
        """Try again what failed, without waiting any longer; False: nothing had."""
        retry_schedule = self.retry_schedule
        if not retry_schedule.count or self._closed:
            return False
        retry_schedule.cancel()
        core = self.core
        if core.making_base and not self._works:
            effect = ev.CreateBaseGeneration(core.leader_epoch, core.replaces)
            self._tasks.spawn(self._make_base(effect, self._begin_work()))
        elif core.role is not ManifestRole.NONE:
            self.step(ev.RetryTriggered())
            self.schedule_pull()
        return True

    # The end.

    def abandon(self) -> None:
        """Nothing is begun any more; what is being put into place is finished or withdrawn."""
        self._closed = True
        self.retry_schedule.reset()
        self._cancel_work()
        self._reject(NotLeaderOrFollower(f"{self._partition}: it is closed"))

    async def close(self) -> None:
        """As :meth:`abandon`; done when no file is worked on."""
        self.abandon()
        await self._tasks.finish()
