"""What followers and leaders exchange: Kafka's Fetch and ListOffsets as plain values.

The cores (:mod:`.follower`, :mod:`.fetcher`) make requests and take answers; the node encodes and
decodes them. They are tuples, which cost a third of what frozen dataclasses do to make: every turn
of replication makes some. Errors are Kafka's codes as they are on the wire; those that mean
something to a follower have names here.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from kept.storage.types import TopicPartition

Buffer = bytes | bytearray | memoryview

NONE: Final = 0
OFFSET_OUT_OF_RANGE: Final = 1
CORRUPT_MESSAGE: Final = 2
NOT_LEADER_OR_FOLLOWER: Final = 6
REQUEST_TIMED_OUT: Final = 7
REPLICA_NOT_AVAILABLE: Final = 9
KAFKA_STORAGE_ERROR: Final = 56
FETCH_SESSION_ID_NOT_FOUND: Final = 70
INVALID_FETCH_SESSION_EPOCH: Final = 71
FENCED_LEADER_EPOCH: Final = 74
UNKNOWN_LEADER_EPOCH: Final = 75
FETCH_SESSION_TOPIC_ID_ERROR: Final = 106

NO_SESSION: Final = 0
"""Session id of a request outside of a session, or of an answer that made none."""
FULL_REQUEST: Final = 0
"""Session epoch of a request that lists everything and asks for a new session."""


class PartitionRequest(NamedTuple):
    """What a follower asks of one partition.

    ``fetch_offset``: it has everything below. ``last_fetched_epoch``: leader epoch of the last
    batch it has, -1 when it knows none (KIP-595).
    """

    tp: TopicPartition
    topic_id: UUID
    leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FetchPartition(NamedTuple):
    """What a leader is asked of one partition, by a follower or a consumer, as Fetch has it.

    ``log_start_offset``: of a follower.
    """

    partition: int
    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = -1
    last_fetched_epoch: int = -1
    log_start_offset: int = -1


class FetchRequest(NamedTuple):
    """One Fetch; in a session (KIP-227) ``partitions`` are those that changed."""

    session_id: int
    session_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    partitions: tuple[PartitionRequest, ...]
    forgotten: tuple[tuple[TopicPartition, UUID], ...] = ()


class PartitionResponse(NamedTuple):
    """What a leader answers for one partition.

    ``records``: whole batches from the fetch offset on; a partial one at the end is ignored.
    ``diverging``: (epoch, end offset) where the follower left the leader's log; then there are no
    records. ``current_leader``: (id, epoch) as the answering node knows it (KIP-951).
    """

    tp: TopicPartition
    error: int = NONE
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    diverging: tuple[int, int] | None = None
    current_leader: tuple[int, int] | None = None
    records: Buffer = b""


class FetchResponse(NamedTuple):
    """The answer to a FetchRequest; in a session partitions without news are left out."""

    error: int = NONE
    session_id: int = NO_SESSION
    partitions: tuple[PartitionResponse, ...] = ()


class OffsetsRequest(NamedTuple):
    """Where do these logs start and end? (ListOffsets -2 and -1, asked as a replica.)

    ``partitions``: (partition, topic id, leader epoch).
    """

    partitions: tuple[tuple[TopicPartition, UUID, int], ...]


class OffsetsResponse(NamedTuple):
    """One partition of the answer to an OffsetsRequest."""

    tp: TopicPartition
    error: int = NONE
    log_start_offset: int = -1
    log_end_offset: int = -1
    current_leader: tuple[int, int] | None = None
