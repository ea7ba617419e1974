"""Appends of a group core that are not committed yet, and what follows when they are: as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kept.node.coordinator.common.events import EndMarker, Response, TransactionalProducer
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.offsets import StoredOffset, TransactionalOffsets
from kept.node.coordinator.groups.records import OffsetCommitKey, OffsetCommitValue

if TYPE_CHECKING:
    from kio.schema.errors import ErrorCode

    from kept.node.coordinator.groups.group import Group, Protocols
    from kept.node.coordinator.groups.offset_cleanup import Sweep
    from kept.node.coordinator.groups.records import GroupRecord


class GroupCreation(Struct, frozen=True):
    """A group exists once its first record is committed."""

    group: Group


class FormerStaticMember(Struct, frozen=True):
    """What a static member was before it came back, and who led."""

    member_id: str
    leader: str
    protocols: Protocols
    rebalance_timeout_ms: int
    session_timeout_ms: int


class StaticMemberReplacement(Struct, frozen=True):
    """A static member that came back in a stable group gets its assignment under its new id."""

    group: Group
    event: ev.Join
    before: FormerStaticMember


class Assignment(Struct, frozen=True):
    """A generation's assignment (member id to its part), which makes the group stable."""

    group: Group
    generation: int
    assignments: Mapping[str, bytes]


class SweepSlice(Struct, frozen=True):
    """A slice of a sweep is deleted, perhaps the last one."""

    sweep: Sweep
    is_last: bool


Sequel = Response | GroupCreation | StaticMemberReplacement | Assignment | SweepSlice
"""A response becomes what :func:`~.events.failed` makes of it if the append fails."""


@dataclass(slots=True)
class PendingAppend:
    """An append that is not committed yet, with what follows it and what undoes it.

    ``producer``: its offsets are part of that transaction. ``marker``: it ends a transaction, which
    had committed ``ended``. ``created``: a group that was made for it. ``removed``: groups that it
    deletes. ``base_offset`` of its records; -1 until it is staged, and without effect on offsets.
    ``is_over``: its sequel has happened. ``late``: the error of an append that was not committed in
    time; it may still be. ``size_bytes`` is what is counted of it while it waits.
    """

    records: tuple[GroupRecord, ...]
    sequel: Sequel | None
    size_bytes: int
    producer: TransactionalProducer | None = None
    marker: EndMarker | None = None
    created: str | None = None
    removed: tuple[Group, ...] = ()
    base_offset: int = -1
    ended: TransactionalOffsets = field(default_factory=dict)
    is_over: bool = False
    late: ErrorCode | None = None

    def offsets(self) -> Iterator[tuple[OffsetCommitKey, StoredOffset | None]]:
        """Offsets that its records commit or, with None, delete."""
        for record_offset, record in enumerate(self.records, self.base_offset):
            if isinstance(record.key, OffsetCommitKey):
                if isinstance(record.value, OffsetCommitValue):
                    yield record.key, StoredOffset(record.value, record_offset)
                else:
                    yield record.key, None


class DeferredResponse(Struct, frozen=True):
    """A response that waits for ``append``; ``result`` may be a FetchOffsets to carry out then."""

    append: int
    request: int
    result: Any
