"""The compiled kernels of compaction: ``_kernel.pyx`` and ``_strategies.pyx``.

There is no other form of them in the product: without them a node serves its clients and cleans
nothing, and whatever uses one raises ConfigurationError (:mod:`kept.kernels`). ``tests/reference``
has each in plain Python.

**Offset map.** Open addressing with 16-byte slots: an 88-bit tag of the key's hash and a 40-bit
offset, relative to where the map begins. The hash is keyed, with a fresh random key per pass: a
collision would drop a live record, so no producer may be able to construct one.

**Segment scan.** Reads the batches of one segment and gathers what is there; in mode ``MAP`` it
also puts keys into a map, in mode ``LOOKUP`` it finds out which records the map does not supersede.

**Rule map, rule scan.** The built-in strategies over a range of the :data:`CLASSES` of key hashes.
**Record scan.** Hands records as objects to a strategy that is not built in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kept import kernels
from kept.compaction.strategy import Rule, RuleKind

if TYPE_CHECKING:
    from kept.compaction.kernels._kernel import OffsetMap, SegmentScan
    from kept.compaction.kernels._strategies import RecordScan, RuleMap, RuleScan, class_of
else:
    _SURVEY: Final = "compaction.kernels._kernel"
    _RULES: Final = "compaction.kernels._strategies"
    OffsetMap = kernels.load(_SURVEY, "OffsetMap")
    SegmentScan = kernels.load(_SURVEY, "SegmentScan")
    RecordScan = kernels.load(_RULES, "RecordScan")
    RuleMap = kernels.load(_RULES, "RuleMap")
    RuleScan = kernels.load(_RULES, "RuleScan")
    class_of = kernels.load(_RULES, "class_of")

STATS: Final = 0
MAP: Final = 1
LOOKUP: Final = 2
"""Modes of a segment scan."""

CLASSES: Final = 1 << 32
"""Classes of key hashes that a rule map can be given a range of."""
WORD_BYTES: Final = 8
_WORDS: Final = {
    RuleKind.LATEST: 3,
    RuleKind.LATEST_N: 4,
    RuleKind.TIMESTAMP: 4,
    RuleKind.VERSION: 6,
}

__all__ = [
    "CLASSES",
    "LOOKUP",
    "MAP",
    "STATS",
    "WORD_BYTES",
    "OffsetMap",
    "RecordScan",
    "RuleMap",
    "RuleScan",
    "SegmentScan",
    "class_of",
    "slot_words",
]


def slot_words(rules: Iterable[Rule]) -> int:
    """Words of :data:`WORD_BYTES` in a slot of a rule map for these rules."""
    return max(_WORDS[rule.kind] for rule in rules)
