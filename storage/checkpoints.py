"""Text checkpoints and the other small files of a data directory, in Apache Kafka's formats.

Checkpoint: ``0\\n<count>\\n`` and one line per entry, ``topic partition offset`` for a directory's
checkpoints, ``epoch start_offset`` for leader epochs. Written through ``.tmp``, fsync, rename and
fsync of the directory. A 0-byte file is valid and empty (a crash of Kafka leaves one); anything
else that does not parse is :class:`DamagedData` and the caller decides what to do without it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.layout import decode_uuid, encode_uuid
from kept.storage.types import MAX_INT64, TopicPartition

VERSION: Final = 0
_INT64_DIGITS: Final = 19


def _write(disk: Disk, path: str, lines: list[str]) -> None:
    disk.write_atomic(path, "\n".join([str(VERSION), str(len(lines)), *lines, ""]).encode())
    disk.reach("checkpoint.written")


def _read(disk: Disk, path: str, fields: int) -> list[list[str]] | None:
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return None
    if not data:
        return []
    return _parse(path, data, fields)


def _parse(path: str, data: bytes, fields: int) -> list[list[str]]:
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise DamagedData(path, error.start, -1, "not text") from error
    if lines[0] != str(VERSION):
        raise DamagedData(path, 0, -1, f"version {lines[0][:20]!r}, expected {VERSION}")
    if len(lines) < 2 or not _is_int(lines[1]):
        raise DamagedData(path, 2, -1, "the second line is no count")
    entries = [line.split(" ") for line in lines[2:] if line]
    if len(entries) != int(lines[1]):
        raise DamagedData(path, 2, -1, f"{len(entries)} lines where {lines[1]} are announced")
    for entry in entries:
        if len(entry) != fields or not all(_is_int(text) for text in entry[fields - 2 :]):
            raise DamagedData(path, -1, -1, f"line {' '.join(entry)[:100]!r} does not parse")
    return entries


def _is_int(text: str) -> bool:
    """Whether it is an int64, in ASCII digits."""
    digits = text.removeprefix("-")
    return (
        digits.isdecimal() and len(digits) <= _INT64_DIGITS and -MAX_INT64 <= int(text) <= MAX_INT64
    )


def parse_checkpoint(path: str, data: bytes) -> list[list[str]]:
    """The entries of any checkpoint's bytes, as texts; DamagedData when they do not parse."""
    fields = 2 if path.endswith("leader-epoch-checkpoint") else 3
    return _parse(path, data, fields) if data else []


def write_offsets(disk: Disk, path: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Replace a directory's checkpoint durably.

    Sorted topic by topic: one sort of all holds the interpreter, and with it the node's loop, for
    as long as it takes.
    """
    topics: dict[str, list[tuple[int, int]]] = {}
    for tp, n in offsets.items():
        topics.setdefault(tp.topic, []).append((tp.partition, n))
    lines = [f"{topic} {part} {n}" for topic in sorted(topics) for part, n in sorted(topics[topic])]
    _write(disk, path, lines)


def read_offsets(disk: Disk, path: str) -> dict[TopicPartition, int]:
    """A directory's checkpoint; an absent file is empty. Raises DamagedData."""
    entries = _read(disk, path, 3) or []
    return {TopicPartition(topic, int(part)): int(offset) for topic, part, offset in entries}


def write_epochs(disk: Disk, path: str, entries: Iterable[tuple[int, int]]) -> None:
    """Replace a log's leader epochs durably: (epoch, start offset), ascending."""
    _write(disk, path, [f"{epoch} {start}" for epoch, start in entries])


def read_epochs(disk: Disk, path: str) -> list[tuple[int, int]]:
    """A log's leader epochs as stored; an absent file is empty. Raises DamagedData."""
    return [(int(epoch), int(start)) for epoch, start in _read(disk, path, 2) or []]


def write_partition_metadata(disk: Disk, path: str, topic_id: uuid.UUID) -> None:
    """Write ``partition.metadata`` durably, but for its name: the log syncs its directory later."""
    content = f"version: 0\ntopic_id: {encode_uuid(topic_id)}".encode()
    disk.write_atomic(path, content, sync_name=False)


def read_partition_metadata(disk: Disk, path: str) -> uuid.UUID | None:
    """The topic id of ``partition.metadata``; None when the file is absent. Raises DamagedData."""
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return None
    try:
        fields = dict(line.split(": ", 1) for line in data.decode().split("\n") if line)
        if fields["version"] != "0":
            raise ValueError(f"version {fields['version']}")
        return decode_uuid(fields["topic_id"])
    except (ValueError, KeyError) as error:
        raise DamagedData(path, 0, -1, f"not a partition.metadata file: {error}") from error


def write_clean_shutdown(disk: Disk, path: str, broker_epoch: int) -> None:
    """Leave the mark of a clean stop; the last file that a node writes."""
    disk.write_atomic(path, f'{{"version":0,"brokerEpoch":{broker_epoch}}}'.encode())


def read_clean_shutdown(disk: Disk, path: str) -> int | None:
    """The broker epoch of the clean mark, -1 when it says none, None when there is no mark."""
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return None
    try:
        epoch = json.loads(data)["brokerEpoch"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return epoch if isinstance(epoch, int) else -1


def write_running(disk: Disk, path: str, broker_epoch: int, boot_id: str) -> None:
    """Say which broker epoch a process has, and in which run of the machine."""
    mark = {"version": 0, "brokerEpoch": broker_epoch, "bootId": boot_id}
    disk.write_atomic(path, json.dumps(mark, separators=(",", ":")).encode())


def read_running(disk: Disk, path: str) -> tuple[int, str] | None:
    """(broker epoch, boot id) of :func:`write_running`; None when the file is absent, or says
    nothing that could be relied on.
    """
    try:
        mark = json.loads(disk.read(path))
        version, epoch, boot_id = mark["version"], mark["brokerEpoch"], mark["bootId"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if version != 0 or not isinstance(epoch, int) or not isinstance(boot_id, str):
        return None
    return epoch, boot_id


def write_properties(disk: Disk, path: str, properties: Mapping[str, str]) -> None:
    """Write a Java properties file such as ``meta.properties`` durably."""
    lines = "".join(f"{name}={value}\n" for name, value in sorted(properties.items()))
    disk.write_atomic(path, lines.encode())


def read_properties(disk: Disk, path: str) -> dict[str, str] | None:
    """The properties of a file; None when it is absent. Raises DamagedData."""
    try:
        text = disk.read(path).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedData(path, error.start, -1, "not text") from error
    properties: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        name, separator, value = stripped.partition("=")
        if not separator:
            raise DamagedData(path, -1, -1, f"line {stripped[:100]!r} is no property")
        properties[name.strip()] = value.strip().replace("\\:", ":").replace("\\=", "=")
    return properties
