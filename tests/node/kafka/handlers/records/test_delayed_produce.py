"""Produce requests between their append and their answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.node.kafka.handlers.records import produce, produce_errors
from kept.node.kafka.handlers.records.delayed_produce import DelayedProduce, DelayedProduceRun
from kept.node.kafka.handlers.records.produce import ProduceHandler
from kept.node.kafka.response_slot import (
    WAITING_BATCH_BYTES,
    WAITING_REQUEST_BYTES,
    ResponseSlot,
)
from kept.node.runtime.memory_budget import BudgetShare, MemoryBudget
from kept.node.runtime.time_slices import IN_PLACE_STEPS, TimeSlices
from kept.steps import Steps
from kept.storage.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    KafkaStorageError,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OutOfOrderSequenceNumber,
)
from kept.storage.log.log import AppendInfo
from kept.storage.types import TopicPartition
from tests.support.given import Given

T0 = TopicPartition("t", 0)


class Asker:
    """A connection that notes what it is told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.context: Any = Given(
            runtime__loop=loop,
            runtime__now_ms=lambda: 0,
            runtime__in_thread=self._in_thread,
            runtime__slices=TimeSlices(loop, lambda: 0.0),
            cluster_link__out_of_touch=False,
            hints__endpoints=lambda *_: [],
            hints__current_leader=lambda *_: None,
            inflating=BudgetShare(MemoryBudget(1 << 30), 1 << 30),
            config__current__inflated_max_bytes=1 << 20,
        )
        self.peer = "asker"
        self.waiting_account = MemoryBudget(1 << 30)
        self.listener = Given(name="P")
        self.unwritten: list[Any] = []
        self.turned_away: dict[Any, Any] = {}
        self.event_started = 0.0
        self.throttle_ms = 0
        self.happened: list[str] = []
        self.job: asyncio.Future[Any] = loop.create_future()

    def _in_thread(self, *_: Any) -> asyncio.Future[Any]:
        return self.job

    def reserve_response(self) -> ResponseSlot:
        return ResponseSlot()

    def count_served(self, _key: int, requests: int, _started: float) -> None:
        self.counted = requests

    def complete(self, reply: ResponseSlot, segments: list[Any]) -> None:
        reply.segments = segments
        self.happened.append("answered")

    def block(self) -> None:
        self.happened.append("blocked")

    def unblock(self) -> None:
        self.happened.append("unblocked")

    def abort(self, *_: Any, **__: Any) -> None:
        self.happened.append("aborted")


class Hosted:
    """A partition's place here; only refusals are asked of it."""

    def __init__(self, replicated: bool = True) -> None:
        leader = {"replicated": replicated, "log_start_offset": 3, "topic_partition": T0}
        self.partition = type("Leader", (), leader)()


@pytest.fixture
def asker():
    loop = asyncio.new_event_loop()
    yield Asker(loop)
    loop.close()


def synced(flushes: list[Any], *, durable: bool) -> Any:
    def flush(_end_offset: int, callback: Any) -> None:
        if durable:
            callback(None)
        else:
            flushes.append(callback)

    leader = Given(is_leader=True, leader_epoch=0)
    return Given(sync=True, partition=leader, flush=flush)


@pytest.mark.parametrize("durable", [(True, False), (False, True), (True, True)])
def test_an_answer_waits_for_the_flush_of_every_partition(asker, durable):
    flushes: list[Any] = []
    request = DelayedProduce(asker.context, asker, 9, 1, acks=1, timeout_ms=10_000)
    request.topic(b"t")
    info = Given(base_offset=0, last_offset=0, log_append_time=-1, log_start_offset=0)
    for index, one in enumerate(durable):
        request.appended(synced(flushes, durable=one), index, info)
    request.written({})
    assert (asker.happened == []) == bool(flushes)
    for callback in flushes:
        callback(None)
    assert asker.happened == ["answered"]


