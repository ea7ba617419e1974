"""Varints and tagged fields: what was written is read, what is cut off is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.client.protocol.wire import MAX_TAGS, read_uvarint, skip_tags, tags, uvarint
from kept.storage.errors import CorruptMessage

NUMBERS = st.integers(0, 2**35 - 1)
TAGS = st.lists(st.tuples(NUMBERS, st.binary(max_size=200)), max_size=5)


def section(fields: list[tuple[int, bytes]]) -> bytes:
    out = uvarint(len(fields))
    for tag, content in fields:
        out += uvarint(tag) + uvarint(len(content)) + content
    return out


@given(NUMBERS, st.binary(max_size=3))
def test_a_varint_is_read_as_it_was_written(value, behind):
    data = uvarint(value)
    assert read_uvarint(b"x" + data + behind, 1) == (value, 1 + len(data))
    assert read_uvarint(memoryview(data), 0) == (value, len(data))


@given(TAGS, st.binary(max_size=3))
def test_tagged_fields_are_found_and_passed_over(fields, behind):
    data = section(fields)
    found, end = tags(data + behind, 0)
    assert end == skip_tags(data + behind, 0) == len(data)
    assert [(tag, data[a:b]) for tag, a, b in found] == fields


@given(TAGS.filter(bool), st.data())
def test_a_section_that_is_cut_off_is_refused(fields, data):
    whole = section(fields)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for reader in (skip_tags, tags):
        with pytest.raises(CorruptMessage):
            reader(cut, 0)


def test_a_section_of_very_many_fields_is_refused_before_they_are_walked():
    for count, refused in ((MAX_TAGS, False), (MAX_TAGS + 1, True), (50_000_000, True)):
        data = uvarint(count) + bytes(2 * MAX_TAGS)
        for reader in (skip_tags, tags):
            if refused:
                with pytest.raises(CorruptMessage, match="tagged fields"):
                    reader(data, 0)
            else:
                reader(data, 0)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 5, b"\x80\x80\x80\x80\x80\x01"])
def test_a_varint_that_does_not_end_is_refused(data):
    with pytest.raises(CorruptMessage, match="does not end"):
        read_uvarint(data, 0)
