"""Reading records: positions, decoding, and membership of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kept.client.admin import groups
from kept.client.consume.aborted_filter import aborted_batches
from kept.client.consume.fetch import Fetched, FetchLimits
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.broker_errors import ConnectionFailed, RetriableBrokerError, failure
from kept.client.core.calls import Call
from kept.client.core.client_core import NOTICE_MS
from kept.client.core.leader_errors import offline_grace_ms, why_no_leader
from kept.storage.errors import KafkaStorageError, KeptError, OffsetOutOfRange, RetriableError
from kept.storage.records import headers, records
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.client.client import Client
    from kept.client.core.metadata import ClusterView

HEARTBEAT_MS: Final = 3_000
SESSION_MS: Final = 45_000
REBALANCE_MS: Final = 60_000
RETRY_PAUSE_S: Final = 0.1
LEADERLESS_DEADLINE_S: Final = 60.0
"""So long all partitions may be without a leader, or its node away, before reading gives up."""
_REJOIN: Final = frozenset({22, 25, 27})  # illegal generation, unknown member, rebalance
_MEMBER_ID_REQUIRED: Final = 79


class ConsumedRecord(NamedTuple):
    """A record as it was read. A None value is a tombstone."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class _Away(NamedTuple):
    """Since when, and why, a partition cannot be read; whether ``on_wait`` of the client knows."""

    since: float
    why: KeptError
    reported: bool = False

    def is_final(self, now: float, view: ClusterView) -> bool:
        """Waiting longer is vain."""
        offline = isinstance(self.why, KafkaStorageError)
        patience = offline_grace_ms(len(view.nodes)) / 1000 if offline else LEADERLESS_DEADLINE_S
        return now - self.since > patience


