from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import CorruptMessage, InvalidRecord
from kept.storage.records import Binary, Block, Field, Record, build_batch, records
from kept.storage.records.python_blocks import microseconds
from kept.storage.types import MAX_INT64, Codec, TimestampType

EVERYTHING = sum(Field)
NAMES = ("kept.storage.records.python_blocks", "kept.storage.records._blocks")


@pytest.fixture(params=NAMES)
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def bits(validity: Any, count: int) -> list[bool]:
    if validity is None:
        return [True] * count
    assert len(validity) == (count + 7) // 8
    spare = validity[-1] >> (count & 7) if count & 7 else 0
    assert spare == 0, "bits after the last row are 0"
    return [bool(validity[i >> 3] >> (i & 7) & 1) for i in range(count)]


def strings(binary: Binary | None, count: int) -> list[bytes | None]:
    assert binary is not None
    at = struct.unpack(f"{count + 1}i", binary.offsets)
    assert len(binary.data) == at[-1]
    valid = bits(binary.validity, count)
    assert binary.nulls == valid.count(False)
    return [bytes(binary.data[at[i] : at[i + 1]]) if valid[i] else None for i in range(count)]


def rows(block: Block) -> list[tuple[int, int, int, Any, Any, tuple[Any, ...]]]:
    """(offset, timestamp, type, key, value, headers) of every record of a block of everything."""
    n = block.rows
    assert block.headers is not None
    names = strings(block.headers.names, block.headers.total)
    values = strings(block.headers.values, block.headers.total)
    lists = struct.unpack(f"{n + 1}i", bytes(block.headers.offsets))
    listed = bits(block.headers.validity, n)
    assert [lists[i + 1] > lists[i] for i in range(n)] == listed
    pairs = [(str(n or b"", "utf-8"), v) for n, v in zip(names, values, strict=True)]
    headers = [tuple(pairs[lists[i] : lists[i + 1]]) for i in range(n)]
    numbers = [
        struct.unpack(f"{n}{kind}", bytes(column))  # type: ignore[arg-type]
        for kind, column in (
            ("q", block.offsets),
            ("q", block.timestamps),
            ("i", block.timestamp_types),
        )
    ]
    keys, contents = strings(block.key, n), strings(block.value, n)
    return list(zip(*numbers, keys, contents, headers, strict=True))  # type: ignore[arg-type]


def read_all(kernel: ModuleType, data: bytes, first: int, end: int, **options: Any) -> list[Any]:
    found, position, next_offset = [], 0, first
    while position < len(data) and next_offset < end:
        block = kernel.read_block(data, position, first, end, EVERYTHING, **options)
        assert block.position > position
        assert block.next_offset >= next_offset
        found += rows(block)
        position, next_offset = block.position, block.next_offset
    return found


def plain(one: Record, kind: int = 0) -> tuple[Any, ...]:
    stamp = microseconds(one.timestamp)
    return one.offset, stamp, kind, one.key, one.value, one.headers


record_fields = st.tuples(
    st.integers(-1, 2**50),
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=60),
    st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3),
)
batch_fields = st.tuples(
    st.lists(record_fields, min_size=1, max_size=5), st.sampled_from(Codec), st.integers(0, 4)
)


def batches_of(drawn: Sequence[tuple[list[Any], Codec, int]]) -> bytes:
    """Batches with gaps before and inside of them, as compaction leaves them."""
    data, offset = b"", 0
    for fields, codec, gap in drawn:
        offset += gap
        offsets = [offset + i * (gap + 1) for i in range(len(fields))]
        data += build_batch(fields, base_offset=offset, offsets=offsets, codec=codec)
        offset = offsets[-1] + 1
    return data


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(batch_fields, max_size=5), st.integers(0, 30), st.integers(0, 60), st.booleans())
def test_a_block_holds_what_the_records_are(
    name: str, drawn: Any, first: int, end: int, small: bool
) -> None:
    data = batches_of(drawn)
    kernel = importlib.import_module(name)
    wanted = [plain(r) for r in records(data) if first <= r.offset < end]
    assert read_all(kernel, data, first, end, **({"max_rows": 1} if small else {})) == wanted


@pytest.mark.parametrize("wanted", list(Field))
def test_only_what_is_asked_for_is_made(kernel: ModuleType, wanted: Field) -> None:
    data = batches_of([([(1, b"k", b"v", [("h", b"x")])] * 3, Codec.NONE, 0)])
    block = kernel.read_block(data, 0, 1, 3, wanted)
    assert block.rows == 2
    columns = dict(
        zip(
            Field,
            (
                block.key,
                block.value,
                block.offsets,
                block.timestamps,
                block.timestamp_types,
                block.headers,
            ),
            strict=True,
        )
    )
    assert [field for field, column in columns.items() if column is not None] == [wanted]


