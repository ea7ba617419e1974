"""The calls by which manifests travel, field for field as in ``node/proto/manifests.proto``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kept.node.internode.controller_rpc import Failure
from kept.replication.manifests_events import ManifestRef


@dataclass(frozen=True, slots=True)
class ManifestPull:
    """One partition of a pull (:class:`kept.replication.manifests_events.PullRequest`)."""

    topic_id: UUID
    partition: int
    leader_epoch: int
    number: int
    held: ManifestRef | None
    applied: ManifestRef | None
    synced: bool
    log_end_offset: int
    has: tuple[ManifestRef, ...]


@dataclass(frozen=True, slots=True)
class PullManifestsRequest:
    """A follower says what it has, and asks what its leader has."""

    replica_id: int
    broker_epoch: int
    pulls: tuple[ManifestPull, ...]


@dataclass(frozen=True, slots=True)
class ManifestBody:
    """A manifest; without ``data`` it is to be fetched in chunks. ``crc`` is of all of it."""

    name: ManifestRef
    size_bytes: int
    crc: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class ManifestAnswer:
    """The answer for one partition."""

    failure: Failure | None = None
    held: ManifestRef | None = None
    published: ManifestRef | None = None
    bodies: tuple[ManifestBody, ...] = ()


@dataclass(frozen=True, slots=True)
class PullManifestsReply:
    """One answer for each pull, in their order."""

    answers: tuple[ManifestAnswer, ...]


@dataclass(frozen=True, slots=True)
class ManifestChunkRequest:
    """A piece of a body."""

    topic_id: UUID
    partition: int
    leader_epoch: int
    name: ManifestRef
    position: int


@dataclass(frozen=True, slots=True)
class ManifestChunkReply:
    """``crc`` is of ``data``."""

    data: bytes
    crc: int


@dataclass(frozen=True, slots=True)
class ManifestNews:
    """There is something to pull for a partition."""

    topic_id: UUID
    partition: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class ManifestNewsRequest:
    """A leader has something for a follower."""

    leader_id: int
    news: tuple[ManifestNews, ...]


@dataclass(frozen=True, slots=True)
class ManifestNewsReply:
    """It was received."""


MANIFEST_CALLS: Final[dict[str, tuple[type, type]]] = {
    "PullManifests": (PullManifestsRequest, PullManifestsReply),
    "ManifestChunk": (ManifestChunkRequest, ManifestChunkReply),
    "ManifestNews": (ManifestNewsRequest, ManifestNewsReply),
}
"""Methods that leaders and followers serve."""
