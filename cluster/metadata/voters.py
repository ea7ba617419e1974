"""Who votes in the metadata's Raft: a node together with the disk it votes from."""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct


class Voter(Struct, frozen=True):
    """A voter is (node id, directory id): a node whose metadata disk was replaced is another one.

    ``host`` and ``port`` are those of its listener for other nodes; they may change without the
    voter becoming another one. A voter that comes from configuration has the directory id
    :data:`kept.cluster.metadata.wal.NO_DIRECTORY` until its node was asked for it.
    """

    node_id: int
    directory_id: UUID
    host: str = ""
    port: int = 0
