"""The Produce codec that is in force: Cython where it was compiled, plain Python otherwise.

``KEPT_KERNEL=python`` in the environment forces the plain one
(``kept.node.kafka.codec.python_produce``, the specification).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kept.node.kafka.codec.python_produce import (
    FLEXIBLE,
    IN_THREAD_BYTES,
    MAX_VERSION,
    MIN_VERSION,
    TOPIC_IDS,
    ZSTD_SINCE,
    PartitionData,
    PartitionResult,
    PlainRequest,
    ProduceRequest,
    encode,
    encode_steps,
    frame_end,
    is_zstd,
)

if TYPE_CHECKING or os.environ.get("KEPT_KERNEL") == "python":
    from kept.node.kafka.codec.python_produce import KERNEL, encode_run, parse, parse_run
else:
    try:
        from kept.node.kafka.codec._codec import KERNEL, encode_run, parse, parse_run
    except ImportError:
        from kept.node.kafka.codec.python_produce import KERNEL, encode_run, parse, parse_run

__all__ = [
    "FLEXIBLE",
    "IN_THREAD_BYTES",
    "KERNEL",
    "MAX_VERSION",
    "MIN_VERSION",
    "TOPIC_IDS",
    "ZSTD_SINCE",
    "PartitionData",
    "PartitionResult",
    "PlainRequest",
    "ProduceRequest",
    "encode",
    "encode_run",
    "encode_steps",
    "frame_end",
    "is_zstd",
    "parse",
    "parse_run",
]
