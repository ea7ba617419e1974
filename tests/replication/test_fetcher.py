"""FetcherCore: what goes into requests, and whose answers count."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import pytest

from kept.replication.fetch_messages import (
    FetchRequest,
    FetchResponse,
    OffsetsRequest,
    OffsetsResponse,
    PartitionResponse,
)
from kept.replication.fetcher import (
    NEVER,
    PATIENCE_MS,
    FetcherCore,
    FetchResponseReceived,
    FetchSettings,
    OffsetsListed,
    RequestAbandoned,
    RequestFailed,
    WorkFailed,
)
from kept.replication.follower import AppendBatches, Backoff, ListOffsets, StartAt
from kept.replication.quota import ReplicationQuota
from kept.storage.errors import CorruptMessage
from kept.storage.types import TopicPartition

TOPIC_ID = uuid.UUID(int=5)
SESSION = 77


@dataclass
class FakeLog:
    log_start_offset: int = 0
    log_end_offset: int = 0
    high_watermark: int = 0
    latest_epoch: int = 0
    awaits_flush: bool = False

    def own_end_offset(self, _epoch: int) -> tuple[int, int]:
        return 0, self.log_end_offset


def tp(number: int) -> TopicPartition:
    return TopicPartition("t", number)


def made(count: int, **options) -> tuple[FetcherCore, list[FakeLog]]:
    fetcher = FetcherCore(1, **options)
    logs = [FakeLog() for _ in range(count)]
    for number, log in enumerate(logs):
        fetcher.add(tp(number), TOPIC_ID, log, 4)
    return fetcher, logs


def asked(request) -> dict[int, int]:
    """Partition number to fetch offset."""
    return {part.tp.partition: part.fetch_offset for part in request.partitions}


def answer(*parts: PartitionResponse, error: int = 0, session: int = SESSION) -> FetchResponse:
    return FetchResponse(error, session, parts)


def data(number: int, size: int = 3, **fields) -> PartitionResponse:
    return PartitionResponse(
        tp(number), 0, fields.pop("hw", 0), -1, 0, records=bytes(size), **fields
    )


def perform(logs: list[FakeLog], work) -> None:
    for partition, effects in work:
        for effect in effects:
            if isinstance(effect, AppendBatches):
                logs[partition.partition].log_end_offset += len(effect.records)


def test_a_session_carries_only_changes() -> None:
    fetcher, logs = made(3)
    first = fetcher.next_request(0)
    assert (first.session_id, first.session_epoch, asked(first)) == (0, 0, {0: 0, 1: 0, 2: 0})
    assert (first.partitions[0].leader_epoch, first.partitions[0].topic_id) == (4, TOPIC_ID)
    assert fetcher.next_request(0) is None, "one in flight"
    perform(logs, fetcher.step(FetchResponseReceived(first, answer(data(0), data(1), data(2))), 0))
    second = fetcher.next_request(0)
    assert (second.session_id, second.session_epoch) == (SESSION, 1)
    assert asked(second) == {0: 3, 1: 3, 2: 3}
    perform(logs, fetcher.step(FetchResponseReceived(second, answer(data(1))), 0))
    third = fetcher.next_request(0)
    assert (third.session_epoch, asked(third), third.forgotten) == (2, {1: 6}, ())
    assert fetcher.step(FetchResponseReceived(third, answer()), 0) == ()
    idle = fetcher.next_request(0)
    assert (idle.session_epoch, idle.partitions, idle.forgotten) == (3, (), ())


def test_partitions_come_and_go_within_a_session() -> None:
    fetcher, _ = made(2)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer()), 0)
    fetcher.remove(tp(0))
    fetcher.add(tp(7), TOPIC_ID, FakeLog(log_end_offset=9), 4)
    request = fetcher.next_request(0)
    assert asked(request) == {7: 9} and request.forgotten == ((tp(0), TOPIC_ID),)
    late = fetcher.step(FetchResponseReceived(request, answer(data(0), data(1))), 0)
    assert [partition for partition, _ in late] == [tp(1)]
    fetcher.remove(tp(0))
    assert tp(0) not in fetcher and tp(7) in fetcher and len(fetcher) == 2


def test_a_topic_made_anew_is_another_one() -> None:
    fetcher, logs = made(1)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer()), 0)
    new = uuid.UUID(int=6)
    fetcher.add(tp(0), new, logs[0], 0)
    request = fetcher.next_request(0)
    assert request.forgotten == ((tp(0), TOPIC_ID),)
    assert [part.topic_id for part in request.partitions] == [new]


@pytest.mark.parametrize("error", [70, 71, 106])
def test_a_refused_session_begins_anew_with_everything(error) -> None:
    fetcher, _ = made(2)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer()), 0)
    refused = fetcher.next_request(0)
    assert fetcher.step(FetchResponseReceived(refused, answer(data(0), error=error)), 0) == ()
    again = fetcher.next_request(0)
    assert again.session_id == (0 if error == 70 else SESSION), "closed by the same request"
    assert (again.session_epoch, asked(again)) == (0, {0: 0, 1: 0})


def test_a_leader_without_room_for_sessions_is_sent_everything() -> None:
    fetcher, _ = made(2)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer(session=0)), 0)
    again = fetcher.next_request(0)
    assert (again.session_id, again.session_epoch, asked(again)) == (0, 0, {0: 0, 1: 0})


def test_the_epoch_of_a_session_wraps() -> None:
    fetcher, _ = made(1)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer()), 0)
    fetcher.session.epoch = 2**31 - 1
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer()), 0)
    assert fetcher.next_request(0).session_epoch == 1


def test_a_lost_connection_waits_longer_each_time() -> None:
    fetcher, _ = made(1, settings=FetchSettings(backoff_min_ms=10, backoff_max_ms=35))
    now, waits = 0, []
    for _ in range(6):
        request = fetcher.next_request(now)
        fetcher.step(RequestFailed(request), now)
        waits.append(fetcher.wake_at_ms() - now if fetcher.retry_at_ms else 0)
        assert fetcher.next_request(fetcher.retry_at_ms - 1) is None or not fetcher.retry_at_ms
        fetcher.step(RequestFailed(request), now)
        now = max(now, fetcher.retry_at_ms)
        if fetcher.in_flight:
            fetcher.in_flight = None
    assert waits == [0, 10, 20, 35, 35, 35]
    request = fetcher.next_request(now)
    assert request.session_epoch == 0
    fetcher.step(FetchResponseReceived(request, answer()), now)
    assert fetcher.failures == 0


def test_answers_to_other_requests_are_ignored() -> None:
    fetcher, logs = made(1)
    first = fetcher.next_request(0)
    perform(logs, fetcher.step(FetchResponseReceived(first, answer(data(0))), 0))
    assert fetcher.step(FetchResponseReceived(first, answer(data(0))), 0) == (), "twice"
    second = fetcher.next_request(0)
    assert fetcher.step(FetchResponseReceived(first, answer(data(0))), 0) == (), "late"
    assert fetcher.in_flight is second
    fetcher.step(RequestFailed(first), 0)
    assert fetcher.in_flight is second
    assert fetcher.step(FetchResponseReceived(second, answer(data(5))), 0) == (), "never asked"


def test_a_partition_that_backs_off_is_forgotten_and_comes_back() -> None:
    fetcher, _ = made(2)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer()), 0)
    refused = PartitionResponse(tp(0), 6)
    work = fetcher.step(FetchResponseReceived(fetcher.next_request(100), answer(refused)), 100)
    assert work == ((tp(0), (Backoff(110, 6),)),)
    without = fetcher.next_request(100)
    assert without.max_wait_ms == 10, "it is asked for again as soon as it may be"
    assert (without.partitions, without.forgotten) == ((), ((tp(0), TOPIC_ID),))
    fetcher.step(FetchResponseReceived(without, answer()), 105)
    assert asked(fetcher.next_request(109)) == {}
    fetcher.step(FetchResponseReceived(fetcher.in_flight, answer()), 110)
    assert asked(fetcher.next_request(110)) == {0: 0}


def test_with_nothing_to_ask_it_sleeps_until_there_is() -> None:
    fetcher, logs = made(1)
    refused = PartitionResponse(tp(0), 6)
    fetcher.step(FetchResponseReceived(fetcher.next_request(100), answer(refused)), 100)
    assert fetcher.next_request(100) is None
    assert fetcher.wake_at_ms() == 110
    assert fetcher.next_request(110) is not None
    assert fetcher.wake_at_ms() == NEVER, "in flight"
    fetcher.step(FetchResponseReceived(fetcher.in_flight, answer()), 111)
    assert fetcher.wake_at_ms() <= 111
    logs[0].awaits_flush = True
    fetcher.nudge(tp(0))
    assert fetcher.next_request(112) is None, "what is not durable is not acknowledged"
    assert fetcher.wake_at_ms() == NEVER
    logs[0].awaits_flush = False
    fetcher.nudge(tp(0))
    assert asked(fetcher.next_request(113)) == {0: 0}
    assert FetcherCore(1).wake_at_ms() == NEVER


def test_what_awaits_its_flush_is_named_to_the_shell() -> None:
    fetcher, logs = made(2)
    logs[1].awaits_flush = True
    assert fetcher.unflushed() == [tp(1)], "a tail from before a restart"
    logs[1].awaits_flush = False
    assert fetcher.unflushed() == []
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer(data(0))), 0)
    logs[0].awaits_flush = True
    assert fetcher.unflushed() == [tp(0)], "what was just appended"
    logs[0].awaits_flush = False
    fetcher.step(RequestFailed(fetcher.next_request(0)), 0)
    logs[1].awaits_flush = True
    assert fetcher.unflushed() == [tp(1)], "everything is asked for again"
    fetcher.remove(tp(1))
    assert fetcher.unflushed() == []


def test_what_fails_here_backs_off_and_the_others_go_on() -> None:
    fetcher, _ = made(2)
    fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer(data(0))), 0)
    fetcher.step(WorkFailed(tp(0), CorruptMessage("crc")), 0)
    request = fetcher.next_request(0)
    assert request.forgotten == ((tp(0), TOPIC_ID),)
    fetcher.step(FetchResponseReceived(request, answer()), 0)
    assert asked(fetcher.next_request(10)) == {0: 0}
    fetcher.step(WorkFailed(tp(9), CorruptMessage("gone")), 0)


def test_out_of_range_asks_for_the_offsets_first() -> None:
    fetcher, logs = made(2)
    out = PartitionResponse(tp(0), 1)
    work = fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer(out, data(1))), 0)
    assert work[0] == (tp(0), (ListOffsets(),))
    perform(logs, work)
    request = fetcher.next_request(0)
    assert request == OffsetsRequest(((tp(0), TOPIC_ID, 4),))
    fetcher.step(RequestFailed(request), 0)
    request = fetcher.next_request(0)
    assert isinstance(request, OffsetsRequest), "asked again"
    assert fetcher.step(OffsetsListed(OffsetsRequest(()), ()), 0) == ()
    work = fetcher.step(OffsetsListed(request, (OffsetsResponse(tp(0), 0, 50, 60),)), 0)
    assert work[0][1][0] == StartAt(50)
    logs[0].log_end_offset = 50
    fetch = fetcher.next_request(0)
    assert isinstance(fetch, FetchRequest) and asked(fetch) == {0: 50, 1: 3}


def test_an_offsets_answer_that_leaves_one_out_is_asked_later() -> None:
    fetcher, _ = made(1)
    fetcher.step(
        FetchResponseReceived(fetcher.next_request(0), answer(PartitionResponse(tp(0), 1))), 0
    )
    request = fetcher.next_request(0)
    assert fetcher.step(OffsetsListed(request, ()), 0) == ((tp(0), (Backoff(10, 7),)),)
    assert fetcher.next_request(9) is None
    assert isinstance(fetcher.next_request(10), OffsetsRequest)
    fetcher.check_invariants()


def test_who_got_records_goes_to_the_end_of_the_line() -> None:
    fetcher, logs = made(3)
    perform(
        logs,
        fetcher.step(FetchResponseReceived(fetcher.next_request(0), answer(data(0), session=0)), 0),
    )
    assert list(asked(fetcher.next_request(0))) == [1, 2, 0]


def test_another_epoch_of_the_same_leader() -> None:
    fetcher, logs = made(1)
    request = fetcher.next_request(0)
    fetcher.add(tp(0), TOPIC_ID, logs[0], 5)
    assert fetcher.step(FetchResponseReceived(request, answer(data(0))), 0) == (), (
        "it was of epoch 4"
    )
    assert fetcher.next_request(0).partitions[0].leader_epoch == 5


def test_new_partitions_do_not_wait_behind_a_request_that_the_leader_holds() -> None:
    fetcher, _ = made(1)
    assert fetcher.impatient_at_ms == NEVER
    held = fetcher.next_request(0)
    fetcher.add(tp(5), TOPIC_ID, FakeLog(), 4, now_ms=100)
    fetcher.add(tp(6), TOPIC_ID, FakeLog(), 4, now_ms=105)
    assert fetcher.impatient_at_ms == 100 + PATIENCE_MS
    fetcher.step(RequestAbandoned(held), 0)
    assert fetcher.impatient_at_ms == NEVER
    request = fetcher.next_request(120)
    assert (request.session_epoch, asked(request)) == (0, {0: 0, 5: 0, 6: 0})
    assert fetcher.step(FetchResponseReceived(held, answer(data(0))), 120) == ()


# Throttles (KIP-73).


def test_a_throttled_partition_out_of_sync_waits_for_its_rate() -> None:
    quota = ReplicationQuota(100)
    fetcher, logs = made(1, quota=quota)
    fetcher.add(tp(9), TOPIC_ID, FakeLog(), 4, throttled=True)
    logs.extend([FakeLog()] * 9)
    request = fetcher.next_request(0)
    assert asked(request) == {0: 0, 9: 0}
    fetcher.step(FetchResponseReceived(request, answer(data(9, 5000, hw=9000))), 0)
    request = fetcher.next_request(0)
    assert request.forgotten == ((tp(9), TOPIC_ID),)
    fetcher.step(FetchResponseReceived(request, answer()), 0)
    assert asked(fetcher.next_request(100)) == {}
    fetcher.step(FetchResponseReceived(fetcher.in_flight, answer()), 12_000)
    assert asked(fetcher.next_request(12_000)) == {9: 0}, "the window has passed"


def test_in_sync_or_unlisted_replicas_are_never_throttled() -> None:
    quota = ReplicationQuota(100)
    quota.record(10_000, 0)
    fetcher, logs = made(1, quota=quota)
    assert asked(fetcher.next_request(0)) == {0: 0}
    fetcher.step(
        FetchResponseReceived(fetcher.in_flight, answer(PartitionResponse(tp(0), 0, 0))), 0
    )
    fetcher.set_throttled(tp(0), True)
    logs[0].log_end_offset = 1
    assert asked(fetcher.next_request(0)) == {0: 1}


def test_the_rate_is_over_a_sliding_window() -> None:
    quota = ReplicationQuota(1000)
    quota.record(10_000, 0)
    assert not quota.exceeded(0), "ten seconds' worth"
    quota.record(1, 0)
    assert quota.exceeded(0)
    quota.record(1, 500)
    assert not quota.exceeded(500), "half a second of the sample has passed, too"
    assert 0 < quota.rate(11_499) < 1000
    assert quota.rate(11_500) == 0, "a window after the last byte of the only sample"
    assert not ReplicationQuota().exceeded(0)


def test_a_log_that_somebody_else_cut_is_asked_for_anew():
    """The session holds the old offset, for which an idle leader has nothing to send."""
    fetcher, (log, _) = made(2)
    log.log_end_offset = 21
    request = fetcher.next_request(0)
    assert asked(request) == {0: 21, 1: 0}
    fetcher.step(FetchResponseReceived(request, answer()), 0)
    log.log_end_offset = 3
    request = fetcher.next_request(0)
    assert asked(request) == {}, "nobody has told"
    fetcher.step(FetchResponseReceived(request, answer()), 0)
    fetcher.nudge(tp(0))
    assert asked(fetcher.next_request(0)) == {0: 3}
