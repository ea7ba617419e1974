"""Record batches, version 2: reading, checking and making them.

Pure functions over buffers. Checking and scanning exist twice, in plain Python (``python.py``, the
specification) and in Cython (``_kernel.pyx``); this module picks one, ``KERNEL`` says which.
``KEPT_KERNEL=python`` in the environment forces the plain one, which also serves where no compiler
was at hand at install time. ``BatchBuilder`` and ``read_block`` are compiled only: without them
using one raises ConfigurationError (:mod:`kept.kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kept import kernels
from kept.storage.records.batch_builder import Area, Rows, build_area_batch
from kept.storage.records.blocks import Binary, Block, Field, HeaderLists
from kept.storage.records.build import RecordFields, build_batch, iterate, seal
from kept.storage.records.codecs import compress, decompress
from kept.storage.records.columns import (
    DEFAULT_INFLATE_LIMIT,
    CheckedBatch,
    CheckRules,
    Record,
    RecordColumns,
)
from kept.storage.records.control import EndTxnMarker, build_control_batch, read_marker
from kept.storage.records.header import (
    HEADER_BYTES,
    BatchHeader,
    Buffer,
    ReplicaBatch,
    headers,
    patch,
    read_header,
)

if TYPE_CHECKING:
    from kept.storage.records._batch_builder import BatchBuilder
else:
    BatchBuilder = kernels.load("storage.records._batch_builder", "BatchBuilder")

if TYPE_CHECKING or kernels.uncompiled(["storage.records._blocks"], load=True):
    from kept.storage.records.python_blocks import read_block
else:
    from kept.storage.records._blocks import read_block

if TYPE_CHECKING or kernels.uncompiled(["storage.records._kernel"], load=True):
    from kept.storage.records.python import (
        KERNEL,
        check,
        check_replica,
        check_replicas,
        crc32c,
        find_records,
        scan,
    )
else:
    from kept.storage.records._kernel import (
        KERNEL,
        check,
        check_replica,
        check_replicas,
        crc32c,
        find_records,
        scan,
    )

__all__ = [
    "DEFAULT_INFLATE_LIMIT",
    "HEADER_BYTES",
    "KERNEL",
    "Area",
    "BatchBuilder",
    "BatchHeader",
    "Binary",
    "Block",
    "Buffer",
    "CheckRules",
    "CheckedBatch",
    "EndTxnMarker",
    "Field",
    "HeaderLists",
    "Record",
    "RecordColumns",
    "RecordFields",
    "ReplicaBatch",
    "Rows",
    "build_area_batch",
    "build_batch",
    "build_control_batch",
    "check",
    "check_replica",
    "check_replicas",
    "compress",
    "crc32c",
    "decompress",
    "find_records",
    "headers",
    "patch",
    "read_block",
    "read_header",
    "read_marker",
    "read_piece",
    "records",
    "scan",
    "seal",
]


def records(buf: Buffer, *, inflate_limit: int = DEFAULT_INFLATE_LIMIT) -> Iterator[Record]:
    """The data records of whole batches as objects; control batches are skipped. The slow path."""
    return iterate(scan(buf, inflate_limit=inflate_limit))


def read_piece(
    batch: Buffer, first: int, *, max_records: int, max_bytes: int, inflate_limit: int
) -> list[Record]:
    """Records of one batch from offset ``first`` on as objects: no more than are wanted.

    At most ``max_records``, and ``max_bytes`` unless the first is larger; an empty list: none is
    left. What a batch inflates to is held during the call only. Raises CorruptMessage,
    InvalidRecord, and InflatesBeyondLimit above ``inflate_limit`` bytes.
    """
    from kept.storage.records.python import iterate_area

    header = check_replica(batch)
    area: Buffer = memoryview(batch)[HEADER_BYTES : header.size_bytes]
    if header.codec and header.record_count:
        area = decompress(header.codec, area, inflate_limit)
    start, end, _ = find_records(
        area, header.record_count, header.base_offset, first, max_records, max_bytes
    )
    return list(iterate_area(bytes(area[start:end]), header))
