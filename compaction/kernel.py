"""Which of the two kernels runs: ``_kernel.pyx`` if it was compiled, else its twin
``offset_map.py``.

``KEPT_KERNEL=python`` in the environment forces the twin. ``KERNEL`` says which one it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or os.environ.get("KEPT_KERNEL") == "python":
    from kept.compaction.offset_map import FACTS, KERNEL, LOOKUP, MAP, OffsetMap, SegmentScan
else:
    try:
        from kept.compaction._kernel import FACTS, KERNEL, LOOKUP, MAP, OffsetMap, SegmentScan
    except ImportError:
        from kept.compaction.offset_map import FACTS, KERNEL, LOOKUP, MAP, OffsetMap, SegmentScan

__all__ = ["FACTS", "KERNEL", "LOOKUP", "MAP", "OffsetMap", "SegmentScan"]
