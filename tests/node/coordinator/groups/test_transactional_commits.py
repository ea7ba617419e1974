"""TxnOffsetCommit: whom it asks first, and what its versions are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from kept.client.protocol import messages
from kept.client.protocol.api_keys import ApiKey
from kept.cluster.metadata.records import PartitionRecord, TopicRecord
from kept.node.coordinator.common.events import EndMarker
from kept.node.coordinator.groups import events as ev
from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.groups.group_offsets import GroupOffsetsHandler
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.security.session import Session
from kept.storage.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    KeptError,
    TransactionCoordinatorFenced,
)
from kept.storage.records import headers
from kept.storage.types import TopicPartition
from tests.support.coordinators import TOPIC_ID, FakeNode, FakePartition, group_in, offsets
from tests.support.loops import result, run
from tests.support.replicas import live_config

TXN_OFFSET_COMMIT = ApiKey.TXN_OFFSET_COMMIT


class Asked(NamedTuple):
    """A question of a leader."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: frozenset[TopicPartition]
    adds: bool


class FakeVerifier:
    """Coordinators that all say the same."""

    def __init__(self, says: ErrorCode = ErrorCode.none) -> None:
        self.says = says
        self.asked: list[Asked] = []

    def coordinator_epoch(self, transactional_id: str) -> int:
        return 4

    def verify(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: frozenset[TopicPartition],
        *,
        adds: bool,
    ) -> CompletableFuture[Mapping[TopicPartition, int]]:
        self.asked.append(Asked(transactional_id, producer_id, epoch, partitions, adds))
        return CompletableFuture.completed(dict.fromkeys(partitions, int(self.says)))


