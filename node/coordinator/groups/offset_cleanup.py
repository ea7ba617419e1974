"""Deletes offsets in slices: those of deleted groups and topics, and expired ones.

A :class:`Sweep` looks at one offset after the other. The core carries out a slice of it when the
shell says so (:class:`~.events.SweepOn`), between other events, and appends the tombstones that it
gave; the next slice comes when these are committed. So neither the loop nor a batch is ever filled
by one group, and what a sweep finds is judged by the present state, never by that at its begin.
A group's own tombstone is in the last slice: after a crash on the way the group is there with fewer
offsets, and can be deleted again.

Kafka does each of these at once, in one batch, which a group may be too large for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.events import NO_ERROR
from kept.node.coordinator.groups.group import EMPTY
from kept.node.coordinator.groups.offsets import StoredOffset, is_expired
from kept.node.coordinator.groups.records import (
    NO_TOPIC_ID,
    GroupMetadataKey,
    GroupRecord,
    OffsetCommitKey,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from kept.node.coordinator.groups.core import GroupCore
    from kept.node.coordinator.groups.group import Group

SLICE_ITEMS: Final = 1_000
"""Offsets and groups that a slice looks at: a millisecond."""
SLICE_RECORDS: Final = 250
"""Tombstones in a slice: a few milliseconds."""
SLICE_BYTES: Final = 128 * 1024
"""Names in them, about: the slice is one batch, and group ids may have 32 kB."""


class Sweep:
    """A walk over offsets. ``records`` and ``removed`` (groups) are what the present slice deletes;
    ``group`` is being deleted whole, if one is, and nobody may use it meanwhile.
    """

    def __init__(self, core: GroupCore) -> None:
        self.core = core
        self.records: list[GroupRecord] = []
        self.removed: list[Group] = []
        self.group: str | None = None
        self._bytes = 0
        self._steps = self._walk()

    def next_slice(self) -> bool:
        """Fill ``records`` and ``removed`` anew; whether this was the last slice."""
        self.records, self.removed, self._bytes = [], [], 0
        for _ in range(SLICE_ITEMS):
            if next(self._steps, self) is self:
                return True
            if len(self.records) >= SLICE_RECORDS or self._bytes >= SLICE_BYTES:
                break
        return False

    def committed(self) -> None:
        """The present slice is in the log."""

    def ended(self) -> None:
        """All slices are in the log."""

    def failed(self, error: ErrorCode) -> None:
        """The present slice is not in the log, or not known to be: this is the end."""

    def _walk(self) -> Iterator[None]:
        """Look at everything, one item a step."""
        yield from ()

    def _delete(self, key: OffsetCommitKey) -> None:
        record = GroupRecord(key, None)
        self.records.append(record)
        self._bytes += record.text_bytes

    def _remove(self, group: Group) -> None:
        del self.core.groups[group.group_id]
        self.records.append(GroupRecord(GroupMetadataKey(group.group_id), None))
        self.removed.append(group)

    def _stored(self, group: str, topics: Iterable[str]) -> Iterator[OffsetCommitKey]:
        """Keys of a group's offsets for ``topics``, as they are now; to be looked up again."""
        appended = self.core.appended
        for topic in topics:
            for partition in tuple(appended.of_group(group).get(topic, ())):
                yield OffsetCommitKey(group, topic, partition)


class GroupsDeletion(Sweep):
    """A DeleteGroups: groups without members, with their offsets."""

    def __init__(self, core: GroupCore, request: ev.DeleteGroups) -> None:
        super().__init__(core)
        self._request = request
        self._results: list[ErrorCode] = []
        """Of the first groups of the request; ``_certain`` of them are in the log."""
        self._certain = 0

    def _walk(self) -> Iterator[None]:
        core = self.core
        for group_id in self._request.groups:
            group = core.groups.get(group_id)
            if group is None:
                self._results.append(ErrorCode.group_id_not_found)
            elif core.is_being_deleted(group_id):
                self._results.append(ErrorCode.coordinator_load_in_progress)
            elif group.state is not EMPTY:
                self._results.append(ErrorCode.non_empty_group)
            else:
                self.group = group_id
                yield from self._delete_offsets(group_id)
                self.group = None
                if core.groups.get(group_id) is group:
                    self._remove(group)
                self._results.append(NO_ERROR)
            yield

    def _delete_offsets(self, group_id: str) -> Iterator[None]:
        core = self.core
        # A transaction may end on the way; nothing new comes.
        in_transactions = dict.fromkeys(core.transactions.keys_of(group_id))
        for key in self._stored(group_id, tuple(core.appended.of_group(group_id))):
            in_transactions.pop(key, None)
            if core.appended.get(key) is not None or core.transactions.holds(key):
                self._delete(key)
            yield
        for key in in_transactions:
            if core.appended.get(key) is not None or core.transactions.holds(key):
                self._delete(key)
            yield

    def committed(self) -> None:
        """As :meth:`Sweep.committed`."""
        self._certain = len(self._results)

    def ended(self) -> None:
        """As :meth:`Sweep.ended`."""
        result = self._result(self._results)
        if len(self._results) == self._certain:
            self.core.respond(self._request.request, result)
        else:
            # A group that is not there any more may have a tombstone that is not committed.
            self.core.respond_when_committed(self._request.request, result)

    def failed(self, error: ErrorCode) -> None:
        """As :meth:`Sweep.failed`."""
        refused = ErrorCode.non_empty_group
        codes = [
            code if place < self._certain or code is refused else error
            for place, code in enumerate(self._results)
        ]
        codes += [error] * (len(self._request.groups) - len(codes))
        self.core.respond(self._request.request, self._result(codes))

    def _result(self, codes: list[ErrorCode]) -> ev.DeleteGroupsResult:
        return ev.DeleteGroupsResult(tuple(zip(self._request.groups, codes, strict=True)))


