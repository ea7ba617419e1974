"""The metadata files as text, for ``kept log dump``: what is in them, and where they are damaged.

Nothing is changed: a torn tail is shown, not cut. What a start refuses as damage is damage here.
"""

from __future__ import annotations

from collections.abc import Iterator

from kept.cluster.metadata import replica_history
from kept.cluster.metadata.records import decode_batch
from kept.cluster.metadata.snapshot import decode_snapshot, is_snapshot_name
from kept.cluster.metadata.wal import (
    HARD_STATE_NAME,
    IDENTITY_NAME,
    WAL_NAME,
    WriteAheadLog,
    read_frames,
    read_hard_state,
    read_header,
    read_identity,
)
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, UnsupportedVersion


def is_metadata_file(path: str) -> bool:
    """Whether :func:`dump_metadata` knows a file by its name."""
    name = path.rpartition("/")[2]
    known = (WAL_NAME, HARD_STATE_NAME, IDENTITY_NAME, replica_history.FILE)
    return name in known or is_snapshot_name(name)


def dump_metadata(path: str, disk: Disk | None = None) -> Iterator[str]:
    """The lines that describe a metadata file.

    Raises FileNotFoundError, DamagedData, DirectoryRefused for a newer version, MachineError.
    """
    disk = disk or Disk()
    directory, _, name = path.rpartition("/")
    if name == HARD_STATE_NAME:
        disk.stat(path)
        state = read_hard_state(disk, directory or ".")
        yield f"term {state.term}, voted for node {state.vote} ({state.vote_directory})"
    elif name == IDENTITY_NAME:
        disk.stat(path)
        identity = read_identity(disk, directory or ".")
        if identity is not None:
            alone = ", begun by a lone node of 0.1.0" if identity.began_alone else ""
            yield f"directory {identity.directory_id}{alone}"
    elif name == replica_history.FILE:
        history = replica_history.decode_history(path, disk.read(path))
        yield f"node {history.node_id}, applied entry {history.applied_index}"
        for topic_id, number in sorted(history.removed):
            yield f"  removed: partition {number} of topic id {topic_id}"
        for (topic_id, number), epoch in sorted(history.unclean.items()):
            yield f"  unclean in epoch {epoch}: partition {number} of topic id {topic_id}"
    elif is_snapshot_name(name):
        image, term = decode_snapshot(path, disk.read(path))
        yield f"snapshot up to entry {image.index} of term {term}"
        yield from (f"  {record}" for record in image.records())
    else:
        yield from _dump_log(path, disk)


def _dump_log(path: str, disk: Disk) -> Iterator[str]:
    data = disk.read(path)
    base_index, base_term = read_header(path, data)
    yield f"log after entry {base_index} of term {base_term}, {len(data)} bytes"
    for position, entry in read_frames(data, base_index):
        yield f"at {position}: entry {entry.index}, term {entry.term}, {len(entry.data)} bytes"
        try:
            yield from (f"  {record}" for record in decode_batch(entry.data))
        except (CorruptMessage, UnsupportedVersion) as error:
            yield f"  not readable: {error}"
    end = WriteAheadLog.inspect(path, disk).size_bytes
    if end < len(data):
        yield f"at {end}: {len(data) - end} bytes are no whole entry (a torn tail is cut at start)"
