"""``format("ready")``: a Spark source whose record batches are made beforehand, a sink that drains.

They have the columns of ours, in two tasks. What they cost is Spark's own, and the least that any
source or sink in Python takes; with ``rows`` 0 its queries are over nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow

ALL_COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp,"
    " timestampType int"
)
TASKS: Final = 2
BATCH_ROWS: Final = 32_768
ROW: Final = {
    "key": b"k" * 16,
    "value": b"x" * 100,
    "topic": "bench-none",
    "partition": 0,
    "offset": 1,
    "timestamp": 1_790_000_000_000_000,
    "timestampType": 0,
}


class Shares:
    """Reads so many rows of a schema; the partition's value says how many."""

    def __init__(self, rows: int, schema: Any) -> None:
        self.rows, self.schema = rows, schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        columns = [pa.repeat(pa.scalar(ROW[f.name], f.type), BATCH_ROWS) for f in arrow]
        made = pa.RecordBatch.from_arrays(columns, schema=arrow)
        for begin in range(0, partition.value, BATCH_ROWS):
            yield made.slice(0, min(partition.value - begin, BATCH_ROWS))


class Reader(Shares, DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self.rows // TASKS) for _ in range(TASKS)]


class StreamReader(Shares, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadAllAvailable:  # noqa: N802
        return ReadAllAvailable()

    def latestOffset(self, start: Any, limit: Any) -> dict[str, int]:  # noqa: ARG002, N802
        return {"at": self.rows}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        share = (end["at"] - start["at"]) // TASKS
        return [InputPartition(share) for _ in range(TASKS) if share]


class Drain(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Ready(DataSource):
    """Source and sink. Option ``rows``: how many there are to read."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return ALL_COLUMNS

    def reader(self, schema: Any) -> Reader:
        return Reader(int(self.options["rows"]), schema)

    def streamReader(self, schema: Any) -> StreamReader:  # noqa: N802
        return StreamReader(int(self.options["rows"]), schema)

    def writer(self, schema: Any, overwrite: bool) -> Drain:  # noqa: ARG002
        return Drain()