class TopicsSweep(Sweep):
    """Offsets of topics (name to ids) that are gone; those of a namesake with another id stay.

    A tombstone deletes all that is stored for its key, also what open transactions commit. So where
    some of that is a namesake's, the rest is tried again later; nobody is shown it meanwhile.
    """

    def __init__(self, core: GroupCore, gone: dict[str, set[UUID]]) -> None:
        super().__init__(core)
        self.gone = gone
        self._left: dict[str, set[UUID]] = {}
        """Topics of which offsets were left, with their ids."""

    def _walk(self) -> Iterator[None]:
        core, gone = self.core, self.gone
        for group_id in tuple(core.groups):
            yield
            in_transactions = dict.fromkeys(core.transactions.keys_of(group_id))
            names = gone.keys() & core.appended.of_group(group_id).keys()
            for key in self._stored(group_id, sorted(names)):
                in_transactions.pop(key, None)
                self._delete_if_gone(key)
                yield
            for key in in_transactions:
                self._delete_if_gone(key)
                yield

    def _delete_if_gone(self, key: OffsetCommitKey) -> None:
        topic_ids = self.gone.get(key.topic)
        if topic_ids is None:
            return
        core = self.core
        appended = core.appended.get(key)
        stored = [*core.transactions.stored(key), *(() if appended is None else (appended,))]
        are_gone = [_is_of(one, topic_ids) for one in stored]
        if any(are_gone):
            if all(are_gone):
                self._delete(key)
            else:
                self._left[key.topic] = topic_ids

    def ended(self) -> None:
        """As :meth:`Sweep.ended`."""
        if self._left:
            self.core.retry_topics(self._left)

    def failed(self, error: ErrorCode) -> None:  # noqa: ARG002
        """As :meth:`Sweep.failed`; it comes again, whatever it is."""
        self.core.retry_topics(self.gone)


def _is_of(stored: StoredOffset, topic_ids: set[UUID]) -> bool:
    """Whether an offset is of a topic with one of the ids, or of an unknown one."""
    topic_id = stored.value.topic_id
    return topic_id == NO_TOPIC_ID or topic_id in topic_ids


class ExpirySweep(Sweep):
    """Offsets whose time is over, and empty groups that have none left. What fails is found again
    when offsets are checked next.
    """

    def _walk(self) -> Iterator[None]:
        core = self.core
        for group in tuple(core.groups.values()):
            yield
            group_id = group.group_id
            if core.is_being_deleted(group_id):
                continue
            kept = False
            for key in self._stored(group_id, tuple(core.appended.of_group(group_id))):
                if self._is_expired(key):
                    self._delete(key)
                else:
                    kept = True
                yield
            if kept or core.groups.get(group_id) is not group or group.state is not EMPTY:
                continue
            if self._has_nothing_else(group_id) and not core.is_being_deleted(group_id):
                self._remove(group)

    def _is_expired(self, key: OffsetCommitKey) -> bool:
        core = self.core
        group, stored = core.groups.get(key.group), core.appended.get(key)
        if group is None or stored is None:
            return False
        retention_ms = core.settings.offsets_retention_ms
        expired = is_expired(group, stored, core.wall_ms, retention_ms)
        return bool(expired) and not (
            group.is_subscribed_to(key.topic) or core.transactions.holds(key)
        )

    def _has_nothing_else(self, group_id: str) -> bool:
        """The group has no offsets but those that this slice deletes."""
        left = sum(map(len, self.core.appended.of_group(group_id).values()))
        own = sum(1 for record in self.records if record.key.group == group_id)
        return left == own and not self.core.transactions.keys_of(group_id)
