"""The shell of one partition of ``__consumer_offsets``: performs the effects of its core.

Appends of one turn of the loop are staged as they come and written together at its end; the core
gets an event when each is committed. A batch that cannot be staged is rejected at once. One that is
not committed within ``offsets.commit.timeout.ms`` fails its request, and may still be committed. If
the write itself fails, the log directory goes offline and this shard is unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.memory_limit import GroupMemory
from kept.node.coordinator.groups.records import NO_TOPIC_ID, GroupRecord
from kept.node.coordinator.sharding.log_loader import load
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.runtime.error_codes import code_for
from kept.node.runtime.logging import log
from kept.storage.errors import (
    KeptError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    RequestTimedOut,
)
from kept.storage.records import build_batch, check
from kept.storage.types import Codec

if TYPE_CHECKING:
    import uuid

    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.runtime import Runtime

PART_BYTES: Final = 256 * 1024
"""Size of the batches over which tombstones are spread that need not be in one."""
RECORD_OVERHEAD_BYTES: Final = 32
"""More than a record's framing takes."""
BARRIER_RETRY_S: Final = 0.5
"""Between two questions to the controller whether the image is whole."""
NOISE_INTERVAL_MS: Final = 10_000
"""At most one line about requests refused for memory in this time."""
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
"""What a failed append means to the clients of a group, who know nothing of its log."""


def group_error(error: BaseException) -> ErrorCode:
    """The code that a group's client gets for a failed append."""
    code = ErrorCode(code_for(error))
    return _TRANSLATED.get(code, code)


