"""A transactional producer that is nothing but its requests: what of a transaction is the broker's.

It sends what librdkafka sends for a transaction of one record, each request when the one before is
answered: AddPartitionsToTxn v0 to the coordinator, Produce v7 to the leader, EndTxn v1 to the
coordinator. librdkafka's threads hand each request and each answer to one another, which takes
longer than most brokers; here one thread blocks on one socket at a time.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

import frames
from kio.schema.errors import ErrorCode

from kept.client.client import Client
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import decode_response, encode_request
from kept.storage.records import build_batch

VALUE = b"v" * 100
TIMEOUT_MS = 60_000
T = TypeVar("T")
DEADLINE_S = 60.0
BACKOFF_S = 0.02
"""As librdkafka's, while the markers of the transaction before are written."""
_LATER = (
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.coordinator_not_available,
    ErrorCode.not_coordinator,
)


class BareProducer:
    """A producer with a transactional id, which writes to partition 0 of ``topic``."""

    def __init__(self, bootstrap: str, name: str, topic: str) -> None:
        self._name, self._topic = name, topic
        with Client(bootstrap) as client:
            found = client.metadata([topic])
            leader = found.nodes[found.topics[topic].partitions[0].leader]
        self._leader = _connect(leader.host, leader.port)
        self._coordinator = self._leader
        host, port = self._find()
        self._coordinator = _connect(host, port)
        self._producer = self._begin()
        self._sequence = 0
        self._add = self._request(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            0,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=self._producer[0],
            v3_and_below_producer_epoch=self._producer[1],
            v3_and_below_topics=[{"name": topic, "partitions": [0]}],
        )
        self._end = self._request(
            ApiKey.END_TXN,
            1,
            transactional_id=name,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            committed=True,
        )

    def transaction(self) -> tuple[float, float]:
        """One transaction of one record; its seconds, and those of its EndTxn."""
        started = time.perf_counter()
        code = _retried(self._join, lambda code: code is ErrorCode.concurrent_transactions)
        _check("AddPartitionsToTxn", code)
        batch = build_batch(
            [(int(time.time() * 1000), None, VALUE, ())],
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=self._sequence,
            is_transactional=True,
        )
        self._sequence += 1
        request = frames.produce(self._topic, batch, -1, transactional_id=self._name)
        produced = _ask(self._leader, ApiKey.PRODUCE, 7, request)
        _check("Produce", produced.responses[0].partition_responses[0].error_code)
        ending = time.perf_counter()
        ended = _ask(self._coordinator, ApiKey.END_TXN, 1, self._end)
        _check("EndTxn", ended.error_code)
        now = time.perf_counter()
        return now - started, now - ending

    def _join(self) -> ErrorCode:
        """What became of AddPartitionsToTxn."""
        added = _ask(self._coordinator, ApiKey.ADD_PARTITIONS_TO_TXN, 0, self._add)
        (partition,) = added.results_by_topic_v3_and_below[0].results_by_partition
        return partition.partition_error_code

    def close(self) -> None:
        """Close its connections."""
        self._leader.close()
        self._coordinator.close()

    def _find(self) -> tuple[str, int]:
        request = self._request(ApiKey.FIND_COORDINATOR, 2, key=self._name, key_type=1)
        found = _retried(
            lambda: _ask(self._leader, ApiKey.FIND_COORDINATOR, 2, request),
            lambda answer: answer.error_code in _LATER,
        )
        _check("FindCoordinator", found.error_code)
        return found.host, found.port

    def _begin(self) -> tuple[int, int]:
        request = self._request(
            ApiKey.INIT_PRODUCER_ID,
            4,
            transactional_id=self._name,
            transaction_timeout=TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        begun = _retried(
            lambda: _ask(self._coordinator, ApiKey.INIT_PRODUCER_ID, 4, request),
            lambda answer: answer.error_code in _LATER,
        )
        _check("InitProducerId", begun.error_code)
        return begun.producer_id, begun.producer_epoch

    @staticmethod
    def _request(api_key: ApiKey, version: int, **values: Any) -> bytes:
        return encode_request(api_key, version, 1, "bench", values)


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _retried(ask: Callable[[], T], later: Callable[[T], bool]) -> T:
    """The answer, once it is none that says "later"; the last one after ``DEADLINE_S``."""
    end = time.monotonic() + DEADLINE_S
    while later(answer := ask()) and time.monotonic() < end:
        time.sleep(BACKOFF_S)
    return answer


def _ask(connection: socket.socket, api_key: ApiKey, version: int, request: bytes) -> Any:
    """The typed response."""
    connection.sendall(request)
    frame = connection.recv(65_536)
    while len(frame) < 4 or len(frame) < 4 + struct.unpack_from(">i", frame)[0]:
        more = connection.recv(65_536)
        if not more:
            raise RuntimeError("the broker closed the connection")
        frame += more
    return decode_response(api_key, version, memoryview(frame)[4:])[1]


def _check(what: str, error: ErrorCode) -> None:
    if error is not ErrorCode.none:
        raise RuntimeError(f"{what}: {error.name}")
