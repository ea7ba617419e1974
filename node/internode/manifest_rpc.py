"""The calls by which manifests travel, field for field as in ``node/proto/manifests.proto``."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.node.internode.controller_rpc import Failure
from kept.replication.manifests_events import ManifestRef


class ManifestPull(Struct, frozen=True):
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
    complete: bool = False


class PullManifestsRequest(Struct, frozen=True):
    """A follower says what it has, and asks what its leader has."""

    replica_id: int
    broker_epoch: int
    pulls: tuple[ManifestPull, ...]


class ManifestBody(Struct, frozen=True):
    """A manifest; without ``data`` it is to be fetched in chunks. ``crc`` is of all of it."""

    name: ManifestRef
    size_bytes: int
    crc: int
    data: bytes = b""


class ManifestAnswer(Struct, frozen=True):
    """The answer for one partition."""

    failure: Failure | None = None
    held: ManifestRef | None = None
    published: ManifestRef | None = None
    bodies: tuple[ManifestBody, ...] = ()
    complete: bool = False
    outside_isr: bool = False


class PullManifestsReply(Struct, frozen=True):
    """One answer for each pull, in their order."""

    answers: tuple[ManifestAnswer, ...]


class ManifestChunkRequest(Struct, frozen=True):
    """A piece of a body."""

    topic_id: UUID
    partition: int
    leader_epoch: int
    name: ManifestRef
    position: int


class ManifestChunkReply(Struct, frozen=True):
    """``crc`` is of ``data``."""

    data: bytes
    crc: int


class ManifestNews(Struct, frozen=True):
    """There is something to pull for a partition."""

    topic_id: UUID
    partition: int
    leader_epoch: int


class ManifestNewsRequest(Struct, frozen=True):
    """A leader has something for a follower."""

    leader_id: int
    news: tuple[ManifestNews, ...]


class ManifestNewsReply(Struct, frozen=True):
    """It was received."""


MANIFEST_CALLS: Final[dict[str, tuple[type, type]]] = {
    "PullManifests": (PullManifestsRequest, PullManifestsReply),
    "ManifestChunk": (ManifestChunkRequest, ManifestChunkReply),
    "ManifestNews": (ManifestNewsRequest, ManifestNewsReply),
}
"""Methods that leaders and followers serve."""
