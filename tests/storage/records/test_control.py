"""Transaction markers: the bytes that Apache Kafka writes, and what is read of others."""

from __future__ import annotations

from struct import pack

import pytest

from kept.storage.records import (
    EndTxnMarker,
    build_batch,
    build_control_batch,
    check_replica,
    read_marker,
    scan,
)
from kept.storage.types import TimestampType

NOW = 1_700_000_000_000


@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("kind", list(TimestampType))
@pytest.mark.parametrize("coordinator_epoch", [-1, 0, 7, 2**31 - 1])
def test_a_marker_is_a_batch_of_one_record(is_commit, kind, coordinator_epoch) -> None:
    marker = EndTxnMarker(is_commit, coordinator_epoch)
    made = build_control_batch(
        marker, 2**40, 32767, NOW, base_offset=12, leader_epoch=5, timestamp_type=kind
    )
    row = (NOW, pack(">hh", 0, is_commit), pack(">hi", 0, coordinator_epoch), ())
    assert made == build_batch(
        [row],
        base_offset=12,
        producer_id=2**40,
        producer_epoch=32767,
        is_transactional=True,
        is_control=True,
        leader_epoch=5,
        timestamp_type=kind,
    )
    assert len(made) == 78
    columns = scan(made)
    assert read_marker(columns.key(0), columns.value(0)) == marker
    assert check_replica(made).base_sequence == -1


def test_apache_kafkas_bytes() -> None:
    """An abort that Kafka 4.3 wrote."""
    kafkas = bytes.fromhex(
        "0000000000000002000000420000000002a7a4dc93003000000000000001a212e1f0ce000001a212e1f0ce"
        "00000000000000000000ffffffff000000012000000008000000000c00000000000000"
    )
    made = build_control_batch(
        EndTxnMarker(False, 0), 0, 0, 1795613126862, base_offset=2, leader_epoch=0
    )
    assert made == kafkas


@pytest.mark.parametrize(
    ("key", "value", "marker"),
    [
        (pack(">hh", 0, 1), pack(">hi", 0, 4), EndTxnMarker(True, 4)),
        (pack(">hhq", 3, 0, 9), pack(">hiq", 2, 4, 9), EndTxnMarker(False, 4)),  # newer versions
        (pack(">hh", 0, 1), b"", EndTxnMarker(True, -1)),
        (pack(">hh", 0, 1), None, EndTxnMarker(True, -1)),
        (pack(">hh", 0, 2), pack(">hi", 0, 4), None),  # of Raft
        (pack(">hh", 0, 257), pack(">hi", 0, 4), None),
        (b"\0\0\0", None, None),
        (None, None, None),
    ],
)
def test_what_is_known_is_read(key, value, marker) -> None:
    assert read_marker(key, value) == marker
