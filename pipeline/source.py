"""The data source ``kept``: PySpark's classes over the plain modules of this folder.

What PySpark does with them: a :class:`KeptSource` is made on the driver for every use; its reader
plans on the driver (``partitions``), is pickled, and reads in the workers (``read``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from kept.pipeline.columns import check_schema, schema_text
from kept.pipeline.connection import BadOption
from kept.pipeline.options import ReadOptions, parse_read, parse_write
from kept.pipeline.read.batch import plan_batch
from kept.pipeline.read.plan import ReadBounds
from kept.pipeline.read.pushdown import push
from kept.pipeline.read.task import read_partition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kept.pipeline.read.streaming import KeptStreamReader
    from kept.pipeline.write.sinks import KeptStreamWriter, KeptWriter


class KeptSource(DataSource):
    """``format("kept")``."""

    @classmethod
    def name(cls) -> str:
        """What Spark calls it."""
        return "kept"

    def schema(self) -> str:
        """The columns of a read, where the user gives no schema."""
        flag = str(self.options.get("includeHeaders", "false")).lower()
        return schema_text(flag == "true")

    def reader(self, schema: StructType) -> KeptReader:
        """A batch read."""
        options = parse_read(self.options, streaming=False)
        check_columns(schema, options)
        return KeptReader(schema, options)

    def streamReader(self, schema: StructType) -> KeptStreamReader:  # noqa: N802
        """A streaming read. What is wrong with it is said by the reader's first method: PySpark
        loses an error that is raised here behind one of its own.
        """
        from kept.pipeline.read.streaming import KeptStreamReader, check_admission

        try:
            options = parse_read(self.options, streaming=True)
            check_columns(schema, options)
            check_admission(options)
        except BadOption as error:
            return KeptStreamReader(schema, error)
        return KeptStreamReader(schema, options)

    def writer(self, schema: StructType, overwrite: bool) -> KeptWriter:
        """A batch write."""
        from kept.pipeline.write.sinks import KeptWriter, check_write

        options = parse_write(self.options)
        check_write(schema, options, overwrite)
        return KeptWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> KeptStreamWriter:  # noqa: N802
        """A streaming write."""
        from kept.pipeline.write.sinks import KeptStreamWriter, check_write

        options = parse_write(self.options, streaming=True)
        check_write(schema, options, overwrite, streaming=True)
        return KeptStreamWriter(options)


def check_columns(schema: StructType, options: ReadOptions) -> None:
    """Refuse a schema that the source cannot fill. Raises BadOption."""
    given = {field.name: field.dataType.simpleString() for field in schema.fields}
    twice = [name for name in given if schema.names.count(name) > 1]
    if twice:
        raise BadOption(f"schema: the column {twice[0]} is named more than once")
    check_schema(given, options.include_headers)


class _Pushdown:
    """``pushFilters`` as PySpark looks it up.

    PySpark refuses a reader that overrides the method while filterPushdown.enabled is off, which is
    its default, although such a reader works without: Spark then applies every filter itself. It
    tells an override by ``__func__``; this one shows it the method of the base class.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: KeptReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        self._reader.bounds, left = push(self._reader.bounds, filters)
        return left


class KeptReader(DataSourceReader):
    """A batch read: one task for each range."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self.schema = schema
        self.options = options
        self.bounds = ReadBounds()

    @property
    def pushFilters(self) -> _Pushdown:  # noqa: N802
        """Take filters into the plan; see :mod:`kept.pipeline.read.pushdown`."""
        return _Pushdown(self)

    def partitions(self) -> list[InputPartition]:
        """The ranges, planned on the driver."""
        with self.options.connection.open() as client:
            ranges = plan_batch(client, self.options, self.bounds)
        return [InputPartition(range_) for range_ in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a range, in a worker."""
        return read_partition(partition, self.options, self.schema, self.bounds)
