from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.storage.errors import CorruptMessage
from kept.storage.records import build_batch, read_header, records
from kept.storage.records.build import append_varint, read_varint
from kept.storage.types import Codec


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"),
        (-1, "01"),
        (1, "02"),
        (63, "7e"),
        (-64, "7f"),
        (64, "8001"),
        (2**31 - 1, "feffffff0f"),
        (-(2**31), "ffffffff0f"),
    ],
)
def test_varints_are_kafkas(number: int, encoded: str) -> None:
    out = bytearray()
    append_varint(out, number)
    assert out.hex() == encoded
    assert read_varint(out, 0, len(out)) == (number, len(out))


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=3))
def test_varints_round_trip(number: int, tail: bytes) -> None:
    out = bytearray()
    append_varint(out, number)
    assert len(out) <= 10
    assert read_varint(bytes(out) + tail, 0, len(out) + len(tail), 64) == (number, len(out))
    with pytest.raises(CorruptMessage):
        read_varint(out, 0, len(out) - 1, 64)
    if not -(2**31) <= number < 2**31:
        with pytest.raises(CorruptMessage):
            read_varint(out, 0, len(out))


def test_a_record_byte_for_byte() -> None:
    batch = build_batch([(1_000, b"k", b"v", [("h", None)])], base_offset=5)
    assert batch[:17].hex() == "0000000000000005" + "0000003d" + "ffffffff" + "02"
    assert batch[61:].hex() == "16" + "00" + "00" + "00" + "026b" + "0276" + "02" + "0268" + "01"


def test_offsets_must_match_the_records() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        build_batch([(0, None, None, ())], offsets=[1, 2])


@pytest.mark.parametrize("codec", list(Codec))
def test_records_may_come_from_an_iterator(codec: Codec) -> None:
    batch = build_batch(((i, None, b"%d" % i, ()) for i in range(300)), codec=codec)
    assert [record.value for record in records(batch)] == [b"%d" % i for i in range(300)]


def test_the_largest_timestamp_wins() -> None:
    header = read_header(
        build_batch([(5, None, None, ()), (9, None, None, ()), (7, None, None, ())])
    )
    assert (header.base_timestamp, header.max_timestamp) == (5, 9)
