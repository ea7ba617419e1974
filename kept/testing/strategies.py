"""The test kit for compaction strategies: see :mod:`kept.compaction.strategy_kit`."""

from __future__ import annotations

from kept.compaction.strategy_kit import (
    LAWS,
    check_strategy,
    clean,
    random_record,
    winners,
)

__all__ = ["LAWS", "check_strategy", "clean", "random_record", "winners"]
