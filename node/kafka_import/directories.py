"""The log directories of an Apache Kafka node that is to be adopted: whose they are, what is in
them that kept could not serve, and the mark of one that was taken over.

Only read here, but for the mark: a file ``kept-adopted`` beside ``meta.properties``, which itself
stays as Kafka wrote it. Refused, with the way out: what is not a clean stop of one node, in all of
its directories; a move between directories that is under way (``-future``); batches older than
version 2; transactions in a state that is not known here. Those that are open are taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final
from uuid import UUID

from kept.node.coordinator.transactions.records import decode_record
from kept.node.metadata.internal_topics import TRANSACTION_STATE
from kept.storage import checkpoints, layout
from kept.storage.directory import META_VERSION, OWNER
from kept.storage.disk import Disk, File
from kept.storage.errors import CorruptMessage, DamagedData, DirectoryRefused
from kept.storage.inspect.check import batches
from kept.storage.producers import snapshots
from kept.storage.records import records
from kept.storage.records.header import HEADER_BYTES, MAGIC, MAGIC_POSITION
from kept.storage.types import TopicPartition

SAID_AT_ONCE: Final = 20
"""Reasons that one refusal names; the others are counted."""


ONE_ROLE: Final = (
    "Adopted are clusters whose nodes were both broker and controller (process.roles="
    "broker,controller). Records of others are copied: kept consume TOPIC --from-beginning --json "
    "--bootstrap KAFKA | kept produce TOPIC --json (docs/operations.md, Coming from Apache Kafka)"
)
"""What to do where the roles are nodes of their own."""


class Owner(Enum):
    """Whose a directory is."""

    NOBODY = "nobody's"
    KAFKA = "Apache Kafka's"
    ADOPTED = "adopted"
    KEPT = "kept's"


@dataclass(frozen=True, slots=True)
class KafkaDirectory:
    """A log directory of Apache Kafka: its ids, and the partitions' logs in it."""

    path: str
    cluster_id: str
    directory_id: UUID
    broker_epoch: int
    logs: Mapping[TopicPartition, UUID | None]


def read_owner(disk: Disk, path: str) -> Owner:
    """Whose ``path`` is."""
    properties = checkpoints.read_properties(disk, f"{path}/{layout.META_PROPERTIES}")
    if properties is None:
        return Owner.NOBODY
    if OWNER in properties:
        return Owner.KEPT
    return Owner.ADOPTED if disk.exists(f"{path}/{layout.ADOPTED}") else Owner.KAFKA


def mark_adopted(disk: Disk, path: str, cluster_id: str) -> None:
    """From now on the directory is kept's, durably."""
    checkpoints.write_properties(
        disk, f"{path}/{layout.ADOPTED}", {"version": META_VERSION, "cluster.id": cluster_id}
    )


def read_directory(disk: Disk, path: str, node_id: int) -> KafkaDirectory:
    """What Kafka says of its directory. Raises DirectoryRefused."""
    name = f"{path}/{layout.META_PROPERTIES}"
    properties = checkpoints.read_properties(disk, name) or {}
    version = properties.get("version")
    if not version:
        raise DirectoryRefused(f"{name} is missing, empty or says no version: put it back")
    if version != META_VERSION:
        what = "ZooKeeper's" if version == "0" else "unknown"
        raise DirectoryRefused(
            f"{name} has version {version}, which is {what}: only KRaft nodes of Apache Kafka 4.x "
            "are adopted; migrate to KRaft and upgrade first"
        )
    if properties.get("node.id") != str(node_id):
        raise DirectoryRefused(
            f"{path} belongs to node.id {properties.get('node.id')}, and this is node {node_id}: "
            "give each node the node.id that it had in Apache Kafka"
        )
    try:
        directory_id = layout.decode_uuid(properties.get("directory.id", ""))
    except ValueError as error:
        raise DirectoryRefused(
            f"{name}: directory.id: {error}: start Apache Kafka 4.x once, which writes one"
        ) from error
    epoch = checkpoints.read_clean_shutdown(disk, f"{path}/{layout.CLEAN_SHUTDOWN}")
    logs = dict(_logs(disk, path))
    if epoch is None and not logs and disk.exists(f"{path}/{layout.METADATA_LOG}"):
        raise DirectoryRefused(
            f"{path} holds metadata and no partition's log: node {node_id} was a controller only. "
            + ONE_ROLE
        )
    if epoch is None:
        raise DirectoryRefused(
            f"{path} was not stopped cleanly ({layout.CLEAN_SHUTDOWN} is missing): start Apache "
            "Kafka once more, and stop it with TERM"
        )
    return KafkaDirectory(path, properties.get("cluster.id", ""), directory_id, epoch, logs)


