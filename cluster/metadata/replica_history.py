"""What a node must remember of the metadata log beside the image: what befell its own replicas.

An image says what is; some questions need to know what was:

- *Was this log's topic deleted, or has the metadata been lost?* A log that the image does not want
  is deleted only where its removal was seen (``removed``), in an entry or as the difference to a
  snapshot that the leader sent. Until its directory is renamed the removal is remembered.
- *May what a returning replica cuts away have been acknowledged?* The image marks an unclean
  election only until the new leader has published its base generation (rule 19). ``unclean`` keeps
  the leader epoch of the last one until this node's replica is in the ISR again: records of older
  epochs that it cuts before that may have been acknowledged. Where a snapshot took the place of
  the entries, nobody can tell any more whether there was one; then it counts as if there was.
- *Is the end of the metadata log missing?* ``applied_index`` was durable, committed and applied.

All of it follows from the entries, so it is written only before a snapshot takes their place, and
now and then for ``applied_index``. File ``replica-history`` (big-endian;
``docs/formats/metadata.md``)::

    magic "kept-rhy", version uint32, node id int32, applied index int64, observed index int64,
    count uint32, `count` times (topic id 16 bytes, partition int32): removed
    count uint32, `count` times (topic id 16 bytes, partition int32, leader epoch int32): unclean
    CRC32C uint32
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kept.cluster.controller.unclean_recovery import is_unclean
from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.wal import check_magic, crc_matches, with_crc
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData

FILE: Final = "replica-history"
_MAGIC: Final = b"kept-rhy"
_VERSION: Final = 1
_HEADER = struct.Struct(">8sIiqq")
_COUNT = struct.Struct(">I")
_REMOVED = struct.Struct(">16si")
_UNCLEAN = struct.Struct(">16sii")

ReplicaKey = tuple[UUID, int]
"""(topic id, partition)."""


@dataclass(slots=True)
class ReplicaHistory:
    """What befell this node's replicas, as the metadata log told it. ``removed`` and ``unclean``
    hold up to entry ``observed_index``.
    """

    node_id: int
    applied_index: int = 0
    observed_index: int = 0
    removed: set[ReplicaKey] = field(default_factory=set)
    unclean: dict[ReplicaKey, int] = field(default_factory=dict)

    def copy(self) -> ReplicaHistory:
        """Another one that is equal."""
        return ReplicaHistory(
            self.node_id,
            self.applied_index,
            self.observed_index,
            set(self.removed),
            dict(self.unclean),
        )

    # What moves it.

    def observe(self, index: int, delta: Delta, *, hidden: bool = False) -> None:
        """Take in what changed up to entry ``index``. ``hidden``: a snapshot took the place of the
        entries, so what happened between is not known.
        """
        for topic in delta.topics_deleted:
            for state in topic.partitions:
                self.unclean.pop(state.key, None)
                if self.node_id in state.replicas:
                    self.removed.add(state.key)
        for change in delta.partitions:
            before, after = change.before, change.after
            key = after.key
            if self.node_id not in after.replicas:
                self.unclean.pop(key, None)
                if before is not None and self.node_id in before.replicas:
                    self.removed.add(key)
                continue
            self.removed.discard(key)
            if self.node_id in after.isr:
                self.unclean.pop(key, None)
                continue
            moved = before is None or before.leader_epoch < after.leader_epoch
            unclean = before is not None and is_unclean(before, after)
            if unclean or (hidden and moved):
                self.unclean[key] = after.leader_epoch
        self.observed_index = max(index, self.observed_index)

    def begin(self, image: Image) -> None:
        """A start from a snapshot: what was not observed of it is hidden."""
        if self.observed_index >= image.index:
            return
        for topic in image.topics.values():
            for state in topic.partitions:
                if self.node_id in state.replicas and self.node_id not in state.isr:
                    self.unclean[state.key] = state.leader_epoch
        self.observed_index = image.index

    def forget_removed(self, removals: Iterable[ReplicaKey]) -> None:
        """Nothing is left on the disks of replicas that were removed."""
        self.removed.difference_update(removals)


def read_history(disk: Disk, directory: str, node_id: int) -> ReplicaHistory:
    """The history of a metadata directory; an empty one where there is none, or another node's.

    Raises DamagedData, DirectoryRefused for a newer version.
    """
    path = f"{directory}/{FILE}"
    try:
        history = decode_history(path, disk.read(path))
    except FileNotFoundError:
        return ReplicaHistory(node_id)
    return history if history.node_id == node_id else ReplicaHistory(node_id)


def decode_history(path: str, data: bytes) -> ReplicaHistory:
    """What a file holds. Raises DamagedData, DirectoryRefused for a newer version."""
    check_magic(path, data, _MAGIC, _VERSION)
    if len(data) < _HEADER.size + 2 * _COUNT.size + 4 or not crc_matches(data):
        raise DamagedData(
            path, 0, -1, "its CRC does not match: remove it, then logs of removed topics stay"
        )
    _, _, node_id, applied_index, observed_index = _HEADER.unpack_from(data)
    history = ReplicaHistory(node_id, applied_index, observed_index)
    at = _HEADER.size + _COUNT.size
    (count,) = _COUNT.unpack_from(data, _HEADER.size)
    rest = len(data) - 4 - at - count * _REMOVED.size - _COUNT.size
    if rest < 0 or rest % _UNCLEAN.size:
        raise DamagedData(path, _HEADER.size, -1, f"{len(data)} bytes do not hold {count} replicas")
    for topic_id, partition in _REMOVED.iter_unpack(data[at : at + count * _REMOVED.size]):
        history.removed.add((UUID(bytes=topic_id), partition))
    at += count * _REMOVED.size + _COUNT.size
    for topic_id, partition, epoch in _UNCLEAN.iter_unpack(data[at:-4]):
        history.unclean[UUID(bytes=topic_id), partition] = epoch
    return history


def write_history(disk: Disk, directory: str, history: ReplicaHistory) -> None:
    """Replace the history; durable when this returns. Blocks; any thread with a :meth:`copy`."""
    parts = [
        _HEADER.pack(
            _MAGIC, _VERSION, history.node_id, history.applied_index, history.observed_index
        ),
        _COUNT.pack(len(history.removed)),
        *(_REMOVED.pack(topic_id.bytes, number) for topic_id, number in sorted(history.removed)),
        _COUNT.pack(len(history.unclean)),
    ]
    for (topic_id, number), epoch in sorted(history.unclean.items()):
        parts.append(_UNCLEAN.pack(topic_id.bytes, number, epoch))
    disk.write_atomic(f"{directory}/{FILE}", with_crc(b"".join(parts)))