class Consumer:
    """Reads partitions from given positions on; EARLIEST and LATEST are looked up at first use.

    A partition that cannot be read is tried again while others are read: through an election, say.
    The client's ``on_wait`` is told why. When none can be read for long, ``poll`` raises why.

    ``isolation`` READ_COMMITTED leaves out records of aborted transactions. An offset that has left
    the log (retention, DeleteRecords) goes on at the log start, as ``auto.offset.reset=earliest``.
    """

    def __init__(
        self,
        client: Client,
        positions: Mapping[TopicPartition, int],
        limits: FetchLimits | None = None,
    ) -> None:
        self.client = client
        self.limits = limits or FetchLimits()
        self.positions = dict(positions)
        self.high_watermarks: dict[TopicPartition, int] = {}
        self._away: dict[TopicPartition, _Away] = {}

    def poll(self, max_wait_ms: int | None = None) -> list[ConsumedRecord]:
        """What has come within ``max_wait_ms``; perhaps nothing."""
        self._resolve_positions()
        if not self.positions:
            time.sleep((max_wait_ms or self.limits.max_wait_ms) / 1000)
            return []
        limits = self.limits
        if max_wait_ms is not None:
            limits = FetchLimits(
                max_wait_ms,
                limits.min_bytes,
                limits.max_bytes,
                limits.partition_max_bytes,
                limits.isolation,
            )
        out: list[ConsumedRecord] = []
        troubles: dict[TopicPartition, KeptError] = {}
        fetched: list[Fetched] = []
        try:
            fetched = self.client.fetch(self.positions, limits)
        except ConnectionFailed as error:
            troubles = dict.fromkeys(self.positions, error)
        else:
            missing = self.positions.keys() - {batch.topic_partition for batch in fetched}
            troubles = {tp: self._why_missing(tp) for tp in missing}
        for batch in fetched:
            if batch.error is None:
                out.extend(self._decode(batch))
            elif isinstance(batch.error, OffsetOutOfRange):
                self._reset(batch.topic_partition)
            elif isinstance(batch.error, RetriableError):
                troubles[batch.topic_partition] = batch.error
            else:
                raise self.client.named(batch.error)
        for tp in troubles:
            self.client.view.forget(tp)
        self._note_away(troubles)
        if troubles and not out:
            time.sleep(RETRY_PAUSE_S)
        return out

    def until_end(self) -> Iterator[ConsumedRecord]:
        """Every record up to the end of each partition as it is now."""
        for batch in self.batches_until_end():
            yield from batch

    def batches_until_end(self) -> Iterator[list[ConsumedRecord]]:
        """The same, as they come."""
        self._resolve_positions()
        ends = {
            tp: at.offset
            for tp, at in self.client.list_offsets(
                dict.fromkeys(self.positions, LATEST), self.limits.isolation
            ).items()
        }
        yield from self.batches_until(ends)

    def batches_until(self, ends: Mapping[TopicPartition, int]) -> Iterator[list[ConsumedRecord]]:
        """Every record below these offsets, one for each partition, as they come. None may be above
        the end of its partition: that would be waited for.
        """
        self._resolve_positions()
        while True:
            for tp in [tp for tp, position in self.positions.items() if position >= ends[tp]]:
                del self.positions[tp]
            if not self.positions:
                return
            batch = self.poll()
            self._give_up(any)
            yield [r for r in batch if r.offset < ends[TopicPartition(r.topic, r.partition)]]

    def _resolve_positions(self) -> None:
        symbolic = {tp: p for tp, p in self.positions.items() if p < 0}
        if symbolic:
            for tp, at in self.client.list_offsets(symbolic).items():
                self.positions[tp] = at.offset

    def _reset(self, tp: TopicPartition) -> None:
        bounds = self.client.list_offsets({tp: EARLIEST})
        end = self.client.list_offsets({tp: LATEST})[tp].offset
        start = bounds[tp].offset
        self.positions[tp] = start if self.positions[tp] < start else end

    def _why_missing(self, tp: TopicPartition) -> KeptError:
        what = f"Fetch of {tp}"
        if self.client.view.leader(*tp) is None:
            return why_no_leader(self.client.view, tp, what)
        return RetriableBrokerError(f"{what}: the answer lacks it")

    def _note_away(self, troubles: Mapping[TopicPartition, KeptError]) -> None:
        """Take down what cannot be read; tell of it in time, and give up when that is all."""
        now = time.monotonic()
        before, self._away = self._away, {}
        for tp, why in troubles.items():
            since, _, reported = before.get(tp, _Away(now, why))
            if not reported and now - since >= NOTICE_MS / 1000:
                reported = True
                if self.client.on_wait is not None:
                    self.client.on_wait(why)
            self._away[tp] = _Away(since, why, reported)
        if len(self._away) == len(self.positions):
            self._give_up(all)

    def _give_up(self, when: Callable[[Iterable[bool]], bool]) -> None:
        now, view = time.monotonic(), self.client.view
        if self._away and when(away.is_final(now, view) for away in self._away.values()):
            raise next(away.why for away in self._away.values() if away.is_final(now, view))

    def _decode(self, one: Fetched) -> Iterator[ConsumedRecord]:
        """Decode a partition's batches and move its position past them."""
        tp = one.topic_partition
        self.high_watermarks[tp] = one.high_watermark
        view = memoryview(one.records)
        hidden: Collection[int] = ()
        if self.limits.isolation is IsolationLevel.READ_COMMITTED:
            hidden = aborted_batches(view, one.aborted)
        for at, header in headers(view):
            position = self.positions[tp]
            self.positions[tp] = max(position, header.next_offset)
            if header.is_control or at in hidden:
                continue
            for r in records(view[at : at + header.size_bytes]):
                if r.offset >= position:
                    yield ConsumedRecord(
                        tp.topic, tp.partition, r.offset, r.timestamp, r.key, r.value, r.headers
                    )


