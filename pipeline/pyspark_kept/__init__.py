"""Spark looks for a ``DefaultSource`` in packages named ``pyspark_…``: ``format("kept")``."""

from kept.pipeline.source import KeptSource as DefaultSource

__all__ = ["DefaultSource"]
