"""What a task of a write does: rows become batches, each acknowledged by all replicas in sync.

Delivery is *at least once*: within a task nothing is written twice (an idempotent producer), but a
task that Spark runs again, and a micro-batch that it repeats after a restart, are new producers and
write their rows anew. With ``exactlyOnce`` a stream's tasks go on as the producers that they were
(:mod:`kept.pipeline.write.ledger`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kept.client.client import Client
from kept.pipeline.columns import HEADERS
from kept.pipeline.connection import BadOption
from kept.pipeline.lazy_imports import pa
from kept.pipeline.options import WriteOptions
from kept.pipeline.write.ledger import Begun, NotTheSame, confirm
from kept.storage.errors import InvalidRecord, OutOfOrderSequenceNumber, PeerError
from kept.storage.records import (
    HEADER_BYTES,
    Area,
    BatchBuilder,
    BatchHeader,
    Binary,
    HeaderLists,
    Rows,
    build_area_batch,
    read_header,
)
from kept.storage.types import MAX_INT32

ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (HEADERS,),
    "timestamp": ("timestamp",),
}
"""Columns that a write looks at, and their types; others are left alone, as the connector does."""


MAX_BYTES: Final = 64 << 20
"""What a task holds of rows that are not sent yet, roughly: a thousand partitions of half a
megabyte each would take half a gigabyte of a worker, three times over while they are sent."""
MIN_SHARE_BYTES: Final = 16 << 10
"""Smaller batches would cost more than they save."""
MANY_TOPICS: Final = 64
"""With more of them (a column ``topic``) rows are not held from one record batch to the next."""


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


def largest_batch(client: Client, options: WriteOptions, topic: str) -> int:
    """Bytes of records that go into one batch: no more than the topic takes at once, and less where
    it has so many partitions that a batch for each would take more than ``MAX_BYTES``.
    """
    settings = client.topic_configs([topic])[topic]
    most = next(
        (setting.value for setting in settings if setting.name == "max.message.bytes"), None
    )
    share = max(MAX_BYTES // len(client.topic(topic).partitions), MIN_SHARE_BYTES)
    taken = options.batch_bytes if most is None else int(most) - HEADER_BYTES
    return max(min(options.batch_bytes, taken, share), 1)


class TopicWriter:
    """Writes the rows of one task to their topics, in order within each partition."""

    def __init__(self, client: Client, options: WriteOptions, begun: Begun | None = None) -> None:
        self.client = client
        self.options = options
        self.written = 0
        self._begun = begun
        self._producer = None if begun is None else (begun.producer_id, begun.epoch)
        self._topics: dict[str, _Target] = {}
        self._sent: dict[tuple[int, int], BatchHeader] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows; some may be sent. Raises BadRow, and what the cluster refuses."""
        if self.options.topic is not None:
            self._write(self.options.topic, batch)
            return
        import pyarrow.compute as pc

        topics = batch.column("topic")
        if topics.null_count:
            raise BadRow("a row whose topic is null, and there is no option topic")
        for topic in topics.unique():
            self._write(topic.as_py(), batch.filter(pc.equal(topics, topic)))
        if len(self._topics) > MANY_TOPICS:
            for topic in self._topics:
                self._send(topic)

    def finish(self) -> int:
        """Send the rest; how many rows were written and acknowledged. Raises NotTheSame for a task
        whose other attempts wrote other rows, or more of them.
        """
        for topic in self._topics:
            self._send(topic)
        begun = self._begun
        if begun is not None and (begun.repeated or begun.others()):
            assert self.options.topic is not None
            target = self._topics.get(self.options.topic)
            rows = {} if target is None else target.sequences
            confirm(self.client, self.options.topic, begun, self._sent, rows)
        return self.written

    def _write(self, topic: str, batch: pa.RecordBatch) -> None:
        target = self._topics.get(topic)
        if target is None:
            partitions = self._partitions(topic)
            if self._begun is None:
                size = largest_batch(self.client, self.options, topic)
            else:
                size = self._begun.batch_bytes
            target = self._topics[topic] = _Target(BatchBuilder(partitions, size))
            target.sticky = self._next_sticky(0)
        at_ms = time.time_ns() // 1_000_000 if self._begun is None else self._begun.at_ms
        try:
            rows, at = rows_of(batch, self.options, at_ms), 0
        except BadRow as error:
            raise BadRow(f"a row for {topic}: {error}") from None
        while at < rows.total:
            try:
                at = target.builder.append(rows, at, target.sticky)
            except InvalidRecord as error:
                raise BadRow(f"a row for {topic}: {error}") from error
            if at < rows.total:
                self._send(topic)

    def _partitions(self, topic: str) -> int:
        """How many partitions keys are spread over. Asked anew by every task: a worker's client may
        remember a topic as it was before it grew, and a key must not be in two partitions because
        two workers disagree. An attempt that goes on has those of the first.
        """
        if self._begun is not None:
            return self._begun.partitions
        self.client.metadata([topic])
        return len(self.client.topic(topic).partitions)

    def _send(self, topic: str) -> None:
        """One batch to each partition that has rows, side by side."""
        target = self._topics[topic]
        areas = target.builder.drain()
        if not areas:
            return
        if self._producer is None:
            producer = self.client.init_producer()
            self._producer = (producer.id, producer.epoch)
        producer_id, epoch = self._producer
        batches = {
            partition: build_area_batch(
                area,
                codec=self.options.codec,
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=target.sequences.get(partition, 0),
            )
            for partition, area in areas.items()
        }
        if self._begun is not None:
            batches = self._new(target, areas, batches)
        if batches:
            self._append(topic, batches)
        if self._begun is not None:
            for partition, batch in batches.items():
                first = target.sequences.get(partition, 0)
                self._sent[partition, first] = read_header(batch)
        for partition, area in areas.items():
            self.written += area.total
            following = target.sequences.get(partition, 0) + area.total
            target.sequences[partition] = following & MAX_INT32
        target.sticky = self._next_sticky(target.sticky)

    def _append(self, topic: str, batches: Mapping[int, bytes]) -> None:
        try:
            self.client.append(topic, batches)
        except OutOfOrderSequenceNumber as error:
            if self._begun is None:
                raise
            raise NotTheSame(
                f"{error}: another attempt at this task, or a driver whose write has the same "
                "name, is ahead of this one, or the topic lost what was written; nothing is there "
                "twice"
            ) from error

    def _next_sticky(self, last: int) -> int:
        """Where rows without a key go next: drawn, or the same whenever a task is repeated."""
        return secrets.randbits(31) if self._begun is None else last + 1

    def _new(
        self, target: _Target, areas: Mapping[int, Area], batches: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """The batches that no earlier attempt has written."""
        assert self._begun is not None
        return {
            partition: batch
            for partition, batch in batches.items()
            if not self._begun.leaves_out(
                partition, target.sequences.get(partition, 0), areas[partition].total, batch
            )
        }


@dataclass(slots=True)
class _Target:
    """A topic that is written to: its rows that wait, and the next sequence of each partition."""

    builder: BatchBuilder
    sequences: dict[int, int] = field(default_factory=dict)
    sticky: int = 0


def rows_of(batch: pa.RecordBatch, options: WriteOptions, at_ms: int) -> Rows:
    """The rows of a record batch as the record kernel takes them; ``at_ms`` is their timestamp
    where they have none. Raises BadRow.
    """
    import pyarrow.compute as pc

    there = set(batch.schema.names)
    partitions = None
    if "partition" in there:
        column = batch.column("partition").cast(pa.int32())
        least = pc.min(column).as_py()
        if least is not None and least < 0:
            raise BadRow(f"partition {least}: it must be at least 0, or null")
        partitions = _numbers(column.fill_null(-1))
    return Rows(
        batch.num_rows,
        _strings(batch.column("key")) if "key" in there else None,
        _strings(batch.column("value")),
        _headers(batch.column("headers")) if "headers" in there else None,
        partitions,
        _numbers(_milliseconds(batch, options, at_ms)),
    )


def _milliseconds(batch: pa.RecordBatch, options: WriteOptions, at_ms: int) -> pa.Array:
    """Timestamps; rows without one take ``at_ms``."""
    import pyarrow.compute as pc

    now = pa.scalar(at_ms, pa.int64())
    if not options.include_timestamps:
        return pa.repeat(now, batch.num_rows)
    stamps = batch.column("timestamp").cast(pa.timestamp("us", "UTC"))
    whole = pc.floor_temporal(stamps, unit="millisecond").cast(pa.timestamp("ms", "UTC"))
    return whole.cast(pa.int64()).fill_null(now)


def _numbers(column: pa.Array) -> Any:
    return _from_its_start(column).buffers()[1]


def _strings(column: pa.Array) -> Binary:
    column = _from_its_start(column.cast(pa.binary()))
    validity, offsets, data = column.buffers()
    return Binary(offsets, data or b"", validity, column.null_count)


def _headers(column: pa.Array) -> HeaderLists:
    column = _from_its_start(column)
    validity, offsets = column.buffers()[:2]
    pairs = column.values
    if pairs.null_count:
        raise BadRow("a header that is null")
    names, values = pairs.field("key"), pairs.field("value")
    return HeaderLists(
        offsets, validity, column.null_count, _strings(names), _strings(values), len(pairs)
    )


def _from_its_start(column: pa.Array) -> pa.Array:
    """The same array in buffers that begin with it: a slice shares those of the whole."""
    return column if column.offset == 0 else pa.concat_arrays([column])
