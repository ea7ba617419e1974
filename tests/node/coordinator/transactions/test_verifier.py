"""Questions of leaders to coordinators: merged by node, one of an id at a time, always answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions.verifier import Verifier
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.runtime.runtime import Runtime
from kept.storage.disk import Disk
from kept.storage.errors import KeptError, NetworkException, NotCoordinator
from kept.storage.types import TopicPartition
from tests.support.given import Given
from tests.support.loops import run
from tests.support.replicas import live_config

ORDERS = TopicPartition("orders", 0)
BILLS = TopicPartition("bills", 3)
NONE, ABORTABLE = ErrorCode.none, ErrorCode.transaction_abortable
HERE = 0
COORDINATORS = {"bank": 1, "shop": 1, "far": 2, "own": HERE}


class Coordinators:
    """Other nodes: a request waits until the test answers it, or fails it."""

    def __init__(self, **settings: str) -> None:
        self.asked: list[tuple[int, list[tuple[str, int, bool]], asyncio.Future[Any]]] = []
        self.closed = False
        self.added: CompletableFuture[ev.AddPartitionsResult]
        self.own: frozenset[TopicPartition] | KeptError = frozenset()
        transactions: Any = Given(
            shards__leader_of=COORDINATORS.get,
            identity__node_id=HERE,
            verify=self.verify,
            add=self.add,
        )
        self.verifier = Verifier(Runtime(Disk()), live_config(**settings), transactions, self)

    def verify(
        self, transactional_id: str, producer_id: int, epoch: int, partitions: Any
    ) -> CompletableFuture[ev.VerifyPartitionsResult]:
        """This node's own coordinator: the test says what it answers."""
        assert (transactional_id, producer_id, epoch) == ("own", 7, 0)
        if isinstance(self.own, KeptError):
            raise self.own
        return CompletableFuture.completed(ev.VerifyPartitionsResult(absent=partitions & self.own))

    def add(
        self, transactional_id: str, producer_id: int, epoch: int, partitions: Any, version: int
    ) -> CompletableFuture[ev.AddPartitionsResult]:
        """The same for partitions that join, once the test says so."""
        assert (transactional_id, producer_id, epoch, version) == ("own", 7, 0, 2)
        if isinstance(self.own, KeptError):
            raise self.own
        self.added = CompletableFuture()
        return self.added

    async def call(
        self, node_id: int, api_key: ApiKey, version: int, values: dict[str, Any], timeout_s: float
    ) -> Any:
        request = protocol.build(
            protocol.message_type(api_key, version, EntityType.request), values
        )
        asked = [
            (t.transactional_id, sum(len(topic.partitions) for topic in t.topics), t.verify_only)
            for t in request.transactions
        ]
        self.asked.append((node_id, asked, asyncio.get_running_loop().create_future()))
        errors = await self.asked[-1][2]
        response = {
            "error_code": 0,
            "results_by_transaction": [
                {
                    "transactional_id": t.transactional_id,
                    "topic_results": [
                        {
                            "name": topic.name,
                            "results_by_partition": [
                                {"partition_index": p, "partition_error_code": errors[topic.name]}
                                for p in topic.partitions
                                if topic.name in errors
                            ],
                        }
                        for topic in t.topics
                    ],
                }
                for t in request.transactions
                if t.transactional_id not in errors
            ],
        }
        return protocol.build(
            protocol.message_type(api_key, version, EntityType.response), response
        )

    async def close(self) -> None:
        self.closed = True

    def ask(self, transactional_id: str, *partitions: TopicPartition, adds: bool = False) -> Any:
        return self.verifier.verify(transactional_id, 7, 0, frozenset(partitions), adds=adds)

    @property
    def sent(self) -> list[tuple[int, list[tuple[str, int, bool]]]]:
        return [(node, asked) for node, asked, _ in self.asked]


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@run
async def test_each_partition_gets_its_own_answer() -> None:
    c = Coordinators()
    answer = c.ask("bank", ORDERS, BILLS)
    await turn()
    assert c.sent == [(1, [("bank", 2, True)])]
    c.asked[0][2].set_result({"orders": NONE, "bills": ABORTABLE})
    assert await answer == {ORDERS: NONE, BILLS: ABORTABLE}
    assert (c.verifier.seconds.count, c.verifier.failures) == (1, 1)


