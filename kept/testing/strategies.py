"""The test kit for compaction strategies: see :mod:`kept.compaction.strategies.kit`."""

from __future__ import annotations

from kept.compaction.strategies.kit import LAWS, check_strategy, clean, random_record, winners

__all__ = ["LAWS", "check_strategy", "clean", "random_record", "winners"]