class GroupConsumer:
    """A member of a consumer group: classic protocol, range assignment.

    ``poll`` joins when needed and keeps the membership alive; call it at least every few seconds.
    The offsets of records that an earlier ``poll`` returned are committed by the next one, and by
    ``close``: what was returned last and not finished comes again after a crash.
    """

    def __init__(
        self,
        client: Client,
        group: str,
        topics: list[str],
        *,
        reset: int = LATEST,
        limits: FetchLimits | None = None,
    ) -> None:
        self.client = client
        self.group = group
        self.topics = topics
        self.reset = reset
        self.member_id = ""
        self.generation = -1
        self.consumer = Consumer(client, {}, limits)
        self._committed: dict[TopicPartition, int] = {}
        self._next_heartbeat = 0.0

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions of this member now."""
        return sorted(self.consumer.positions)

    def poll(self, max_wait_ms: int = 500) -> list[ConsumedRecord]:
        """Records of the assigned partitions; perhaps none."""
        if self.generation < 0:
            self._join()
        else:
            self.commit()
            self._heartbeat()
        if self.generation < 0:
            return []
        return self.consumer.poll(max_wait_ms)

    def commit(self) -> KeptError | None:
        """Commit the positions, if they have moved.

        Returns why the group refused it: this is no member any more, the next ``poll`` joins again,
        and what was read since the last commit comes again.
        """
        moved = {
            tp: position
            for tp, position in self.consumer.positions.items()
            if position >= 0 and self._committed.get(tp) != position
        }
        if not moved or self.generation < 0:
            return None
        try:
            self.client.commit(self.group, moved, self.member_id, self.generation)
        except RetriableError:
            raise
        except KeptError as error:
            self.generation = -1
            return error
        self._committed.update(moved)
        return None

    def give_back(self, records: Iterable[ConsumedRecord]) -> None:
        """Records of the last ``poll`` that were not dealt with: they come again."""
        for record in records:
            tp = TopicPartition(record.topic, record.partition)
            if record.offset < self.consumer.positions.get(tp, -1):
                self.consumer.positions[tp] = record.offset

    def close(self) -> KeptError | None:
        """Commit and leave the group; returns what :meth:`commit` does."""
        refused = self.commit()
        if self.member_id:
            self.client.call(groups.leave_call(self.group, self.member_id))
        self.member_id, self.generation = "", -1
        return refused

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat or self.generation < 0:
            return
        self._next_heartbeat = now + HEARTBEAT_MS / 1000
        call = groups.heartbeat_call(self.group, self.member_id, self.generation)
        self._judge(int(self._call(call).error_code), "Heartbeat")

    def _judge(self, code: int, api: str) -> bool:
        """True for code 0; one that asks to join again is noted; others are raised."""
        if code in _REJOIN:
            if code == 25:
                self.member_id = ""
            self.generation = -1
            return False
        error = failure(code, f"{api} of {self.group}")
        if error is not None:
            raise error
        return True

    def _call(self, call: Call) -> Any:
        """Run a call; errors that mean another or a loading coordinator are tried again."""

        def check(response: Any) -> KeptError | None:
            error = failure(int(response.error_code), call.what)
            moved = isinstance(error, RetriableError) and response.error_code not in _REJOIN
            return error if moved else None

        call.check = check
        return self.client.call(call)

    def _join(self) -> None:
        """JoinGroup and SyncGroup until there is an assignment."""
        while True:
            call = groups.join_call(
                self.group, self.member_id, self.topics, SESSION_MS, REBALANCE_MS
            )
            joined = self._call(call)
            if joined.error_code == _MEMBER_ID_REQUIRED:
                self.member_id = joined.member_id
                continue
            if not self._judge(int(joined.error_code), "JoinGroup"):
                continue
            self.member_id = joined.member_id
            self.generation = int(joined.generation_id)
            shares: dict[str, bytes] = {}
            if joined.leader == joined.member_id:
                shares = self._share(joined)
            synced = self._call(
                groups.sync_call(self.group, self.member_id, self.generation, shares)
            )
            if self._judge(int(synced.error_code), "SyncGroup"):
                self._begin(groups.decode_assignment(synced.assignment))
                return

    def _share(self, joined: Any) -> dict[str, bytes]:
        wishes = {m.member_id: groups.decode_subscription(m.metadata) for m in joined.members}
        topics = sorted({t for wish in wishes.values() for t in wish})
        view = self.client.metadata(topics)
        counts = {t: len(view.topics[t].partitions) for t in topics if t in view.topics}
        shares = groups.range_assignment(wishes, lambda t: counts.get(t, 0))
        return {member: groups.encode_assignment(tps) for member, tps in shares.items()}

    def _begin(self, assigned: list[TopicPartition]) -> None:
        committed = self.client.committed(self.group, assigned) if assigned else {}
        self._committed = dict(committed)
        self.consumer.positions = {tp: committed.get(tp, self.reset) for tp in assigned}
        self._next_heartbeat = time.monotonic() + HEARTBEAT_MS / 1000
