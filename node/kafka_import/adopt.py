"""``kept serve --adopt``: what happens before the node starts, once.

Order: everything is read and checked first, under Kafka's own locks, and a refusal leaves nothing
changed. Then the metadata directory is written, with a note in it that it is not whole; then each
log directory gets its mark; then the note goes. A start without all marks is refused as Kafka's
(:func:`~kept.storage.directory.refuse_kafka`), so that a crash anywhere here means: the same
command once more. Where all are marked nothing is left to do, and the node just starts.

One way: from the first start on kept's logs go their own way, and Kafka's metadata stay behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final
from uuid import NAMESPACE_OID, UUID, uuid5

from msgspec.structs import replace

from kept.cluster.metadata.snapshot import write_snapshot
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Identity, WriteAheadLog, write_hard_state, write_identity
from kept.node.kafka_import import adopted_metadata, directories
from kept.node.kafka_import.adopted_metadata import ImportedMetadata
from kept.node.kafka_import.directories import KafkaDirectory, Owner
from kept.node.metadata import directory_ids
from kept.node.runtime.logging import log
from kept.storage import layout
from kept.storage.disk import Disk, Lock
from kept.storage.errors import ConfigurationError, DirectoryInUse, DirectoryRefused
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig

NOTE: Final = "adopting"
"""In the metadata directory while it is not whole."""
ENTRIES_A_WRITE: Final = 1000
NOT_SERVED: Final = {
    "__share_group_state": "share groups",
    "__remote_log_metadata": "what is in remote storage",
}
"""Topics in which Kafka keeps what kept does not serve: they stay as topics, and it is said."""


def adopt(
    config: NodeConfig,
    disk: Disk,
    *,
    kafka_metadata: str | None = None,
    ignore_security: bool = False,
    dry: bool = False,
) -> None:
    """Take over ``log.dirs`` from Apache Kafka, unless that was done; see the module.

    ``kafka_metadata`` is Kafka's ``metadata.log.dir`` where that is none of ``log.dirs``. ``dry``:
    everything is checked, nothing written. Raises DirectoryRefused, DirectoryInUse,
    ConfigurationError with what would be right; DamagedData; MachineError.
    """
    if set(config.process_roles) != {"broker", "controller"}:
        raise ConfigurationError(
            f"--adopt: process.roles is {','.join(config.process_roles)}. {directories.ONE_ROLE}"
        )
    owners = {path: directories.read_owner(disk, path) for path in config.log_dirs}
    nobodys = [path for path, whose in owners.items() if whose is Owner.NOBODY]
    is_done = not {Owner.ADOPTED, Owner.KEPT}.isdisjoint(owners.values())
    is_done = is_done and Owner.KAFKA not in owners.values()
    if nobodys and not is_done:
        raise DirectoryRefused(
            f"--adopt: {', '.join(nobodys)}: no {layout.META_PROPERTIES} there: set log.dirs to "
            "what it was in Apache Kafka"
        )
    metadata = config.metadata_log_dir
    if is_done:  # a directory of nobody's is a disk that was added or replaced since
        if not dry and disk.exists(f"{metadata}/{NOTE}"):
            disk.unlink(f"{metadata}/{NOTE}")
        log.info("nothing to adopt", dirs=",".join(config.log_dirs), why="kept's already")
        return
    _refuse_used(disk, metadata)
    locks = _lock(disk, config.log_dirs)
    try:
        kafkas = [*config.log_dirs, *((kafka_metadata,) if kafka_metadata else ())]
        directories.raise_refused(
            [why for path in kafkas for why in directories.symbolic_links(disk, path)]
        )
        imports = [
            directories.read_directory(disk, path, config.node_id) for path in config.log_dirs
        ]
        imported = _read(config, disk, imports, kafka_metadata)
        _check(config, disk, imports, imported, ignore_security)
        if not dry:
            _write(config, disk, imports, imported)
    finally:
        for lock in locks:
            lock.release()


def _refuse_used(disk: Disk, metadata: str) -> None:
    if disk.exists(metadata) and not disk.exists(f"{metadata}/{NOTE}"):
        found = _names(disk, metadata)
        if found:
            raise DirectoryRefused(
                f"--adopt: metadata.log.dir={metadata} is not empty (it holds {found[0]}): name a "
                "directory that is to hold kept's metadata of this node, and nothing else"
            )


def _names(disk: Disk, metadata: str) -> list[str]:
    """What a metadata directory holds; a volume of its own has the file system's folder, too."""
    return sorted(name for name in disk.listdir(metadata) if name != layout.LOST_AND_FOUND)


def _lock(disk: Disk, paths: Sequence[str]) -> list[Lock]:
    locks: list[Lock] = []
    try:
        for path in paths:
            locks.append(disk.lock(f"{path}/{layout.LOCK}"))
    except DirectoryInUse as error:
        for lock in locks:
            lock.release()
        raise DirectoryInUse(f"{error}: is Apache Kafka still running? Stop it first") from error
    return locks


def directory_id(cluster_id: str, node_id: int) -> UUID:
    """The disk that an adopted node votes from. All of them must know it of all, before any has
    spoken with another; a node whose metadata disk was lost later gets a random one, as always."""
    return uuid5(NAMESPACE_OID, f"kept, adopted: cluster {cluster_id}, node {node_id}")


def voters(config: NodeConfig, cluster_id: str) -> tuple[Voter, ...]:
    """Who votes from the first entry on."""
    listed = config.controller_quorum_voters
    if not listed:
        return (Voter(config.node_id, directory_id(cluster_id, config.node_id)),)
    return tuple(
        Voter(node.node_id, directory_id(cluster_id, node.node_id), node.host, node.port)
        for node in sorted(listed, key=lambda node: node.node_id)
    )


