"""The job of a pass: everything that a worker must know, as plain data.

A pass is a function of its job and of the segments it names: time and randomness are in the job. It
travels to the worker process as one line of JSON.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kept.storage import layout
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import MAX_INT64, Generation, LogConfig, TimestampType, TopicPartition

HASH_KEY_BYTES: Final = 16
DEFAULT_LOAD_FACTOR: Final = 0.9
DEFAULT_BUFFER_BYTES: Final = 134_217_728
DEFAULT_CHUNK_BYTES: Final = 1 << 20
"""Read at once: it stays in the processor's cache between CRC, parsing and copying."""
MAX_SCANS: Final = 16
"""Scans of one pass with a map that is too small; the rest waits for the next pass."""
INFLATE_LIMIT: Final = 1 << 30
"""Largest inflated batch; more than produce lets in, for logs of Apache Kafka's."""


DEFAULT_CHECK_KEYS: Final = 64
"""kept.compaction.check.keys: keys that a pass proves right (``self_check.py``); 0: none."""

CACHED_BYTES: Final = 1 << 30
"""A survey leaves so much in the page cache for the build, which reads it again a moment later."""


@dataclass(frozen=True, slots=True)
class Source:
    """A segment to read: ``base_offset..end_offset``, where the end is the next segment's base.

    It may be a part of a file: ``size_bytes`` from ``start_bytes`` on of the one that begins at
    ``file_offset`` (-1: at ``base_offset``).
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    mtime_ms: int
    index_bytes: int = 0
    time_index_bytes: int = 0
    start_bytes: int = 0
    file_offset: int = -1

    def path(self, directory: str, kind: str = layout.LOG, state: str = "") -> str:
        """Path of one of its files."""
        base = self.base_offset if self.file_offset < 0 else self.file_offset
        return layout.segment_file(directory, base, kind, state)


@dataclass(frozen=True, slots=True)
class Producer:
    """An active producer: where its last data is (-1: none), and its epoch (rule 8)."""

    producer_id: int
    last_data_offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Job:
    """One pass of a worker, as plain data. ``first_dirty..end_offset`` is the cleanable range.

    ``horizons_only``: nothing new is mapped; only the segments in ``rewrite`` are looked at, the
    others are taken over from the manifest ``previous``. ``base``: every record survives, and
    nothing is mapped: the generation that an unclean leader begins with (rule 19). ``urgent``:
    the pass is overdue, and takes its share of the processors; any other takes what is left over.
    """

    directory: str
    topic: str
    partition: int
    topic_id: str
    generation: Generation
    log_start_offset: int
    first_dirty: int
    end_offset: int
    sources: tuple[Source, ...]
    now_ms: int
    hash_key: bytes
    config: LogConfig
    producers: tuple[Producer, ...] = ()
    aborted: tuple[AbortedTxn, ...] = ()
    previous: Generation | None = None
    horizons_only: bool = False
    base: bool = False
    rewrite: frozenset[int] = field(default_factory=frozenset)
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    load_factor: float = DEFAULT_LOAD_FACTOR
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    max_scans: int = MAX_SCANS
    max_bytes_per_second: float = float(MAX_INT64)
    urgent: bool = False
    check_keys: int = DEFAULT_CHECK_KEYS

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition."""
        return TopicPartition(self.topic, self.partition)

    @property
    def uuid(self) -> uuid.UUID:
        """The topic's id."""
        return uuid.UUID(self.topic_id)

    @property
    def horizon_ms(self) -> int:
        """Until when tombstones and markers stay that this pass keeps for the first time; int64,
        which ``delete.retention.ms`` may exceed together with the time.
        """
        return min(self.now_ms + self.config.delete_retention_ms, MAX_INT64)

    @property
    def source_bytes(self) -> int:
        """Bytes of all segments of the pass."""
        return sum(source.size_bytes for source in self.sources)


def encode(job: Job) -> str:
    """The job as one line of JSON."""
    fields: dict[str, Any] = {name: getattr(job, name) for name in Job.__slots__}
    fields["hash_key"] = job.hash_key.hex()
    fields["rewrite"] = sorted(job.rewrite)
    fields["sources"] = [asdict(source) for source in job.sources]
    fields["producers"] = [asdict(producer) for producer in job.producers]
    fields["config"] = config_fields(job.config)
    return json.dumps(fields)


def config_fields(config: LogConfig) -> dict[str, Any]:
    """Settings as JSON has them."""
    fields = {name: getattr(config, name) for name in LogConfig.__slots__}
    fields["cleanup_policy"] = sorted(config.cleanup_policy)
    return fields


def config_from(fields: dict[str, Any]) -> LogConfig:
    """What :func:`config_fields` made."""
    return LogConfig(
        **{
            **fields,
            "cleanup_policy": frozenset(fields["cleanup_policy"]),
            "message_timestamp_type": TimestampType(fields["message_timestamp_type"]),
        }
    )


def decode(text: str) -> Job:
    """The job in a line of JSON."""
    fields = json.loads(text)
    previous = fields["previous"]
    return Job(
        **{
            **fields,
            "generation": Generation(*fields["generation"]),
            "previous": None if previous is None else Generation(*previous),
            "hash_key": bytes.fromhex(fields["hash_key"]),
            "rewrite": frozenset(fields["rewrite"]),
            "sources": tuple(Source(**source) for source in fields["sources"]),
            "producers": tuple(Producer(**producer) for producer in fields["producers"]),
            "aborted": tuple(AbortedTxn(*entry) for entry in fields["aborted"]),
            "config": config_from(fields["config"]),
        }
    )
