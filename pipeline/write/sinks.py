"""PySpark's faces of a write: one for batches, one for streams.

Both are checked on the driver, then pickled and run in the workers; what they guarantee is said in
:mod:`kept.pipeline.write.task`. Rows are in the topic once their task has ended, also when the job
fails later; ``commit`` and ``abort`` close the ledger of a write that is ``exactlyOnce``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from kept.pipeline.connection import BadOption
from kept.pipeline.options import Subscribe, WriteOptions
from kept.pipeline.read.offsets import find_partitions
from kept.pipeline.read.task import client_for
from kept.pipeline.write import ledger
from kept.pipeline.write.ledger import Batch
from kept.pipeline.write.task import TopicWriter, check_columns, largest_batch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


@dataclass
class Written(WriterCommitMessage):
    """What a task has written, and as which batch where that counts. ``repeated``: an attempt
    before this one had begun it, or another run may have begun its other tasks.
    """

    records: int
    batch: Batch | None = None
    repeated: bool = False


Messages = Sequence[WriterCommitMessage | None]


def write_rows(
    iterator: Iterator[pa.RecordBatch], options: WriteOptions, batch: Batch | None = None
) -> Written:
    """Write the rows of a task and wait until all are acknowledged."""
    client = client_for(options.connection)
    begun = None
    if options.exactly_once:
        from pyspark import TaskContext

        assert options.topic is not None
        context = TaskContext.get()
        assert context is not None
        batch = batch or ledger.micro_batch(options.topic, context.getLocalProperty)
        size = largest_batch(client, options, options.topic)
        begun = ledger.begin(client, options.ledger, batch, context.partitionId(), size)
    writer = TopicWriter(client, options, begun)
    for rows in iterator:
        writer.write(rows)
    repeated = begun is not None and (begun.repeated or begun.first_of_run)
    return Written(writer.finish(), batch, repeated)


def close_ledger(options: WriteOptions, messages: Messages) -> None:
    """Every task has ended. Raises NotTheSame for a batch that was begun with more of them."""
    again = next((m for m in messages if isinstance(m, Written) and m.repeated), None)
    if again is not None and again.batch is not None:
        ledger.end(client_for(options.connection), options.ledger, again.batch, len(messages))


class KeptWriter(DataSourceArrowWriter):
    """A batch write. One that is ``exactlyOnce`` and has no name gets one here, on the driver."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options
        self.batch: Batch | None = None
        if options.exactly_once:
            assert options.topic is not None
            app, passing = options.app_id or uuid.uuid4().hex, options.app_id is None
            run = uuid.uuid4().hex
            self.batch = Batch(app, options.version, options.topic, passing, run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """The rows of a task, in a worker."""
        return write_rows(iterator, self.options, self.batch)

    def commit(self, messages: Messages) -> None:
        """All tasks have ended well."""
        if self.batch is not None and not self.batch.passing:
            close_ledger(self.options, messages)
        self._forget(messages)

    def abort(self, messages: Messages) -> None:
        """The job has failed; what its tasks wrote stays."""
        self._forget(messages)

    def _forget(self, messages: Messages) -> None:
        if self.batch is not None and self.batch.passing:
            client = client_for(self.options.connection)
            ledger.forget(client, self.options.ledger, self.batch, len(messages))


class KeptStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """The rows of a task, in a worker."""
        return write_rows(iterator, self.options)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """All tasks of a micro-batch have ended well."""
        del batchId
        if self.options.exactly_once:
            close_ledger(self.options, messages)


def check_write(
    schema: StructType, options: WriteOptions, overwrite: bool, *, streaming: bool = False
) -> None:
    """Refuse a write on the driver: its columns, its mode, a topic that is not there. Raises
    BadOption, and what the cluster refuses.

    Spark does this for every micro-batch anew, in a process of its own: a stream's cluster may just
    be starting again, and is waited for.
    """
    if overwrite:
        raise BadOption("mode overwrite: a topic is only appended to; use mode append")
    check_columns({f.name: f.dataType.simpleString() for f in schema.fields}, options)
    if options.topic is not None:
        with options.connection.open(known=streaming) as client:
            find_partitions(client, Subscribe((options.topic,)))
            if options.exactly_once:
                ledger.create(client, options.ledger)
