"""KIP-482: what a newer peer adds as tagged fields is passed over, wherever it stands."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from kio.schema.index import api_key_map
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.bounds import NO_LIMIT, Walk, program
from kept.storage.errors import CorruptMessage
from tests.client.protocol.messages import plain_walk, sample

UNKNOWN = bytes((1, 99, 3)) + b"new"
"""A section of one tagged field: tag 99, three bytes."""


def flexible() -> list[Any]:
    """Every flexible request and response that kio knows, in its newest version."""
    found = []
    for key in api_key_map:
        for kind in (EntityType.request, EntityType.response):
            cls = protocol.message_type(key, protocol.versions(key)[-1], kind)
            if cls.__flexible__:
                found.append(cls)
    return found


def rewritten(walk: Any, cls: Any, data: bytes) -> bytes:
    """A message without its unknown tagged fields, by a walk in Cython or Python."""
    found: bytes = walk(program(cls).code, data, NO_LIMIT).rewritten(program(cls).start, 0)
    return found


@pytest.mark.parametrize("cls", flexible(), ids=lambda cls: cls.__name__)
def test_a_message_without_unknown_tags_stays_what_it_is(cls) -> None:
    data = protocol.encode(protocol.build(cls, sample(cls)))
    assert program(cls).without_unknown_tags(b"?" + data + b"?", 1) == data
    assert rewritten(plain_walk(), cls, data) == data
    empty = protocol.encode(protocol.decode(cls, data)[0])
    assert empty == data


def without_tags(cls: Any) -> bool:
    """Whether a message may leave all tagged fields out: kio has no default for nested ones."""
    tagged = [field.name for field in fields(cls) if "tag" in field.metadata]
    return all(default is not None for name, _, _, default in protocol._plan(cls) if name in tagged)


@pytest.mark.parametrize(
    "cls", list(filter(without_tags, flexible())), ids=lambda cls: cls.__name__
)
def test_an_unknown_tag_at_the_end_is_passed_over(cls) -> None:
    values = {
        name: value
        for name, value in sample(cls).items()
        if "tag" not in next(f for f in fields(cls) if f.name == name).metadata
    }
    message = protocol.build(cls, values)
    data = protocol.encode(message)
    assert data[-1] == 0, "the section of tagged fields is empty"
    assert protocol.decode(cls, data[:-1] + UNKNOWN) == (message, len(data) - 1 + len(UNKNOWN))


def test_unknown_tags_within_and_beside_known_ones() -> None:
    cls = protocol.message_type(3, 12, EntityType.request)  # Metadata
    topics = [{"topic_id": None, "name": "a"}, {"topic_id": None, "name": "b"}]
    message = protocol.build(
        cls,
        {
            "topics": topics,
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        },
    )
    data = protocol.encode(message)
    for name in (b"\x02a", b"\x02b"):
        assert data.count(name + b"\0") == 1
        data = data.replace(name + b"\0", name + UNKNOWN)
    assert protocol.decode(cls, data) == (message, len(data))

    cls = protocol.message_type(1, 12, EntityType.request)  # Fetch: cluster_id has tag 0
    message = protocol.build(cls, sample(cls))
    data = protocol.encode(message)
    known = bytes((1, 0, 3)) + b"\x03ab"
    assert data.endswith(known)
    both = bytes((2, 0, 3)) + b"\x03ab" + UNKNOWN[1:]
    longer = data.removesuffix(known) + both
    assert protocol.decode(cls, longer)[0] == message
    assert [rewritten(walk, cls, longer) for walk in (Walk, plain_walk())] == [data, data]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_message_that_ends_early_is_corrupt(cut) -> None:
    cls = protocol.message_type(3, 12, EntityType.request)
    message = protocol.build(
        cls,
        {
            "topics": [{"topic_id": None, "name": "a"}],
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        },
    )
    data = protocol.encode(message).replace(b"\x02a\0", b"\x02a" + UNKNOWN)
    with pytest.raises(CorruptMessage):
        protocol.decode(cls, data[:-cut])
