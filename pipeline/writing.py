"""What a task of a write does: rows become batches, each acknowledged by all replicas in sync.

Delivery is *at least once*: within a task nothing is written twice (an idempotent producer), but a
task that Spark runs again, and a micro-batch that it repeats after a restart, are new producers and
write their rows anew.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.client.blocking import Client, OutRecord
from kept.client.partitioner import partition_for
from kept.pipeline.columns import HEADERS
from kept.pipeline.options import BadOption, WriteOptions
from kept.storage.errors import PeerError

if TYPE_CHECKING:
    import pyarrow as pa

RECORD_BYTES: Final = 70
"""What a record takes beside its key and value, headers not counted; only sizes batches."""

ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (HEADERS,),
    "timestamp": ("timestamp",),
}
"""Columns that a write looks at, and their types; others are left alone, as the connector does."""


class BadRow(PeerError):
    """A row that cannot be written; the message says why."""


def check_columns(given: Mapping[str, str], options: WriteOptions) -> None:
    """Refuse what cannot be written. Raises BadOption."""
    if "value" not in given:
        raise BadOption(f"a write needs a column value; there are {', '.join(given) or 'none'}")
    if options.topic is None and "topic" not in given:
        raise BadOption("where to write is missing: give the option topic or a column topic")
    if options.include_timestamps and "timestamp" not in given:
        raise BadOption("includeTimestamps=true needs a column timestamp")
    for name, kinds in ACCEPTED.items():
        if name == "timestamp" and not options.include_timestamps:
            continue
        if name in given and given[name] not in kinds:
            raise BadOption(
                f"column {name} is {given[name]}, it must be {' or '.join(kinds)}; cast it first"
            )


class TopicWriter:
    """Writes the rows of one task to their topics, in order within each partition."""

    def __init__(self, client: Client, options: WriteOptions) -> None:
        self.client = client
        self.options = options
        self.written = 0
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[str, dict[int, int]] = {}
        self._waiting: dict[str, dict[int, list[OutRecord]]] = {}
        self._sizes: dict[tuple[str, int], int] = {}
        self._sticky = secrets.randbits(31)

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows; some may be sent."""
        for row in rows(batch, self.options):
            self._add(*row)

    def finish(self) -> int:
        """Send the rest; how many rows were written and acknowledged."""
        for topic in list(self._waiting):
            self._send(topic)
        return self.written

    def _add(self, topic: str, record: OutRecord) -> None:
        partition = record.partition
        count = len(self.client.topic(topic).partitions)
        if partition is None:
            partition = partition_for(record.key, count, self._sticky)
        elif not 0 <= partition < count:
            raise BadRow(f"partition {partition}: {topic} has {count} partitions")
        record = record._replace(partition=partition)
        self._waiting.setdefault(topic, {}).setdefault(partition, []).append(record)
        size = self._sizes.get((topic, partition), 0) + _size(record)
        self._sizes[topic, partition] = size
        if size >= self.options.batch_bytes:
            self._send(topic)

    def _send(self, topic: str) -> None:
        """One batch to each partition that has rows, side by side."""
        waiting = self._waiting.pop(topic)
        if self._producer is None:
            self._producer = self.client.init_producer()[:2]
        sequences = self._sequences.setdefault(topic, {})
        self.client.produce(
            topic,
            [record for records in waiting.values() for record in records],
            codec=self.options.codec,
            producer=(*self._producer, sequences),
        )
        for partition, records in waiting.items():
            self.written += len(records)
            del self._sizes[topic, partition]
        self._sticky = secrets.randbits(31)


def _size(record: OutRecord) -> int:
    return RECORD_BYTES + len(record.key or b"") + len(record.value or b"")


def rows(batch: pa.RecordBatch, options: WriteOptions) -> Iterator[tuple[str, OutRecord]]:
    """(topic, record) of every row. Raises BadRow."""
    count = batch.num_rows
    nothing: list[Any] = [None] * count
    columns = {name: _values(batch, name) for name in ACCEPTED if name in batch.schema.names}
    topics = nothing if options.topic is not None else columns["topic"]
    when = [time.time_ns() // 1_000_000] * count
    if options.include_timestamps:
        when = _milliseconds(batch.column("timestamp"), when)
    for topic, key, value, headers, partition, stamp in zip(
        topics,
        columns.get("key", nothing),
        columns["value"],
        columns.get("headers", nothing),
        columns.get("partition", nothing),
        when,
        strict=True,
    ):
        where = options.topic if options.topic is not None else topic
        if where is None:
            raise BadRow("a row whose topic is null, and there is no option topic")
        yield where, OutRecord(key, value, _headers(headers), stamp, partition)


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    import pyarrow as pa

    column = batch.column(name)
    if name in ("key", "value") and pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    found: list[Any] = column.to_pylist()
    return found


def _headers(pairs: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    if not pairs:
        return ()
    if any(one is None or one["key"] is None for one in pairs):
        raise BadRow("a header whose key is null")
    return tuple((one["key"], one["value"]) for one in pairs)


def _milliseconds(column: pa.Array, now: list[int]) -> list[int]:
    """Timestamps of rows; those without take the time of now."""
    import pyarrow as pa

    stamps = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    return [n if s is None else s // 1000 for s, n in zip(stamps, now, strict=True)]