def test_a_check_that_fails_as_it_must_not_ends_the_connection(asker, capfd):
    request = Given(topics=[])
    answer = DelayedProduce(asker.context, asker, 9, 1, acks=1, timeout_ms=10_000)
    nothing: Any = None
    handler = ProduceHandler(
        nothing, nothing, nothing, asker.context, asker.context, transactional=nothing
    )
    handler._check_in_thread(asker, answer, request, memoryview(b""), [])
    asker.job.set_exception(MemoryError("no room to inflate"))
    asker.context.runtime.loop.call_soon(asker.context.runtime.loop.stop)
    asker.context.runtime.loop.run_forever()
    assert asker.happened == ["blocked", "aborted", "unblocked"]
    assert asker.context.inflating.used_bytes == 0


@pytest.mark.parametrize("steps", [0, IN_PLACE_STEPS])
@pytest.mark.parametrize("part", ["_check_and_append", "_append_all"])
def test_work_that_was_cancelled_below_it_ends_the_connection(
    asker, monkeypatch, capfd, part, steps
):
    """Its client would wait for ever, and so would all of its later requests."""
    request = Given(topics=[], acks=1, timeout_ms=0)
    monkeypatch.setattr(produce, "check_entries", lambda *_: None)
    monkeypatch.setattr(produce, "parse_produce", lambda *_: request)
    asker.listener.max_decoded_bytes = 1 << 20
    lease: Any = Given(until=float("inf"))
    nothing: Any = None
    handler = ProduceHandler(
        nothing, lease, nothing, asker.context, asker.context, transactional=nothing
    )

    def cancelled(*_: Any) -> Steps[None]:
        yield from (None for _ in range(steps))
        raise asyncio.CancelledError

    monkeypatch.setattr(handler, part, cancelled)
    if part == "_check_and_append":
        handler.handle(asker, 9, 1, memoryview(b""), 0)
    else:
        answer = DelayedProduce(asker.context, asker, 9, 1, acks=1, timeout_ms=10_000)
        asker.block()
        handler._append_verified(asker, answer, request, [], None)  # type: ignore[arg-type]
    loop = asker.context.runtime.loop
    for _ in range(5):
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert asker.happened == ["blocked", "aborted", "unblocked"]
    assert "CancelledError" in capfd.readouterr().err


class Committing:
    """A hosted partition whose high watermark the test moves."""

    def __init__(self, *, sync: bool = False) -> None:
        self.is_leader, self.leader_epoch = True, 4
        self.topic_partition = T0
        self.high_watermark = 0
        self.sync = sync
        self.partition = self
        self.commits: list[tuple[int, Any]] = []
        self.flushes: list[tuple[int, Any]] = []
        self.forgotten: list[int] = []

    def when_committed(self, end_offset: int, callback: Any) -> int:
        self.commits.append((end_offset, callback))
        return len(self.commits)

    def forget_commit(self, token: int) -> None:
        self.forgotten.append(token)

    def flush(self, end_offset: int, callback: Any) -> None:
        self.flushes.append((end_offset, callback))


def committing_request(asker, acks, *partitions):
    request = DelayedProduce(asker.context, asker, 9, 1, acks=acks, timeout_ms=10_000)
    request.topic(b"t")
    for index, one in enumerate(partitions):
        info = Given(base_offset=4, last_offset=6, log_append_time=-1, log_start_offset=0)
        request.appended(one, index, info)
    request.written({})
    return request


def test_a_request_of_acks_all_waits_for_the_commit_of_every_partition(asker):
    first, second, committed = Committing(), Committing(), Committing()
    committed.high_watermark = 7
    committing_request(asker, -1, first, second, committed)
    assert [end for end, _ in first.commits + second.commits] == [7, 7]
    assert committed.commits == [] and asker.happened == []
    first.commits[0][1](None)
    assert asker.happened == []
    second.commits[0][1](None)
    assert asker.happened == ["answered"]


def test_at_the_timeout_each_partition_answers_for_itself(asker):
    """A producer sends again what timed out, and only that: acknowledged records would be twice."""
    committed, slow, lost, unsynced = (Committing(sync=n == 3) for n in range(4))
    request = committing_request(asker, -1, committed, slow, lost, unsynced)
    results = request._topics[0][1]
    committed.commits[0][1](None)
    lost.commits[0][1](NotLeaderOrFollower("elsewhere"))
    unsynced.commits[0][1](None)
    assert asker.happened == []
    request._expire()
    assert [result.error_code for result in results] == [0, 7, 6, 7]
    assert [result.base_offset for result in results] == [4] * 4, "they are in the log"
    slow.commits[0][1](None)
    unsynced.flushes[0][1](None)
    assert asker.happened == ["answered"] and asker.waiting_account.used_bytes == 0


