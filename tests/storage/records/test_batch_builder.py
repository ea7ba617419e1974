from __future__ import annotations

import importlib
import struct
from array import array
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import InvalidRecord
from kept.storage.records import Binary, HeaderLists, Record, Rows, build_area_batch, records
from kept.storage.records.batch_builder import murmur2
from kept.storage.records.blocks import bitmap
from kept.storage.types import Codec

NAMES = ("tests.reference.batch_builder", "kept.storage.records._batch_builder")
STICKY = 7


@pytest.fixture(params=NAMES)
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def binary(strings: list[bytes | None]) -> Binary:
    offsets, data = [0], b""
    for one in strings:
        data += one or b""
        offsets.append(len(data))
    valid = [one is not None for one in strings]
    validity = None if all(valid) else bitmap(valid)
    return Binary(struct.pack(f"{len(offsets)}i", *offsets), data, validity, valid.count(False))


def rows_of(drawn: list[Any]) -> Rows:
    """(partition, timestamp, key, value, headers or None) of each row in columns."""
    lists, names, values = [0], [], []
    for *_, headers in drawn:
        for name, value in headers or ():
            names.append(name.encode())
            values.append(value)
        lists.append(len(names))
    listed = [row[4] is not None for row in drawn]
    headers = HeaderLists(
        array("i", lists).tobytes(),
        None if all(listed) else bitmap(listed),
        listed.count(False),
        binary(names),
        binary(values),
        len(names),
    )
    return Rows(
        len(drawn),
        binary([r[2] for r in drawn]),
        binary([r[3] for r in drawn]),
        headers,
        array("i", [r[0] for r in drawn]).tobytes(),
        array("q", [r[1] for r in drawn]).tobytes(),
    )


row_fields = st.tuples(
    st.integers(-1, 2),
    st.integers(0, 2**50),
    st.none() | st.binary(max_size=12),
    st.none() | st.binary(max_size=300),
    st.none() | st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4))),
)


def packed(kernel: ModuleType, rows: Rows, limit: int) -> dict[int, list[Record]]:
    builder = kernel.BatchBuilder(3, limit)
    found: dict[int, list[Record]] = {0: [], 1: [], 2: []}
    at = 0
    while at < rows.total:
        after = builder.append(rows, at, STICKY)
        assert after > at
        at = after
        areas = builder.drain()
        for where, area in areas.items():
            assert area.total == 1 or len(area.records) <= limit
            batch = build_area_batch(
                area, codec=Codec.NONE, producer_id=1, producer_epoch=0, base_sequence=0
            )
            assert area.max_timestamp == max(r.timestamp for r in records(batch))
            found[where] += records(batch)
    assert builder.drain() == {}
    return found


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(row_fields, max_size=8), st.sampled_from([1, 200, 1 << 20]))
def test_rows_become_the_records_of_their_partitions(
    name: str, drawn: list[Any], limit: int
) -> None:
    wanted: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for where, when, key, value, headers in drawn:
        if where < 0:
            where = (STICKY if key is None else murmur2(key) & 0x7FFFFFFF) % 3
        wanted[where].append((when, key, value, tuple(headers or ())))
    kernel = importlib.import_module(name)
    found = packed(kernel, rows_of(drawn), limit)
    assert {w: [tuple(r)[1:] for r in rs] for w, rs in found.items()} == wanted


def test_areas_are_full_and_the_same_however_the_rows_come(kernel: ModuleType) -> None:
    """A large row after small ones would make a batch that a topic refuses; and a repeated task
    is compared batch by batch.
    """
    rows = [(0, 1, None, b"v" * (900 if n % 7 == 6 else 90), None) for n in range(40)]

    def areas(step: int) -> list[Any]:
        builder, found = kernel.BatchBuilder(3, 1000), []
        for start in range(0, len(rows), step):
            part, at = rows_of(rows[start : start + step]), 0
            while (at := builder.append(part, at, STICKY)) < part.total:
                found += builder.drain().values()
        return [*found, *builder.drain().values()]

    sizes = [len(a.records) for a in areas(40)]
    assert max(sizes) <= 1000 and max(a.total for a in areas(40)) == 6
    assert all(areas(step) == areas(40) for step in (1, 3, 7))


def test_absent_columns_are_null(kernel: ModuleType) -> None:
    rows = Rows(2, None, binary([b"a", b"b"]), None, None, array("q", [5, 4]).tobytes())
    (found,) = [rs for rs in packed(kernel, rows, 1 << 20).values() if rs]
    assert [tuple(r) for r in found] == [(0, 5, None, b"a", ()), (1, 4, None, b"b", ())]


def test_what_cannot_be_a_record(kernel: ModuleType) -> None:
    builder = kernel.BatchBuilder(3, 1 << 20)
    with pytest.raises(InvalidRecord, match="partition 3: the topic has 3"):
        builder.append(rows_of([(0, 1, b"k", b"v", None), (3, 1, b"k", b"v", None)]), 0, STICKY)
    nameless = rows_of([(0, 1, b"k", b"v", [("h", b"x")])])
    assert nameless.headers is not None
    nameless = nameless._replace(headers=nameless.headers._replace(names=binary([None])))
    with pytest.raises(InvalidRecord, match="row 0: a header without a name"):
        builder.append(nameless, 0, STICKY)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_is_what_a_producer_sends(kernel: ModuleType, codec: Codec) -> None:
    from kept.storage.records import CheckRules, check, read_header

    builder = kernel.BatchBuilder(1, 1 << 20)
    builder.append(rows_of([(0, 10 + n, b"k", b"v" * 50, None) for n in range(20)]), 0, STICKY)
    batch = build_area_batch(
        builder.drain()[0], codec=codec, producer_id=9, producer_epoch=2, base_sequence=30
    )
    check(batch, CheckRules(compacted=True), 100)
    header = read_header(batch)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 2, 30)
    assert (header.base_timestamp, header.max_timestamp, header.codec) == (10, 29, codec)
