"""Planting faults: what a replica has on disk is changed while its node is stopped."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from kept.storage.records import crc32c, headers
from kept.testing import Cluster

Batches = dict[int, bytes]
"""Base offset -> batch; every record of these tests is a batch of its own."""


def directory(cluster: Cluster, node: int, topic: str, partition: int) -> Path:
    return Path(cluster.log_dir(node)) / f"{topic}-{partition}"


def batches(log: Path) -> Batches:
    """The batches of one segment."""
    data = log.read_bytes()
    return {h.base_offset: data[at : at + h.size_bytes] for at, h in headers(data)}


def all_batches(cluster: Cluster, node: int, topic: str, partition: int) -> Batches:
    """What a replica has on disk."""
    found: Batches = {}
    for log in sorted(directory(cluster, node, topic, partition).glob("*.log")):
        found |= batches(log)
    return found


def edit(
    cluster: Cluster,
    node: int,
    topic: str,
    partition: int,
    *,
    cut: tuple[int, ...] = (),
    put: Mapping[int, bytes] | None = None,
) -> None:
    """Take batches out of a stopped node's first segment and put others in, in order."""
    assert not cluster.running(node)
    folder = directory(cluster, node, topic, partition)
    log = min(folder.glob("*.log"))
    there = batches(log)
    assert set(cut) <= there.keys(), f"{sorted(there)} in {log}"
    left = {o: b for o, b in {**there, **(put or {})}.items() if o not in cut}
    log.write_bytes(b"".join(batch for _, batch in sorted(left.items())))
    for index in (*folder.glob("*.index"), *folder.glob("*.timeindex")):
        index.unlink()


def forget_manifests(cluster: Cluster, topic: str, partition: int) -> None:
    """As if no generation had ever been published: a start would see by the applied manifest that
    a segment was cut, and fetch again what is missing.
    """
    for node in range(len(cluster)):
        assert not cluster.running(node)
        for path in directory(cluster, node, topic, partition).iterdir():
            if path.name.startswith(("manifest-", "held-manifest", "told-manifest", "removals-")):
                path.unlink()


def altered(batch: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A batch with other records of the same size, and a CRC that says they are right."""
    made = batch[:61] + change(batch[61:])
    assert len(made) == len(batch)
    return made[:17] + struct.pack(">I", crc32c(made[21:])) + made[21:]
