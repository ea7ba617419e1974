"""One replica: the three real cores over an abstract log, and the shell that does what they say.

What is durable survives a crash: log, epoch cache, manifests held and applied, and a swap that has
begun (rule 11: a start completes it). Everything slow is a job that the history moves on, so that
anything may happen between its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.replication import follower as fol
from kept.replication import manifests_events as ev
from kept.replication.fetch_messages import PartitionRequest, PartitionResponse
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition_core import Effects
from kept.storage.types import TopicPartition
from tests.replication.manifests import logs
from tests.replication.manifests.logs import Body, Rec, Violation

if TYPE_CHECKING:
    from tests.replication.manifests.world import World

TP = TopicPartition("t", 0)
TOPIC_ID = UUID(int=1)
LAG_MS = 30_000


@dataclass
class ApplyJob:
    body: Body
    begun: bool = False
    """A segment is in place."""
    cancelled: bool = False
    at: int = 0


@dataclass
class StoreJob:
    held: Body | None
    told: Body | None
    base: bool = False
    complete: bool = False


@dataclass
class PassJob:
    body: Body
    leader_epoch: int
    based_on: ManifestRef | None


@dataclass
class Disk:
    """What a crash leaves."""

    log: list[Rec] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    held: Body | None = None
    applied: Body | None = None
    swapping: ApplyJob | None = None
    complete: bool = False
    """It is so for what is held and not applied."""
    damaged: frozenset[int] = frozenset()
    """Offsets of records that an apply finds damaged."""


class Machine:
    """One replica: its cores, its log, and its shell. It is the FollowerLog of its FollowerCore."""

    awaits_flush = False
    log_start_offset = 0

    def __init__(self, world: World, node_id: int) -> None:
        self.world, self.id = world, node_id
        self.disk = Disk()
        self.broker_epoch = 1
        self.up = True
        self.torn = False
        """The file of what it holds is damaged."""
        self.born_epoch = -1
        """Leader epoch of the image when the process started; -1 for the first processes."""
        self.boot()

    def boot(self) -> None:
        disk, world = self.disk, self.world
        if disk.swapping is not None:
            world.saw("crashed in a swap")
            job, disk.swapping = disk.swapping, None
            disk.log = logs.apply(disk.log, job.body, 0, job.body.end_offset)
            self.mark(job.body)
        self.leader: Any = world.leader_core(self.id, LAG_MS)
        self.follower = fol.FollowerCore(self)
        held = None if disk.held is None else disk.held.ref
        applied = None if disk.applied is None else disk.applied.ref
        self.manifests: Any = world.manifest_core(
            self.id, held, applied, lost=self.torn, complete=disk.complete
        )
        if disk.complete:
            world.saw("started complete")
        self.leader.manifests = self.manifests
        if disk.applied is not None:
            self.leader.high_watermark = min(disk.applied.end_offset, self.log_end_offset)
        self.view = -1
        self.told: Body | None = None
        self.store: StoreJob | None = None
        self.job: ApplyJob | None = None
        self.pass_: PassJob | None = None
        self.request: ev.PullRequest | None = None
        self.answer: tuple[ev.PullRequest, ev.PullResponse, dict[Any, Body]] | None = None
        self.old_requests: list[ev.PullRequest] = []

    # FollowerLog.

    @property
    def log_end_offset(self) -> int:
        return logs.log_end(self.disk.log)

    @property
    def high_watermark(self) -> int:
        return self.leader.high_watermark

    @property
    def latest_epoch(self) -> int:
        return self.disk.epochs[-1][0] if self.disk.epochs else -1

    def own_end_offset(self, epoch: int) -> tuple[int, int] | None:
        epochs = self.disk.epochs
        if not epochs or not 0 <= epoch <= epochs[-1][0]:
            return None
        if epoch == epochs[-1][0]:
            return epoch, self.log_end_offset
        higher = next(i for i, entry in enumerate(epochs) if entry[0] > epoch)
        if higher == 0:
            return epoch, epochs[0][1]
        return epochs[higher - 1][0], epochs[higher][1]

    def assign(self, epoch: int, start: int) -> None:
        if self.latest_epoch < epoch:
            kept = [entry for entry in self.disk.epochs if entry[1] < start]
            self.disk.epochs = [*kept, (epoch, start)]

    # Effects.

    def step(self, event: Any) -> None:
        """Step the core, and do what it says."""
        self.did(self.leader.step(event, self.world.now_ms))

    def did(self, effects: Effects) -> None:
        self.leader.check_invariants()
        self.manifests.check_invariants()
        self.perform(effects)
        self.world.committed_by(self)

    def perform(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case ev.StoreManifest(held, told, complete):
                    self.store = StoreJob(self.body(held), self.body(told), complete=complete)
                case ev.ApplyManifest(ref):
                    body = self.body(ref)
                    assert body is not None
                    self.job = ApplyJob(body)
                    if self.world.bug("mark-first"):
                        self.mark(body)
                case ev.CancelApply():
                    self.world.saw("cancelled")
                    if self.job is not None:
                        self.job.cancelled = True
                case ev.CreateBaseGeneration(epoch, replaces):
                    generation = 0 if replaces is None else replaces.generation.number + 1
                    self.store = StoreJob(self.base(epoch, generation), None, base=True)
                    self.disk.held = self.disk.applied = self.told = None
                    self.disk.complete = False
                case ev.ClearApplied():
                    self.disk.applied = None
                case ev.ClearComplete():
                    self.disk.complete = False
                case ev.MarkManifestLost():
                    self.tear()
                case ev.TruncateLog(offset):
                    self.cut(offset)
                case ev.ReportMissing(ref, offset):
                    self.world.missing_survivor(self, ref, offset)
                    if self.world.bug("cut-unasked") and self.id not in self.leader.isr:
                        self.cut(offset)
                case ev.DiscardPass():
                    self.world.saw("discarded")

    def body(self, ref: ManifestRef | None) -> Body | None:
        """A body that is here: nothing else may be stored or applied."""
        if ref is None:
            return None
        here = [self.disk.held, self.disk.applied, self.told]
        if self.pass_ is not None:
            here.append(self.pass_.body)
        if self.answer is not None:
            here += self.answer[2].values()
        for body in here:
            if body is not None and body.ref == ref:
                return body
        raise Violation(f"BODY replica {self.id} has no body of {ref}")

    def base(self, epoch: int, generation: int) -> Any:
        end = self.log_end_offset
        survivors = {rec.offset: logs.as_it_is(rec) for rec in self.disk.log}
        clean_to = end if self.world.bug("base-clean") else 0
        ref = ManifestRef(self.world.generation(epoch, generation), end)
        return Body(ref, generation, end, clean_to, survivors)

    def cut(self, offset: int) -> None:
        """Cut the log; a swap that has begun is completed before (``Replacement.settle``)."""
        if offset < self.log_end_offset:
            if self.job is not None and self.job.begun:
                self.finish_swap()
            self.world.cuts(self, offset)
            self.disk.log = [rec for rec in self.disk.log if rec.offset < offset]
            self.disk.damaged = frozenset(o for o in self.disk.damaged if o < offset)
        end = self.log_end_offset
        self.disk.epochs = [entry for entry in self.disk.epochs if entry[1] < min(offset, end)]
        self.step(ev.TruncationCompleted(end))

    # Jobs.

    def move_store(self) -> bool:
        job, self.store = self.store, None
        if job is None:
            return False
        self.torn = False
        self.disk.held, self.disk.complete = job.held, job.complete
        self.told = job.told
        if job.base:
            self.disk.applied = job.held
            assert job.held is not None
            self.step(ev.BaseGenerationCreated(job.held.ref))
        else:
            self.step(ev.ManifestStored(None if job.held is None else job.held.ref))
        return True

    def move_apply(self, at: int) -> bool:
        """Look for what is missing; then put segments into place up to ``at``; then the mark."""
        job = self.job
        if job is None:
            return False
        if not job.begun:
            if job.cancelled:
                self.job = None
                self.step(ev.ApplyAborted(job.body.ref))
                return True
            missing = self.world.missing_from(self, job.body)
            if missing is not None:
                self.job = None
                self.step(ev.ApplyAborted(job.body.ref, missing))
                return True
            job.begun, self.disk.swapping = True, job
        elif job.at >= job.body.end_offset:
            self.job = self.disk.swapping = None
            self.mark(job.body)
            self.world.saw(f"applied as {self.manifests.role.value}")
            self.step(ev.ApplyCompleted(job.body.ref))
            return True
        job.at = max(job.at + 1, min(at, job.body.end_offset))
        self.disk.log = self.world.swapped(self, job.body, job.at)
        return True

    def finish_swap(self) -> None:
        while self.job is not None and self.job.begun:
            self.move_apply(self.job.body.end_offset)

    def mark(self, body: Body) -> None:
        self.disk.applied = body
        if self.disk.held is not None and self.disk.held.ref == body.ref:
            self.disk.complete = False

    def compute(self, end: int, *, expire: bool) -> Body | None:
        """A pass as leader; None when there is nothing to do."""
        world, applied = self.world, self.disk.applied
        limit = self.log_end_offset if world.bug("beyond-hw") else self.high_watermark
        start = 0 if applied is None else applied.clean_to
        if world.bug("checkpoint-of-held"):
            start = 0 if self.disk.held is None else self.disk.held.clean_to
        end = min(end, limit)
        if end < start or end == 0:
            return None
        lowest = 0 if applied is None or world.bug("b-down") else applied.end_offset
        survivors, removed, b = logs.decide(
            self.disk.log, start, end, lowest, expire=expire, keep_last=not world.bug("last")
        )
        epoch = self.leader.leader_epoch
        generation = 1 + (0 if self.disk.held is None else self.disk.held.generation)
        ref = ManifestRef(world.generation(epoch, generation), b)
        return Body(ref, generation, b, end, survivors, start, removed)

    # Crashes.

    def crash(self) -> None:
        self.up = False
        if self.world.bug("volatile"):
            self.disk.held, self.disk.complete = self.disk.applied, False

    def restart(self) -> None:
        self.up = True
        self.broker_epoch += 1
        self.born_epoch = self.world.image.epoch
        self.boot()

    def wipe(self) -> None:
        self.disk, self.torn = Disk(), False

    def tear(self) -> None:
        self.disk.held = self.disk.applied = None
        self.disk.complete = False
        self.torn = True

    # Fetching.

    def fetch_request(self) -> PartitionRequest:
        return PartitionRequest(
            TP, TOPIC_ID, self.follower.leader_epoch, self.log_end_offset, self.latest_epoch, 0, 1
        )

    def fetched(self, asked: PartitionRequest, answer: PartitionResponse) -> None:
        self.follower_did(self.follower.fetch_completed(asked, answer, self.world.now_ms))
        self.step(ev.DivergenceChecked(asked.leader_epoch, self.follower.agreed))

    def follower_did(self, effects: fol.Effects) -> None:
        for effect in effects:
            match effect:
                case fol.TruncateTo(offset):
                    self.cut(offset)
                case fol.StartAt():
                    raise Violation("START log starts do not move here")
                case fol.AppendBatches(records, high_watermark, _):
                    if records:
                        self.append_fetched(bytes(records))
                    known = min(high_watermark, self.log_end_offset)
                    self.leader.high_watermark = max(self.leader.high_watermark, known)
                case _:
                    pass

    def encoded(self, rec: Rec) -> bytes:
        """What a follower fetches."""
        return rec.encode()

    def append_fetched(self, data: bytes) -> None:
        self.append(Rec.decode(data))

    def append(self, rec: Rec) -> None:
        assert rec.offset >= self.log_end_offset
        self.disk.log = [*self.disk.log, rec]
        self.assign(rec.epoch, rec.offset)
