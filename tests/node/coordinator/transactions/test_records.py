"""Records of ``__transaction_state``: Apache Kafka's bytes, both versions, and what does not
decode."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kept.node.coordinator.transactions import records as r
from kept.storage.errors import CorruptMessage
from kept.storage.records import build_batch
from kept.storage.records import records as read_records
from kept.storage.types import Codec, TopicPartition
from tests.tools import kafka_dist

KAFKA_LOG = Path(__file__).parent / "data" / "kafka-4.3.0-transaction-state.log"
"""Written by Apache Kafka 4.3.0 at ``transaction.version`` 2 for librdkafka (``bank-é``: a commit,
an abort, a fence; ``open``) and for its own producer (``perf``)."""

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int16 = st.integers(-(2**15), 2**15 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
partitions = st.frozensets(st.builds(TopicPartition, text, int32), max_size=6)
metadata = st.builds(
    r.TransactionMetadata,
    int64,
    int16,
    int32,
    st.sampled_from(r.TransactionState),
    partitions,
    int64,
    int64,
    int64,
    int64,
    int16,
    int16,
).map(lambda m: replace(m, partitions=frozenset()) if m.state == 0 else m)
ORDERS = frozenset({TopicPartition("orders", 0), TopicPartition("orders", 1)})
STATE = r.TransactionMetadata(7, 3, 30_000, r.TransactionState.ONGOING, ORDERS, 90, 100, 7, -1, 2)


def kafka_records() -> list[tuple[bytes, bytes | None]]:
    return [(record.key, record.value) for record in read_records(KAFKA_LOG.read_bytes())]


def test_apache_kafkas_records_are_understood() -> None:
    found = [r.decode_record(key, value) for key, value in kafka_records()]
    bank = [record.metadata for record in found if record.transactional_id == "bank-é"]
    assert [m.state.kafka_name for m in bank] == [
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "CompleteCommit",
        "Ongoing",
        "PrepareAbort",
        "CompleteAbort",
        "Ongoing",
        "PrepareAbort",
        "CompleteAbort",
        "Empty",
    ]
    assert [(m.epoch, m.client_version) for m in bank[6:]] == [
        (0, 0),
        (0, 0),
        (1, 2),
        (1, 2),
        (2, 2),
    ]
    assert bank[2] == r.TransactionMetadata(
        0,
        0,
        30_000,
        r.TransactionState.PREPARE_COMMIT,
        ORDERS | {TopicPartition("users", 0)},
        1795612484300,
        1795612484344,
        0,
    )
    assert bank[-1].partitions == frozenset()
    assert found[-1] == r.TransactionRecord(
        "open",
        r.TransactionMetadata(
            2,
            0,
            900_000,
            r.TransactionState.ONGOING,
            frozenset({TopicPartition("orders", 0)}),
            1795612488627,
            1795612488627,
            2,
        ),
    )


def test_we_write_the_same_bytes_as_apache_kafka() -> None:
    for key, value in kafka_records():
        assert r.decode_record(key, value).encode() == (key, value)


def test_version_0_is_written_as_kafka_did_before_transaction_version_1() -> None:
    key, value = r.TransactionRecord("a", replace(STATE, client_version=0), version=0).encode()
    assert key.hex() == "0000" + "0001" + "61"
    assert value.hex() == (
        "0000"
        + "0000000000000007"
        + "0003"
        + "00007530"
        + "01"
        + "00000001"
        + "0006"
        + b"orders".hex()
        + "00000002"
        + "00000000"
        + "00000001"
        + "0000000000000064"
        + "000000000000005a"
    )
    empty = replace(STATE, state=r.TransactionState.EMPTY, partitions=frozenset())
    assert "00" + "ffffffff" in r.encode_metadata(empty, 0).hex()


@given(text, st.none() | metadata, st.sampled_from(r.VALUE_VERSIONS))
def test_records_come_back(name: str, value: r.TransactionMetadata | None, version: int) -> None:
    back = r.decode_record(*r.TransactionRecord(name, value, version).encode())
    if value is not None and version == 0:
        value = replace(
            value, previous_producer_id=-1, next_producer_id=-1, last_epoch=-1, client_version=0
        )
    assert (back.transactional_id, back.metadata) == (name, value)


def test_other_types_are_left_alone() -> None:
    for kind in (1, 2, 32767, -1):
        assert r.decode_record(kind.to_bytes(2, "big", signed=True) + b"anything", b"") is None


@given(st.binary(max_size=80))
def test_garbage_is_refused_not_more(data: bytes) -> None:
    for version in (b"", b"\0\0", b"\0\1"):
        with contextlib.suppress(CorruptMessage):
            r.decode_metadata(version + data)
    with contextlib.suppress(CorruptMessage):
        r.decode_record(data, None)


@given(metadata, st.sampled_from(r.VALUE_VERSIONS))
def test_no_prefix_is_a_transaction(value: r.TransactionMetadata, version: int) -> None:
    data = r.encode_metadata(value, version)
    for size in range(len(data)):
        with pytest.raises(CorruptMessage):
            r.decode_metadata(data[:size])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\0\2" + bytes(40), "version 2; this node reads versions up to 1"),
        (b"\0\1" + bytes(14) + b"\6" + bytes(40), "status 6; this node knows statuses 0 to 5"),
        (b"\0\1" + bytes(15) + b"\0" + bytes(16) + b"\1\2\1\0", "tagged field 2 .* has 1 bytes"),
    ],
)
def test_what_would_be_lost_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(CorruptMessage, match=why):
        r.decode_metadata(data)


@pytest.mark.java
@pytest.mark.slow
def test_kafkas_decoder_reads_our_records(tmp_path: Path) -> None:
    """Also the tagged field that only we know, which it skips."""
    written = [
        r.TransactionRecord("bank-é", STATE, 0),
        r.TransactionRecord("bank-é", replace(STATE, last_epoch=2, next_producer_id=9), 1),
        r.TransactionRecord("bank-é", None),
    ]
    log = tmp_path / "00000000000000000000.log"
    log.write_bytes(build_batch([(1, *w.encode(), ()) for w in written], codec=Codec.NONE))
    dumped = kafka_dist.dump([log], "--transaction-log-decoder")
    old, new, gone = re.findall(r"key: (\{.*?\}\}) payload: (.*)", dumped)
    assert {json.loads(key)["data"]["transactionalId"] for key, _ in (old, new, gone)} == {"bank-é"}
    common = {
        "producerId": 7,
        "producerEpoch": 3,
        "transactionTimeoutMs": 30_000,
        "transactionStatus": 1,
        "transactionPartitions": [{"topic": "orders", "partitionIds": [0, 1]}],
        "transactionLastUpdateTimestampMs": 100,
        "transactionStartTimestampMs": 90,
    }
    assert json.loads(old[1]) == {"version": "0", "data": common}
    assert json.loads(new[1]) == {
        "version": "1",
        "data": common | {"previousProducerId": 7, "nextProducerId": 9},
    }
    assert gone[1] == "<DELETE>"
