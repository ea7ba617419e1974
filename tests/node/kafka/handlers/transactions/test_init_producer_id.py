"""Producer ids: never one twice, from any node, whatever dies."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.node.coordinator import producer_ids
from kept.node.coordinator.producer_ids import ProducerIds
from kept.node.internode.controller_rpc import (
    AllocateProducerIdsReply,
    AllocateProducerIdsRequest,
)
from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.transactions.init_producer_id import ProducerIdHandler
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.runtime.runtime import Runtime
from kept.node.security.session import node_session
from kept.storage.disk import Disk
from kept.storage.errors import KafkaStorageError, NotController, StaleBrokerEpoch
from kept.testing import Cluster
from tests.support.given import Given
from tests.support.kafka_connection import Connection
from tests.support.metadata import KnownMetadata
from tests.support.replicas import RecordedPeers

INIT_PRODUCER_ID = 22
BLOCK = 1000


class Controller:
    """Gives blocks, or refuses as often as the test says."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.blocks = 0

    async def call(self, node_id: int, method: str, request: Any) -> AllocateProducerIdsReply:
        assert (node_id, method) == (1, "AllocateProducerIds")
        assert request == AllocateProducerIdsRequest(0, 9)
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop(0)
        self.blocks += 1
        return AllocateProducerIdsReply(self.blocks * 10, 3)

    def ids(self) -> ProducerIds:
        metadata: Any = KnownMetadata(leader_id=1)
        peers: Any = RecordedPeers(self.call)
        return ProducerIds(Runtime(Disk()), metadata, NodeIdentity(0, "cluster", 9), peers)


async def asked(ids: ProducerIds) -> Any:
    nothing: Any = None
    context = RequestContext(INIT_PRODUCER_ID, 4, "c", node_session("P"))
    answer: Any = ProducerIdHandler(ids, nothing).init_producer_id(
        context, Given(transactional_id=None, producer_id=-1, producer_epoch=-1)
    )
    return await answer


@pytest.mark.parametrize(("producer_id", "epoch"), [(5, -1), (-1, 0), (10**6, -1)])
def test_a_producer_names_its_id_and_its_epoch_or_neither(producer_id, epoch):
    """Half of it is a client's bug, which a fresh id would hide (KIP-360)."""
    nothing: Any = None
    request = Given(transactional_id=None, producer_id=producer_id, producer_epoch=epoch)
    context = RequestContext(INIT_PRODUCER_ID, 5, "c", node_session("P"))
    answer: Any = ProducerIdHandler(nothing, nothing).init_producer_id(context, request)
    assert answer["error_code"] == ErrorCode.invalid_request
    assert answer["producer_id"] == -1


def test_ids_of_a_block_are_given_in_order_and_then_the_next_block():
    async def run() -> list[int]:
        ids = Controller().ids()
        return await asyncio.gather(*(ids.next() for _ in range(7)))

    assert asyncio.run(run()) == [10, 11, 12, 20, 21, 22, 30]


def test_a_change_of_controllers_is_waited_for(monkeypatch):
    monkeypatch.setattr(producer_ids, "RETRY_S", 0)

    async def run() -> Any:
        controller = Controller(NotController("elected anew"), StaleBrokerEpoch("again"))
        return await asked(controller.ids())

    assert asyncio.run(run()) == {"error_code": 0, "producer_id": 10, "producer_epoch": 0}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotController("nobody"), ErrorCode.coordinator_load_in_progress),
        (KafkaStorageError("disk"), ErrorCode.kafka_storage_error),
    ],
)
def test_without_a_block_clients_are_told_to_try_again(monkeypatch, error, code):
    monkeypatch.setattr(producer_ids, "ALLOCATE_S", 0)

    async def run() -> Any:
        return await asked(Controller(error).ids())

    assert asyncio.run(run())["error_code"] == code


class Asker:
    """Asks one node for ids until stopped, over a new connection when the old one breaks."""

    def __init__(self, port: int) -> None:
        self.ids: list[int] = []
        self.codes: set[ErrorCode] = set()
        self._address = f"localhost:{port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection = Connection(self._address)
            except OSError:
                self._stop.wait(0.05)
                continue
            try:
                while not self._stop.is_set():
                    self._ask(connection)
            except OSError:
                pass  # the node was killed
            finally:
                connection.close()

    def _ask(self, connection: Connection) -> None:
        values = {"transactional_id": None, "transaction_timeout": 0}
        answer = connection.ask(INIT_PRODUCER_ID, 4, producer_id=-1, producer_epoch=-1, **values)
        if answer.error_code is ErrorCode.none:
            self.ids.append(answer.producer_id)
        else:
            self.codes.add(answer.error_code)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def controller_of(cluster: Cluster) -> int:
    with urllib.request.urlopen(f"{cluster.url(0)}/metrics", timeout=60) as answer:
        (line,) = (one for one in answer if one.startswith(b"kept_raft_leader "))
    return int(float(line.split()[1]))


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 3])
def test_no_id_is_given_twice_while_controllers_die(kept_cluster, victims):
    cluster = kept_cluster(nodes=3)
    askers = [Asker(cluster.port(i)) for i in range(3)]

    def go_on(nodes: tuple[int, ...] = (0, 1, 2)) -> None:
        """Blocks are used up, so that each of these nodes has asked for a new one."""
        goals = {i: len(askers[i].ids) + BLOCK + 1 for i in nodes}
        cluster.wait_until(
            lambda: all(len(askers[i].ids) > goal for i, goal in goals.items()), "more ids"
        )

    try:
        go_on()
        first = controller_of(cluster)
        for victim in [(first + i) % 3 for i in range(victims)]:
            cluster.kill(victim)
            go_on(tuple(i for i in range(3) if i != victim))
            cluster.start(victim)
            go_on((victim,))
    finally:
        for asker in askers:
            asker.stop()
    found = [number for asker in askers for number in asker.ids]
    assert len(found) == len(set(found))
    assert set().union(*(asker.codes for asker in askers)) <= {
        ErrorCode.coordinator_load_in_progress
    }
