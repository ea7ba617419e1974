"""Messages of every API and version with something in every field, and what mutation makes of them.

A module of its own, so that a child process with little memory can use it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import bounds
from kept.client.protocol import messages as protocol
from kept.node.kafka.api import APIS
from kept.storage.errors import KeptError

VALUES = {
    "bool": True,
    "string": "ab",
    "bytes": b"xyz",
    "records": b"xyz",
    "uuid": uuid.UUID(int=7),
}
LENGTHS = (
    bytes((0xFF, 0xFF, 0xFF, 0xFF, 0x0F)),
    bytes((0xFF, 0xFF, 0xFF, 0xFF, 0x07)),
    bytes((0x7F, 0xFF, 0xFF, 0xFF)),
    bytes((0x80, 0, 0, 0)),
    bytes((0x7F, 0xFF)),
    bytes((0xFF, 0xFE)),
    bytes((0x80,) * 11),
)
"""What lengths may be set to: the largest of each encoding, negative ones, a varint without end."""


def sample(cls: Any) -> dict[str, Any]:
    """Values for every field, two in every array."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        hint = hints[field.name]
        if type(None) in get_args(hint):
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        array = get_origin(hint) is tuple
        if array:
            hint = get_args(hint)[0]
        if is_dataclass(hint):
            one: Any = sample(hint)
        else:
            one = VALUES.get(field.metadata["kafka_type"], 1)
        values[field.name] = [one, one] if array else one
    return values


def classes() -> Iterator[Any]:
    """Every request and response that this node reads or writes, in every version."""
    for api in APIS:
        for version in range(max(api.min_version, api.refused_below), api.max_version + 1):
            for kind in (EntityType.request, EntityType.response):
                if version in protocol.versions(api.key):
                    yield protocol.message_type(api.key, version, kind)


def mutants(data: bytes, every: int = 1) -> Iterator[bytes]:
    """``data`` with a length put over, and put in, at every place."""
    for at in range(0, len(data), every):
        for length in LENGTHS:
            yield data[:at] + length + data[at + len(length) :]
            yield data[:at] + length + data[at + 1 :]


def decode_all(found: Iterable[Any], every: int = 1) -> int:
    """Decode all mutants of messages of these classes; how many there were."""
    count = 0
    for cls in found:
        data = protocol.encode(protocol.build(cls, sample(cls)))
        for mutant in mutants(data, every):
            count += 1
            with contextlib.suppress(KeptError):
                protocol.decode(cls, mutant)
    return count


@cache
def plain_walk() -> Any:
    """The walk in plain Python, whichever is in force."""
    spec = importlib.util.spec_from_file_location("kept_plain_bounds", bounds.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEPT_KERNEL", "python")
        spec.loader.exec_module(module)
    return module.Walk
