"""What one replica's manifests are on disk, and the slow work on them.

Everything here blocks or takes long, so it runs in the directory's threads and in worker processes.
Files that name what is held and applied change one at a time (``lock``); outputs are built and put
into place one at a time (``turn``), a few on the whole node (``appliers``), and never while a pass
computes in the same directory. Work that waits for its turn has changed nothing yet: it ends as
soon as it is cancelled, however long the work before it takes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner.cleaner_run import Result, discard
from kept.compaction.cleaner.job_builder import base_job
from kept.compaction.cleaner.worker import COMMAND
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import follow, follow_worker, manifest, manifest_store
from kept.compaction.manifest.manifest import Manifest
from kept.node.replicas.manifests import install
from kept.node.replicas.manifests.errors import ManifestUnreadable, Withdrawn
from kept.node.replicas.manifests.status import ref_of
from kept.node.replicas.manifests.workers import ManifestWork, failure, or_vanished, pass_limits
from kept.replication.manifests_events import ManifestRef
from kept.storage import layout
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    is_bug,
)

SMALL_BYTES: Final = 2 << 20
"""Logs up to this are built from in a thread: to start a process for each of a thousand small ones
would keep a replica that comes back out of the ISR for minutes.
"""

if TYPE_CHECKING:
    from kept.compaction.manifest.apply import CompactionState
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.manifests.context import ManifestContext
    from kept.storage.log.log import Log
    from kept.storage.types import Generation


@dataclass(slots=True)
class PassOutputs:
    """Of a pass that was computed here: they are in the directory. The log began at ``begins_at``
    and had been cut ``truncations`` times; ``based_on`` was applied when the pass began.
    ``outcome`` is for who requested it.
    """

    ref: ManifestRef
    result: Result
    based_on: Generation | None
    truncations: int
    begins_at: int
    outcome: asyncio.Future[None]

    def is_valid_for(self, ref: ManifestRef, log_: Log) -> bool:
        """They are of this generation, and of the segments that there still are."""
        begins_at = log_.segments[0].base_offset
        return (self.ref, self.truncations, self.begins_at) == (ref, log_.truncations, begins_at)


@dataclass(slots=True)
class ComputingPass:
    """A pass that is being computed: nothing else may use its files."""

    work: ManifestWork
    ended: asyncio.Future[None]


class ManifestFiles:
    """Reads and writes one replica's manifests, and does the slow work on them."""

    def __init__(self, context: ManifestContext, hosted: LocalReplica) -> None:
        self._context = context
        self._hosted = hosted
        self.computing: ComputingPass | None = None
        self.placing = False
        """Segments are being swapped, until the mark says which generation they are."""
        self.bodies: dict[ManifestRef, Manifest] = {}
        """Manifests that came or were made, and are not stored yet."""
        self._lock = asyncio.Lock()
        self._turn = asyncio.Lock()

    @property
    def _directory(self) -> str:
        return self._hosted.partition.log.directory

    def read_manifest(self, ref: ManifestRef | None) -> Manifest | None:
        """A manifest that came, or is here; blocks. Raises FileNotFoundError, DamagedData."""
        if ref is None or ref in self.bodies:
            return None if ref is None else self.bodies[ref]
        return manifest_store.read_manifest(
            self._directory, self._context.runtime.disk, ref.generation
        )

    def require_manifest(self, ref: ManifestRef) -> Manifest:
        """As :meth:`read_manifest`, for one that should be here.

        Raises ManifestUnreadable, MachineError.
        """
        try:
            body = self.read_manifest(ref)
        except (FileNotFoundError, DamagedData) as error:
            raise ManifestUnreadable(str(error)) from error
        assert body is not None
        return body

    async def encoded(self, ref: ManifestRef) -> bytes:
        """A manifest that is here, as it travels. Raises ManifestUnreadable, MachineError."""
        async with self._lock:
            data: bytes = await self._hosted.directory.pool.run(
                lambda: manifest_store.encode(self.require_manifest(ref))
            )
        return data

    def mark_lost(self) -> None:
        """What is held cannot be read; blocks. No other work may be under way."""
        manifest_store.mark_lost(self._directory, self._context.runtime.disk)
        self.bodies.clear()

    async def store(
        self, newest: ManifestRef | None, published: ManifestRef | None, *, complete: bool
    ) -> None:
        """Make ``newest`` what this replica holds, durably, and whether the log is complete for it;
        ``published`` is an older one that the leader called so. Raises KeptError, OSError.
        """
        disk = self._context.runtime.disk

        def work() -> None:
            held, called_published = self.read_manifest(newest), self.read_manifest(published)
            manifest_store.store(self._directory, disk, held, called_published, complete=complete)

        async with self._lock:
            await self._hosted.directory.pool.run(work)
        self.bodies.clear()

    def clear_applied(self) -> None:
        """The log was cut below what was applied; blocks. No other work may be under way."""
        manifest_store.clear_applied(self._directory, self._context.runtime.disk)

    def clear_complete(self) -> None:
        """The log was cut below the end of what is held; blocks. No other work may be under way."""
        manifest_store.clear_complete(self._directory, self._context.runtime.disk)

    async def read_pass_manifest(self, result: Result) -> Manifest:
        """The manifest of a pass that was computed here. Raises DamagedData, MachineError."""
        disk = self._context.runtime.disk
        path = layout.manifest_file(self._directory, *result.generation) + layout.TEMPORARY

        def read() -> Manifest:
            return manifest.decode(path, disk.read(path))[0]

        decoded: Manifest = await self._hosted.directory.pool.run(read)
        return decoded

    def stage_outputs(
        self,
        new: Manifest,
        result: Result,
        based_on: Generation | None,
        *,
        truncations: int,
        begins_at: int,
    ) -> PassOutputs:
        """The outputs of a pass over a log that began at ``begins_at``, and had been cut
        ``truncations`` times, with their manifest, until they are stored; beside what came from a
        leader, if this node led no more.
        """
        ref = ref_of(new)
        self.bodies[ref] = new
        outcome = self._context.runtime.loop.create_future()
        return PassOutputs(ref, result, based_on, truncations, begins_at, outcome)

    def begin_pass(self, work: ManifestWork) -> None:
        """A pass uses the directory from now on."""
        self.computing = ComputingPass(work, self._context.runtime.loop.create_future())

    def end_pass(self) -> None:
        """It uses it no more."""
        computing, self.computing = self.computing, None
        if computing is not None:
            computing.ended.set_result(None)

    async def cancel_pass(self) -> None:
        """No pass uses the directory any more; one that does is ended."""
        while self.computing is not None:
            self.computing.work.cancel()
            await asyncio.wait([self.computing.ended])

    # Applying.

    def check(self, work: ManifestWork) -> None:
        """Raises Withdrawn, KafkaStorageError when the work is to go no further."""
        if work.cancelled:
            raise Withdrawn(f"{self._hosted.partition.topic_partition.place}: not wanted any more")
        if self._hosted.directory.offline is not None:
            raise KafkaStorageError(self._hosted.directory.offline)

    @asynccontextmanager
    async def _turn_of(self, work: ManifestWork) -> AsyncIterator[None]:
        """Wait until the work may use the files. Raises Withdrawn, as soon as it is cancelled, and
        KafkaStorageError.
        """
        self.check(work)
        async with AsyncExitStack() as acquired:
            for limit in (self._turn, self._context.appliers):
                if await work.acquire(limit):
                    acquired.callback(limit.release)
                self.check(work)
            work.has_turn = True
            yield

    async def apply(
        self, work: ManifestWork, ref: ManifestRef, pass_outputs: PassOutputs | None
    ) -> CompactionState:
        """Bring the log to a manifest: all of it, or nothing and an error.

        ``pass_outputs`` are placed where they are valid; else outputs are built. Retention may take
        the oldest segments meanwhile: then it begins anew, and retention waits, or a build that
        takes longer than from one segment to the next would never end. Raises Withdrawn,
        PassFailed, KeptError, OSError.
        """
        log_ = self._hosted.partition.log
        async with self._turn_of(work):
            try:
                while True:
                    self.check(work)
                    result, based_on = await self._outputs(work, ref, pass_outputs)
                    begins_at = log_.segments[0].base_offset
                    try:
                        return await self._place(result, based_on, lambda: self.check(work))
                    except InvariantViolation:
                        # Retention took the oldest just before; then nothing was placed.
                        if log_.segments[0].base_offset == begins_at:
                            raise
                    log_.holds_segments = True
            finally:
                log_.holds_segments = False

    async def _outputs(
        self, work: ManifestWork, ref: ManifestRef, pass_outputs: PassOutputs | None
    ) -> tuple[Result, Generation | None]:
        """Outputs of the segments that there are, and the generation that was applied when they
        were begun: it begins anew when the oldest segments were deleted.
        """
        log_ = self._hosted.partition.log
        while True:
            begins_at = log_.segments[0].base_offset
            if pass_outputs is not None and pass_outputs.is_valid_for(ref, log_):
                return pass_outputs.result, pass_outputs.based_on
            try:
                outputs = await self._build(work, ref)
            except MachineError:
                raise
            except (KeptError, OSError):
                if log_.segments[0].base_offset == begins_at:
                    raise
            else:
                if log_.segments[0].base_offset == begins_at:
                    return outputs
            log_.holds_segments = True
            self.check(work)

    async def _place(
        self, result: Result, based_on: Generation | None, check: Callable[[], None]
    ) -> CompactionState:
        check()
        self.placing = True
        try:
            installable = await install.place(self._context, self._hosted, result, based_on, check)
            async with self._lock:
                return await install.conclude(self._context, self._hosted, installable)
        finally:
            self.placing = False

    def _begin_build(self) -> Generation | None:
        """Remove what was built before and not placed; what is applied, as the mark says. Blocks.

        Not what this replica takes for applied: a mark that was written before an error is ahead.
        """
        disk = self._context.runtime.disk
        discard(self._directory, disk)
        return applying.read_mark(self._directory, disk)

    async def _build(
        self, work: ManifestWork, ref: ManifestRef
    ) -> tuple[Result, Generation | None]:
        """Build the outputs from the manifest: a worker does, or for a small log a thread. Beside
        the result is what was applied when it began.
        """
        context, log_ = self._context, self._hosted.partition.log
        await self.cancel_pass()
        based_on: Generation | None = await context.runtime.in_thread(self._begin_build)
        async with self._lock:
            body = await context.runtime.in_thread(self.require_manifest, ref)
        self.check(work)
        job = replace(
            follow.job_for(log_, body, None, context.runtime.now_ms()),
            check_keys=context.config.current.compaction_check_keys,
            check_seed=os.urandom(jobs.HASH_KEY_BYTES),
        )
        if follow_worker.source_bytes(job) <= SMALL_BYTES:
            return await or_vanished(
                context.runtime, log_, work, self._build_here(work, job, based_on)
            ), based_on
        limit = context.config.current.log_cleaner_io_max_bytes_per_second
        threads = max(context.config.current.log_cleaner_threads, 1)
        question = follow_worker.encode(job, based_on, limit / threads)
        building = work.run(follow_worker.COMMAND, question)
        try:
            return await or_vanished(context.runtime, log_, work, building), based_on
        finally:
            context.kernels.worker_lacks(work.uncompiled)

    async def _build_here(
        self, work: ManifestWork, job: follow.FollowJob, based_on: Generation | None
    ) -> Result:
        """In a thread; it fails as a worker does."""
        runtime = self._context.runtime
        try:
            result: Result = await runtime.in_thread(
                follow_worker.run_here, job, based_on, runtime.disk
            )
        except (KeptError, OSError) as error:
            if is_bug(error):
                raise
            message = follow_worker.error_message(error)
            raise failure(message, cancelled=work.cancelled) from error
        return result

    async def checkpoint_cleaned(self) -> None:
        """Write ``cleaner-offset-checkpoint``. Raises KeptError."""
        await install.checkpoint_cleaned(self._context, self._hosted)

    # A base generation (rule 19).

    async def create_base(
        self, work: ManifestWork, name: Generation, still_wanted: Callable[[], bool]
    ) -> CompactionState:
        """Forget all manifests and begin anew with one in which everything survives.

        Until it is in place a start finds that what was held is lost. Raises Withdrawn, PassFailed,
        KeptError, OSError.
        """
        context, hosted = self._context, self._hosted
        log_ = hosted.partition.log

        def check() -> None:
            self.check(work)
            if not still_wanted():
                raise Withdrawn(f"{hosted.partition}: another leader was elected")

        async with self._turn_of(work):
            await self.cancel_pass()
            async with self._lock:
                check()
                await hosted.directory.pool.run(
                    manifest_store.mark_lost, log_.directory, context.runtime.disk
                )
            hosted.compaction = None
            hosted.partition.applied_end = 0
            state = await self._install_base(work, name, check)
            async with self._lock:
                await hosted.directory.pool.run(
                    manifest_store.store_base, log_.directory, context.runtime.disk, state.applied
                )
            return state

    async def _install_base(
        self, work: ManifestWork, name: Generation, check: Callable[[], None]
    ) -> CompactionState:
        """Make the base and place it. Where retention took the oldest segments meanwhile it begins
        anew, and retention waits: see :meth:`apply`.
        """
        context, hosted = self._context, self._hosted
        runtime, log_ = context.runtime, hosted.partition.log
        limits = pass_limits(context.config.current, runtime.disk, hosted.directory.name)
        try:
            while True:
                check()
                begins_at = log_.segments[0].base_offset
                job = base_job(log_, name, now_ms=runtime.now_ms(), limits=limits)
                try:
                    result = await or_vanished(
                        runtime, log_, work, work.run(COMMAND, jobs.encode(job))
                    )
                    check()
                    hosted.partition.raise_high_watermark(result.end_offset)
                    # Nothing is applied: see create_base.
                    return await self._place(result, None, check)
                except MachineError:
                    raise
                except (KeptError, OSError):
                    if log_.segments[0].base_offset == begins_at:
                        raise
                log_.holds_segments = True
                check()
                await runtime.in_thread(discard, self._directory, runtime.disk)
        finally:
            log_.holds_segments = False
