"""Files of committed offsets: what is read from them, and what of a wrong one is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.cli.offset_file import csv_text, json_rows, parse_offsets
from kept.storage.types import TopicPartition

_NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=9)
_OFFSETS = st.dictionaries(
    st.builds(
        TopicPartition,
        _NAMES.filter(lambda n: not n.startswith(("[", "{"))),
        st.integers(0, 2**31 - 1),
    ),
    st.integers(0, 2**63 - 1),
    min_size=1,
    max_size=5,
)


@given(st.dictionaries(_NAMES.map("g{}".format), _OFFSETS, min_size=1, max_size=3))
def test_what_is_written_is_read(offsets) -> None:
    wanted = {(group, tp, at) for group, its in offsets.items() for tp, at in its.items()}
    assert set(parse_offsets(csv_text(offsets, named=True).encode())) == wanted
    assert set(parse_offsets(json.dumps(json_rows(offsets)).encode())) == wanted
    group, its = next(iter(offsets.items()))
    unnamed = parse_offsets(csv_text({group: its}, named=False).encode())
    assert {(tp, at) for _, tp, at in unnamed} == set(its.items())
    assert {group for group, _, _ in unnamed} == {None}


def test_what_kafkas_tool_exports_is_read() -> None:
    exported = b'readers,orders,0,3\n"r,x",users,1,0\n\n'
    assert parse_offsets(exported) == [
        ("readers", TopicPartition("orders", 0), 3),
        ("r,x", TopicPartition("users", 1), 0),
    ]
    assert parse_offsets(b"\xef\xbb\xbforders,0,3\r\n") == [(None, TopicPartition("orders", 0), 3)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"topic,partition,offset\n", "line 1: 'partition' is no partition (is that a header"),
        (b"users,0,1\nusers,x,1\n", "line 2: 'x' is no partition"),
        (b"users,0,-1\n", "line 1: '-1' is no offset"),
        (b"users,0,9223372036854775808\n", "'9223372036854775808' is no offset"),
        (b"users,2147483648,1\n", "'2147483648' is no partition"),
        ("users,0,\u0663\n".encode(), "is no offset"),
        (b"users,1\n", "line 1 has 2 fields"),
        (b"users,0,1\ng,users,1,1\n", "line 2 has 4 fields"),
        (b",0,1\n", "line 1: '' is no topic"),
        (b"users,0,1\nusers,0,2\n", "line 2 names users:0 again, after line 1"),
        (b'"users,0,1\n', "line 1 is no CSV"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b"users,0,1\nus\xffers,1,1\n", "line 2 is not UTF-8"),
        (b"\n", "there is no offset in it"),
        (b'{"topic": "users"}', "no list of objects"),
        (b"[1", "no JSON"),
        (b"[1]", "entry 1 is no object"),
        (b'[{"topic": "users"}]', "entry 1 has no 'partition'"),
        (b'[{"topic": "users", "partition": 0, "offset": 1, "lag": 2}]', "an unknown 'lag'"),
        (b'[{"topic": "users", "partition": true, "offset": 1}]', "True is no partition"),
        (b'[{"topic": 5, "partition": 0, "offset": 1}]', "entry 1: 5 is no topic"),
        (
            b'[{"topic": "a", "partition": 0, "offset": 1},'
            b' {"topic": "a", "partition": 1, "offset": 1, "group": "g"}]',
            "some do not",
        ),
    ],
)
def test_what_is_wrong_is_named(content: bytes, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_offsets(content)
    assert said in str(raised.value)