def test_a_request_of_acks_1_waits_for_no_commit(asker):
    partition = Committing()
    committing_request(asker, 1, partition)
    assert partition.commits == [] and asker.happened == ["answered"]


@pytest.mark.parametrize("acks", [-1, 1])
@pytest.mark.parametrize("now", [{"is_leader": False, "leader_epoch": 5}, {"leader_epoch": 6}])
def test_what_was_appended_before_the_leader_changed_is_not_acknowledged(asker, acks, now):
    """A long request goes on in later turns, and others' records may be at its offsets by then."""
    stayed, changed = Committing(), Committing()
    request = DelayedProduce(asker.context, asker, 9, 1, acks=acks, timeout_ms=10_000)
    results = request.topic(b"t")
    for index, hosted in enumerate((stayed, changed)):
        info = Given(base_offset=4, last_offset=6, log_append_time=-1, log_start_offset=0)
        request.appended(hosted, index, info)
        hosted.high_watermark = 7
    vars(changed).update(now)
    request.written({})
    assert [(result.error_code, result.base_offset) for result in results] == [(0, 4), (6, 4)]
    assert results[1].error_message == "t:0: its leader changed during the request"
    assert changed.commits == [] and asker.happened == ["answered"]


@pytest.mark.parametrize("as_run", [False, True])
def test_what_waits_is_counted_until_nothing_will_call_back(asker, as_run):
    """Also after its time is up: an fsync that hangs keeps what it will call."""
    hosted = Committing(sync=True)
    if as_run:
        request = run_of(asker, -1, (hosted, 0), (hosted, 5))
        request.written({})
    else:
        request = committing_request(asker, -1, hosted, hosted)
    held = WAITING_REQUEST_BYTES + 2 * WAITING_BATCH_BYTES
    assert asker.waiting_account.used_bytes == held
    request._expire()
    assert asker.happened == ["answered"]
    callbacks = [late for _, late in (*hosted.commits, *hosted.flushes)]
    for late in callbacks:
        assert asker.waiting_account.used_bytes == held
        late(NotLeaderOrFollower("elsewhere"))
    assert asker.waiting_account.used_bytes == 0 and asker.happened == ["answered"]


@pytest.mark.parametrize("as_run", [False, True])
def test_what_is_answered_gives_back_what_it_held(asker, as_run):
    hosted = Committing()
    if as_run:
        run_of(asker, -1, (hosted, 0)).written({})
    else:
        committing_request(asker, -1, hosted)
    assert asker.waiting_account.used_bytes == WAITING_REQUEST_BYTES + WAITING_BATCH_BYTES
    hosted.commits[0][1](None)
    assert asker.waiting_account.used_bytes == 0 and asker.happened == ["answered"]


def run_of(asker: Asker, acks: int, *places: tuple[Committing, int]) -> DelayedProduceRun:
    run = DelayedProduceRun(asker.context, asker, acks, timeout_ms=10_000)
    for number, (hosted, base) in enumerate(places):
        one = (9, number, acks, 10_000, b"t", 0, 0, 0)
        run.entries.append((one, hosted, AppendInfo(base, base + 4, -1, 0, False)))
        run.sync = run.sync or hosted.sync
    return run


def answers(run: DelayedProduceRun) -> list[tuple[int, int, int]]:
    """(correlation id, error code, base offset) of each response."""
    (data,) = run.segments
    found, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        correlation_id, body = protocol.decode_response(0, 9, data[at + 4 : end])
        result = body.responses[0].partition_responses[0]
        found.append((correlation_id, int(result.error_code), result.base_offset))
        at = end
    return found


def test_a_run_waits_once_for_each_partition_and_answers_all_in_order(asker):
    one, other = Committing(), Committing()
    run = run_of(asker, -1, (one, 0), (other, 7), (one, 5))
    run.written({})
    assert [[end for end, _ in p.commits] for p in (one, other)] == [[10], [12]]
    one.commits[0][1](None)
    assert asker.happened == []
    other.commits[0][1](None)
    assert answers(run) == [(0, 0, 0), (1, 0, 7), (2, 0, 5)]
    assert asker.happened == ["answered"]
    assert asker.counted == 3