def test_counting_inflates_nothing_but_what_is_cut(kernel: ModuleType) -> None:
    fields = [(1, b"k", b"v" * 100, ())] * 4
    whole = build_batch(fields, codec=Codec.ZSTD)
    damaged = bytearray(build_batch(fields, base_offset=4, codec=Codec.NONE))
    damaged[22] |= Codec.GZIP  # the records are no gzip stream
    from kept.storage.records import crc32c

    struct.pack_into(">I", damaged, 17, crc32c(damaged[21:]))
    data = whole + bytes(damaged)
    assert kernel.read_block(data, 0, 0, 8, 0).rows == 8
    assert kernel.read_block(data, 0, 2, 8, 0).rows == 6
    with pytest.raises(InvalidRecord, match="gzip"):
        kernel.read_block(data, 0, 0, 7, 0)
    with pytest.raises(InvalidRecord, match="gzip"):
        kernel.read_block(data, 0, 0, 8, Field.OFFSET)


def test_control_hidden_and_old_batches_are_left_out(kernel: ModuleType) -> None:
    one = [(5, b"k", b"v", ())]
    parts = [
        build_batch(one, base_offset=0),
        build_batch(one, base_offset=1, is_control=True, is_transactional=True, producer_id=1),
        build_batch([(9, b"k", b"v", ())], base_offset=2),
        build_batch([], base_offset=3, last_offset=6),
    ]
    data = b"".join(parts)
    block = kernel.read_block(data, 0, 0, 100, EVERYTHING)
    assert [r[0] for r in rows(block)] == [0, 2]
    assert (block.position, block.next_offset) == (len(data), 7)
    hidden = kernel.read_block(data, 0, 0, 100, EVERYTHING, hidden={len(parts[0] + parts[1])})
    assert [r[0] for r in rows(hidden)] == [0]
    recent = kernel.read_block(data, 0, 0, 100, EVERYTHING, min_timestamp=9)
    assert [r[0] for r in rows(recent)] == [2]


def test_the_end_of_the_range_is_the_end_even_in_a_gap(kernel: ModuleType) -> None:
    one = [(5, b"k", b"v", ())]
    data = build_batch(one, base_offset=3) + build_batch(one, base_offset=90)
    block = kernel.read_block(data, 0, 0, 50, Field.OFFSET)
    assert (block.rows, block.position, block.next_offset) == (1, len(data), 90)


def test_a_batch_that_is_cut_off_waits_unless_it_is_the_first(kernel: ModuleType) -> None:
    one = build_batch([(5, b"k", b"v", ())])
    for cut in (1, 11, 12, 60, len(one) - 1):
        block = kernel.read_block(one + one[:cut], 0, 0, 9, Field.KEY)
        assert (block.rows, block.position) == (1, len(one))
        again = kernel.read_block(one + one[:cut], len(one), 0, 9, Field.KEY)
        assert (again.rows, again.position) == (0, len(one))
        with pytest.raises(CorruptMessage):
            kernel.read_block(one[:cut], 0, 0, 9, Field.KEY)


def test_damage_is_found(kernel: ModuleType) -> None:
    data = bytearray(build_batch([(5, b"key", b"value", ())]) * 2)
    data[-3] ^= 1
    with pytest.raises(CorruptMessage, match="CRC"):
        kernel.read_block(bytes(data), 0, 0, 9, 0)


def test_log_append_time_and_times_out_of_range(kernel: ModuleType) -> None:
    data = build_batch(
        [(5, None, None, ())], timestamp_type=TimestampType.LOG_APPEND_TIME
    ) + build_batch([(MAX_INT64, None, None, ()), (-1, None, None, ())], base_offset=1)
    found = rows(kernel.read_block(data, 0, 0, 9, EVERYTHING))
    assert [(r[1], r[2]) for r in found] == [(5000, 1), (MAX_INT64, 0), (-1000, 0)]


def test_header_names_that_are_not_utf_8(kernel: ModuleType) -> None:
    data = bytearray(build_batch([(5, None, None, [("né", b"1"), ("xx", None)])]))
    at = data.index(b"xx")
    data[at : at + 2] = b"\xff\xfe"
    from kept.storage.records import crc32c

    struct.pack_into(">I", data, 17, crc32c(data[21:]))
    (row,) = rows(kernel.read_block(bytes(data), 0, 0, 9, EVERYTHING))
    assert row[5] == (("né", b"1"), ("\ufffd\ufffd", None))