def symbolic_links(disk: Disk, path: str) -> Iterator[str]:
    """Symbolic links in a directory and those in it, each as a reason to refuse it: they may lead
    to files that are not Kafka's, which would be read, cut and deleted as if they were.
    """
    for name in disk.listdir(path):
        inner = f"{path}/{name}"
        if disk.is_link(inner):
            yield f"{inner} is a symbolic link: put what it leads to in its place"
        elif name != layout.LOST_AND_FOUND and disk.stat(inner).is_directory:
            yield from symbolic_links(disk, inner)


def _logs(disk: Disk, path: str) -> Iterator[tuple[TopicPartition, UUID | None]]:
    for name in disk.listdir(path):
        parsed = layout.parse_directory_name(name)
        if parsed is None or name in layout.IGNORED_NAMES:
            continue
        if parsed.state == layout.FUTURE_DIRECTORY:
            raise DirectoryRefused(
                f"{path}/{name}: a replica is being moved between directories: let Apache Kafka "
                "finish that (kafka-reassign-partitions --verify), then stop it"
            )
        if not parsed.state and disk.stat(f"{path}/{name}").is_directory:
            metadata = f"{path}/{name}/{layout.PARTITION_METADATA}"
            yield parsed.topic_partition, checkpoints.read_partition_metadata(disk, metadata)


def unservable_logs(disk: Disk, imports: Sequence[KafkaDirectory]) -> Iterator[str]:
    """What in the logs could not be served."""
    for directory in imports:
        for tp in directory.logs:
            path = f"{directory.path}/{layout.directory_name(tp)}"
            yield from _log_problems(disk, path)
            if tp.topic == TRANSACTION_STATE:
                yield from _unknown_transactions(disk, path)


def _log_problems(disk: Disk, path: str) -> Iterator[str]:
    newest = -1
    for name in disk.listdir(path):
        parsed = layout.parse_segment_file(name)
        if parsed is None or parsed.state:
            continue
        if parsed.kind == layout.LOG and (magic := _magic(disk, f"{path}/{name}")) != MAGIC:
            yield (
                f"{path}/{name} holds batches of version {magic}, written before Apache Kafka "
                "0.11: let retention or a copy of the topic replace them first"
            )
        if parsed.kind == layout.SNAPSHOT:
            newest = max(newest, parsed.base_offset)
    if newest >= 0:
        snapshot = layout.segment_file(path, newest, layout.SNAPSHOT)
        try:
            snapshots.decode(snapshot, disk.read(snapshot))
        except DamagedData as error:
            yield f"{error}: start Apache Kafka once more, and stop it cleanly"


def _magic(disk: Disk, path: str) -> int:
    """Of a segment's first batch; an empty one is of the newest version. Versions only grow."""
    file: File = disk.open_read(path)
    head = disk.pread(file, 0, HEADER_BYTES)
    return head[MAGIC_POSITION] if len(head) > MAGIC_POSITION else MAGIC


def _unknown_transactions(disk: Disk, path: str) -> Iterator[str]:
    """The first record of a log of ``__transaction_state`` that its coordinator could not load."""
    for name in sorted(disk.listdir(path)):
        parsed = layout.parse_segment_file(name)
        if parsed is None or parsed.state or parsed.kind != layout.LOG:
            continue
        for _, header, batch in batches(disk, f"{path}/{name}"):
            if header.is_control:
                continue
            for record in records(batch):
                try:
                    decode_record(record.key or b"", record.value)
                except CorruptMessage as error:
                    yield (
                        f"{path}/{name}: offset {record.offset}: {error}: let Apache Kafka end "
                        "that transaction, and stop it again"
                    )
                    return


def raise_refused(reasons: Sequence[str]) -> None:
    """Raise DirectoryRefused where there are any."""
    if reasons:
        rest = len(reasons) - SAID_AT_ONCE
        more = f"; and {rest} more" if rest > 0 else ""
        raise DirectoryRefused("not adopted: " + "; ".join(reasons[:SAID_AT_ONCE]) + more)
