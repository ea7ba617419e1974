"""Record batches, version 2: reading, checking and making them.

Pure functions over buffers. The loops over records exist twice, in plain Python (``python.py``, the
specification) and in Cython (``_kernel.pyx``); this module picks one, ``KERNEL`` says which.
``KEPT_KERNEL=python`` in the environment forces the plain one, which also serves where no compiler
was at hand at install time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
from kept.storage.records.header import (
    HEADER_BYTES,
    BatchHeader,
    Buffer,
    ReplicaBatch,
    headers,
    patch,
    read_header,
)
from kept.storage.records.packing import Area, Rows, pack_batch

if TYPE_CHECKING or os.environ.get("KEPT_KERNEL") == "python":
    from kept.storage.records.blocks import read_block
    from kept.storage.records.packing import Packer
    from kept.storage.records.python import (
        KERNEL,
        check,
        check_replica,
        check_replicas,
        crc32c,
        scan,
    )
else:
    try:
        from kept.storage.records._blocks import read_block
        from kept.storage.records._kernel import (
            KERNEL,
            check,
            check_replica,
            check_replicas,
            crc32c,
            scan,
        )
        from kept.storage.records._packing import Packer
    except ImportError:
        from kept.storage.records.blocks import read_block
        from kept.storage.records.packing import Packer
        from kept.storage.records.python import (
            KERNEL,
            check,
            check_replica,
            check_replicas,
            crc32c,
            scan,
        )

__all__ = [
    "DEFAULT_INFLATE_LIMIT",
    "HEADER_BYTES",
    "KERNEL",
    "Area",
    "BatchHeader",
    "Binary",
    "Block",
    "Buffer",
    "CheckRules",
    "CheckedBatch",
    "Field",
    "HeaderLists",
    "Packer",
    "Record",
    "RecordColumns",
    "RecordFields",
    "ReplicaBatch",
    "Rows",
    "build_batch",
    "check",
    "check_replica",
    "check_replicas",
    "compress",
    "crc32c",
    "decompress",
    "headers",
    "pack_batch",
    "patch",
    "read_block",
    "read_header",
    "records",
    "scan",
    "seal",
]


def records(buf: Buffer, *, inflate_limit: int = DEFAULT_INFLATE_LIMIT) -> Iterator[Record]:
    """The data records of whole batches as objects; control batches are skipped. The slow path."""
    return iterate(scan(buf, inflate_limit=inflate_limit))
