"""The nouns that every part shares. Names are Kafka's; ends are exclusive; the unit is last."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

NO_OFFSET: Final = -1
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_SEQUENCE: Final = -1
NO_LEADER_EPOCH: Final = -1
MAX_INT16: Final = 2**15 - 1
MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1


MAX_DECIMAL_DIGITS: Final = 19


def decimal_number(text: str) -> int | None:
    """The number that ASCII digits spell, below 10^19; None for any other text.

    For numbers from outside: ``int`` takes the digits of all scripts, blanks and underscores,
    ``str.isdigit`` takes what ``int`` refuses, and ``int`` raises for some thousands of digits.
    """
    if len(text) <= MAX_DECIMAL_DIGITS and text.isascii() and text.isdecimal():
        return int(text)
    return None


class TopicPartition(NamedTuple):
    """A partition by name. ``str()`` is Kafka's ``topic-partition``, as directories are named."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def place(self) -> str:
        """``topic:partition``, as commands take it: so errors and answers name it."""
        return f"{self.topic}:{self.partition}"


class Codec(IntEnum):
    """Compression of a record batch: bits 0-2 of its attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class TimestampType(IntEnum):
    """Who set a batch's timestamps: bit 3 of its attributes."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class AppendOrigin(IntEnum):
    """Who appends to a log as its leader. Kafka's third, a replica, has calls of its own."""

    CLIENT = 0
    COORDINATOR = 1


class IsolationLevel(IntEnum):
    """How far a consumer may read: to the high watermark, or to the last stable offset."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class Generation(NamedTuple):
    """The name of a compaction: epoch of the leader that computed it, and its number in that epoch.

    Names are equal or not; none is "newer" than another.
    """

    leader_epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.leader_epoch}.{self.number}"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """A topic's settings as its logs use them: Kafka's names with dots as underscores.

    Built from a topic's settings by ``kept.node.config.topic_config``; the defaults are Kafka's. -1
    means no limit for the retention fields. ``raw`` keeps settings that only other parts use, by
    full name.
    """

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    compression_type: str = "producer"
    delete_retention_ms: int = 86_400_000
    file_delete_delay_ms: int = 60_000
    flush_messages: int = MAX_INT64
    flush_ms: int = MAX_INT64
    index_interval_bytes: int = 4096
    max_compaction_lag_ms: int = MAX_INT64
    max_message_bytes: int = 1_048_588
    message_timestamp_after_max_ms: int = 3_600_000
    message_timestamp_before_max_ms: int = MAX_INT64
    message_timestamp_type: TimestampType = TimestampType.CREATE_TIME
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    min_insync_replicas: int = 1
    retention_bytes: int = -1
    retention_ms: int = 604_800_000
    segment_bytes: int = 1_073_741_824
    segment_index_bytes: int = 10_485_760
    segment_jitter_ms: int = 0
    segment_ms: int = 604_800_000
    unclean_leader_election_enable: bool = False
    compaction_strategy: str = "latest"
    raw: dict[str, str] = field(default_factory=dict)

    @property
    def compact(self) -> bool:
        """The cleaner keeps this log, and every record needs a key."""
        return "compact" in self.cleanup_policy

    @property
    def delete(self) -> bool:
        """Retention by time and size applies."""
        return "delete" in self.cleanup_policy
