"""The shell of one partition of an internal topic: performs the effects of its core.

Appends of one turn of the loop are staged as they come and written together at its end, those that
nobody waits for with the next ones, or after :data:`LAZY_S`; the core gets an event when each is
committed. A batch that cannot be staged is rejected at once. One that is
not committed in time fails its request, and may still be committed. If the write itself fails, the
log directory goes offline and this shard is unloaded.

It waits until the high watermark reaches the log end offset of the election: what an earlier leader
acknowledged is below that, and may be above the high watermark of a follower. Then it reads the log
in slices, so that the node goes on serving.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from kio.schema.errors import ErrorCode

from kept.node.coordinator.common.core import ShardCore
from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    Response,
    TransactionalProducer,
)
from kept.node.coordinator.common.log_loader import load
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.runtime.error_codes import code_for
from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import SLICE_S
from kept.steps import Steps, run_to_end
from kept.storage.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    KeptError,
    NotCoordinator,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    RequestTimedOut,
    TransactionCoordinatorFenced,
    client_message,
    is_bug,
)
from kept.storage.records import EndTxnMarker, build_batch, check
from kept.storage.types import NO_PRODUCER_ID, NO_SEQUENCE, AppendOrigin

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.runtime import Runtime
    from kept.storage.log.log import AppendInfo
    from kept.storage.records import BatchHeader
    from kept.storage.types import TopicPartition

PART_BYTES: Final = 256 * 1024
"""Size of the batches over which tombstones are spread that need not be in one."""
RECORD_OVERHEAD_BYTES: Final = 32
"""More than a record's framing takes."""
LAZY_S: Final = 0.005
"""How long an append may stay staged that nobody waits for."""
STALL_MS: Final = 1_000
"""A timer that is later than that is late because this process stood still."""

_TRANSLATED: Final = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
    ErrorCode.invalid_record: ErrorCode.unknown_server_error,
}
"""What a failed append means to the clients of a coordinator, who know nothing of its log."""

_FAULTS_OF_PRODUCERS: Final = (
    InvalidProducerEpoch,
    InvalidTxnState,
    TransactionCoordinatorFenced,
)
NO_PRODUCER: Final = TransactionalProducer(NO_PRODUCER_ID, -1)

Core = TypeVar("Core", bound=ShardCore[Any, Any])
MakeEvent = Callable[[int], Any]
"""Makes the event of a request from the number that the shard gives it."""


class CoordinatorKind(Protocol[Core]):
    """What one kind of coordinator adds to the shells of its shards."""

    @property
    def topic(self) -> str:
        """The internal topic."""
        ...

    def new_core(self, tp: TopicPartition, leader_epoch: int) -> Core:
        """A core without records, for a partition that this node leads in ``leader_epoch``."""
        ...

    def commit_timeout_ms(self) -> int:
        """How long a request waits for its records to be committed."""
        ...

    def replay(
        self,
        core: Core,
        batch: BatchHeader,
        offset: int,
        key: memoryview | None,
        value: memoryview | None,
    ) -> None:
        """Apply one record of the log. Raises CorruptMessage."""
        ...

    async def prepare(self, shard: Shard[Core]) -> None:
        """All is replayed: return when the shard may serve. Its core gets first what it is notified
        of here. Not called for an empty log.
        """
        ...

    def perform(self, shard: Shard[Core], effect: Any) -> None:
        """Carry out an effect that is no AppendRecords, nor a Response that needs no proof."""
        ...

    def unloaded(self, shard: Shard[Core]) -> None:
        """The shard serves no more."""
        ...


def coordinator_error(
    error: BaseException, event: str = "coordinator failed", **fields: Any
) -> ErrorCode:
    """The code that a coordinator's client gets for a failed append; the rest is for the log, as
    :func:`code_for` has it.
    """
    code = ErrorCode(code_for(error, event, **fields))
    return _TRANSLATED.get(code, code)