class GuardedPartition(FakePartition):
    """A log that wants a proof of each transaction's first batch; a proof is the epoch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.known: KeptError | None = None
        self.newest = -1
        self.floors: list[tuple[int, int]] = []
        self.open: set[int] = set()

    def verification_guard(
        self, producer_id: int, epoch: int, sequence: int, *, is_tv2: bool, now_ms: int
    ) -> Any:
        assert sequence == -1
        if self.known is not None:
            raise self.known
        return None if producer_id in self.open else (epoch, is_tv2)

    def note_coordinator_epoch(self, producer_id: int, epoch: int) -> None:
        if epoch < self.newest:
            raise TransactionCoordinatorFenced("a later coordinator is known")
        self.floors.append((producer_id, epoch))

    def append(self, checked: Any, now_ms: int, acks: int, guard: Any, origin: Any) -> Any:
        info = super().append(checked, now_ms, acks, guard, origin)
        if checked.is_transactional:
            assert guard is not None or checked.producer_id in self.open
            self.open.add(checked.producer_id)
        return info


class Fixture:
    """One group, its coordinator, and a topic of two partitions."""

    def __init__(self, says: ErrorCode = ErrorCode.none) -> None:
        self.node = FakeNode()
        self.group = group_in(0)
        self.partition = GuardedPartition()
        self.node.host(0, self.partition)
        orders = [
            PartitionRecord(
                topic_id=TOPIC_ID,
                partition=number,
                replicas=(0,),
                isr=(0,),
                leader=0,
                leader_epoch=0,
                partition_epoch=0,
            )
            for number in range(2)
        ]
        self.node.apply(*self.node.created(), TopicRecord("orders", TOPIC_ID), *orders)
        self.verifier = FakeVerifier(says)
        nothing: Any = None
        metadata: Any = self.node.metadata
        self.handler = GroupOffsetsHandler(
            self.node.runtime,
            live_config(),
            metadata,
            nothing,
            nothing,
            self.node.groups,
            self.verifier,
        )

    async def commit(
        self, version: int, *where: tuple[str, int], group: str | None = None, **more: Any
    ) -> list[str]:
        values = {
            "transactional_id": "bank",
            "producer_id": 7,
            "producer_epoch": 3,
            "group_id": self.group if group is None else group,
            "topics": [
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": number,
                            "committed_offset": 5,
                            "committed_metadata": None,
                        }
                    ],
                }
                for topic, number in where or (("orders", 0),)
            ],
            **more,
        }
        kind = messages.message_type(TXN_OFFSET_COMMIT, version, EntityType.request)
        request = messages.build(kind, values)
        context = RequestContext(TXN_OFFSET_COMMIT, version, "c", Session(host="h", listener="P"))
        answer: Any = self.node.runtime.slices.run(self.handler.txn_offset_commit(context, request))
        while not isinstance(answer, dict):  # of the slices, and then of what they end in
            answer = await result(answer)
        assert messages.encode_response(TXN_OFFSET_COMMIT, version, 1, answer)
        found = [p["error_code"] for topic in answer["topics"] for p in topic["partitions"]]
        return [ErrorCode(code).name for code in found]

    async def fetched(self) -> list[int]:
        fetched = self.node.groups.shards.submit(
            self.group, lambda n: ev.FetchOffsets(n, self.group, None, require_stable=True)
        )
        return offsets(await result(fetched))


@run
async def test_who_is_refused_sets_no_floor_for_the_markers_of_others() -> None:
    f = Fixture(ErrorCode.invalid_producer_id_mapping)
    assert await f.commit(3) == ["invalid_producer_id_mapping"]
    assert f.partition.floors == []


@pytest.mark.parametrize("version", range(6))
@run
async def test_the_coordinator_is_asked_before_the_first_batch_only(version: int) -> None:
    f = Fixture()
    assert await f.commit(version) == ["none"]
    tp = TopicPartition("__consumer_offsets", 0)
    assert f.verifier.asked == [Asked("bank", 7, 3, frozenset({tp}), version >= 5)]
    assert f.partition.floors == [(7, 4)]
    assert await f.commit(version, ("orders", 0), ("orders", 1)) == ["none", "none"]
    assert len(f.verifier.asked) == 1
    batches = [header for _, header in headers(f.partition.log)]
    assert [(b.producer_id, b.producer_epoch, b.record_count) for b in batches] == [
        (7, 3, 1),
        (7, 3, 2),
    ]
    assert await f.fetched() == []
    marker = EndMarker(7, 3, 0, is_commit=True)
    assert await result(f.node.groups.end_transaction(0, marker)) is ErrorCode.none
    assert await f.fetched() == [5, 5]


@run
async def test_the_yes_of_a_coordinator_that_was_replaced_counts_for_nothing() -> None:
    f = Fixture()
    f.partition.newest = 5
    assert await f.commit(5) == ["coordinator_load_in_progress"]
    assert await f.commit(0) == ["coordinator_not_available"]
    assert not f.partition.log and f.partition.floors == []


@pytest.mark.parametrize(
    ("says", "version", "error"),
    [
        ("producer_fenced", 5, "invalid_producer_epoch"),
        ("producer_fenced", 0, "invalid_producer_epoch"),
        ("transaction_abortable", 4, "transaction_abortable"),
        ("transaction_abortable", 3, "invalid_txn_state"),
        ("network_exception", 3, "coordinator_load_in_progress"),
        ("network_exception", 1, "coordinator_not_available"),
        ("invalid_producer_id_mapping", 3, "invalid_producer_id_mapping"),
        ("concurrent_transactions", 5, "concurrent_transactions"),
        ("invalid_request", 3, "invalid_request"),
    ],
)
@run
async def test_what_the_transactions_coordinator_refuses(
    says: str, version: int, error: str
) -> None:
    f = Fixture(ErrorCode[says])
    refused = await f.commit(version, ("orders", 0), ("missing", 0))
    assert sorted(refused) == sorted([error, "unknown_topic_or_partition"])
    assert not f.partition.log and len(f.verifier.asked) == 1


@run
async def test_what_is_refused_before_anybody_is_asked() -> None:
    f = Fixture()
    missing = (("missing", 0), ("orders", 2), ("orders", -1))
    assert await f.commit(3, *missing) == ["unknown_topic_or_partition"] * 3
    assert await f.commit(3, group="") == ["invalid_group_id"]
    unhosted = group_in(1)
    assert await f.commit(2, group=unhosted) == ["coordinator_load_in_progress"]
    assert await f.commit(1, group=unhosted) == ["coordinator_not_available"]
    f.partition.known = InvalidProducerEpoch("a newer one is known")
    assert await f.commit(3) == ["invalid_producer_epoch"]
    assert f.verifier.asked == []


@run
async def test_members_are_judged_and_old_versions_name_none() -> None:
    f = Fixture()
    member = {"generation_id": 1, "member_id": "m", "group_instance_id": None}
    assert await f.commit(3, **member) == ["illegal_generation"]
    assert await f.commit(0) == ["none"]
    assert await f.commit(3, **member) == ["unknown_member_id"]


@run
async def test_a_batch_that_the_log_refuses() -> None:
    f = Fixture()
    f.partition.refuse = InvalidTxnState("its guard is gone")
    assert await f.commit(3) == ["invalid_txn_state"]
    assert await f.fetched() == []
