"""Reading records: positions, decoding, and membership of a group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kept.client.admin import groups
from kept.client.consume.aborted_filter import aborted_batches
from kept.client.consume.fetch import Fetched, FetchLimits
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.broker_errors import NoResponse, RetriableBrokerError, failure
from kept.client.core.calls import Call
from kept.client.core.client_core import NOTICE_MS
from kept.client.core.leader_errors import offline_grace_ms, why_no_leader
from kept.client.core.metadata import METADATA_MAX_AGE_S, Endpoint
from kept.storage.errors import KafkaStorageError, KeptError, OffsetOutOfRange, RetriableError
from kept.storage.records import headers, records
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.client.client import Client
    from kept.client.core.metadata import ClusterMetadata

HEARTBEAT_MS: Final = 3_000
SESSION_MS: Final = 45_000
REBALANCE_MS: Final = 60_000
RETRY_PAUSE_S: Final = 0.1
LEADERLESS_DEADLINE_S: Final = 60.0
"""So long all partitions may be without a leader, or its node away, before reading gives up."""
SILENT_MS: Final = 3_000
"""A leader that says nothing for so long after the time of a Fetch is up is not waited for."""
LEFT_OUT_S: Final = 10.0
"""So long other leaders are asked without it, unless its partitions get another one."""
RECOUNT_S: Final = 5.0
"""After so long the leader of a group counts partitions again where a topic was not known."""
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

    def is_final(self, now: float, view: ClusterMetadata) -> bool:
        """Waiting longer is vain."""
        offline = isinstance(self.why, KafkaStorageError)
        patience = offline_grace_ms(len(view.nodes)) / 1000 if offline else LEADERLESS_DEADLINE_S
        return now - self.since > patience


class _Silent(NamedTuple):
    """A leader that has said nothing, and until when it is left out."""

    leader: Endpoint | None
    until: float
    why: KeptError


class Consumer:
    """Reads partitions from given positions on; EARLIEST and LATEST are looked up at first use.

    A partition that cannot be read is tried again while others are read: through an election, say.
    The client's ``on_wait`` is told why. When none can be read for long, ``poll`` raises why.

    ``isolation`` READ_COMMITTED leaves out records of aborted transactions. An offset that has left
    the log (retention, DeleteRecords) goes on at ``reset``: EARLIEST, the log start, or LATEST; one
    above its end (what was there is lost) at the end. ``on_wait`` is told of what is left out.
    """

    def __init__(
        self,
        client: Client,
        positions: Mapping[TopicPartition, int],
        limits: FetchLimits | None = None,
        *,
        reset: int = EARLIEST,
    ) -> None:
        self.client = client
        self.limits = limits or FetchLimits()
        self.reset = reset
        self.positions = dict(positions)
        self.high_watermarks: dict[TopicPartition, int] = {}
        self._away: dict[TopicPartition, _Away] = {}
        self._silent: dict[TopicPartition, _Silent] = {}
        self._refused: KeptError | None = None

    def poll(self, max_wait_ms: int | None = None) -> list[ConsumedRecord]:
        """What has come within ``max_wait_ms``; perhaps nothing. An error that waiting cannot mend
        is raised once what came of other partitions was returned. Positions move when it returns.
        """
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error
        self._resolve_positions()
        limits = self.limits
        if max_wait_ms is not None:
            limits = replace(limits, max_wait_ms=max_wait_ms)
        if not self.positions:
            time.sleep(limits.max_wait_ms / 1000)
            return []
        out: list[ConsumedRecord] = []
        moved: dict[TopicPartition, int] = {}
        refused: KeptError | None = None
        left_out = self._left_out()
        asked = {tp: at for tp, at in self.positions.items() if tp not in left_out}
        fetched = self.client.fetch(asked, limits, SILENT_MS)
        troubles = {tp: self._silent[tp].why for tp in left_out}
        for tp in asked.keys() - {batch.topic_partition for batch in fetched}:
            troubles[tp] = self._why_missing(tp)
        for batch in fetched:
            tp = batch.topic_partition
            if batch.error is None:
                records_read, moved[tp] = self._decode(batch)
                out += records_read
            elif isinstance(batch.error, OffsetOutOfRange):
                moved[tp] = self._reset(tp)
            elif isinstance(batch.error, RetriableError):
                troubles[tp] = batch.error
            else:
                refused = refused or self.client.named(batch.error)
        self._note_silent(asked, troubles)
        for tp in troubles:
            self.client.view.forget_topic(tp.topic)
        if refused is not None and not out:
            self.positions.update(moved)
            raise refused
        self._note_away(troubles)
        if troubles and not out:
            time.sleep(RETRY_PAUSE_S)
        self._refused = refused
        self.positions.update(moved)
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
            yield [r for r in batch if r.offset < ends[TopicPartition(r.topic, r.partition)]]
            self._give_up(any)

    def _resolve_positions(self) -> None:
        symbolic = {tp: p for tp, p in self.positions.items() if p < 0}
        if symbolic:
            for tp, at in self.client.list_offsets(symbolic, self.limits.isolation).items():
                self.positions[tp] = at.offset

    def _left_out(self) -> set[TopicPartition]:
        """Partitions that are not asked for now: their leader was silent a moment ago and still
        leads, and there are others.
        """
        now = time.monotonic()
        recent = {tp for tp, silent in self._silent.items() if now < silent.until}
        recent &= self.positions.keys()
        if not recent or recent == self.positions.keys():
            return set()
        view = self.client.metadata(sorted({tp.topic for tp in recent}))
        return {tp for tp in recent if view.leader(*tp) in (None, self._silent[tp].leader)}

    def _note_silent(
        self, asked: Iterable[TopicPartition], troubles: Mapping[TopicPartition, KeptError]
    ) -> None:
        """Which of the partitions that were asked for have a silent leader now."""
        until = time.monotonic() + LEFT_OUT_S
        for tp in asked:
            why = troubles.get(tp)
            if isinstance(why, NoResponse):
                self._silent[tp] = _Silent(self.client.view.leader(*tp), until, why)
            else:
                self._silent.pop(tp, None)

    def _reset(self, tp: TopicPartition) -> int:
        """Where to go on, since the position is not in the log."""
        position = self.positions[tp]
        start = self.client.list_offsets({tp: EARLIEST})[tp].offset
        end = self.client.list_offsets({tp: LATEST}, self.limits.isolation)[tp].offset
        if start <= position <= end:
            return position
        to = start if self.reset == EARLIEST and position < start else end
        if self.client.on_wait is not None:
            gone = f"offset {position} of {tp.place} is not in its log any more"
            self.client.on_wait(OffsetOutOfRange(f"{gone}; reading on from {to}"))
        return to

    def _why_missing(self, tp: TopicPartition) -> KeptError:
        what = f"Fetch of {tp.place}"
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

    def _decode(self, fetched: Fetched) -> tuple[list[ConsumedRecord], int]:
        """The records of a partition's batches, and the position after them."""
        tp = fetched.topic_partition
        self.high_watermarks[tp] = fetched.high_watermark
        view = memoryview(fetched.records)
        hidden: Collection[int] = ()
        if self.limits.isolation is IsolationLevel.READ_COMMITTED:
            hidden = aborted_batches(view, fetched.aborted)
        out: list[ConsumedRecord] = []
        position = self.positions[tp]
        for at, header in headers(view):
            if not header.is_control and at not in hidden:
                out += [
                    ConsumedRecord(
                        tp.topic, tp.partition, r.offset, r.timestamp, r.key, r.value, r.headers
                    )
                    for r in records(view[at : at + header.size_bytes])
                    if r.offset >= position
                ]
            position = max(position, header.next_offset)
        return out, position


