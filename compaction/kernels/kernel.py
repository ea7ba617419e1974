"""Which kernels run: ``_kernel.pyx`` and ``_strategies.pyx`` if they were compiled, else their
twins ``offset_map.py`` and ``rule_map.py``.

``KEPT_KERNEL=python`` in the environment forces the twin. ``KERNEL`` says which one it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or os.environ.get("KEPT_KERNEL") == "python":
    from kept.compaction.kernels.offset_map import (
        KERNEL,
        LOOKUP,
        MAP,
        STATS,
        OffsetMap,
        SegmentScan,
    )
    from kept.compaction.kernels.rule_map import RecordScan, RuleMap, RuleScan, class_of
else:
    try:
        from kept.compaction.kernels._kernel import (
            KERNEL,
            LOOKUP,
            MAP,
            STATS,
            OffsetMap,
            SegmentScan,
        )
    except ImportError:
        from kept.compaction.kernels.offset_map import (
            KERNEL,
            LOOKUP,
            MAP,
            STATS,
            OffsetMap,
            SegmentScan,
        )
    try:
        from kept.compaction.kernels._strategies import RecordScan, RuleMap, RuleScan, class_of
    except ImportError:
        from kept.compaction.kernels.rule_map import RecordScan, RuleMap, RuleScan, class_of

__all__ = [
    "KERNEL",
    "LOOKUP",
    "MAP",
    "STATS",
    "OffsetMap",
    "RecordScan",
    "RuleMap",
    "RuleScan",
    "SegmentScan",
    "class_of",
]
