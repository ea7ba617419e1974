"""PySpark's faces of a write: one for batches, one for streams.

Both are checked on the driver, then pickled and run in the workers; what they guarantee is said in
:mod:`kept.pipeline.writing`. ``commit`` and ``abort`` have nothing to do: rows are in the topic
once their task has ended, also when the job fails later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from kept.pipeline.options import BadOption, WriteOptions
from kept.pipeline.writing import check_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


@dataclass
class Written(WriterCommitMessage):
    """What a task has written."""

    records: int


def write_rows(iterator: Iterator[pa.RecordBatch], options: WriteOptions) -> Written:
    """Write the rows of a task and wait until all are acknowledged."""
    from kept.pipeline.reading import client_for
    from kept.pipeline.writing import TopicWriter

    client = client_for(options.connection)
    begun = None
    if options.exactly_once:
        from pyspark import TaskContext

        from kept.pipeline import ledger

        assert options.topic is not None
        context = TaskContext.get()
        names = ("sql.streaming.queryId", "streaming.sql.batchId")
        query, batch = ledger.task_of({name: context.getLocalProperty(name) for name in names})
        begun = ledger.begin(
            client,
            options.ledger,
            options.topic,
            query=query,
            task=context.partitionId(),
            batch=batch,
        )
    writer = TopicWriter(client, options, begun)
    for batch in iterator:
        writer.write(batch)
    return Written(writer.finish())


class KeptWriter(DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """The rows of a task, in a worker."""
        return write_rows(iterator, self.options)


class KeptStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """The rows of a task, in a worker."""
        return write_rows(iterator, self.options)


def check_write(schema: StructType, options: WriteOptions, overwrite: bool) -> None:
    """Refuse a write on the driver: its columns, its mode, a topic that is not there."""
    if overwrite:
        raise BadOption("mode overwrite: a topic is only appended to; use mode append")
    check_columns({f.name: f.dataType.simpleString() for f in schema.fields}, options)
    if options.topic is not None:
        from kept.client.blocking import Client
        from kept.pipeline.offsets import find_partitions
        from kept.pipeline.options import Subscribe

        connection = options.connection
        with Client(
            connection.bootstrap, connection.client_id, timeout_ms=connection.timeout_ms
        ) as client:
            find_partitions(client, Subscribe((options.topic,)))
            if options.exactly_once:
                from kept.pipeline import ledger

                ledger.create(client, options.ledger)
