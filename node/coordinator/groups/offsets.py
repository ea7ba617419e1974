"""Committed offsets of the groups of one partition of ``__consumer_offsets``.

A port of what Kafka's ``OffsetMetadataManager`` keeps. There is one :class:`OffsetStore` with all
that was appended, which decisions use, and one with what is committed, which readers see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kept.node.coordinator.groups.group import EMPTY, STABLE, Group
from kept.node.coordinator.groups.memory_limit import OFFSET_BYTES, SHORT_METADATA, GroupMemory
from kept.node.coordinator.groups.records import OffsetCommitKey, OffsetCommitValue
from kept.storage.types import MAX_INT64

LIVE_RECORD_OFFSET: Final = MAX_INT64
"""Record offset of what was committed after loading: newer than all that was loaded."""


class StoredOffset(NamedTuple):
    """A committed offset and where in the log it was found."""

    value: OffsetCommitValue
    record_offset: int


class TransactionalOffset(NamedTuple):
    """An offset that an open transaction of a producer commits."""

    producer_id: int
    key: OffsetCommitKey
    stored: StoredOffset


def offset_bytes(stored: StoredOffset | None) -> int:
    """What a store holds for an offset, about."""
    if stored is None:
        return 0
    return OFFSET_BYTES + max(0, len(stored.value.metadata) - SHORT_METADATA)


class OffsetStore:
    """Offsets by group, topic and partition; ``memory`` counts them where it is given."""

    __slots__ = ("_groups", "_memory")

    def __init__(self, memory: GroupMemory | None = None) -> None:
        self._groups: dict[str, dict[str, dict[int, StoredOffset]]] = {}
        self._memory = memory

    def get(self, key: OffsetCommitKey) -> StoredOffset | None:
        """What is stored for a partition."""
        return self._groups.get(key.group, {}).get(key.topic, {}).get(key.partition)

    def put(self, key: OffsetCommitKey, stored: StoredOffset | None) -> StoredOffset | None:
        """Store or, with None, remove; what was there before."""
        if stored is None:
            return self._remove(key)
        topics = self._groups.setdefault(key.group, {})
        partitions = topics.setdefault(key.topic, {})
        before = partitions.get(key.partition)
        partitions[key.partition] = stored
        if self._memory is not None:
            self._memory.used_bytes += offset_bytes(stored) - offset_bytes(before)
        return before

    def _remove(self, key: OffsetCommitKey) -> StoredOffset | None:
        topics = self._groups.get(key.group)
        partitions = None if topics is None else topics.get(key.topic)
        if topics is None or partitions is None:
            return None
        before = partitions.pop(key.partition, None)
        if self._memory is not None:
            self._memory.used_bytes -= offset_bytes(before)
        if not partitions:
            del topics[key.topic]
            if not topics:
                del self._groups[key.group]
        return before

    def clear(self) -> None:
        """Forget all."""
        if self._memory is not None:
            self._memory.used_bytes -= sum(offset_bytes(stored) for _, stored in self)
        self._groups.clear()

    def of_group(self, group: str) -> dict[str, dict[int, StoredOffset]]:
        """Topic to partition to offset of a group; not to be changed."""
        return self._groups.get(group, {})

    def keys_of(self, group: str) -> Iterator[OffsetCommitKey]:
        """Keys of a group's offsets."""
        for topic, partitions in self.of_group(group).items():
            for partition in partitions:
                yield OffsetCommitKey(group, topic, partition)

    def groups(self) -> set[str]:
        """Groups that have offsets."""
        return set(self._groups)

    def __iter__(self) -> Iterator[tuple[OffsetCommitKey, StoredOffset]]:
        for group, topics in self._groups.items():
            for topic, partitions in topics.items():
                for partition, stored in partitions.items():
                    yield OffsetCommitKey(group, topic, partition), stored

    def __len__(self) -> int:
        return sum(len(p) for topics in self._groups.values() for p in topics.values())


class OpenTransactions:
    """Offsets of transactions whose end was not found in the log, by producer id."""

    __slots__ = ("_producers",)

    def __init__(self) -> None:
        self._producers: dict[int, OffsetStore] = {}

    def add(self, producer_id: int, key: OffsetCommitKey, stored: StoredOffset) -> None:
        """A commit inside a transaction."""
        self._producers.setdefault(producer_id, OffsetStore()).put(key, stored)

    def forget(self, key: OffsetCommitKey) -> list[TransactionalOffset]:
        """A tombstone for a partition: commits inside open transactions are void; which these are,
        for :meth:`add`, should the tombstone not reach the log.
        """
        return [
            TransactionalOffset(producer_id, key, stored)
            for producer_id, store in self._producers.items()
            if (stored := store.put(key, None)) is not None
        ]

    def end(self, producer_id: int) -> list[tuple[OffsetCommitKey, StoredOffset]]:
        """The transaction of a producer is over: what it had committed."""
        store = self._producers.pop(producer_id, None)
        return [] if store is None else list(store)

    def holds(self, key: OffsetCommitKey) -> bool:
        """Whether an open transaction commits that partition's offset."""
        return any(store.get(key) is not None for store in self._producers.values())

    def keys_of(self, group: str) -> set[OffsetCommitKey]:
        """Partitions of a group whose offsets open transactions commit."""
        return {key for store in self._producers.values() for key in store.keys_of(group)}

    def keys_of_topic(self, topic: str) -> Iterator[tuple[OffsetCommitKey, StoredOffset]]:
        """The same for a topic, over all groups."""
        for store in self._producers.values():
            yield from ((key, stored) for key, stored in store if key.topic == topic)


def is_expired(group: Group, stored: StoredOffset, now_ms: int, retention_ms: int) -> bool | None:
    """Whether an offset's time is over; None if offsets of this group do not expire now.

    Groups with members keep them (KIP-211), except consumers', for topics nobody subscribes to:
    those count from the commit. Empty groups count from when they became empty, simple ones from
    the commit.
    """
    base: int = stored.value.commit_timestamp
    if group.protocol_type is not None:
        if group.state is EMPTY:
            base = base if group.state_timestamp is None else group.state_timestamp
        elif not (
            group.state is STABLE
            and group.is_consumer_protocol
            and group.subscribed_topics is not None
        ):
            return None
    if stored.value.expire_timestamp != -1:
        return now_ms >= stored.value.expire_timestamp
    return now_ms - base >= retention_ms
