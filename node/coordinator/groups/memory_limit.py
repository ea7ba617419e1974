"""What the groups of a node hold in memory, all shards together: an estimate, and its limit.

Groups live for as long as their members and offsets do, so they do not draw on the budget of what
is in flight. Kafka bounds neither; there a stranger who joins with large subscriptions, or commits
under invented group ids, ends the broker. Here nobody new comes in above ``kept.groups.max.bytes``,
and what is there goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kept.node.coordinator.groups.group import Group

GROUP_BYTES: Final = 1024
"""A group without its members: objects, timers, its place in tables."""
MEMBER_BYTES: Final = 1024
"""A member without what it brought."""
PENDING_BYTES: Final = 512
"""An id that was given out, beside its text: its place, its timer."""
OFFSET_BYTES: Final = 256
"""A committed offset in one of the two stores, with metadata of :data:`SHORT_METADATA`."""
SHORT_METADATA: Final = 64


class GroupMemory:
    """``used_bytes`` of ``limit_bytes``; members and offsets that exist are counted above, too."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def admits(self, more_bytes: int) -> bool:
        """Whether there is room for so much more; for nothing, or less, there always is."""
        return more_bytes <= 0 or self.used_bytes + more_bytes <= self.limit_bytes


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

    def clear(self) -> None:
        """Take all out."""
        for group in self.values():
            group.count_out()
        super().clear()
