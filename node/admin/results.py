"""What results of the operator's API have in common. JSON is made of them in ``kept.node.http``.

A result is a frozen Struct; its fields, in their order, are those of the JSON object. A field that
is :data:`OMITTED` is left out; one that the class lists in ``INLINED`` gives its own fields instead
of one of its name. What another node answered is passed on as it came (:class:`Remote`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from msgspec import Struct


class Omitted(Enum):
    """The type of :data:`OMITTED`."""

    OMITTED = "omitted"


OMITTED: Final = Omitted.OMITTED
"""A field that this result does not have."""


class Remote(Struct, frozen=True):
    """A JSON value of another node of the cluster, or of a process of this one."""

    value: Mapping[str, Any]


class PartitionResult(Struct, frozen=True):
    """A result about one partition."""

    topic: str
    partition: int


class Unanswered(Struct, frozen=True):
    """A node that did not answer, and why."""

    node: int
    reason: str
