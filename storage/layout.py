"""Every file name of a data directory, in one place.

A data directory is Apache Kafka's ``log.dirs`` entry::

    <dir>/meta.properties  .lock  .kafka_cleanshutdown  kept-running
          recovery-point-offset-checkpoint  replication-offset-checkpoint
          log-start-offset-checkpoint  cleaner-offset-checkpoint
          <topic>-<partition>/          one log
              %020d.log .index .timeindex .txnindex .snapshot
              leader-epoch-checkpoint  partition.metadata
              manifest-<epoch>-<generation>        ours (compaction)
          <topic>-<partition>.<32 hex>-delete/    a deleted log, to be removed
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Iterable
from typing import Final, NamedTuple

from kept.storage.types import TopicPartition

META_PROPERTIES: Final = "meta.properties"
ADOPTED: Final = "kept-adopted"
"""Beside it where Apache Kafka wrote it and kept took over (``kept serve --adopt``)."""
LOCK: Final = ".lock"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
RUNNING: Final = "kept-running"
RECOVERY_POINTS: Final = "recovery-point-offset-checkpoint"
HIGH_WATERMARKS: Final = "replication-offset-checkpoint"
LOG_STARTS: Final = "log-start-offset-checkpoint"
CLEANER_OFFSETS: Final = "cleaner-offset-checkpoint"

LEADER_EPOCHS: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
MANIFEST_PREFIX: Final = "manifest-"
LOST_PREFIX: Final = "lost-"
HELD_MANIFEST: Final = "held-manifest"
PUBLISHED_MANIFEST: Final = "told-manifest"
REMOVALS_PREFIX: Final = "removals-"
_OF_COMPACTION: Final = (MANIFEST_PREFIX, HELD_MANIFEST, PUBLISHED_MANIFEST, REMOVALS_PREFIX)

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TXN_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"
SEGMENT_SUFFIXES: Final = (LOG, INDEX, TIME_INDEX, TXN_INDEX)
"""Files of one segment; a producer snapshot belongs to the log, not to the segment."""

DELETED: Final = ".deleted"
CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
TEMPORARY: Final = ".tmp"

DELETE_DIRECTORY: Final = "-delete"
FUTURE_DIRECTORY: Final = "-future"
STRAY_DIRECTORY: Final = "-stray"
METADATA_LOG: Final = "__cluster_metadata-0"
"""Apache Kafka's metadata in a directory that was adopted: left alone."""
LOST_AND_FOUND: Final = "lost+found"
"""The file system's own, in its root: none but its superuser may look into it."""
IGNORED_NAMES: Final = frozenset({LOST_AND_FOUND, METADATA_LOG})
DAMAGED_CHARACTERS: Final = 2
"""An id in a file that differs in more characters from what it should be is another one."""
NAME_BYTES: Final = 255
"""Longest name of a directory entry."""

_SEGMENT_FILE = re.compile(
    r"([0-9]{20})(\.log|\.index|\.timeindex|\.txnindex|\.snapshot)(\.deleted|\.cleaned|\.swap)?"
)
_DIRECTORY = re.compile(r"(.+)-([0-9]+)")
_DELETED_DIRECTORY = re.compile(r"(.+)-([0-9]+)\.[0-9a-f]{32}(-delete|-stray|-future)")


class SegmentFile(NamedTuple):
    """A parsed file name: ``base_offset`` (a snapshot's: its end offset), kind and state suffix."""

    base_offset: int
    kind: str
    state: str


class LogDirectoryName(NamedTuple):
    """A parsed name of a log's directory; ``state`` is "" or the suffix after the unique part."""

    topic_partition: TopicPartition
    state: str


def segment_file(directory: str, base_offset: int, kind: str, state: str = "") -> str:
    """Path of a segment's file, such as ``.../00000000000000000000.log``."""
    return f"{directory}/{base_offset:020d}{kind}{state}"


def parse_segment_file(name: str) -> SegmentFile | None:
    """What a file name in a log's directory says; None for a file that is no segment's."""
    match = _SEGMENT_FILE.fullmatch(name)
    if match is None:
        return None
    return SegmentFile(int(match[1]), match[2], match[3] or "")


def directory_name(tp: TopicPartition) -> str:
    """Name of a log's directory."""
    return f"{tp.topic}-{tp.partition}"


def deleted_directory_name(
    tp: TopicPartition, unique: uuid.UUID, state: str = DELETE_DIRECTORY
) -> str:
    """Name of a deleted (or stray) log's directory; a long topic is cut."""
    suffix = f"-{tp.partition}.{unique.hex}{state}"
    return tp.topic[: NAME_BYTES - len(suffix)] + suffix


def parse_directory_name(name: str) -> LogDirectoryName | None:
    """The partition of a directory; None when the name is not one of a log."""
    match = _DELETED_DIRECTORY.fullmatch(name)
    if match is not None:
        return LogDirectoryName(TopicPartition(match[1], int(match[2])), match[3])
    match = _DIRECTORY.fullmatch(name)
    if match is None:
        return None
    return LogDirectoryName(TopicPartition(match[1], int(match[2])), "")


def tells_of_compaction(names: Iterable[str]) -> bool:
    """Whether files of these names, in a log's directory, say that it was compacted, or may have
    been: a manifest that was given up is gone, and the gaps that it explained stay.
    """
    return any(name.startswith(_OF_COMPACTION) for name in names)


def manifest_file(directory: str, epoch: int, generation: int) -> str:
    """Path of a manifest in a log's directory."""
    return f"{directory}/{MANIFEST_PREFIX}{epoch}-{generation}"


def lost_file(directory: str, leader_epoch: int, first_offset: int) -> str:
    """Path of a report of lost records in a log's directory."""
    return f"{directory}/{LOST_PREFIX}{leader_epoch}-{first_offset}.json"


def encode_uuid(value: uuid.UUID) -> str:
    """Kafka's text of an id: 22 characters of url-safe base64."""
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def may_be_misread(stored: uuid.UUID, wanted: uuid.UUID) -> bool:
    """Whether a file of ``wanted`` may say ``stored`` because a byte or two of it are damaged; two
    ids that were drawn differ in nearly all characters.
    """
    pairs = zip(encode_uuid(stored), encode_uuid(wanted), strict=True)
    return sum(a != other for a, other in pairs) <= DAMAGED_CHARACTERS


def decode_uuid(text: str) -> uuid.UUID:
    """The id of a Kafka text; ValueError when it is none."""
    if len(text) != 22:
        raise ValueError(f"{text!r} is not an id: 22 characters of url-safe base64 expected")
    return uuid.UUID(bytes=base64.b64decode(text + "==", altchars=b"-_", validate=True))
