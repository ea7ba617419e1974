"""The same replicas on real logs: real passes, real manifests in real files, real swaps.

A :class:`RealMachine` does on a :class:`kept.storage.log.log.Log` what the shell of a node will do:
``compaction/manifest/follow.py`` builds, ``apply.py`` swaps and marks, ``manifest_store.py`` keeps
what is held. A crash kills the process and keeps what was written.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kept.compaction.cleaner import log_snapshot, planner
from kept.compaction.cleaner.cleaner_run import discard, run_pass
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import follow, manifest
from kept.compaction.manifest import manifest_store as held
from kept.compaction.manifest.apply import CompactionState
from kept.compaction.manifest.manifest import Manifest
from kept.replication import manifests_events as ev
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition_core import Effects
from kept.storage import layout
from kept.storage.log.log import Log
from kept.storage.records import build_batch, headers, records
from kept.storage.types import Generation, LogConfig
from kept.testing.simulated_disk import SimulatedDisk
from tests.replication.manifests.logs import EMPTY, Rec
from tests.replication.manifests.machine import TOPIC_ID, TP, ApplyJob, Machine
from tests.replication.manifests.world import World

DIRECTORY = "/t-0"
RETENTION_MS = 3_600_000
CONFIG = LogConfig(
    cleanup_policy=frozenset({"compact"}), delete_retention_ms=RETENTION_MS, segment_bytes=400
)


@dataclass(frozen=True, eq=False)
class RealBody:
    """A manifest, named as the cores name it."""

    manifest: Manifest

    @property
    def ref(self) -> ManifestRef:
        generation = self.manifest.generation
        return ManifestRef(generation, self.manifest.end_offset)

    @property
    def end_offset(self) -> int:
        return self.manifest.end_offset

    def __deepcopy__(self, memo: object) -> RealBody:
        return self


@dataclass
class RealJob(ApplyJob):
    built: Any = None
    published: Any = None
    replacement: Any = None


@dataclass
class RealDisk:
    """What :class:`.machine.Disk` tells, read from files."""

    files: SimulatedDisk = field(default_factory=SimulatedDisk)
    machine: Any = None
    batches: list[tuple[Rec, bytes]] | None = None
    held: RealBody | None = None
    applied: RealBody | None = None
    swapping: Any = None

    @property
    def log(self) -> list[Rec]:
        if self.batches is None:
            self.batches = read(self.machine.real)
        return [rec for rec, _ in self.batches]

    @property
    def epochs(self) -> list[tuple[int, int]]:
        return self.machine.real.leader_epochs.entries


def read(log: Log) -> list[tuple[Rec, bytes]]:
    """Every batch, as the histories see it and as it is."""
    found: list[tuple[Rec, bytes]] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        data = log.read_batches(offset, 1 << 20, log.log_end_offset)
        if not data:
            break
        for at, header in headers(data):
            batch = bytes(data[at : at + header.size_bytes])
            rows = list(records(batch))
            key = ord(rows[0].key) - ord("a") if rows else EMPTY
            live = bool(rows) and rows[0].value is not None
            marked = header.has_delete_horizon
            rec = Rec(header.base_offset, header.partition_leader_epoch, key, live, marked)
            found.append((rec, batch))
            offset = header.next_offset
    return found


class RealWorld(World):
    """Replicas on real logs. ``hours`` is what the clock has jumped so far."""

    hours = 0
    two_passes = True

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        super().__init__(machine=RealMachine, **options)


class RealMachine(Machine):
    """See the module."""

    real: Log

    def boot(self) -> None:
        if not isinstance(self.disk, RealDisk):
            self.disk = RealDisk(machine=self)
        files, now_ms = self.disk.files, self.clock
        files.now_ms = now_ms
        state = applying.load_state(DIRECTORY, files)
        self.real = Log.open(
            DIRECTORY, TP, TOPIC_ID, CONFIG, files, now_ms=now_ms,
            unfinished_swap=state.unfinished,
            compacted_to=None if state.applied is None else state.end_offset,
        )  # fmt: skip
        self.state = applying.complete_swap(DIRECTORY, files, state)
        if self.state.applied is not None:
            held.applied(DIRECTORY, files, self.state.applied)
        self.disk.batches = self.disk.swapping = None
        self.refresh()
        super().boot()

    @property
    def clock(self) -> int:
        return 1_700_000_000_000 + self.world.now_ms + self.world.hours * RETENTION_MS

    def refresh(self) -> None:
        """What is held and applied, from the files."""
        files = self.disk.files
        found = held.load(DIRECTORY, files)
        self.disk.held = None if found is None else RealBody(found)
        applied = self.state.applied
        self.disk.applied = (
            None if applied is None else RealBody(held.body(DIRECTORY, files, applied))
        )

    # The log.

    @property
    def log_end_offset(self) -> int:
        return self.real.log_end_offset

    @property
    def latest_epoch(self) -> int:
        latest = self.real.leader_epochs.latest
        return -1 if latest is None else latest

    def own_end_offset(self, epoch: int) -> tuple[int, int] | None:
        return self.real.leader_epochs.end_offset_for(epoch)

    def assign(self, epoch: int, start: int) -> None:
        if self.latest_epoch < epoch:
            self.real.leader_epochs.assign(epoch, start)
            self.real.leader_epochs.save()

    def append(self, rec: Rec) -> None:
        key, value = b"%c" % (ord("a") + rec.key), b"v%d" % rec.offset if rec.live else None
        self.append_fetched(
            build_batch(
                [(self.clock, key, value, ())], base_offset=rec.offset, leader_epoch=rec.epoch
            )
        )

    def append_fetched(self, data: bytes) -> None:
        self.real.append_as_follower(data, self.clock)
        self.real.write()
        if self.world.random.random() < 0.3:
            self.real.roll(self.clock)
        self.disk.batches = None

    def encoded(self, rec: Rec) -> bytes:
        assert self.disk.batches is not None
        return next(batch for known, batch in self.disk.batches if known == rec)

    def cut(self, offset: int) -> None:
        if offset < self.log_end_offset:
            if self.job is not None and self.job.begun:
                self.finish_swap()
            elif self.job is not None:
                self.withdraw()
            self.world.cuts(self, offset)
        self.real.truncate_to(offset)
        self.disk.batches = None
        end = self.log_end_offset
        self.step(ev.Cut(end))

    # Manifests.

    def compute(self, end: int, *, expire: bool) -> Any:
        """A pass of the real cleaner; its outputs go, and are built again from the manifest."""
        self.world.hours += 2 * expire
        log, files = self.real, self.disk.files
        if log.active_segment.size_bytes:
            log.roll(self.clock)
        seen = log_snapshot.view(log, self.state, self.high_watermark)
        plan = planner.plan(seen, self.clock, planner.Limits(), on_demand=True)
        if isinstance(plan, planner.NotNow) or self.job is not None:
            return None
        applied = self.state.applied
        generation = planner.next_generation(applied, self.leader.leader_epoch)
        discard(DIRECTORY, files)
        job = log_snapshot.job_for(
            log, plan, generation, now_ms=self.clock, hash_key=bytes(16), limits=planner.Limits()
        )
        run_pass(job, files)
        path = layout.manifest_file(DIRECTORY, *generation) + layout.TEMPORARY
        found = manifest.decode(path, files.read(path))[0]
        discard(DIRECTORY, files)
        return RealBody(found)

    def base(self, epoch: int, generation: int) -> Any:
        files = self.disk.files
        self.withdraw()
        held.lose(DIRECTORY, files)
        name = Generation(epoch, generation)
        self.state = CompactionState()
        job = log_snapshot.base_job(self.real, name, now_ms=self.clock, limits=planner.Limits())
        result = run_pass(job, files)
        self.state = applying.apply(self.real, result, None, self.clock)
        held.begun(DIRECTORY, files, name)
        self.disk.batches = None
        return RealBody(held.body(DIRECTORY, files, name))

    def move_store(self) -> bool:
        job, self.store = self.store, None
        if job is None:
            return False
        files = self.disk.files
        if job.base:
            return self._base_stored(job.held)
        found = None if job.held is None else job.held.manifest
        told = None if job.told is None else job.told.manifest
        held.store(DIRECTORY, files, found, told)
        self.told = job.told
        self.refresh()
        self.step(ev.Stored(None if job.held is None else job.held.ref))
        return True

    def _base_stored(self, body: RealBody) -> bool:
        self.disk.held = self.disk.applied = body
        self.step(ev.BaseMade(body.ref))
        return True

    def perform(self, effects: Effects) -> None:
        for effect in effects:
            super().perform((effect,))
            if isinstance(effect, ev.Apply):
                assert self.job is not None
                self.job = RealJob(self.job.body)
            elif isinstance(effect, ev.ClearApplied):
                held.clear_applied(DIRECTORY, self.disk.files)
                self.state = CompactionState()
                self.refresh()

    def move_apply(self, at: int) -> bool:
        """Build; publish and prepare; group by group; the mark: one of these at a time."""
        job: Any = self.job
        if job is None:
            return False
        if job.cancelled and not job.begun:
            self.withdraw()
            return self._ended(None)
        if job.built is None:
            return self._build(job)
        files = self.disk.files
        if job.published is None:
            expected = applying.read_mark(DIRECTORY, files)
            job.published = applying.publish(DIRECTORY, files, job.built, expected)
            job.replacement = applying.begin(self.real, job.published)
            job.replacement.prepare()
            return True
        job.begun, self.disk.swapping = True, job
        more = job.replacement.place_next(self.clock)
        self.disk.batches = None
        if not more:
            self._finish(job)
        return True

    def _build(self, job: RealJob) -> bool:
        files = self.disk.files
        discard(DIRECTORY, files)
        previous = None if self.disk.applied is None else self.disk.applied.manifest
        found = follow.job_for(self.real, job.body.manifest, previous, self.clock)
        try:
            job.built = follow.follow(found, files)
        except follow.LogsDiffer as error:
            discard(DIRECTORY, files)
            return self._ended(error.offset)
        return True

    def _ended(self, missing: int | None) -> bool:
        body, self.job = self.job.body, None
        self.step(ev.ApplyEnded(body.ref, missing))
        return True

    def _finish(self, job: RealJob) -> None:
        files = self.disk.files
        job.replacement.finish()
        job.replacement.end()
        self.state = applying.conclude(DIRECTORY, files, job.published)
        held.applied(DIRECTORY, files, job.body.manifest.generation)
        self.job = self.disk.swapping = None
        self.refresh()
        self.real.check_invariants()
        self.world.saw(f"applied as {self.manifests.role.value}")
        self.step(ev.Applied(job.body.ref))

    def withdraw(self) -> None:
        job: Any = self.job
        if job is None or job.begun:
            return
        job.cancelled = True
        if job.published is not None:
            applying.withdraw(DIRECTORY, self.disk.files, job.published, job.replacement)
            job.replacement.end()
        job.built = job.published = job.replacement = None
        discard(DIRECTORY, self.disk.files)

    # Crashes.

    def crash(self) -> None:
        self.up = False
        if not self.disk.log:
            self.disk.batches = []
        self.disk.files = self.disk.files.after_kill()

    def wipe(self) -> None:
        self.disk = RealDisk(machine=self)
