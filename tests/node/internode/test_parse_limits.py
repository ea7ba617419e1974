"""A message of very many items is refused before protobuf makes objects of it."""

from __future__ import annotations

import time

import pytest

from kept.cluster.metadata.wal import MAX_ENTRY_BYTES, Entry
from kept.cluster.raft.messages import AppendEntries
from kept.node.internode.frames import MAX_BODY_BYTES
from kept.node.internode.parse_limits import MAX_FIELDS, MAX_ITEMS, UNCOUNTED_BYTES
from kept.node.internode.protobuf_conversion import codecs, decode_raft, encode_raft, parse
from kept.storage.errors import CorruptMessage

APPEND, LEADER_HINT = 1, 11
ENTRIES, VOTERS = 7, 7


def field(number: int, body: bytes) -> bytes:
    """A field of wire type 2."""
    size, length = b"", len(body)
    while length > 0x7F:
        size, length = size + bytes([length & 0x7F | 0x80]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + body


HOSTILE = {
    "entries": (field(APPEND, field(ENTRIES, b"") * (MAX_ITEMS + 1)), "more than 32768 items"),
    "a full body": (field(APPEND, bytes([0x3A, 0]) * (MAX_BODY_BYTES // 2)), "more than 32768"),
    "packed numbers": (field(LEADER_HINT, field(VOTERS, bytes(UNCOUNTED_BYTES))), "32768 items"),
    "one field again": (field(APPEND, b"\x08\x01" * (MAX_FIELDS + 1)), f"{MAX_FIELDS} fields"),
    "a wrong length": (field(APPEND, b"\x3a\x7f" + bytes(126))[:-1] + bytes(99999), "RaftMessage"),
    "a field past its message": (field(APPEND, bytes([0x0A]) * 99999), "too late|wire type"),
    "a group": (bytes([0x0B]) * 99999, "a field of wire type 3"),
    "no number": (b"\x08" + b"\xff" * 99999, "a number of more than 10 bytes"),
    "half a number": (field(2, bytes(99999)) + b"\x08\xff", "ends within a number"),
}


@pytest.mark.parametrize(("body", "error"), HOSTILE.values(), ids=HOSTILE)
def test_what_no_node_sends_is_refused_before_it_is_parsed(body, error):
    began = time.process_time()
    with pytest.raises(CorruptMessage, match=error):
        parse(codecs().raft_message, body)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "entries",
    [tuple(Entry(1, n, b"") for n in range(1, 29_128)), (Entry(1, 1, bytes(MAX_ENTRY_BYTES)),)],
    ids=["the most", "the largest"],
)
def test_the_largest_appends_of_a_leader_pass(entries):
    message = AppendEntries(term=1, sender=1, to=2, prev_index=0, prev_term=0, entries=entries)
    assert decode_raft(encode_raft(message)) == message
