"""Reports of committed records that are cut away here (``kept compact lost``).

An unclean election, or a whole ISR that lost power, leaves a replica with records that the new
leader does not have, and which were committed, or may have been: a replica that crashed knows an
older high watermark than there was, and one that led alone acknowledged all that it had. Before it
cuts them off, their offsets and keys are written to ``lost-<leader epoch>-<first offset>.json`` in
the partition's directory, durably. The files stay until the partition goes, or somebody removes
them. A node that ends between the report and the cut reports again, in the place of the first one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime.logging import log
from kept.storage import layout
from kept.storage.errors import MachineError

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.replication.replica_effects import LostRecord, RecordsLost
    from kept.storage.disk import Disk

WHY: Final = (
    "an unclean election, or a whole ISR that lost power: the leader does not have them. Those "
    "below committed_to were acknowledged, the others may have been"
)


def report(
    runtime: Runtime, counters: Counters, node_id: int, hosted: LocalReplica, losing: RecordsLost
) -> None:
    """Write the report; blocks. A disk that refuses it is told: the cut goes ahead."""
    partition = hosted.partition
    tp, disk = partition.topic_partition, runtime.disk
    counters.cluster.lost_records += losing.end - losing.start
    content = {
        "format": "kept lost records",
        "version": 1,
        "topic": tp.topic,
        "topic_id": str(partition.topic_id),
        "partition": tp.partition,
        "node": node_id,
        "leader": partition.leader_id,
        "leader_epoch": partition.leader_epoch,
        "first_offset": losing.start,
        "end_offset": losing.end,
        "committed_to": losing.committed_to,
        "last_epoch": partition.latest_epoch,
        "log_end_offset": partition.log_end_offset,
        "at_ms": runtime.now_ms(),
        "why": WHY,
        "incomplete": losing.incomplete,
        "records": [_plain(record) for record in losing.records],
    }
    path = layout.lost_file(partition.log.directory, partition.leader_epoch, losing.start)
    try:
        before = _of_the_same(content, partition.log.directory, disk) - {path}
        disk.write_atomic(path, json.dumps(content, indent=1).encode())
        for other in before:
            disk.unlink(other)
    except MachineError as error:
        log.error("lost records not reported", path=path, error=str(error))
    else:
        log.error(
            "records cut away that were or may have been committed",
            topic=tp.topic,
            partition=tp.partition,
            first=losing.start,
            end=losing.end,
            committed_to=losing.committed_to,
            leader=partition.leader_id,
            epoch=partition.leader_epoch,
            why=WHY,
            report=path,
        )


def _of_the_same(content: dict[str, Any], directory: str, disk: Disk) -> set[str]:
    """Reports of a log that ended as this one does, with the same last record: it was not cut."""
    ends = {name: content[name] for name in ("last_epoch", "log_end_offset")}
    return {
        path
        for path, found in _read_all(directory, disk)
        if {name: found.get(name) for name in ends} == ends
    }


def _plain(record: LostRecord) -> dict[str, Any]:
    said: dict[str, Any] = {"offset": record.offset}
    if record.key is not None:
        try:
            said["key"] = record.key.decode()
        except UnicodeDecodeError:
            said["key_base64"] = base64.b64encode(record.key).decode()
    if record.tombstone:
        said["tombstone"] = True
    return said


def reports(directory: str, disk: Disk) -> Iterator[dict[str, Any]]:
    """The reports in a partition's directory, by name; blocks. Raises MachineError.

    One that cannot be read is told with what is wrong, in ``incomplete``.
    """
    for _, content in _read_all(directory, disk):
        yield content


def _read_all(directory: str, disk: Disk) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in sorted(disk.listdir(directory)):
        if not name.startswith(layout.LOST_PREFIX) or not name.endswith(".json"):
            continue
        path = f"{directory}/{name}"
        try:
            content: dict[str, Any] = json.loads(disk.read(path))
        except ValueError as error:
            content = {"incomplete": f"{name} cannot be read: {error}", "records": []}
        yield path, content
