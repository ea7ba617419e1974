"""What the kernels take and give: rules of a check, columns of a scan, a record."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

from kept.storage.records.header import BatchHeader
from kept.storage.types import MAX_INT64, Codec, TimestampType

MAX_RECORD_ERRORS: Final = 100
"""Faulty records named in one refusal; the walk stops there, so that an answer stays small."""

DEFAULT_INFLATE_LIMIT: Final = 1 << 30
"""Largest inflated record area of one batch where a caller sets no limit of its own."""

PRODUCER_CODEC: Final = "producer"
"""compression.type that keeps whatever the producer chose."""


@dataclass(frozen=True, slots=True)
class CheckRules:
    """What a topic asks of a batch (rule 37). The defaults are Kafka's.

    ``max_inflated_bytes`` bounds the decompressed records of one batch; ``compression_type`` is
    ``producer``, ``uncompressed`` or the name of a codec.
    """

    compacted: bool = False
    max_batch_bytes: int = 1_048_588
    max_inflated_bytes: int = 128 << 20
    timestamp_type: TimestampType = TimestampType.CREATE_TIME
    timestamp_before_max_ms: int = MAX_INT64
    timestamp_after_max_ms: int = 3_600_000
    compression_type: str = PRODUCER_CODEC
    compiled: Any = field(default=None, init=False, repr=False, compare=False)
    """What a kernel made of them, for the next batch."""

    @property
    def codec(self) -> Codec | None:
        """Codec that every batch must have in the log, None for the producer's."""
        return wanted_codec(self.compression_type)

    def within(self, max_inflated_bytes: int) -> CheckRules:
        """The same rules for a caller that inflates no more than so much."""
        if max_inflated_bytes >= self.max_inflated_bytes:
            return self
        return replace(self, max_inflated_bytes=max_inflated_bytes)


def wanted_codec(compression_type: str) -> Codec | None:
    """Codec of a compression.type, None for ``producer``. Raises KeyError."""
    if compression_type == PRODUCER_CODEC:
        return None
    if compression_type == "uncompressed":
        return Codec.NONE
    return Codec[compression_type.upper()]


class CheckedBatch(Protocol):
    """A batch that passed ``check`` and may be appended once its offsets are patched.

    Each kernel has a class of its own; all attributes are read-only. ``data`` is a view of the
    buffer that was checked, or, when ``rewritten``, of new bytes that belong to this object.
    """

    @property
    def data(self) -> memoryview:
        """The batch."""

    @property
    def size_bytes(self) -> int:
        """Length of ``data``."""

    @property
    def record_count(self) -> int:
        """Records in the batch; also last offset delta + 1."""

    @property
    def max_timestamp(self) -> int:
        """Largest timestamp of the records, or the append time."""

    @property
    def producer_id(self) -> int:
        """Idempotent producer, -1 for none."""

    @property
    def producer_epoch(self) -> int:
        """Epoch of that producer."""

    @property
    def base_sequence(self) -> int:
        """Sequence of the first record."""

    @property
    def is_transactional(self) -> bool:
        """The batch is part of a transaction."""

    @property
    def codec(self) -> Codec:
        """Compression of ``data``."""

    @property
    def rewritten(self) -> bool:
        """Header or codec differ from what the producer sent."""

    @property
    def area_bytes(self) -> int:
        """Size of the records as they were checked, inflated."""


class Record(NamedTuple):
    """One record. Header keys that are not UTF-8 are decoded with U+FFFD, as Java does."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The records of some batches, one column per field; row i of each is record i.

    ``offsets``, ``timestamps`` and the ``*_start`` columns are int64 (format ``q``), lengths and
    ``batch_index`` int32 (``i``). Starts are positions in ``data``; a length of -1 is null. The
    header area begins with its count (a varint), so a record without headers has one byte there.
    ``data`` is the scanned buffer itself if no batch was compressed, otherwise new bytes.
    """

    count: int
    data: memoryview
    batches: list[BatchHeader]
    offsets: memoryview
    timestamps: memoryview
    key_start: memoryview
    key_length: memoryview
    value_start: memoryview
    value_length: memoryview
    headers_start: memoryview
    headers_length: memoryview
    batch_index: memoryview

    def key(self, i: int) -> memoryview | None:
        """Key of record ``i``, a view of ``data``."""
        length = self.key_length[i]
        start = self.key_start[i]
        return None if length < 0 else self.data[start : start + length]

    def value(self, i: int) -> memoryview | None:
        """Value of record ``i``, a view of ``data``."""
        length = self.value_length[i]
        start = self.value_start[i]
        return None if length < 0 else self.data[start : start + length]
