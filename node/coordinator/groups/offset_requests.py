"""What clients do with offsets: commit, fetch, delete.

A part of :class:`.core.GroupCore`. Source: Kafka's ``OffsetMetadataManager``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kio.schema.errors import ErrorCode

from kept.node.coordinator.common.events import Response
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.events import NO_ERROR
from kept.node.coordinator.groups.group import (
    COMPLETING_REBALANCE,
    EMPTY,
    PREPARING_REBALANCE,
    STABLE,
    Group,
    GroupError,
)
from kept.node.coordinator.groups.memory_limit import GROUP_BYTES, GroupMemory, records_bytes
from kept.node.coordinator.groups.offsets import (
    StoredOffset,
    offset_bytes,
    value_bytes,
)
from kept.node.coordinator.groups.records import (
    GroupRecord,
    OffsetCommitKey,
    OffsetCommitValue,
    is_other_topic,
    utf16_length,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kept.node.coordinator.groups.core import GroupCore


class _Room:
    """What one commit adds to the memory of groups. An offset is in two stores."""

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory
        self.spent_bytes = 0
        self.refused = False

    def admits(self, value: OffsetCommitValue, before: StoredOffset | None) -> bool:
        """Whether there is room for ``value`` in the place of ``before``."""
        more = 2 * (value_bytes(value) - offset_bytes(before))
        if more > 0 and not self._memory.admits_offsets(self.spent_bytes + more):
            self.refused = True
            return False
        self.spent_bytes += more
        return True


class OffsetRequests:
    """Requests that concern offsets."""

    def __init__(self, core: GroupCore) -> None:
        self._core = core

    # Commit.

    def commit(self, event: ev.CommitOffsets) -> None:
        """Append the offsets, if whoever commits may."""
        core = self._core
        group = core.groups.get(event.group)
        try:
            self._validate_commit(group, event)
        except GroupError as refusal:
            core.respond(event.request, ev.CommitResult(refusal.code))
            return
        is_plain = event.producer is None
        if is_plain and group is not None and group.state in (STABLE, PREPARING_REBALANCE):
            core.membership.restart_session(group, group.members[event.member])
        records: list[GroupRecord] = []
        room = _Room(core.memory)
        if group is None:
            room.spent_bytes = GROUP_BYTES + len(event.group)
        topics = tuple(
            (topic.name, topic.topic_id, self._commit_topic(event, topic, records, room))
            for topic in event.topics
        )
        if room.refused:
            core.refused_for_memory(event.group, "kept.groups.max.bytes")
        result = ev.CommitResult(topics=topics)
        if not records:
            core.respond(event.request, result)
            return
        if not core.memory.admits_records(records_bytes(records)):
            # What waits is committed soon: the client looks for its coordinator and comes back.
            core.refused_for_memory(event.group, "kept.groups.max.bytes")
            core.respond(event.request, ev.CommitResult(ErrorCode.coordinator_not_available))
            return
        if group is None:
            core.groups[event.group] = Group(event.group)
        created = event.group if group is None else None
        response = Response(event.request, result)
        core.append(tuple(records), response, producer=event.producer, created=created)

    def _validate_commit(self, group: Group | None, event: ev.CommitOffsets) -> None:
        if group is None:
            if event.generation < 0:
                return
            missing = ErrorCode.group_id_not_found
            raise GroupError(
                missing if event.knows_missing_groups else ErrorCode.illegal_generation
            )
        if event.generation < 0 and group.state is EMPTY:
            return
        anonymous = not event.member and event.group_instance_id is None
        if event.generation < 0 and anonymous:
            if event.producer is not None:
                return  # old clients do not say who they are: their transactional id fences them
            raise GroupError(ErrorCode.unknown_member_id)
        group.validate_member(event.member, event.group_instance_id)
        if event.generation != group.generation:
            raise GroupError(ErrorCode.illegal_generation)
        if group.state is COMPLETING_REBALANCE and event.producer is None:
            raise GroupError(ErrorCode.rebalance_in_progress)

    def _commit_topic(
        self,
        event: ev.CommitOffsets,
        topic: ev.CommitTopic,
        records: list[GroupRecord],
        room: _Room,
    ) -> tuple[tuple[int, ErrorCode], ...]:
        limit = self._core.settings.offset_metadata_max_bytes
        wall_ms = self._core.wall_ms
        expires = -1 if event.retention_ms == -1 else wall_ms + event.retention_ms
        results = []
        for p in topic.partitions:
            metadata = p.metadata or ""
            if utf16_length(metadata) > limit:
                results.append((p.partition, ErrorCode.offset_metadata_too_large))
                continue
            value = OffsetCommitValue(
                p.offset, metadata, wall_ms, max(p.leader_epoch, -1), expires, topic.topic_id
            )
            key = OffsetCommitKey(event.group, topic.name, p.partition)
            before = None if event.producer else self._core.appended.get(key)
            if not room.admits(value, before):
                results.append((p.partition, ErrorCode.invalid_commit_offset_size))
                continue
            records.append(GroupRecord(key, value))
            results.append((p.partition, NO_ERROR))
        return tuple(results)

    # Fetch.

    def fetch(self, event: ev.FetchOffsets) -> ev.FetchResult:
        """Committed offsets; a group that does not exist has none, and that is no error."""
        offsets = self._core.committed_of(event.group)
        topics = event.topics
        if topics is None:
            topics = tuple(
                ev.OffsetFetchTopic(name, tuple(partitions)) for name, partitions in offsets.items()
            )
        return ev.FetchResult(
            topics=tuple(
                (t.name, t.topic_id, self._fetch_topic(event, t, offsets.get(t.name, {})))
                for t in topics
            )
        )

    def _fetch_topic(
        self, event: ev.FetchOffsets, topic: ev.OffsetFetchTopic, stored: Mapping[int, StoredOffset]
    ) -> tuple[ev.FetchedOffset, ...]:
        fetched = []
        for partition in topic.partitions:
            key = OffsetCommitKey(event.group, topic.name, partition)
            offset = stored.get(partition)
            if event.require_stable and self._core.is_unstable(key):
                unstable = ErrorCode.unstable_offset_commit
                fetched.append(ev.FetchedOffset(partition, error=unstable))
            elif offset is None or is_other_topic(offset.value.topic_id, topic.topic_id):
                fetched.append(ev.FetchedOffset(partition))
            else:
                v = offset.value
                fetched.append(ev.FetchedOffset(partition, v.offset, v.leader_epoch, v.metadata))
        return tuple(fetched)

    # Delete.

    def delete(self, event: ev.DeleteOffsets) -> None:
        """Delete offsets of topics that no member reads."""
        core = self._core
        group = core.groups.get(event.group)
        if group is None:
            missing = ev.DeleteOffsetsResult(ErrorCode.group_id_not_found)
            core.respond_when_committed(event.request, missing)
            return
        if group.state is not EMPTY and not group.is_consumer_protocol:
            core.respond(event.request, ev.DeleteOffsetsResult(ErrorCode.non_empty_group))
            return
        records: list[GroupRecord] = []
        topics = []
        for name, partitions in event.topics:
            subscribed = group.is_subscribed_to(name)
            error = ErrorCode.group_subscribed_to_topic if subscribed else NO_ERROR
            topics.append((name, tuple((partition, error) for partition in partitions)))
            for partition in () if subscribed else partitions:
                key = OffsetCommitKey(event.group, name, partition)
                if core.appended.get(key) is not None or core.transactions.holds(key):
                    records.append(GroupRecord(key, None))
        result = ev.DeleteOffsetsResult(topics=tuple(topics))
        if records:
            core.append(tuple(records), Response(event.request, result))
        else:
            # An offset that is not there any more may have a tombstone that is not committed.
            core.respond_when_committed(event.request, result)