@run
async def test_what_comes_while_a_request_is_under_way_goes_with_the_next_one() -> None:
    c = Coordinators()
    first = c.ask("bank", ORDERS)
    await turn()
    rest = [c.ask("bank", BILLS), c.ask("shop", ORDERS, adds=True), c.ask("bank", ORDERS)]
    elsewhere = c.ask("far", ORDERS)
    await turn()
    assert c.sent == [(1, [("bank", 1, True)]), (2, [("far", 1, True)])]
    c.asked[0][2].set_result({"orders": NONE})
    assert await first == {ORDERS: NONE}
    await turn()
    assert c.sent[2:] == [(1, [("bank", 1, True), ("shop", 1, False)])]
    c.asked[2][2].set_result({"orders": NONE, "bills": ABORTABLE})
    await turn()
    assert c.sent[3:] == [(1, [("bank", 1, True)])]
    c.asked[3][2].set_result({"orders": ABORTABLE})
    c.asked[1][2].set_result({"orders": NONE})
    assert [await one for one in rest] == [{BILLS: ABORTABLE}, {ORDERS: NONE}, {ORDERS: ABORTABLE}]
    assert await elsewhere == {ORDERS: NONE}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NetworkException("gone"), ErrorCode.network_exception),
        (NotCoordinator("moved"), ErrorCode.not_coordinator),
    ],
)
@run
async def test_a_request_that_fails_is_an_answer_too(error: KeptError, code: ErrorCode) -> None:
    c = Coordinators()
    answers = [c.ask("bank", ORDERS), c.ask("shop", BILLS)]
    await turn()
    for _, _, reply in c.asked:
        reply.set_exception(error)
    await turn()
    for _, _, reply in c.asked[1:]:
        if not reply.done():
            reply.set_exception(error)
    assert [await a for a in answers] == [{ORDERS: code}, {BILLS: code}]
    # The next question is asked anew.
    again = c.ask("bank", ORDERS)
    await turn()
    c.asked[-1][2].set_result({"orders": NONE})
    assert await again == {ORDERS: NONE}


@run
async def test_what_a_coordinator_leaves_out_is_no_consent() -> None:
    c = Coordinators()
    answers = [c.ask("bank", ORDERS, BILLS), c.ask("shop", ORDERS)]
    await turn()
    c.asked[0][2].set_result({"orders": NONE, "shop": NONE})
    unknown = ErrorCode.unknown_server_error
    assert await answers[0] == {ORDERS: NONE, BILLS: unknown}
    await turn()
    if len(c.asked) > 1:
        c.asked[1][2].set_result({"orders": NONE, "shop": NONE})
    assert await answers[1] == {ORDERS: unknown}


@run
async def test_without_a_coordinator_nobody_is_asked() -> None:
    c = Coordinators()
    answer = c.ask("nobody", ORDERS)
    assert answer.result() == {ORDERS: ErrorCode.coordinator_not_available}
    assert c.sent == []


@run
async def test_at_the_end_of_the_node_whoever_waits_hears_of_it() -> None:
    c = Coordinators()
    answers = [c.ask("bank", ORDERS)]
    await turn()
    answers.append(c.ask("shop", ORDERS))
    await c.verifier.close()
    assert [a.result() for a in answers] == [{ORDERS: ErrorCode.not_coordinator}] * 2
    assert c.closed


@run
async def test_without_verification_nobody_is_asked_but_who_adds() -> None:
    c = Coordinators(transaction_partition_verification_enable="false")
    assert c.ask("bank", ORDERS).result() == {ORDERS: NONE}
    answer = c.ask("bank", ORDERS, adds=True)
    await turn()
    assert c.sent == [(1, [("bank", 1, False)])]
    c.asked[0][2].set_result({"orders": NONE})
    assert await answer == {ORDERS: NONE}


@pytest.mark.parametrize(
    ("own", "expected", "failures"),
    [
        (frozenset(), {ORDERS: NONE, BILLS: NONE}, 0),
        (frozenset({BILLS}), {ORDERS: NONE, BILLS: ABORTABLE}, 1),
        (NotCoordinator("moved"), dict.fromkeys((ORDERS, BILLS), ErrorCode.not_coordinator), 1),
    ],
)
@run
async def test_this_node_verifies_without_a_request(own: Any, expected: Any, failures: int) -> None:
    c = Coordinators()
    c.own = own
    assert c.ask("own", ORDERS, BILLS).result() == expected
    assert (c.sent, c.verifier.seconds.count, c.verifier.failures) == ([], 1, failures)


@pytest.mark.parametrize("error", [NONE, ErrorCode.concurrent_transactions])
@run
async def test_this_node_adds_without_a_request(error: ErrorCode) -> None:
    c = Coordinators()
    adding = c.ask("own", ORDERS, BILLS, adds=True)
    assert not adding.done()
    c.added.set_result(ev.AddPartitionsResult(error))
    assert adding.result() == {ORDERS: error, BILLS: error}
    assert (c.sent, c.verifier.seconds.count, c.verifier.failures) == ([], 1, int(error != NONE))
    c.own = NotCoordinator("moved")
    adding = c.ask("own", ORDERS, adds=True)
    assert adding.result() == {ORDERS: ErrorCode.not_coordinator}
