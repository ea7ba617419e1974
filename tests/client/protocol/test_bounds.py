"""No length in a message is trusted: what is larger than the bytes left is refused before kio."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import field, make_dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.index import api_key_map
from kio.static.constants import EntityType

from kept.client.protocol import bounds
from kept.client.protocol import messages as protocol
from kept.client.protocol.bounds import NO_LIMIT, program
from kept.storage.errors import CorruptMessage, InvalidRequest, InvariantViolation, KeptError
from tests.client.protocol.messages import mutants, plain_walk, sample
from tests.support.slow import rest_slow

METADATA = (3, 9)
HUGE = bytes((0xFF, 0xFF, 0xFF, 0xFF, 0x0F))
"""A compact array's length: 2^32 - 2 elements."""
IN_A_CHILD = """
import resource
import sys
from tests.client.protocol.messages import classes, decode_all
decode_all(list(classes())[:40], every=7)  # what is loaded once is not counted
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
part, parts = int(sys.argv[1]), int(sys.argv[2])
print(decode_all(list(classes())[part::parts], every=5))
"""


def all_classes() -> list[Any]:
    return [
        protocol.message_type(key, version, kind)
        for key in api_key_map
        for version in protocol.versions(key)
        for kind in (EntityType.request, EntityType.response)
    ]


@cache
def encoded(cls: Any) -> bytes:
    return protocol.encode(protocol.build(cls, sample(cls)))


def outcome(walk: Any, cls: Any, data: bytes, limit: int = NO_LIMIT) -> Any:
    """What a walk makes of ``data``: its results, or its error."""
    checked = program(cls)
    one = walk(checked.code, memoryview(data), limit)
    try:
        return one.check(checked.start, 0), one.entries, one.unknown
    except KeptError as error:
        return type(error), str(error)


def test_the_kernel_is_compiled_here() -> None:
    assert bounds.Walk.__module__ == "kept.client.protocol._bounds", (
        "else it is held against itself"
    )
    assert bounds.Walk is not plain_walk()


def test_a_message_that_kio_wrote_is_walked_to_its_end() -> None:
    for cls in all_classes()[::2]:
        data = encoded(cls)
        end, entries, unknown = outcome(bounds.Walk, cls, data + b"behind")
        assert (end, unknown) == (len(data), 0), cls
        assert (end, entries, unknown) == outcome(plain_walk(), cls, data)


def test_a_message_that_ends_early_is_refused_at_every_byte() -> None:
    for cls in all_classes()[::5]:
        data = encoded(cls)
        for cut in range(len(data)):
            error, _ = outcome(bounds.Walk, cls, data[:cut])
            assert error is CorruptMessage


def test_both_walks_judge_alike_whatever_is_changed() -> None:
    for cls in all_classes()[::9]:
        for data in mutants(encoded(cls), every=3):
            assert outcome(bounds.Walk, cls, data) == outcome(plain_walk(), cls, data)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 10_000), st.integers(0, 30))
def test_both_walks_judge_alike_of_any_bytes(data: bytes, which: int, limit: int) -> None:
    cls = all_classes()[which % len(all_classes())]
    assert outcome(bounds.Walk, cls, data, limit) == outcome(plain_walk(), cls, data, limit)


@pytest.mark.parametrize("part", rest_slow(range(2), 1))
def test_no_mutant_makes_the_reader_reserve_more_than_its_bytes(part: int) -> None:
    """In a process that may not have 256 MiB more: a reader that reserves what a length says ends
    it.
    """
    child = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, str(part), "2"],
        cwd=os.getcwd(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout) > 4_000


def test_the_request_that_ended_a_node_is_refused() -> None:
    with pytest.raises(CorruptMessage, match="an array of 4294967294 where 2 bytes are left"):
        protocol.decode_request(*METADATA, HUGE + b"\0\0", 0)


def test_unknown_tagged_fields_cannot_claim_more_than_there_is() -> None:
    head = b"\x01" + bytes(3)  # no topics, three flags
    assert protocol.decode_request(*METADATA, head + b"\x01\x63\x01x", 0).topics == ()
    for tags in (HUGE, b"\x01\x63" + HUGE, b"\x02\x63\x01x"):
        with pytest.raises(CorruptMessage):
            protocol.decode_request(*METADATA, head + tags, 0)


