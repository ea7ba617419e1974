"""Transactional requests over the wire: what connections and versions make of the core's results.

What the core decides is in ``tests/node/coordinator/transactions``; what Apache Kafka answers, and
kept, in ``tests/golden/transactions``.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.groups.group_membership import GroupMembershipHandler
from kept.node.kafka.handlers.transactions.init_producer_id import ProducerIdHandler
from kept.node.kafka.handlers.transactions.transactions import TransactionsHandler
from kept.node.runtime.time_slices import TimeSlices
from kept.node.security.session import node_session
from kept.steps import run_to_end
from kept.testing import Cluster
from tests.support.given import Given
from tests.support.kafka_connection import Connection
from tests.support.loops import run

FIND, INIT, ADD, ADD_OFFSETS, END, DESCRIBE, LIST = 10, 22, 24, 25, 26, 65, 66
NONE, FENCED, OLD_EPOCH = (
    ErrorCode.none,
    ErrorCode.producer_fenced,
    ErrorCode.invalid_producer_epoch,
)


@run
async def test_a_cluster_that_is_not_whole_refuses_transactional_ids() -> None:
    """Rule 40: a client gives up at once; some messages say why."""
    nothing: Any = None
    transactions: Any = Given(is_served=False)
    refused = ErrorCode.transactional_id_authorization_failed
    ids = ProducerIdHandler(nothing, transactions)
    request = Given(transactional_id="bank", producer_id=-1, producer_epoch=-1)
    begun: Any = ids.init_producer_id(RequestContext(22, 5, "c", node_session("P")), request)
    assert begun["error_code"] is refused
    finder = GroupMembershipHandler(nothing, nothing, nothing, nothing, transactions, nothing)
    for version in (1, 6):
        context = RequestContext(FIND, version, "c", node_session("P"))
        request = Given(key="bank", coordinator_keys=["bank"], key_type=1)
        found: Any = await run_to_end(finder.find_coordinator(context, request))
        one = found["coordinators"][0] if version >= 4 else found
        assert one["error_code"] is refused
        assert "not every node" in one["error_message"]


async def adding(handler: TransactionsHandler, version: int, request: Any) -> tuple[Any, int]:
    """The answer to an AddPartitionsToTxn, and how many turns others had meanwhile."""
    seconds = count()  # by a clock on which each step takes a slice
    slices = TimeSlices(asyncio.get_running_loop(), lambda: next(seconds))
    context = RequestContext(ADD, version, "c", node_session("P"))

    async def answered() -> Any:
        said = await slices.finish(handler.add_partitions_to_txn(context, request))
        return await slices.finish(await said)

    work, turns = asyncio.ensure_future(answered()), 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    return work.result(), turns


@run
async def test_many_partitions_let_others_run_meanwhile() -> None:
    nothing: Any = None
    metadata: Any = Given(image=Given(partition=lambda *_: None))
    handler = TransactionsHandler(metadata, nothing, nothing, nothing)
    topics = [Given(name="none", partitions=range(20_000))]
    of_client = Given(
        v3_and_below_topics=topics,
        v3_and_below_transactional_id="bank",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
    )
    of_broker = Given(
        transactional_id="bank", producer_id=1, producer_epoch=0, verify_only=True, topics=topics
    )
    requests = {3: of_client, 5: Given(transactions=[of_broker])}
    for version, request in requests.items():
        answer, turns = await adding(handler, version, request)
        (topic,) = (
            answer["results_by_topic_v3_and_below"]
            if version < 4
            else answer["results_by_transaction"][0]["topic_results"]
        )
        found = [p["partition_index"] for p in topic["results_by_partition"]]
        assert found == list(range(20_000))
        assert turns > 10


@run
async def test_a_request_of_many_ids_lets_others_run() -> None:
    nothing: Any = None
    metadata: Any = Given(image=Given(partition=lambda *_: None))
    handler = TransactionsHandler(metadata, nothing, nothing, nothing)
    asked = Given(
        transactional_id="bank",
        producer_id=7,
        producer_epoch=0,
        verify_only=False,
        topics=[Given(name="gone", partitions=[0])],
    )
    answer, turns = await adding(handler, 4, Given(transactions=[asked] * 1600))
    assert len(answer["results_by_transaction"]) == 1600
    assert turns >= 100


class Bank:
    """A transactional producer by hand."""

    def __init__(self, connect: Callable[[], Connection], name: str, topic: str) -> None:
        self.connect = connect
        self.name = name
        self.topic = topic
        self.connection = connect()
        assert self.ask(FIND, 2, key=name, key_type=1).error_code is NONE
        self.producer_id, self.epoch = self.begin_anew()

    def ask(self, api: int, version: int, **values: Any) -> Any:
        return self.connection.ask(api, version, **values)

    def begin_anew(self) -> tuple[int, int]:
        while True:
            found = self.ask(
                INIT,
                4,
                transactional_id=self.name,
                transaction_timeout=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
            if found.error_code is not ErrorCode.concurrent_transactions:
                assert found.error_code is NONE
                return found.producer_id, found.producer_epoch

    def adding(self, *partitions: int, epoch: int | None = None) -> dict[str, Any]:
        return {
            "v3_and_below_transactional_id": self.name,
            "v3_and_below_producer_id": self.producer_id,
            "v3_and_below_producer_epoch": self.epoch if epoch is None else epoch,
            "v3_and_below_topics": [{"name": self.topic, "partitions": list(partitions)}],
        }

    def producer(self, epoch: int | None = None) -> dict[str, Any]:
        return {
            "transactional_id": self.name,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch if epoch is None else epoch,
        }

    def described(self) -> tuple[str, dict[str, tuple[int, ...]]]:
        (found,) = self.ask(DESCRIBE, 0, transactional_ids=[self.name]).transaction_states
        return found.transaction_state, {t.topic: t.partitions for t in found.topics}


@pytest.fixture
def bank(kept_broker: Cluster) -> Iterator[Bank]:
    opened: list[Connection] = []

    def connect() -> Connection:
        opened.append(Connection(kept_broker.bootstrap))
        return opened[-1]

    topic = kept_broker.create_topic(partitions=3)
    yield Bank(connect, f"bank-{topic}", topic)
    for connection in opened:
        connection.close()


def errors(response: Any) -> list[ErrorCode]:
    return [
        p.partition_error_code
        for t in response.results_by_topic_v3_and_below
        for p in t.results_by_partition
    ]


def test_requests_sent_together_are_served_one_after_another(bank: Bank) -> None:
    """librdkafka adds partitions and offsets at once, and 51 would cost it a retry."""
    bank.connection.send(ADD, 0, **bank.adding(0))
    bank.connection.send(ADD_OFFSETS, 0, **bank.producer(), group_id="readers")
    bank.connection.send(ADD, 3, **bank.adding(1, 2))
    bank.connection.send(END, 1, **bank.producer(), committed=True)
    assert errors(bank.connection.receive()) == [NONE]
    assert bank.connection.receive().error_code is NONE
    assert errors(bank.connection.receive()) == [NONE, NONE]
    assert bank.connection.receive().error_code is NONE


@pytest.mark.parametrize(("api", "knows_from"), [(ADD, 2), (ADD_OFFSETS, 2), (END, 2)])
def test_old_versions_hear_of_fencing_by_the_code_they_know(
    bank: Bank, api: int, knows_from: int
) -> None:
    bank.epoch = bank.begin_anew()[1]
    for version in range(4):
        if api == ADD:
            (code,) = errors(bank.ask(ADD, version, **bank.adding(0, epoch=0)))
        elif api == END:
            code = bank.ask(END, version, **bank.producer(0), committed=True).error_code
        else:
            code = bank.ask(ADD_OFFSETS, version, **bank.producer(0), group_id="g").error_code
        assert code is (FENCED if version >= knows_from else OLD_EPOCH)


def test_an_old_instance_hears_of_fencing_by_the_code_that_its_version_knows(bank: Bank) -> None:
    bank.begin_anew()
    for version, code in ((3, OLD_EPOCH), (4, FENCED), (5, FENCED)):
        found = bank.ask(INIT, version, **bank.producer(0), transaction_timeout=60_000)
        assert found.error_code is code


def test_a_partition_that_does_not_exist_keeps_out_the_others(bank: Bank) -> None:
    added = bank.ask(ADD, 3, **bank.adding(0, 9))
    assert errors(added) == [
        ErrorCode.operation_not_attempted,
        ErrorCode.unknown_topic_or_partition,
    ]
    assert errors(bank.ask(ADD, 3, **bank.adding(1))) == [NONE]
    assert bank.described() == ("Ongoing", {bank.topic: (1,)})


def test_a_request_over_a_connection_that_was_replaced_closes_it(bank: Bank) -> None:
    """KAFKA-17754: it would end, or begin, a later transaction of the same epoch."""
    stale = bank.connection
    assert errors(bank.ask(ADD, 3, **bank.adding(0))) == [NONE]
    bank.connection = bank.connect()
    assert errors(bank.ask(ADD, 3, **bank.adding(1))) == [NONE]
    stale.send(ADD, 3, **bank.adding(2))
    with pytest.raises(ConnectionResetError):
        stale.receive()
    assert bank.described() == ("Ongoing", {bank.topic: (0, 1)})


def test_what_is_listed(bank: Bank) -> None:
    assert errors(bank.ask(ADD, 3, **bank.adding(0))) == [NONE]

    def listed(states: list[str], pattern: str | None, **more: Any) -> set[str]:
        response = bank.ask(
            LIST,
            2,
            state_filters=states,
            transactional_id_pattern=pattern,
            producer_id_filters=more.get("producers", []),
            duration_filter=-1,
        )
        assert response.error_code is NONE
        return {t.transactional_id for t in response.transaction_states} & {bank.name}

    whole, nobody = {bank.name}, set[str]()
    assert listed([], None) == listed(["Ongoing"], "bank-.*") == whole
    assert listed(["Empty"], None) == listed([], "ban") == listed(["Strange"], None) == nobody
    assert listed([], None, producers=[bank.producer_id]) == whole
    assert listed([], None, producers=[bank.producer_id + 1]) == nobody


def test_a_pattern_that_is_refused_has_a_code_of_its_own(bank: Bank) -> None:
    refused = bank.ask(
        LIST,
        2,
        state_filters=[],
        producer_id_filters=[],
        duration_filter=-1,
        transactional_id_pattern="(a+)+",
    )
    assert refused.error_code is ErrorCode.invalid_regular_expression


def test_transactions_are_counted(bank: Bank, kept_broker: Cluster) -> None:
    def sample(name: str) -> float:
        with urllib.request.urlopen(f"{kept_broker.url()}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = [f"kept_transactions_{what}_total" for what in ("started", "committed", "aborted")]
    ends = "kept_transaction_end_seconds_count"
    ends_before = sample(ends)
    before, open_before = [sample(n) for n in names], sample('kept_transactions{state="Ongoing"}')
    for is_commit in (True, False, True):
        assert errors(bank.ask(ADD, 3, **bank.adding(0))) == [NONE]
        assert sample('kept_transactions{state="Ongoing"}') == open_before + 1
        assert bank.ask(END, 3, **bank.producer(), committed=is_commit).error_code is NONE
        while bank.ask(END, 3, **bank.producer(), committed=is_commit).error_code is not NONE:
            pass  # its markers are being written
    while sample(ends) < ends_before + 3:
        pass  # the last completion is written a moment later
    assert [sample(n) for n in names] == [before[0] + 3, before[1] + 2, before[2] + 1]
    assert sample(ends) == ends_before + 3
    assert sample("kept_producer_ids") >= 1
    assert sample("kept_transaction_markers_pending") == 0
    assert sample("kept_late_transactions") == 0
