"""Estimates and limits the memory of a node's groups, all shards together.

Groups live as long as their members and offsets, so they do not draw on the budget of requests in
flight. Kafka limits neither: there a client that joins with large subscriptions, or commits under
invented group ids, can exhaust the broker. Here nothing new is admitted above
``kept.groups.max.bytes``, and existing groups go on.

Pending records count until they are committed or rejected, or the shard is unloaded, also after
their request timed out. They have room of their own above the limit
(:meth:`GroupMemory.admits_records`); otherwise new groups that fill the memory would stop the
commits of existing ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kept.steps import clear_in_steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from kept.node.coordinator.groups.group import Group
    from kept.node.coordinator.groups.records import GroupRecord
    from kept.steps import Steps

GROUP_BYTES: Final = 1024
"""A group without its members: objects, timers, its place in tables."""
MEMBER_BYTES: Final = 1024
"""A member without what it brought."""
PROTOCOL_BYTES: Final = 160
"""A protocol that a member offers, beside its name and metadata: there may be 25,000 of them, and
each join compares those of all members."""
PENDING_BYTES: Final = 512
"""An id that was given out, beside its text: its place, its timer."""
OFFSET_BYTES: Final = 256
"""A committed offset in one of the two stores, with metadata of :data:`SHORT_METADATA`."""
SHORT_METADATA: Final = 64
RECORD_BYTES: Final = 768
"""A pending record without its content: itself, its part of the response, what undoes it."""
RECORDS_SHARE: Final = 8
"""Pending records may take this fraction of the limit above it."""


class GroupMemory:
    """``used_bytes`` of ``limit_bytes``; members and offsets that exist are counted above, too.
    ``records_bytes`` of them are records that wait to be committed.
    """

    __slots__ = ("limit_bytes", "records_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.records_bytes = 0

    def admits(self, more_bytes: int) -> bool:
        """Whether there is room for so much more; for nothing, or less, there always is."""
        return more_bytes <= 0 or self.used_bytes + more_bytes <= self.limit_bytes

    def admits_offsets(self, more_bytes: int) -> bool:
        """The same for offsets. Their refusal is permanent, so pending records do not count."""
        kept_bytes = self.used_bytes - self.records_bytes
        return more_bytes <= 0 or kept_bytes + more_bytes <= self.limit_bytes

    def admits_records(self, more_bytes: int) -> bool:
        """Whether so much more may wait to be committed: while there is room, and above the limit
        an eighth of it, or one append.
        """
        own_bytes = self.limit_bytes // RECORDS_SHARE
        return (
            self.admits(more_bytes)
            or not self.records_bytes
            or self.records_bytes + more_bytes <= own_bytes
        )

    def count_records(self, more_bytes: int) -> None:
        """Add the size of pending records; negative when they are no longer pending."""
        self.used_bytes += more_bytes
        self.records_bytes += more_bytes


def records_bytes(records: Collection[GroupRecord]) -> int:
    """What records hold while they wait to be committed, about."""
    return sum(RECORD_BYTES + record.text_bytes for record in records)


class GroupTable(dict[str, "Group"]):
    """Groups by id, whose memory counts for as long as they are in here."""

    def __init__(self, memory: GroupMemory) -> None:
        super().__init__()
        self._memory = memory

    def __setitem__(self, group_id: str, group: Group) -> None:
        self.pop(group_id, None)
        super().__setitem__(group_id, group)
        group.count_in(self._memory)

    def __delitem__(self, group_id: str) -> None:
        self[group_id].count_out()
        super().__delitem__(group_id)

    def pop(self, group_id: str, default: Any = None) -> Any:
        """Take a group out; ``default`` where there is none."""
        group = super().pop(group_id, None)
        if group is None:
            return default
        group.count_out()
        return group

    def release(self) -> Steps[None]:
        """Take all out."""
        while self:
            _, group = self.popitem()
            group.count_out()
            yield from clear_in_steps(group.members)
            yield from clear_in_steps(group.static_members)
            yield from clear_in_steps(group.pending_join)
            yield
