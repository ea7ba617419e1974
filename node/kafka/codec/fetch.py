"""The Fetch codec that is in force: Cython where it was compiled, plain Python otherwise.

``KEPT_KERNEL=python`` in the environment forces the plain one
(``kept.node.kafka.codec.python_fetch``, the specification).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kept.node.kafka.codec.python_fetch import (
    FLEXIBLE,
    MAX_VERSION,
    MIN_VERSION,
    SESSIONS,
    TOPIC_IDS,
    FetchPartition,
    FetchRequest,
    PartitionData,
    Segment,
)

if TYPE_CHECKING or os.environ.get("KEPT_KERNEL") == "python":
    from kept.node.kafka.codec.python_fetch import encode, parse
else:
    try:
        from kept.node.kafka.codec._codec import encode_fetch as encode
        from kept.node.kafka.codec._codec import parse_fetch as parse
    except ImportError:
        from kept.node.kafka.codec.python_fetch import encode, parse

__all__ = [
    "FLEXIBLE",
    "MAX_VERSION",
    "MIN_VERSION",
    "SESSIONS",
    "TOPIC_IDS",
    "FetchPartition",
    "FetchRequest",
    "PartitionData",
    "Segment",
    "encode",
    "parse",
]