def test_a_run_of_acks_1_waits_for_nothing_and_for_the_flush_where_asked(asker):
    plain = run_of(asker, 1, (Committing(), 0))
    plain.written({})
    assert answers(plain) == [(0, 0, 0)]
    hosted = Committing(sync=True)
    durable = run_of(asker, 1, (hosted, 0), (hosted, 5))
    durable.written({})
    assert durable.segments is None
    assert [end for end, _ in hosted.flushes] == [10]
    hosted.flushes[0][1](None)
    assert answers(durable) == [(0, 0, 0), (1, 0, 5)]


def test_a_failed_write_fails_its_partition_s_requests_only(asker):
    broken, well = Committing(), Committing()
    run = run_of(asker, 1, (broken, 0), (well, 0), (broken, 5))
    run.written({broken: KafkaStorageError("the disk is full")})
    assert answers(run) == [(0, 56, 0), (1, 0, 0), (2, 56, 5)]


def test_a_lost_leadership_fails_what_was_not_committed(asker):
    hosted = Committing()
    run = run_of(asker, -1, (hosted, 0), (hosted, 5))
    run.written({})
    hosted.high_watermark = 5
    hosted.commits[0][1](NotLeaderOrFollower("elsewhere"))
    assert answers(run) == [(0, 0, 0), (1, 6, 5)]


def test_too_few_replicas_fail_what_is_committed_too(asker):
    hosted = Committing()
    run = run_of(asker, -1, (hosted, 0))
    run.written({})
    hosted.high_watermark = 5
    hosted.commits[0][1](NotEnoughReplicasAfterAppend("one left"))
    assert answers(run) == [(0, 20, 0)]


def test_at_the_timeout_only_what_still_waits_has_timed_out(asker):
    hosted, slow = Committing(), Committing(sync=True)
    run = run_of(asker, -1, (hosted, 0), (hosted, 5), (slow, 0))
    run.written({})
    hosted.high_watermark = slow.high_watermark = 5
    run._expire()
    assert answers(run) == [(0, 0, 0), (1, 7, 5), (2, 7, 0)]
    assert hosted.forgotten == [1]
    for _, late in (*hosted.commits, *slow.commits, *slow.flushes):
        late(None)
    assert asker.happened == ["answered"]


class Told(Committing):
    """Its waits are over; who gives up hears so."""

    def forget_commit(self, token: int) -> None:
        self.commits[token - 1][1](NotEnoughReplicasAfterAppend("one left"))


def test_what_a_run_is_about_to_be_told_at_its_timeout_counts(asker):
    """Very many are told in turn; those who wait longest may have no time left for it."""
    told, slow = Told(), Committing()
    over = run_of(asker, -1, (told, 0))
    over.written({})
    told.high_watermark = 5
    over._expire()
    assert answers(over) == [(0, 20, 0)]
    run = run_of(asker, -1, (told, 5), (slow, 0))
    run.written({})
    told.high_watermark = 10
    run._expire()
    assert answers(run) == [(0, 20, 5), (1, 7, 0)]
    assert asker.happened == ["answered"] * 2


@pytest.mark.parametrize(("lost", "code"), [(True, 6), (False, 7)])
def test_a_leader_out_of_touch_sends_producers_elsewhere(asker, lost, code):
    asker.context.cluster_link.out_of_touch = lost
    run = run_of(asker, -1, (Committing(), 0))
    run.written({})
    run._expire()
    assert [error for _, error, _ in answers(run)] == [code]


class Doubtful(Hosted):
    """A partition that is led here in epoch 4, as this node thinks."""

    def __init__(self, replicated: bool = True) -> None:
        super().__init__(replicated)
        self.partition.is_leader = True
        self.partition.leader_epoch = 4


