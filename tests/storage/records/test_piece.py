"""A batch's records in pieces: no more of them than are wanted, whatever it inflates to."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import InflatesBeyondLimit, InvalidRecord
from kept.storage.records import (
    HEADER_BYTES,
    build_batch,
    find_records,
    python,
    read_header,
    read_piece,
    records,
    seal,
)
from kept.storage.types import Codec

LIMIT = 1 << 20


def piece(batch, first=0, max_records=1000, max_bytes=LIMIT, limit=LIMIT):
    return read_piece(
        batch, first, max_records=max_records, max_bytes=max_bytes, inflate_limit=limit
    )


@pytest.mark.parametrize("codec", list(Codec))
def test_pieces_are_the_records_of_a_batch(codec):
    given_ = [(1000 + n, b"k%d" % n, b"v" * n, (("h", b"x"), ("n", None))) for n in range(50)]
    batch = build_batch(given_, codec=codec, base_offset=7)
    found, position = [], 0
    while more := piece(batch, position, max_records=8, max_bytes=200):
        assert len(more) <= 8
        found += more
        position = more[-1].offset + 1
    assert found == list(records(batch)) and len(found) == 50


def test_a_record_that_is_larger_comes_alone():
    batch = build_batch([(0, None, bytes(n), ()) for n in (10, 5000, 10)])
    assert [len(r.value) for r in piece(batch, 1, max_bytes=100)] == [5000]
    assert [len(r.value) for r in piece(batch, 0, max_bytes=100)] == [10]
    assert piece(batch, 3) == []


def test_a_batch_that_inflates_to_more_says_how_much():
    batch = build_batch([(0, b"k", bytes(3_000_000), ())], codec=Codec.GZIP)
    with pytest.raises(InflatesBeyondLimit) as refused:
        piece(batch)
    assert refused.value.told_bytes > 3_000_000
    assert len(piece(batch, limit=4_000_000)) == 1


def test_damage_is_named_where_it_is_reached():
    whole = build_batch([(0, b"k", b"v", ())] * 3)
    # The last byte is the last record's count of headers.
    damaged = seal(read_header(whole), whole[HEADER_BYTES:-1] + b"\x09")
    assert len(piece(damaged, max_records=1)) == 1
    with pytest.raises(InvalidRecord):
        piece(damaged)


def test_a_few_records_cost_no_more_than_a_few():
    """150,000 tiny records were 150,000 objects: 290 MB for the one that was wanted."""
    batch = build_batch([(0, None, b"", ())] * 150_000)
    tracemalloc.start()
    try:
        (one,) = piece(batch, 140_000, max_records=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert one.offset == 140_000
    assert peak < 100_000, peak


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(-5, 40),
    st.integers(1, 10),
    st.integers(1, 200),
)
def test_the_kernels_agree(sizes, first, max_records, max_bytes):
    batch = build_batch([(0, None, bytes(size), ()) for size in sizes], base_offset=3)
    args = (batch[HEADER_BYTES:], len(sizes), 3, first, max_records, max_bytes)
    assert find_records(*args) == python.find_records(*args)


@given(st.binary(max_size=60), st.integers(0, 5))
def test_the_kernels_agree_about_garbage(area, count):
    outcomes = []
    for kernel in (find_records, python.find_records):
        try:
            outcomes.append(kernel(area, count, 0, 0, 10, 100))
        except InvalidRecord as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