class Shard(Generic[Core]):
    """A core with its log, timers and pending requests. ``failed`` says why it could not load."""

    def __init__(
        self,
        runtime: Runtime,
        kind: CoordinatorKind[Core],
        tp: TopicPartition,
        hosted: LocalReplica,
        leader_epoch: int,
    ) -> None:
        self._runtime = runtime
        self._kind = kind
        self.tp = tp
        self._hosted = hosted
        self.leader_epoch = leader_epoch
        self.partition = hosted.partition
        self.core = kind.new_core(tp, leader_epoch)
        self.is_active = False
        self.failed: str | None = None
        self.load_started_s = 0.0
        """By the loop's clock."""
        self._loading: asyncio.Task[None] | None = None
        self._requests: dict[int, asyncio.Future[Any] | CompletableFuture[Any]] = {}
        self._last_request = 0
        self._staged: list[tuple[int, int]] = []
        """(append, its end offset) since the last write."""
        self._write_scheduled = False
        self._lazy_write: asyncio.TimerHandle | None = None
        self._uncommitted: dict[int, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms: int | None = None
        self._timer_due_ms = 0
        """When the loop should call: a deadline may have passed before, while others were met."""
        self._unloaded = False
        self._held_back: deque[Any] = deque()
        """Events that came while we were loading."""

    @property
    def leads(self) -> bool:
        """The partition is led here, in the epoch that this shard was made for."""
        return self.partition.is_leader and self.partition.leader_epoch == self.leader_epoch

    @property
    def in_sync_followers(self) -> frozenset[int]:
        """Who else is in the ISR, or about to join: a successor was one of them."""
        return self.partition.core.maximal_isr - {self.partition.node_id}

    # Loading.

    def load(self, done: Callable[[], None]) -> None:
        """Begin to read the log, an empty one at once; then, or on failure, ``done`` is called."""
        partition = self.partition
        if partition.log_start_offset == partition.log_end_offset:
            run_to_end(self._loaded(run_to_end(self._core_loaded())))
            return
        self._loading = self._runtime.loop.create_task(self._load())
        self._loading.add_done_callback(lambda _: done())

    async def _load(self) -> None:
        self.load_started_s = self._runtime.loop.time()
        partition = self.partition
        try:
            await self._await_committed(partition.epoch_start_offset)
            steps = load(partition, partial(self._kind.replay, self.core))
            count = await self._runtime.loads.finish(steps)
            await self._kind.prepare(self)
            effects = await self._runtime.loads.finish(self._core_loaded())
            await self._runtime.loads.finish(self._loaded(effects, count))
        except NotLeaderOrFollower as error:
            self.failed = error.client_message
        # Whatever it is: clients would be told to wait for ever.
        except Exception as error:  # noqa: BLE001
            self.failed = client_message(error)
            if is_bug(error):
                log.exception("coordinator not loaded", error, partition=self.tp.place)
            else:
                log.error("coordinator not loaded", partition=self.tp.place, error=str(error))
            self._stop()

    def _stop(self) -> None:
        """The core may be half changed, and steps no more. What it appended is in the log."""
        self._loading = None
        self._respond_to_all()
        if self._staged:
            self._staged.clear()
            with suppress(KeptError):  # the partition is offline then, and says so
                self.partition.write()

    async def _await_committed(self, end_offset: int) -> None:
        """Wait until HW is at ``end_offset``, where the log ended when this node was elected.

        All that earlier leaders acknowledged is below, since an elected leader was in the ISR; HW
        here may be older than theirs. By how many it is committed now is no matter.
        """
        done = self._runtime.loop.create_future()

        def resolve(error: BaseException | None) -> None:
            if not done.done():
                if error is None or isinstance(error, NotEnoughReplicasAfterAppend):
                    done.set_result(None)
                else:
                    done.set_exception(error)

        self.partition.when_committed(end_offset, resolve)
        await done

    def _core_loaded(self) -> Steps[tuple[Any, ...]]:
        now_ms = self._timer_due_ms = self._now_ms()
        self._sync_clock(now_ms)
        return self.core.loaded(now_ms)

    def _loaded(self, effects: tuple[Any, ...], count: int = 0) -> Steps[None]:
        """Carry out the effects of the load, then step what was held back, one a step; then serve.
        The core steps nothing else before the last effect, and its timers wait until it serves.
        :meth:`unload` ends this where it is.
        """
        for effect in effects:
            self._perform((effect,))
            yield
        while self._held_back:
            self.step(self._held_back.popleft())
            yield
        self.is_active = True
        self._tick()  # which gives back what the load took, if that was long
        if count:
            took_ms = self._now_ms() - round(self.load_started_s * 1000)
            log.info("coordinator loaded", partition=self.tp.place, records=count, ms=took_ms)

    def unload(self) -> None:
        """Write what is staged; pending requests get NOT_COORDINATOR."""
        if not self._unloaded:
            self._write()
        if not self._unloaded:
            self._respond_to_all()

    def _respond_to_all(self) -> None:
        self._unloaded, self.is_active = True, False
        if self._loading is not None:
            self._loading.cancel()
        for timer in (self._timer, self._lazy_write):
            if timer is not None:
                timer.cancel()
        for handle in self._uncommitted.values():
            handle.cancel()
        self._uncommitted.clear()
        self._held_back.clear()
        for effect in self.core.unload():
            if isinstance(effect, Response):
                self.respond(effect.request, effect.result)
            elif not isinstance(effect, AppendRecords):
                self._kind.perform(self, effect)
        self._kind.unloaded(self)
        self._runtime.slices.run(self.core.release())

    # Events.

    def submit(self, make_event: MakeEvent) -> asyncio.Future[Any]:
        """Step an event for a request; the future is its result. Raises NotCoordinator where this
        partition has been given up meanwhile.
        """
        future: asyncio.Future[Any] = self._runtime.loop.create_future()
        self._request(make_event, future)
        return future

    def submit_completable(self, make_event: MakeEvent) -> CompletableFuture[Any]:
        """As :meth:`submit`. Its callbacks are called while effects are carried out: they must not
        step this shard.
        """
        future: CompletableFuture[Any] = CompletableFuture()
        self._request(make_event, future)
        return future

    def _request(
        self, make_event: MakeEvent, result: asyncio.Future[Any] | CompletableFuture[Any]
    ) -> None:
        if self._unloaded:
            raise NotCoordinator(f"{self.tp.place} is not led here any more")
        self._last_request += 1
        self._requests[self._last_request] = result
        self.step(make_event(self._last_request))

    def follow_up(self, future: asyncio.Future[Any], make_event: MakeEvent) -> None:
        """Step an event about the request that waits for ``future``, if one does."""
        request = next((n for n, waiting in self._requests.items() if waiting is future), None)
        if request is not None:
            self.step(make_event(request))

    def notify(self, event: Any) -> None:
        """Step an event that no request waits for: now, or once the core is loaded."""
        if self.is_active:
            self.step(event)
        elif not self._unloaded:
            self._held_back.append(event)

    def step(self, event: Any) -> None:
        """Step an event now, also while loading."""
        if self._unloaded:
            return
        now_ms = self._now_ms()
        self._sync_clock(now_ms)
        self._perform(self.core.step(event, now_ms))

    def _now_ms(self) -> int:
        # Rounded: a timer that is due by the loop's clock must be due by this one, or it spins.
        return round(self._runtime.loop.time() * 1000)

    def _sync_clock(self, now_ms: int) -> None:
        self.core.wall_offset_ms = self._runtime.now_ms() - now_ms

    # Effects.

    def _perform(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Response) and effect.unproven is None:
                self.respond(effect.request, effect.result)
            elif isinstance(effect, AppendRecords):
                self._append(effect)
            else:
                self._kind.perform(self, effect)
        self._schedule_tick()

    def respond(self, request: int, result: Any) -> None:
        """Respond to a request, unless it was responded to."""
        future = self._requests.pop(request, None)
        if future is not None and not future.done():
            future.set_result(result)

    def _append(self, effect: AppendRecords) -> None:
        """Stage an append: what came of it goes to the core before anything else does."""
        try:
            batches = list(self._stage(effect))
        except KeptError as error:
            if not isinstance(error, _FAULTS_OF_PRODUCERS):
                partition = self.tp.place
                log.warning("coordinator's records refused", partition=partition, error=str(error))
            self.step(AppendRejected(effect.append, coordinator_error(error)))
            return
        self._staged.append((effect.append, batches[-1].last_offset + 1))
        self._schedule_write(effect.lazy)
        self.step(AppendStaged(effect.append, batches[0].base_offset))

    def _schedule_write(self, lazy: bool) -> None:
        if self._write_scheduled:
            return
        if not lazy:
            self._write_scheduled = True
            self._runtime.loop.call_soon(self._write)
        elif self._lazy_write is None:
            self._lazy_write = self._runtime.loop.call_later(LAZY_S, self._write_lazy)

    def _write_lazy(self) -> None:
        """An earlier write may have taken it along: then this is about nothing, or something newer
        that is written early.
        """
        self._lazy_write = None
        if not self._write_scheduled:
            self._write()

    def _stage(self, effect: AppendRecords) -> Iterator[AppendInfo]:
        rules, wall_ms = self._hosted.rules, self._runtime.now_ms()
        if (marker := effect.marker) is not None:
            yield self.partition.append_marker(
                EndTxnMarker(marker.is_commit, marker.coordinator_epoch),
                marker.producer_id,
                marker.epoch,
                wall_ms,
                is_tv2=marker.is_tv2,
            )
            return
        producer = effect.producer or NO_PRODUCER
        in_transaction = effect.producer is not None
        for part in _parts(effect):
            batch = build_batch(
                [(wall_ms, key, value, ()) for key, value in part],
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=0 if in_transaction else NO_SEQUENCE,
                is_transactional=in_transaction,
            )
            yield self.partition.append(
                check(batch, rules, wall_ms), wall_ms, -1, producer.guard, AppendOrigin.COORDINATOR
            )

    def _write(self) -> None:
        """Write what was staged in this turn, and wait for it to be committed."""
        self._write_scheduled = False
        staged, self._staged = self._staged, []
        if not staged or self._unloaded:
            return
        try:
            self.partition.write()
        except KeptError as error:
            # The partition is offline now: nothing of this can be undone.
            log.error("coordinator's records lost", partition=self.tp.place, error=str(error))
            self.failed = error.client_message
            self.unload()
            return
        for append, end_offset in staged:
            self._wait_for_commit(append, end_offset)

    def _wait_for_commit(self, append: int, end_offset: int) -> None:
        waits = 2 if self._hosted.sync else 1

        def step_done(error: BaseException | None) -> None:
            nonlocal waits
            if error is not None:
                self._timed_out(append, error)
            if error is not None and not isinstance(error, NotEnoughReplicasAfterAppend):
                return  # its fate is unknown: the shard is about to be unloaded
            waits -= 1
            if waits == 0:
                self._append_committed(append)

        if self.partition.high_watermark < end_offset or self._hosted.sync:
            timeout_s = self._kind.commit_timeout_ms() / 1000
            late = RequestTimedOut(f"{self.tp.place}: not committed in time")
            self._uncommitted[append] = self._runtime.loop.call_later(
                timeout_s, self._timed_out, append, late
            )
        self.partition.when_committed(end_offset, step_done)
        if self._hosted.sync:
            self._hosted.flush(end_offset, step_done)

    def _timed_out(self, append: int, error: BaseException) -> None:
        self.notify(AppendTimedOut(append, coordinator_error(error)))

    def _append_committed(self, append: int) -> None:
        timer = self._uncommitted.pop(append, None)
        if timer is not None:
            timer.cancel()
        self.notify(AppendCommitted(append))

    # Timers.

    def _schedule_tick(self) -> None:
        """Have the loop call when the core's next timer is due; an earlier call does no harm."""
        deadline_ms = self.core.next_deadline_ms
        if deadline_ms is None or not self.is_active:
            return
        if self._timer_deadline_ms is not None and self._timer_deadline_ms <= deadline_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline_ms = deadline_ms
        self._timer_due_ms = max(deadline_ms, self._now_ms())
        self._timer = self._runtime.loop.call_at(deadline_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_deadline_ms = None
        if self._unloaded:
            return
        now_ms = self._now_ms()
        self._sync_clock(now_ms)
        if now_ms - self._timer_due_ms > STALL_MS:
            self._perform(self.core.restart_timeouts(now_ms))
        until = perf_counter() + SLICE_S
        while not self._unloaded:
            self._perform(self.core.tick(now_ms))
            deadline_ms = self.core.next_deadline_ms
            if deadline_ms is None or deadline_ms > now_ms or perf_counter() >= until:
                break


def _parts(effect: AppendRecords) -> Iterable[list[tuple[bytes, bytes | None]]]:
    """The records of each batch to append: all in one, or spread over several."""
    part: list[tuple[bytes, bytes | None]] = []
    size = 0
    for record in effect.records:
        key, value = record.encode()
        if part and not effect.atomic and size > PART_BYTES:
            yield part
            part, size = [], 0
        part.append((key, value))
        size += len(key) + len(value or b"") + RECORD_OVERHEAD_BYTES
    yield part
