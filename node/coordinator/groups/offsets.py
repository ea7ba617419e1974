"""Committed offsets of the groups of one partition of ``__consumer_offsets``.

A port of what Kafka's ``OffsetMetadataManager`` keeps. There is one :class:`OffsetStore` with all
that was appended, which decisions use, and one with what is committed, which readers see.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec import Struct

from kept.node.coordinator.groups.group import EMPTY, STABLE, Group
from kept.node.coordinator.groups.memory_limit import OFFSET_BYTES, SHORT_METADATA, GroupMemory
from kept.node.coordinator.groups.records import OffsetCommitKey, OffsetCommitValue
from kept.steps import Steps, clear_in_steps
from kept.storage.errors import InvariantViolation


class StoredOffset(Struct, frozen=True, gc=False):
    """A committed offset and where in the log its record is: of two the later one counts, even if
    the transaction of the earlier one ends after it.

    There are hundreds of thousands, so none has anything that the garbage collector follows: it
    would hold the node's loop.
    """

    value: OffsetCommitValue
    record_offset: int


TransactionalOffsets = dict[OffsetCommitKey, StoredOffset]
"""What one transaction commits."""


def offset_bytes(stored: StoredOffset | None) -> int:
    """What a store holds for an offset, about."""
    return 0 if stored is None else value_bytes(stored.value)


def value_bytes(value: OffsetCommitValue) -> int:
    """The same for an offset that is to be stored."""
    return OFFSET_BYTES + max(0, len(value.metadata) - SHORT_METADATA)


class OffsetStore:
    """Offsets by group, topic and partition; ``memory`` counts them."""

    __slots__ = ("_groups", "_memory", "_size_bytes")

    def __init__(self, memory: GroupMemory) -> None:
        self._groups: dict[str, dict[str, dict[int, StoredOffset]]] = {}
        self._memory = memory
        self._size_bytes = 0

    def get(self, key: OffsetCommitKey) -> StoredOffset | None:
        """What is stored for a partition."""
        return self._groups.get(key.group, {}).get(key.topic, {}).get(key.partition)

    def put(self, key: OffsetCommitKey, stored: StoredOffset | None) -> None:
        """Store or, with None, remove."""
        if stored is None:
            self._remove(key)
            return
        topics = self._groups.setdefault(key.group, {})
        partitions = topics.setdefault(key.topic, {})
        before = partitions.get(key.partition)
        partitions[key.partition] = stored
        self._count(offset_bytes(stored) - offset_bytes(before))

    def put_later(self, offsets: TransactionalOffsets) -> None:
        """Store those of a transaction that is committed, unless a later record is here."""
        for key, stored in offsets.items():
            present = self.get(key)
            if present is None or present.record_offset < stored.record_offset:
                self.put(key, stored)

    def _remove(self, key: OffsetCommitKey) -> None:
        topics = self._groups.get(key.group, {})
        partitions = topics.get(key.topic, {})
        before = partitions.pop(key.partition, None)
        self._count(-offset_bytes(before))
        if before is not None and not partitions:
            del topics[key.topic]
            if not topics:
                del self._groups[key.group]

    def _count(self, more_bytes: int) -> None:
        self._size_bytes += more_bytes
        self._memory.used_bytes += more_bytes

    def release(self) -> Steps[None]:
        """Forget all."""
        self._count(-self._size_bytes)
        while self._groups:
            _, topics = self._groups.popitem()
            while topics:
                yield from clear_in_steps(topics.popitem()[1])
                yield

    def of_group(self, group: str) -> dict[str, dict[int, StoredOffset]]:
        """Topic to partition to offset of a group; not to be changed."""
        return self._groups.get(group, {})

    def by_group(self) -> Iterator[tuple[str, dict[str, dict[int, StoredOffset]]]]:
        """Each group with what :meth:`of_group` says of it."""
        yield from self._groups.items()

    def walk(self) -> Iterator[tuple[OffsetCommitKey, StoredOffset]]:
        """What is stored, while it may change: what comes or goes meanwhile may be left out."""
        for group in tuple(self._groups):
            for topic in tuple(self.of_group(group)):
                for partition, stored in tuple(self.of_group(group).get(topic, {}).items()):
                    yield OffsetCommitKey(group, topic, partition), stored

    def groups(self) -> set[str]:
        """Groups that have offsets."""
        return set(self._groups)

    def __iter__(self) -> Iterator[tuple[OffsetCommitKey, StoredOffset]]:
        for group, topics in self._groups.items():
            for topic, partitions in topics.items():
                for partition, stored in partitions.items():
                    yield OffsetCommitKey(group, topic, partition), stored


class OpenTransactions:
    """Offsets that open transactions commit, by producer id; ``memory`` counts them."""

    __slots__ = ("_holders", "_memory", "_producers")

    def __init__(self, memory: GroupMemory) -> None:
        self._producers: dict[int, TransactionalOffsets] = {}
        self._holders: dict[str, dict[OffsetCommitKey, set[int]]] = {}
        """Whose transactions commit an offset, by group."""
        self._memory = memory

    def add(self, producer_id: int, key: OffsetCommitKey, stored: StoredOffset) -> None:
        """A commit inside a transaction."""
        offsets = self._producers.setdefault(producer_id, {})
        self._memory.used_bytes += offset_bytes(stored) - offset_bytes(offsets.get(key))
        offsets[key] = stored
        self._holders.setdefault(key.group, {}).setdefault(key, set()).add(producer_id)

    def forget(self, key: OffsetCommitKey) -> bool:
        """A tombstone for a partition voids commits inside open transactions; whether any is."""
        producers = tuple(self._holders.get(key.group, {}).get(key, ()))
        for producer_id in producers:
            self._remove(producer_id, key)
        return bool(producers)

    def end(self, producer_id: int) -> TransactionalOffsets:
        """The transaction of a producer is over: what it had committed."""
        offsets = dict(self._producers.get(producer_id, {}))
        for key in offsets:
            self._remove(producer_id, key)
        return offsets

    def _remove(self, producer_id: int, key: OffsetCommitKey) -> None:
        offsets = self._producers[producer_id]
        self._memory.used_bytes -= offset_bytes(offsets.pop(key))
        if not offsets:
            del self._producers[producer_id]
        holders = self._holders[key.group]
        holders[key].discard(producer_id)
        if not holders[key]:
            del holders[key]
            if not holders:
                del self._holders[key.group]

    def release(self) -> Steps[None]:
        """Forget all."""
        while self._holders:
            yield from clear_in_steps(self._holders.popitem()[1])
        while self._producers:
            _, offsets = self._producers.popitem()
            while offsets:
                self._memory.used_bytes -= offset_bytes(offsets.popitem()[1])
                yield

    def holds(self, key: OffsetCommitKey) -> bool:
        """Whether an open transaction commits that partition's offset."""
        return key in self._holders.get(key.group, ())

    def stored(self, key: OffsetCommitKey) -> Iterator[StoredOffset]:
        """What open transactions commit for a partition."""
        for producer_id in self._holders.get(key.group, {}).get(key, ()):
            yield self._producers[producer_id][key]

    def keys_of(self, group: str) -> Collection[OffsetCommitKey]:
        """Partitions of a group whose offsets open transactions commit; not to be changed."""
        return self._holders.get(group, {}).keys()

    def groups(self) -> set[str]:
        """Groups that have such offsets."""
        return set(self._holders)

    def __iter__(self) -> Iterator[tuple[OffsetCommitKey, StoredOffset]]:
        for offsets in self._producers.values():
            yield from offsets.items()

    def check_invariants(self) -> None:
        """Raise InvariantViolation when the two tables disagree."""
        held = {
            (producer_id, key)
            for keys in self._holders.values()
            for key, producers in keys.items()
            for producer_id in producers
        }
        if held != {(pid, key) for pid, offsets in self._producers.items() for key in offsets}:
            raise InvariantViolation("who holds an offset in a transaction is filed wrongly")
        if not all((*self._producers.values(), *self._holders.values())):
            raise InvariantViolation("something is kept of a transaction that commits nothing here")


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
