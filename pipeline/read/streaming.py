"""The streaming read: PySpark's face of :mod:`kept.pipeline.read.progress`.

The offsets in a checkpoint have the form of Spark's Kafka connector, and beside them the ids of the
topics, since a topic that was deleted and created again is another one, and the epochs of their
leaders: one that was elected uncleanly may have other records there. A checkpoint of the connector
is read as well.

Admission control and ``AvailableNow`` exist for Python sources since Spark 4.2. On Spark 4.1 every
trigger takes all there is, and limits are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kept.pipeline.connection import BadOption
from kept.pipeline.options import ReadOptions
from kept.pipeline.read.admission import (
    Checkpoint,
    from_json,
    leader_epochs_in,
    to_json,
    topic_ids_in,
)
from kept.pipeline.read.progress import StreamProgress
from kept.pipeline.read.task import client_for, read_partition
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.1
    ADMISSION = False
    SupportsTriggerAvailableNow = object
else:
    ADMISSION = True


def check_admission(options: ReadOptions) -> None:
    """Refuse limits where Spark has no admission control for Python sources. Raises BadOption."""
    if not ADMISSION and (options.max_per_trigger, options.min_per_trigger) != (None, None):
        import pyspark

        raise BadOption(
            "maxOffsetsPerTrigger and minOffsetsPerTrigger need Spark 4.2 or newer, this is "
            f"{pyspark.__version__}: its Python sources have no admission control"
        )


class KeptStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read, micro-batch by micro-batch."""

    def __init__(self, schema: StructType, options: ReadOptions | BadOption) -> None:
        self.schema = schema
        self._given = options
        self._progress: StreamProgress | None = None
        self._told: Checkpoint = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}  # sockets stay on the driver

    @property
    def options(self) -> ReadOptions:
        """What was asked for. Raises BadOption when it cannot be done."""
        if isinstance(self._given, BadOption):
            raise self._given
        return self._given

    def _current(self) -> StreamProgress:
        if self._progress is None:
            self._progress = StreamProgress(
                client_for(self.options.connection, known=False), self.options
            )
        return self._progress

    def _checkpoint(self, offsets: Mapping[TopicPartition, int]) -> Checkpoint:
        progress = self._current()
        return to_json(offsets, progress.topic_ids(offsets), progress.leader_epochs)

    def _end(self, start: Checkpoint, offsets: Mapping[TopicPartition, int]) -> Checkpoint:
        """Where a trigger ends; as it was said before, where nothing has moved but leaders."""
        end = self._checkpoint(offsets)
        if from_json(start) == offsets and topic_ids_in(start) == topic_ids_in(end):
            return start
        return end

    def _remember(self, start: Checkpoint) -> StreamProgress:
        progress = self._current()
        progress.remember(topic_ids_in(start), leader_epochs_in(start))
        return progress

    def initialOffset(self) -> Checkpoint:  # noqa: N802
        """Where a query without a checkpoint starts."""
        return self._checkpoint(self._current().begin())

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """The limit of an ordinary trigger."""
        if self.options.max_per_trigger is not None:
            return ReadMaxRows(self.options.max_per_trigger)
        if self.options.min_per_trigger is not None:
            return ReadMinRows(self.options.min_per_trigger)
        return ReadAllAvailable()

    def latestOffset(  # noqa: N802
        self, start: Checkpoint | None = None, limit: Any = None
    ) -> Checkpoint:
        """Where the next micro-batch ends. Spark 4.1 asks without saying where it starts."""
        if start is None:
            self._told = self._end(self._told, self._current().newest())
            return self._told
        most = limit.max_rows if ADMISSION and isinstance(limit, ReadMaxRows) else None
        least = None
        if not ADMISSION or not isinstance(limit, ReadAllAvailable):
            least = self.options.min_per_trigger
        return self._end(start, self._remember(start).next_end(from_json(start), most, least))

    def reportLatestOffset(self) -> Checkpoint:  # noqa: N802
        """The end of every partition, for the query's progress."""
        newest = self._current().newest()
        return to_json(newest, self._current().topic_ids(newest))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note what there is: the query ends there."""
        self._current().stop_at_newest()

    def partitions(self, start: Checkpoint, end: Checkpoint) -> list[InputPartition]:
        """The tasks of a micro-batch."""
        progress = self._remember(start)
        ranges = progress.ranges(from_json(start), from_json(end), topic_ids_in(end))
        return [InputPartition(range_) for range_ in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in a worker."""
        return read_partition(partition, self.options, self.schema)