class GroupConsumer:
    """A member of a consumer group: classic protocol, range assignment.

    ``poll`` joins when needed and keeps the membership alive; call it at least every few seconds.
    The offsets of records that an earlier ``poll`` returned are committed by the next one, and by
    ``close``: what was returned last and not finished comes again after a crash. As a context
    manager it is closed at the end of the block; where an error leaves the block, what was returned
    last is not committed. ``reset``, EARLIEST or LATEST, is where a partition begins of which the
    group has committed nothing, or an offset that has left the log.
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
        self.consumer = Consumer(client, {}, limits, reset=reset)
        self._committed: dict[TopicPartition, int] = {}
        self._refused: groups.NotAMember | None = None
        self._next_heartbeat = 0.0
        self._shared: dict[str, int] | None = None
        """Partitions of each topic as this member shared them out, if it leads the group."""
        self._next_count = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave()

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions of this member now."""
        return sorted(self.consumer.positions)

    def poll(self, max_wait_ms: int = 500) -> list[ConsumedRecord]:
        """Records of the assigned partitions; perhaps none. After an error none count as read."""
        if self.generation < 0:
            self._join()
        else:
            with contextlib.suppress(groups.NotAMember):  # what was returned comes again
                self.commit()
            self._heartbeat()
            self._count_partitions()
        if self.generation < 0:
            return []
        return self.consumer.poll(max_wait_ms)

    def commit(self) -> None:
        """Commit the positions, if they have moved.

        Raises NotAMember where this is no member any more: the next ``poll`` joins again, and what
        was read since the last commit comes again. Other refusals are raised, too, and leave it a
        member.
        """
        moved = {
            tp: position
            for tp, position in self.consumer.positions.items()
            if position >= 0 and self._committed.get(tp) != position
        }
        if not moved or self.generation < 0:
            return
        try:
            self.client.commit(self.group, moved, self.member_id, self.generation)
        except groups.NotAMember as error:
            self.generation, self._refused = -1, error
            raise
        self._committed.update(moved)
        self._refused = None

    def give_back(self, records: Iterable[ConsumedRecord]) -> None:
        """Records of the last ``poll`` that were not dealt with: they come again."""
        for record in records:
            tp = TopicPartition(record.topic, record.partition)
            if record.offset < self.consumer.positions.get(tp, -1):
                self.consumer.positions[tp] = record.offset

    def close(self) -> None:
        """Commit and leave the group. Raises what :meth:`commit` does, and NotAMember where the
        last commit of a ``poll`` was refused so.
        """
        try:
            self.commit()
            if self._refused is not None:
                raise self._refused
        finally:
            self._leave()

    def _leave(self) -> None:
        if self.member_id:
            with contextlib.suppress(KeptError):  # the group finds out when the session ends
                self.client.call(groups.leave_call(self.group, self.member_id))
        self.member_id, self.generation, self._refused = "", -1, None

    def _count_partitions(self) -> None:
        """The leader of a group has it share anew when one of its topics has grown."""
        before = self._shared
        if before is None or self.generation < 0 or time.monotonic() < self._next_count:
            return
        counts = self._counts(before)
        if any(count > before[topic] for topic, count in counts.items()):
            self.generation = -1

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat or self.generation < 0:
            return
        self._next_heartbeat = now + HEARTBEAT_MS / 1000
        call = groups.heartbeat_call(self.group, self.member_id, self.generation)
        self._judge(int(self._call(call).error_code), "Heartbeat")

    def _judge(self, code: int, api: str) -> bool:
        """True for code 0; one that asks to join again is noted; others are raised."""
        if code in groups.NOT_A_MEMBER:
            if code == 25:
                self.member_id = ""
            self.generation = -1
            return False
        error = failure(code, f"{api} of {self.group}", key=self.group)
        if error is not None:
            raise error
        return True

    def _call(self, call: Call) -> Any:
        """Run a call; errors that mean another or a loading coordinator are tried again."""

        def check(response: Any) -> KeptError | None:
            error = failure(int(response.error_code), call.what)
            moved = (
                isinstance(error, RetriableError) and response.error_code not in groups.NOT_A_MEMBER
            )
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
            self._shared = None
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
        counts = self._counts({t for wish in wishes.values() for t in wish})
        self._shared = counts
        shares = groups.range_assignment(wishes, lambda t: counts[t])
        return {member: groups.encode_assignment(tps) for member, tps in shares.items()}

    def _counts(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions these topics have now; 0 where there is none."""
        view = self.client.metadata(sorted(topics))
        counts = {t: len(view.topics[t].partitions) if t in view.topics else 0 for t in topics}
        pause_s = METADATA_MAX_AGE_S if all(counts.values()) else RECOUNT_S
        self._next_count = time.monotonic() + pause_s
        return counts

    def _begin(self, assigned: list[TopicPartition]) -> None:
        committed = self.client.committed(self.group, assigned) if assigned else {}
        self._committed = dict(committed)
        positions = {tp: committed.get(tp, self.reset) for tp in assigned}
        self.consumer = Consumer(self.client, positions, self.consumer.limits, reset=self.reset)
        self._next_heartbeat = time.monotonic() + HEARTBEAT_MS / 1000