def _read(
    config: NodeConfig, disk: Disk, imports: Sequence[KafkaDirectory], kafka_metadata: str | None
) -> ImportedMetadata:
    clusters = {directory.cluster_id for directory in imports}
    if len(clusters) > 1:
        raise DirectoryRefused(f"log.dirs belong to several clusters: {sorted(clusters)}")
    cluster_id = imports[0].cluster_id
    places = [kafka_metadata] if kafka_metadata else list(config.log_dirs)
    paths = [f"{place}/{layout.METADATA_LOG}" for place in places]
    there = [path for path in paths if disk.exists(path)]
    if len(there) != 1:
        raise DirectoryRefused(
            f"{layout.METADATA_LOG} is in {len(there)} of {', '.join(places)}, and must be in one: "
            "name Apache Kafka's metadata.log.dir with --kafka-metadata"
        )
    return adopted_metadata.read(
        disk,
        there[0],
        cluster_id=cluster_id,
        node_id=config.node_id,
        voters=voters(config, cluster_id),
    )


def _check(
    config: NodeConfig,
    disk: Disk,
    imports: Sequence[KafkaDirectory],
    imported: ImportedMetadata,
    ignore_security: bool,
) -> None:
    translation = imported.translation
    reasons = list(translation.problems())
    left = translation.left
    if not ignore_security:
        reasons += _not_asked(config, imported)
    me = translation.brokers.get(config.node_id)
    registered = set() if me is None else set(me.log_dirs)
    lacking = registered - {directory.directory_id for directory in imports}
    for directory_id in sorted(lacking):
        reasons.append(
            f"the log directory {layout.encode_uuid(directory_id)}, with which node "
            f"{config.node_id} was registered, is not in log.dirs: name all that it had"
        )
    reasons += _missing(config, imports, imported)
    reasons += directories.unservable_logs(disk, imports)
    directories.raise_refused(reasons)
    held = sorted(NOT_SERVED.keys() & set(translation.topics.values()))
    states = (f"{NOT_SERVED[topic]}; {topic} stays as a topic" for topic in held)
    for what in (*left.described(), *states):
        log.warning("not taken over from Apache Kafka", what=what)


def _not_asked(config: NodeConfig, imported: ImportedMetadata) -> Iterator[str]:
    """What Kafka may have refused clients by, and this node would not."""
    image = imported.final_image
    go_on = "--ignore-security goes on"
    if tokens := imported.translation.left.tokens:
        yield f"{len(tokens)} delegation tokens: kept has none; {go_on} without them"
    if image.acls and not config.authorizer_class_name:
        yield (
            f"{len(image.acls)} ACLs, and authorizer.class.name is not set: everybody would be "
            f"served. Set it as it was in Apache Kafka, and super.users; {go_on} all the same"
        )
    if image.credentials and not any("SASL" in each.protocol for each in config.listeners):
        yield (
            f"{len(image.credentials)} SCRAM credentials, and no listener asks for one: set "
            f"listeners and listener.security.protocol.map as in Apache Kafka; {go_on} all the same"
        )


def _missing(
    config: NodeConfig, imports: Sequence[KafkaDirectory], imported: ImportedMetadata
) -> list[str]:
    """Logs that this node must have, and others that a lone one would need."""
    present: dict[TopicPartition, UUID | None] = {}
    for directory in imports:
        present |= directory.logs
    translation, me = imported.translation, config.node_id
    alone = len(voters(config, "")) == 1
    reasons = []
    for (topic_id, number), known in sorted(translation.partitions.items()):
        tp = TopicPartition(translation.topics[topic_id], number)
        in_sync = known.isr or known.elr
        if me in in_sync and present.get(tp) != topic_id:
            reasons.append(
                f"{layout.directory_name(tp)} (topic id {layout.encode_uuid(topic_id)}) is not in "
                "log.dirs, and this node was in sync with it"
            )
        elif alone and set(known.replicas) != {me}:
            reasons.append(
                f"{layout.directory_name(tp)} has replicas on the nodes {list(known.replicas)}, "
                "and this one is alone: move them to it in Apache Kafka first"
            )
    return reasons


def _write(
    config: NodeConfig, disk: Disk, imports: Sequence[KafkaDirectory], imported: ImportedMetadata
) -> None:
    metadata = config.metadata_log_dir
    cluster_id = imports[0].cluster_id
    disk.ensure_data_directory(metadata)
    disk.write_atomic(f"{metadata}/{NOTE}", b"")
    for name in _names(disk, metadata):
        if name != NOTE:
            disk.unlink(f"{metadata}/{name}")
    write_snapshot(disk, metadata, imported.image, imported.term)
    wal = WriteAheadLog.open(metadata, disk)
    wal.restart_at(imported.image.index, imported.term)
    for at in range(0, len(imported.entries), ENTRIES_A_WRITE):
        wal.append(imported.entries[at : at + ENTRIES_A_WRITE])
    own = directory_id(cluster_id, config.node_id)
    write_hard_state(disk, metadata, replace(imported.hard_state, vote_directory=own))
    write_identity(disk, metadata, Identity(own))
    directory_ids.remember_cluster(disk, metadata, config.node_id, cluster_id)
    for directory in imports:
        directories.mark_adopted(disk, directory.path, cluster_id)
    disk.unlink(f"{metadata}/{NOTE}")
    disk.fsync_dir(metadata)
    translation = imported.translation
    log.warning(
        "adopted from Apache Kafka; there is no way back",
        cluster=cluster_id,
        topics=len(translation.topics),
        partitions=len(translation.partitions),
        logs=sum(len(directory.logs) for directory in imports),
        entries=imported.entries[-1].index if imported.entries else imported.image.index,
        metadata=metadata,
    )
