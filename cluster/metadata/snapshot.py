"""A snapshot of the metadata image: one file, so that the log before it can go.

File ``snapshot-<index %020d>-<term %010d>`` (big-endian; ``docs/formats/metadata.md``)::

    magic "kept-snp", version uint32, index int64, term int64, the image's records as one batch,
    CRC32C uint32 of everything before it

``index`` and ``term`` are those of the last entry that the image contains. The file is written
beside its name, fsynced and renamed; only then are older snapshots and the log's prefix dropped, so
that at every moment a whole snapshot and the log after it are on disk.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kept.cluster.metadata.image import Delta, Image, PartitionChange
from kept.cluster.metadata.persistent_map import changed_keys
from kept.cluster.metadata.records import decode_batch, encode_batch
from kept.cluster.metadata.wal import check_magic, crc_matches, with_crc
from kept.storage.disk import Disk
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    DirectoryRefused,
    InvariantViolation,
    UnsupportedVersion,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.raft.messages import InstallSnapshot

_MAGIC: Final = b"kept-snp"
_VERSION: Final = 1
_HEADER = struct.Struct(">8sIqq")
_NAME = re.compile(r"snapshot-([0-9]{20})-([0-9]{10})\Z")


def snapshot_name(index: int, term: int) -> str:
    """The file name of a snapshot."""
    return f"snapshot-{index:020d}-{term:010d}"


def is_snapshot_name(name: str) -> bool:
    """Whether a file name is that of a snapshot."""
    return _NAME.match(name) is not None


def encode_snapshot(image: Image, term: int) -> bytes:
    """The content of a snapshot file."""
    head = _HEADER.pack(_MAGIC, _VERSION, image.index, term)
    return with_crc(head + encode_batch(image.records()))


def decode_snapshot(path: str, data: bytes) -> tuple[Image, int]:
    """The image of a snapshot file and the term of its last entry.

    Raises DamagedData, and DirectoryRefused for a newer version.
    """
    check_magic(path, data, _MAGIC, _VERSION)
    if len(data) < _HEADER.size + 4 or not crc_matches(data):
        raise DamagedData(path, 0, -1, "its CRC does not match")
    _, _, index, term = _HEADER.unpack_from(data)
    try:
        records = decode_batch(memoryview(data)[_HEADER.size : -4])
        image, _ = Image().apply(records)
    except UnsupportedVersion as error:
        raise DirectoryRefused(f"{path}: {error}: use a newer kept") from error
    except (CorruptMessage, InvariantViolation) as error:
        raise DamagedData(path, _HEADER.size, -1, str(error)) from error
    return replace(image, index=index), term


def check_install(message: InstallSnapshot) -> str:
    """Why a leader's snapshot cannot be taken, or empty. It takes the place of everything here, so
    it is read before. A newer version's is let through: opening it says so.
    """
    try:
        image, term = decode_snapshot("the image", message.image_bytes)
    except DirectoryRefused:
        return ""
    except DamagedData as error:
        return str(error)
    if (image.index, term) != (message.last_index, message.last_term):
        return f"the image is that of entry {image.index} of term {term}"
    if image.voters != message.voters:
        return "the image has other voters than the message"
    return ""


def write_snapshot(disk: Disk, directory: str, image: Image, term: int) -> int:
    """Write a snapshot durably, then remove older ones; returns its size in bytes."""
    data = encode_snapshot(image, term)
    write_snapshot_bytes(disk, directory, image.index, term, data)
    return len(data)


def write_snapshot_bytes(disk: Disk, directory: str, index: int, term: int, data: bytes) -> None:
    """Write a snapshot that is encoded already, durably, then remove older ones."""
    disk.write_atomic(f"{directory}/{snapshot_name(index, term)}", data)
    _remove_others(disk, directory, snapshot_name(index, term))


def load_snapshot(disk: Disk, directory: str) -> tuple[Image, int, int]:
    """The newest snapshot of a directory as (image, term, bytes of the file); the empty image where
    there is none. Raises DamagedData.
    """
    names = [name for name in disk.listdir(directory) if _NAME.match(name)]
    if not names:
        return Image(), 0, 0
    path = f"{directory}/{names[-1]}"
    data = disk.read(path)
    image, term = decode_snapshot(path, data)
    if snapshot_name(image.index, term) != names[-1]:
        raise DamagedData(path, 12, -1, f"holds entry {image.index} of term {term}")
    return image, term, len(data)


def _remove_others(disk: Disk, directory: str, keep: str) -> None:
    for name in disk.listdir(directory):
        if name != keep and _NAME.match(name.removesuffix(".tmp")):
            disk.unlink(f"{directory}/{name}")


def difference(before: Image, after: Image) -> Delta:
    """What changed between two images, as one delta: for a node that was given the later one."""
    old, new = before.topics_by_id, after.topics_by_id
    created = tuple(new[topic_id] for topic_id in new if topic_id not in old)
    deleted = tuple(old[topic_id] for topic_id in old if topic_id not in new)
    changes: list[PartitionChange] = []
    for topic_id, topic in new.items():
        known = old[topic_id].partitions if topic_id in old else ()
        if known is topic.partitions:
            continue
        for number, partition in enumerate(topic.partitions):
            was = known[number] if number < len(known) else None
            if was != partition:
                changes.append(PartitionChange(TopicPartition(topic.name, number), was, partition))
    return Delta(
        created,
        deleted,
        tuple(changes),
        changed_keys(before.configs, after.configs),
        changed_keys(before.brokers, after.brokers),
        changed_keys(before.features, after.features),
        before.voters != after.voters,
        changed_keys(before.acls, after.acls),
        changed_keys(before.credentials, after.credentials),
        changed_keys(before.quotas, after.quotas),
    )