class Shard:
    """A core with its log, timers and pending requests. ``failed`` says why it could not load."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        metadata: Metadata,
        barrier: LeadershipBarrier,
        number: int,
        hosted: LocalReplica,
        leader_epoch: int,
        settings: ev.GroupSettings,
        memory: GroupMemory | None = None,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._barrier = barrier
        self.number = number
        self._hosted = hosted
        self.leader_epoch = leader_epoch
        self.core = GroupCore(settings, memory)
        self._quiet_until_ms = 0
        self.is_active = False
        self.failed: str | None = None
        self._loading: asyncio.Task[None] | None = None
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._last_request = 0
        self._staged: list[tuple[int, int]] = []
        """(append, its end offset) since the last write."""
        self._write_scheduled = False
        self._uncommitted: dict[int, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms: int | None = None
        self._unloaded = False
        self._deleted_while_loading: list[tuple[str, uuid.UUID]] = []
        """Topics that were deleted while we were loading."""

    @property
    def leads(self) -> bool:
        """The partition is led here, in the epoch that this shard was made for."""
        partition = self._hosted.partition
        return partition.is_leader and partition.leader_epoch == self.leader_epoch

    @property
    def in_sync_followers(self) -> frozenset[int]:
        """Who else is in the ISR, or about to join: a successor was one of them."""
        return self._hosted.partition.core.maximal_isr - {self._hosted.partition.node_id}

    # Loading.

    def load(self, done: Callable[[], None]) -> None:
        """Begin to read the log, an empty one at once; then, or on failure, ``done`` is called."""
        partition = self._hosted.partition
        if partition.log_start_offset == partition.log_end_offset:
            self._loaded(0, self._now_ms())
            return
        self._loading = self._runtime.loop.create_task(self._load())
        self._loading.add_done_callback(lambda _: done())

    async def _load(self) -> None:
        started = self._now_ms()
        partition = self._hosted.partition
        try:
            await self._await_committed(partition.epoch_start_offset)
            count = await load(partition, self.core)
        except NotLeaderOrFollower as error:
            self.failed = str(error)
            return
        except KeptError as error:
            self.failed = str(error)
            log.error("groups not loaded", partition=self.number, error=str(error))
            return
        if self._deleted_topics():
            await self._await_current_image()
        if not self._unloaded:
            self._loaded(count, started)

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

        self._hosted.partition.when_committed(end_offset, resolve)
        await done

    async def _await_current_image(self) -> None:
        """A read barrier: return when this node has acted on all that was decided by now.

        A topic that an older image lacks may have been made, or made again, since, and offsets of
        it committed: they must not go. Nor may a namesake's offsets be shown meanwhile, so the
        groups stay unloaded.
        """
        while True:
            answer: asyncio.Future[bool] = self._runtime.loop.create_future()
            self._barrier.confirm(partial(_resolve_once, answer))
            if await answer:
                return
            await asyncio.sleep(BARRIER_RETRY_S)

    def _loaded(self, count: int, started_ms: int) -> None:
        now_ms = self._now_ms()
        self.is_active = True
        self._sync_clock(now_ms)
        self._perform(self.core.loaded(now_ms))
        for topic in (*self._deleted_while_loading, *self._deleted_topics()):
            self.topics_deleted([topic])
        if count:
            log.info(
                "groups loaded",
                partition=self.number,
                records=count,
                groups=len(self.core.groups),
                ms=now_ms - started_ms,
            )

    def _deleted_topics(self) -> set[tuple[str, uuid.UUID]]:
        """Topics with offsets here that were deleted while nobody led this partition, as after a
        failover: the image does not have them, or has them by another id.
        """
        topics = self._metadata.image.topics
        deleted = set()
        for key, stored in self.core.appended:
            topic = topics.get(key.topic)
            known = stored.value.topic_id
            if topic is None or known not in (NO_TOPIC_ID, topic.topic_id):
                deleted.add((key.topic, known))
        return deleted

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
        if self._timer is not None:
            self._timer.cancel()
        for handle in self._uncommitted.values():
            handle.cancel()
        self._uncommitted.clear()
        for effect in self.core.unload():
            if isinstance(effect, ev.Response):
                self._respond(effect)

    # Events.

    def submit(self, make_event: Callable[[int], ev.Event]) -> asyncio.Future[Any]:
        """Step an event for a request; the future is its result."""
        self._last_request += 1
        future: asyncio.Future[Any] = self._runtime.loop.create_future()
        self._requests[self._last_request] = future
        self._step(make_event(self._last_request))
        return future

    def join_abandoned(self, group: str, future: asyncio.Future[Any]) -> None:
        """The connection of a JoinGroup that waits for ``future`` is gone."""
        request = next((n for n, waiting in self._requests.items() if waiting is future), None)
        if request is not None:
            self._step(ev.JoinAbandoned(group, request))

    def topics_deleted(self, topics: Iterable[tuple[str, uuid.UUID]]) -> None:
        """Forget the offsets of topics that are gone."""
        if not self.is_active:
            self._deleted_while_loading += topics
            return
        self._step(ev.TopicsDeleted(tuple(topics)))

    def _step(self, event: ev.Event) -> None:
        if self._unloaded:
            return
        now_ms = self._now_ms()
        self._sync_clock(now_ms)
        self._perform(self.core.step(event, now_ms))

    def _now_ms(self) -> int:
        return int(self._runtime.loop.time() * 1000)

    def _sync_clock(self, now_ms: int) -> None:
        self.core.wall_offset_ms = self._runtime.now_ms() - now_ms

    # Effects.

    def _perform(self, effects: tuple[ev.Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, ev.Response):
                self._respond(effect)
            elif isinstance(effect, ev.Append):
                self._append(effect)
            elif isinstance(effect, ev.OutOfMemory):
                self._refused_for_memory(effect)
            else:
                log.info("group", group=effect.group, what=effect.text)
        self._schedule_tick()

    def _refused_for_memory(self, effect: ev.OutOfMemory) -> None:
        """Log it, at most once in :data:`NOISE_INTERVAL_MS`."""
        now_ms = self._now_ms()
        if now_ms >= self._quiet_until_ms:
            self._quiet_until_ms = now_ms + NOISE_INTERVAL_MS
            used = self.core.memory.used_bytes
            log.warning(
                "group request refused", group=effect.group, setting=effect.setting, used_bytes=used
            )

    def _respond(self, effect: ev.Response) -> None:
        future = self._requests.pop(effect.request, None)
        if future is not None and not future.done():
            future.set_result(effect.result)

    def _append(self, effect: ev.Append) -> None:
        """Stage an append; a refusal goes to the core before anything else does."""
        partition, rules = self._hosted.partition, self._hosted.rules
        wall_ms = self._runtime.now_ms()
        end_offset = 0
        try:
            for part in _parts(effect):
                records = [(wall_ms, key, value, ()) for key, value in part]
                batch = build_batch(records, codec=self._codec)
                info = partition.append(check(batch, rules, wall_ms), wall_ms, acks=-1)
                end_offset = info.last_offset + 1
        except KeptError as error:
            code = group_error(error)
            log.warning("group records not appended", partition=self.number, error=str(error))
            self._step(ev.AppendRejected(effect.append, code))
            return
        self._staged.append((effect.append, end_offset))
        if not self._write_scheduled:
            self._write_scheduled = True
            self._runtime.loop.call_soon(self._write)

    @property
    def _codec(self) -> Codec:
        return Codec(int(getattr(self._config.current, "offsets_topic_compression_codec", 0)))

    def _write(self) -> None:
        """Write what was staged in this turn, and wait for it to be committed."""
        self._write_scheduled = False
        staged, self._staged = self._staged, []
        if not staged or self._unloaded:
            return
        try:
            self._hosted.partition.write()
        except KeptError as error:
            # The partition is offline now: nothing of this can be undone.
            log.error("group records not written", partition=self.number, error=str(error))
            self.failed = str(error)
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

        if self._hosted.partition.high_watermark < end_offset or self._hosted.sync:
            timeout_s = self._config.current.offsets_commit_timeout_ms / 1000
            late = RequestTimedOut(f"{CONSUMER_OFFSETS}-{self.number}: not committed in time")
            self._uncommitted[append] = self._runtime.loop.call_later(
                timeout_s, self._timed_out, append, late
            )
        self._hosted.partition.when_committed(end_offset, step_done)
        if self._hosted.sync:
            self._hosted.flush(end_offset, step_done)

    def _timed_out(self, append: int, error: BaseException) -> None:
        self._step(ev.AppendTimedOut(append, group_error(error)))

    def _append_committed(self, append: int) -> None:
        timer = self._uncommitted.pop(append, None)
        if timer is not None:
            timer.cancel()
        self._step(ev.AppendCommitted(append))

    # Timers.

    def _schedule_tick(self) -> None:
        """Have the loop call when the core's next timer is due; an earlier call does no harm."""
        deadline_ms = self.core.next_deadline_ms
        if deadline_ms is None or self._unloaded:
            return
        if self._timer_deadline_ms is not None and self._timer_deadline_ms <= deadline_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline_ms = deadline_ms
        self._timer = self._runtime.loop.call_at(deadline_ms / 1000, self._tick)

    def _tick(self) -> None:
        deadline_ms, self._timer, self._timer_deadline_ms = self._timer_deadline_ms, None, None
        if self._unloaded:
            return
        now_ms = self._now_ms()
        self._sync_clock(now_ms)
        if deadline_ms is not None and now_ms - deadline_ms > STALL_MS:
            self.core.restart_timeouts(now_ms)
        self._perform(self.core.tick(now_ms))


def _resolve_once(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():  # whoever waited may have gone
        future.set_result(value)


def _parts(effect: ev.Append) -> Iterable[list[tuple[bytes, bytes | None]]]:
    """The records of each batch to append: all in one, or spread over several."""
    part: list[tuple[bytes, bytes | None]] = []
    size = 0
    for record in effect.records:
        key, value = _encoded(record)
        if part and not effect.atomic and size > PART_BYTES:
            yield part
            part, size = [], 0
        part.append((key, value))
        size += len(key) + len(value or b"") + RECORD_OVERHEAD_BYTES
    yield part


def _encoded(record: GroupRecord) -> tuple[bytes, bytes | None]:
    return record.encode()
