"""The columns of a read: Spark's schema of them, and Arrow batches from the record kernel's blocks.

They are those of Spark's Kafka connector. A schema that the user gives may leave columns out, which
are not read then, and may order them as it likes; it cannot change their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kept.pipeline.connection import BadOption
from kept.pipeline.lazy_imports import pa
from kept.storage.records import Binary, Block, Field, HeaderLists

TYPES: Final[Mapping[str, str]] = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
}
"""Column -> type as Spark writes it."""
HEADERS: Final = "array<struct<key:string,value:binary>>"

FIELDS: Final[Mapping[str, Field]] = {
    "key": Field.KEY,
    "value": Field.VALUE,
    "offset": Field.OFFSET,
    "timestamp": Field.TIMESTAMP,
    "timestampType": Field.TIMESTAMP_TYPE,
    "headers": Field.HEADERS,
}
"""What the record kernel has to bring for a column; topic and partition are known."""


def schema_text(include_headers: bool) -> str:
    """The schema of a read. What ``timestamp`` alone means is a setting of the session."""
    columns = {**TYPES, "timestamp": "timestamp_ltz"}
    if include_headers:
        columns["headers"] = HEADERS
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def check_schema(given: Mapping[str, str], include_headers: bool) -> None:
    """Refuse a user's schema that has other columns or types. Raises BadOption."""
    types = {**TYPES, "headers": HEADERS}
    for name, kind in given.items():
        if name not in types:
            raise BadOption(f"schema: no column {name}; there are {', '.join(types)}")
        if kind != types[name]:
            raise BadOption(f"schema: {name} is {types[name]}, it cannot be read as {kind}")
    if "headers" in given and not include_headers:
        raise BadOption("schema: the column headers needs includeHeaders=true")


def wanted_fields(names: list[str]) -> int:
    """What the record kernel has to bring for these columns."""
    wanted = 0
    for name in names:
        wanted |= FIELDS.get(name, 0)
    return wanted


class ArrowBatches:
    """Makes Arrow record batches of one partition's blocks, without copying what they hold."""

    def __init__(self, schema: pa.Schema, topic: str, partition: int) -> None:
        self.schema = schema
        self._constants = {
            "topic": pa.scalar(topic, pa.string()),
            "partition": pa.scalar(partition, pa.int32()),
        }
        self._repeated: dict[str, Any] = {}

    def batch(self, block: Block) -> pa.RecordBatch:
        """The rows of a block."""
        arrays = [self._column(name, block) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, name: str, block: Block) -> pa.Array:
        kind = self.schema.field(name).type
        if name in self._constants:
            return self._constant(name, block.rows)
        if name == "headers":
            assert block.headers is not None
            return _lists(block.headers, block.rows, kind)
        if name in ("key", "value"):
            column = block.key if name == "key" else block.value
            assert column is not None
            return _strings(column, block.rows, kind)
        numbers = {
            "offset": block.offsets,
            "timestamp": block.timestamps,
            "timestampType": block.timestamp_types,
        }[name]
        return pa.Array.from_buffers(kind, block.rows, [None, pa.py_buffer(numbers)], 0)

    def _constant(self, name: str, rows: int) -> pa.Array:
        """One value for every row, kept from batch to batch."""
        array = self._repeated.get(name)
        if array is None or len(array) < rows:
            array = self._repeated[name] = pa.repeat(self._constants[name], rows)
        return array.slice(0, rows)


def _strings(binary: Binary, count: int, kind: pa.DataType) -> pa.Array:
    validity = None if binary.validity is None else pa.py_buffer(binary.validity)
    buffers = [validity, pa.py_buffer(binary.offsets), pa.py_buffer(binary.data)]
    return pa.Array.from_buffers(kind, count, buffers, binary.nulls)


def _lists(headers: HeaderLists, rows: int, kind: pa.DataType) -> pa.Array:
    struct = kind.value_type
    children = [
        _strings(headers.names, headers.total, struct.field("key").type),
        _strings(headers.values, headers.total, struct.field("value").type),
    ]
    pairs = pa.StructArray.from_arrays(children, fields=[struct.field(i) for i in range(2)])
    validity = None if headers.validity is None else pa.py_buffer(headers.validity)
    buffers = [validity, pa.py_buffer(headers.offsets)]
    return pa.Array.from_buffers(kind, rows, buffers, headers.nulls, children=[pairs])