def refused(asker, error, hosted, acks=-1):
    """A request whose one batch is refused; and whom its proof was asked of."""
    questions: list[Any] = []
    asker.context.barrier = Given(confirm=questions.append)
    request = DelayedProduce(asker.context, asker, 9, 1, acks=acks, timeout_ms=10_000)
    request.topic(b"t")
    request.refused(0, error("t-0: 5 came after 3"), hosted)
    request.written({})
    return request, questions


def code_of(request) -> int:
    ((_, (result,)),) = request._topics
    assert result.base_offset == -1, "nothing was appended"
    return result.error_code


@pytest.mark.parametrize(
    ("error", "code"),
    [(OutOfOrderSequenceNumber, 45), (InvalidProducerEpoch, 47), (InvalidTxnState, 48)],
)
def test_a_leader_proves_that_it_is_one_before_it_says_something_final(asker, error, code):
    request, (then,) = refused(asker, error, Doubtful())
    assert asker.happened == []
    then(True)
    assert (code_of(request), asker.happened) == (code, ["answered"])


@pytest.mark.parametrize("why", ["nobody answers", "another leads", "it was elected anew"])
def test_without_proof_a_producer_looks_for_the_leader(asker, why):
    hosted = Doubtful()
    request, (then,) = refused(asker, OutOfOrderSequenceNumber, hosted)
    hosted.partition.is_leader = why != "another leads"
    hosted.partition.leader_epoch += why == "it was elected anew"
    then(why != "nobody answers")
    assert (code_of(request), asker.happened) == (6, ["answered"])
    ((_, (result,)),) = request._topics
    assert result.error_message.startswith("t:0: another one may lead; ")
    # What was sent behind it is turned away alike, with nobody asked.
    request, questions = refused(asker, OutOfOrderSequenceNumber, hosted)
    assert (code_of(request), questions) == (6, [])
    ((_, (result,)),) = request._topics
    assert result.error_message.startswith("t:0: a batch before this one was refused; ")


def test_a_proof_that_comes_after_the_timeout_is_too_late(asker):
    request, (then,) = refused(asker, OutOfOrderSequenceNumber, Doubtful())
    request._expire()
    then(True)
    assert (code_of(request), asker.happened) == (6, ["answered"])


@pytest.mark.parametrize(
    ("error", "hosted", "acks", "code"),
    [
        (NotEnoughReplicas, Doubtful(), -1, 19),
        (OutOfOrderSequenceNumber, Doubtful(replicated=False), -1, 45),
        (OutOfOrderSequenceNumber, Doubtful(), 0, 45),
    ],
)
def test_what_needs_no_proof_is_answered_at_once(asker, error, hosted, acks, code):
    request, questions = refused(asker, error, hosted, acks)
    assert (code_of(request), questions) == (code, [])
    assert asker.happened == (["answered"] if acks else ["aborted"])


@pytest.mark.parametrize(("first", "code"), [(NotLeaderOrFollower, 6), (NotEnoughReplicas, 19)])
def test_what_was_sent_behind_a_refused_batch_is_refused_alike(asker, monkeypatch, first, code):
    """A node that stood still: it refuses, looks up, and leads again when the next batch comes."""
    hosted, other = Hosted(), Hosted()
    gap = OutOfOrderSequenceNumber("sequence 159 after 157")

    def told(where, error):
        return produce_errors.refusal(
            asker, 0, error, where, asker.context.runtime.loop.time()
        ).error_code

    assert told(hosted, gap) == 45
    assert told(hosted, first("as yet")) == code
    assert [told(hosted, gap), told(hosted, gap)] == [code, code]
    assert told(hosted, InvalidProducerEpoch("0 < 1")) == 47
    assert told(other, gap) == 45
    monkeypatch.setattr(produce_errors, "BEHIND_S", 0.0)
    assert told(other, first("as yet")) == code
    assert told(other, gap) == 45, "nothing is on its way any more"


def test_a_refusal_that_stands_for_another_does_not_keep_itself_alive(asker):
    """A producer whose batches before this one are gone hears so in the end."""
    hosted = Doubtful()
    refused(asker, NotEnoughReplicas, hosted)
    (until,) = asker.turned_away.values()
    request, _ = refused(asker, OutOfOrderSequenceNumber, hosted)
    assert code_of(request) == 19
    assert list(asker.turned_away.values()) == [until]
