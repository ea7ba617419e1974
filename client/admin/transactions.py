"""Transactional ids and the producers of partitions: operations without I/O (see
:mod:`kept.client.admin.topics`).

A *hanging* transaction is open in a partition, and its coordinator does not know of it: nobody ends
it but an operator, and ``read_committed`` readers wait for it. Source: Kafka's
``TransactionsCommand``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kept.client.admin.cluster import describe_members
from kept.client.admin.topics import Operation
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Call, ToCoordinator, ToLeader, ToNode
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import milliseconds
from kept.storage.errors import KeptError, PeerError
from kept.storage.types import TopicPartition

KEY_TYPE_TRANSACTION: Final = 1
_OPEN: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id as ListTransactions has it; ``coordinator`` is the node that said so."""

    transactional_id: str
    coordinator: int
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id as DescribeTransactions has it; ``started_ms`` -1: none has begun.

    ``partitions`` are those of the transaction; of one that is ending, those without a marker.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in a partition, as DescribeProducers of its leader has it."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    start_offset: int
    last_timestamp_ms: int


class TransactionNotOpen(PeerError):
    """No transaction is open at that place."""


STATES: Final = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)
"""States of a transactional id, as brokers spell them."""


def list_transactions(
    silent: list[int], silent_ms: int, *, states: Iterable[str] = (), producers: Iterable[int] = ()
) -> Operation[list[TransactionListing]]:
    """Transactional ids of the cluster, by name; nodes that do not answer within ``silent_ms`` are
    put into ``silent``. Given ``states`` or ``producers``, only those.
    """
    _, members = yield from describe_members()
    asked = [member.node_id for member in members if not member.fenced]
    calls = [_list_call(node_id, states, producers) for node_id in asked]
    for call in calls:
        call.optional, call.timeout_ms = True, silent_ms
    responses = yield calls
    found = []
    for node_id, response in zip(asked, responses, strict=True):
        if isinstance(response, KeptError):
            silent.append(node_id)
        else:
            found += _listings(node_id, response)
    return sorted(found, key=lambda one: one.transactional_id)


def transactions_of_node(node_id: int) -> Operation[list[TransactionListing]]:
    """The transactional ids that a node coordinates."""
    (response,) = yield [_list_call(node_id)]
    return _listings(node_id, response)


def _list_call(node_id: int, states: Iterable[str] = (), producers: Iterable[int] = ()) -> Call:
    values = {
        "state_filters": tuple(states),
        "producer_id_filters": tuple(producers),
        "duration_filter": -1,
        "transactional_id_pattern": None,
    }
    return Call(
        ApiKey.LIST_TRANSACTIONS,
        values,
        ToNode(node_id),
        check=lambda r: failure(int(r.error_code), "ListTransactions"),
    )


def _listings(node_id: int, response: Any) -> list[TransactionListing]:
    return [
        TransactionListing(t.transactional_id, node_id, t.producer_id, t.transaction_state)
        for t in response.transaction_states
    ]


def describe_transaction(transactional_id: str) -> Operation[TransactionDescription]:
    """One id. Raises BrokerError where there is none."""
    what = f"DescribeTransactions of {transactional_id}"
    (response,) = yield [
        Call(
            ApiKey.DESCRIBE_TRANSACTIONS,
            {"transactional_ids": (transactional_id,)},
            ToCoordinator(transactional_id, KEY_TYPE_TRANSACTION),
            what=what,
            check=lambda r: failure(
                int(r.transaction_states[0].error_code), what, key=transactional_id
            ),
        )
    ]
    one = response.transaction_states[0]
    return TransactionDescription(
        transactional_id,
        one.transaction_state,
        one.producer_id,
        one.producer_epoch,
        milliseconds(one.transaction_timeout),
        one.transaction_start_time,
        tuple(TopicPartition(t.topic, number) for t in one.topics for number in t.partitions),
    )


def open_transactions(partitions: Iterable[TopicPartition]) -> Operation[list[OpenTransaction]]:
    """What is open in partitions, by their leaders."""
    asked = list(partitions)
    responses = yield [
        Call(
            ApiKey.DESCRIBE_PRODUCERS,
            {"topics": [{"name": tp.topic, "partition_indexes": (tp.partition,)}]},
            ToLeader(*tp),
            what=f"DescribeProducers of {tp.place}",
            check=_check_producers,
        )
        for tp in asked
    ]
    return [
        OpenTransaction(
            *tp,
            producer.producer_id,
            producer.producer_epoch,
            producer.coordinator_epoch,
            producer.current_txn_start_offset,
            int(producer.last_timestamp),
        )
        for tp, response in zip(asked, responses, strict=True)
        for producer in response.topics[0].partitions[0].active_producers
        if producer.current_txn_start_offset >= 0
    ]


def _check_producers(response: Any) -> KeptError | None:
    one = response.topics[0].partitions[0]
    return failure(int(one.error_code), "DescribeProducers", one.error_message)


def hanging_transactions(
    partitions: Iterable[TopicPartition], before_ms: int, silent: list[int], silent_ms: int
) -> Operation[list[OpenTransaction]]:
    """Of what is open in partitions since before a time, what no coordinator is going to end. A
    transaction may be known to a node that is put into ``silent``: then nothing is said of it.
    """
    found = yield from open_transactions(partitions)
    found = [one for one in found if one.last_timestamp_ms < before_ms]
    if not found:
        return []
    producers = {one.producer_id for one in found}
    known = yield from list_transactions(silent, silent_ms, producers=producers)
    if silent:
        return []
    held: set[tuple[int, TopicPartition]] = set()
    for listed in known:
        if listed.state in _OPEN:
            described = yield from describe_transaction(listed.transactional_id)
            held |= {(described.producer_id, tp) for tp in described.partitions}
    return [
        one
        for one in found
        if (one.producer_id, TopicPartition(one.topic, one.partition)) not in held
    ]


def abort_transaction(tp: TopicPartition, start_offset: int) -> Operation[OpenTransaction]:
    """Write an abort marker behind the transaction that is open in a partition since
    ``start_offset``, whatever its coordinator knows: for hanging ones. Raises TransactionNotOpen.
    """
    found = yield from open_transactions([tp])
    opened = next((one for one in found if one.start_offset == start_offset), None)
    if opened is None:
        known = ", ".join(str(one.start_offset) for one in found)
        raise TransactionNotOpen(
            f"no transaction is open in {tp.place} since offset {start_offset}; "
            + (f"open since: {known}" if known else "none is open there")
        )
    what = f"WriteTxnMarkers of {tp.place}"

    def check(response: Any) -> KeptError | None:
        return failure(int(response.markers[0].topics[0].partitions[0].error_code), what)

    yield [
        Call(
            ApiKey.WRITE_TXN_MARKERS,
            {
                "markers": [
                    {
                        "producer_id": opened.producer_id,
                        "producer_epoch": opened.producer_epoch,
                        "transaction_result": False,
                        "topics": [{"name": tp.topic, "partition_indexes": (tp.partition,)}],
                        "coordinator_epoch": max(opened.coordinator_epoch, 0),
                        "transaction_version": 0,
                    }
                ]
            },
            ToLeader(*tp),
            what=what,
            check=check,
        )
    ]
    return opened