def test_a_string_is_as_long_as_kafkas_may_be() -> None:
    values = {"topics": [{"name": "a" * 32767}], "allow_auto_topic_creation": False}
    values |= dict.fromkeys(
        ("include_cluster_authorized_operations", "include_topic_authorized_operations"), False
    )
    cls = protocol.message_type(*METADATA, EntityType.request)
    body = protocol.encode(protocol.build(cls, values))
    assert len(protocol.decode_request(*METADATA, body, 0).topics[0].name) == 32767
    values["topics"] = [{"name": "a" * 32768}]
    body = protocol.encode(protocol.build(cls, values))
    with pytest.raises(CorruptMessage, match="a string of 32768 bytes"):
        protocol.decode_request(*METADATA, body, 0)


def test_entries_are_counted_on_all_levels_and_bounded() -> None:
    cls = protocol.message_type(9, 9, EntityType.request)  # OffsetFetch
    groups = [
        {"group_id": "g", "topics": [{"name": "t", "partition_indexes": range(5)}] * 3}
        for _ in range(2)
    ]
    body = protocol.encode(protocol.build(cls, {"groups": groups, "require_stable": False}))
    assert program(cls).check(body, 0) == (len(body), 2 + 2 * 3 + 2 * 3 * 5, 0)
    assert protocol.decode_request(9, 9, body, 0, 38)
    with pytest.raises(InvalidRequest, match="OffsetFetchRequest v9 of more than 37 entries"):
        protocol.decode_request(9, 9, body, 0, 37)


def test_the_limit_holds_before_the_array_is_walked() -> None:
    """Not an element was looked at: those of a hundred megabytes would take their time."""
    cls = protocol.message_type(9, 5, EntityType.request)
    data = b"\0\1g" + (1_000_000).to_bytes(4, "big") + b"\xff" * 6_000_000
    error, text = outcome(bounds.Walk, cls, data, 1000)
    assert (error, text) == (InvalidRequest, "more than 1000 entries")


def test_a_schema_with_elements_of_no_bytes_is_refused() -> None:
    """Their count would have no bound: no class of kio has such, and none may come."""
    for cls in all_classes():
        assert program(cls).code
    empty = make_dataclass("Empty", (), namespace={"__flexible__": False})
    outer = make_dataclass("Outer", (), namespace={"__flexible__": False})
    with pytest.raises(InvariantViolation, match="elements without a byte"):
        bounds._field(tuple[empty, ...], None, outer, [])


@pytest.mark.parametrize(
    ("hint", "kind", "flexible", "least"),
    [
        (int, "int32", True, 4),
        (uuid.UUID, "uuid", False, 16),
        (str, "string", True, 1),
        (str, "string", False, 2),
        (bytes, "records", True, 1),
        (bytes, "bytes", False, 4),
        ("inner", None, True, 9),
        ("inner", None, False, 8),
        ("nullable", None, True, 1),
        (tuple[int, ...], "int8", True, 1),
        (tuple[int, ...], "int8", False, 4),
        (tuple[str, ...], "string", True, 1),
        (tuple[str, ...], "string", False, 4),
    ],
)
def test_the_least_that_a_field_takes(hint: Any, kind: str, flexible: bool, least: int) -> None:
    """What bounds the count of an array: neither more than its elements take, nor less."""
    namespace = {"__flexible__": flexible}
    cls = make_dataclass("Outer", (), namespace=namespace)
    number = ("number", int, field(metadata={"kafka_type": "int64"}))
    inner = make_dataclass("Inner", [number], namespace=namespace)
    hint = {"inner": inner, "nullable": inner | None}.get(hint, hint)
    assert bounds._field(hint, kind, cls, [])[1] == least


def test_a_class_is_compiled_once() -> None:
    """A tenth of a millisecond and more to compile, and each message that is decoded
    needs it."""
    cls = protocol.message_type(*METADATA, EntityType.request)
    assert program(cls) is program(cls)
