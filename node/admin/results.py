"""What results of the operator's API have in common. JSON is made of them in ``kept.node.http``.

A result is a frozen dataclass; its fields, in their order, are those of the JSON object. A field
that is :data:`OMITTED` is left out, one marked :data:`INLINE` gives its own fields instead of one
of its name. What another node answered is passed on as it came (:class:`Remote`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Omitted(Enum):
    """The type of :data:`OMITTED`."""

    OMITTED = "omitted"


OMITTED: Final = Omitted.OMITTED
"""A field that this result does not have."""


INLINE: Final = {"inline": True}
"""Metadata of a dataclass field whose own fields take its place in JSON."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A JSON value of another node of the cluster, or of a process of this one."""

    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OfPartition:
    """A result about one partition."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A node that did not answer, and why."""

    node: int
    reason: str
