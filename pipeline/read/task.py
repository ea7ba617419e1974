"""What a task does: bring the batches of its range and hand them on as Arrow record batches.

A worker process keeps its client, and with it connections and what it knows of the cluster, from
task to task.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import uuid
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Final

from kept.client.client import Client
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.range_reader import RangeReader
from kept.pipeline.columns import ArrowBatches, wanted_fields
from kept.pipeline.connection import Connection
from kept.pipeline.lazy_imports import pa
from kept.pipeline.options import ReadOptions
from kept.pipeline.read.plan import MIN_INT64, Range, ReadBounds
from kept.storage.errors import CorruptMessage, InvalidRecord
from kept.storage.records import read_block
from kept.storage.types import MAX_INT64

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

logger = logging.getLogger("kept.pipeline")

MAX_CLIENTS: Final = 4
"""Clusters that one worker process stays connected to."""
BLOCK_ROWS: Final = 32768
BLOCK_BYTES: Final = 2 << 20
"""A record batch has about so many rows or inflated bytes: larger ones cost memory, smaller ones
time."""
KEPT_FREE_BYTES: Final = 64 << 20
"""Freed memory that a worker does not hand back to the system: what several fetched chunks and
record batches take. Fetching into pages that are given back and taken anew each time costs a
quarter to two thirds more CPU."""

_clients: dict[tuple[int, Connection], Client] = {}


def client_for(connection: Connection, *, known: bool = True) -> Client:
    """This process's client of a cluster; never close it. A task's cluster is ``known``: the driver
    has asked it, and a node that is being started again is waited for.
    """
    key = (os.getpid(), connection)  # a forked worker must not share its parent's sockets
    client = _clients.get(key)
    if client is None:
        while len(_clients) >= MAX_CLIENTS:
            oldest = next(iter(_clients))
            gone = _clients.pop(oldest)
            if oldest[0] == os.getpid():
                gone.close()
        client = connection.open(known=known)
        _clients[key] = client
    return client


@cache
def keep_memory() -> None:
    """Let the C library keep freed memory for the next chunk (once a process). Only glibc has the
    knobs; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, KEPT_FREE_BYTES)
        mallopt(mmap_threshold, KEPT_FREE_BYTES // 2)


def read_partition(
    partition: InputPartition | None,
    options: ReadOptions,
    schema: StructType,
    bounds: ReadBounds | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Spark runs one without a range where there is nothing to read.

    Spark 4.1 always means UTC by an Arrow timestamp, later versions want to be told.
    """
    range_ = partition.value if partition is not None else None
    if not isinstance(range_, Range):
        return iter(())
    from pyspark.sql.pandas.types import to_arrow_schema

    parameters = inspect.signature(to_arrow_schema).parameters
    arrow = to_arrow_schema(schema, **({"timezone": "UTC"} if "timezone" in parameters else {}))
    bounds = bounds or ReadBounds()
    on = options.until_caught_up and bounds.end == MAX_INT64  # a filter may end it sooner
    return read_range(range_, options, arrow, bounds.min_timestamp, until_caught_up=on)


def read_range(
    one: Range,
    options: ReadOptions,
    schema: pa.Schema,
    min_timestamp: int = MIN_INT64,
    *,
    until_caught_up: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The rows of a range with the columns of ``schema``; ``until_caught_up`` goes on to the end of
    the log as it is then.

    Raises OffsetsLost for what is no longer there (``failOnDataLoss``); damage names partition and
    offset.
    """
    keep_memory()
    limits = FetchLimits(
        max_wait_ms=options.max_wait_ms,
        max_bytes=max(options.fetch_bytes, 1),
        partition_max_bytes=options.fetch_bytes,
        isolation=options.isolation,
    )
    reader = RangeReader(
        client_for(options.connection),
        one.topic_partition,
        one.start,
        one.end,
        limits,
        timeout_ms=options.poll_timeout_ms,
        fail_on_data_loss=options.fail_on_data_loss,
        topic_id=None if one.topic_id is None else uuid.UUID(one.topic_id),
        node=options.replica,
        until_caught_up=until_caught_up,
    )
    batches = ArrowBatches(schema, one.topic, one.partition)
    wanted = wanted_fields(schema.names)
    for records, hidden in reader.chunks():
        position = 0
        while position < len(records) and reader.position < reader.end:
            try:
                block = read_block(
                    records,
                    position,
                    reader.position,
                    reader.end,
                    wanted,
                    hidden=hidden,
                    min_timestamp=min_timestamp,
                    max_rows=BLOCK_ROWS,
                    max_bytes=BLOCK_BYTES,
                )
            except (CorruptMessage, InvalidRecord) as error:
                where = f"{one.topic_partition.place} at or after offset {reader.position}"
                raise type(error)(f"{where}: {error}") from error
            if block.position == position:
                break
            position, reader.position = block.position, block.next_offset
            if block.rows:
                yield batches.batch(block)
    for loss in reader.lost:
        logger.warning("%s", loss)
