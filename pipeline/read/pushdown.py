"""Filters that narrow a read: equality and ranges on topic, partition, offset and timestamp.

Topic, partition and offset filters are met exactly, so Spark need not look at them again. For a
timestamp the brokers know the first offset at or after it, before which every record is older;
records after it may be older too, so Spark still filters. An upper bound on time narrows nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Final

from kept.pipeline.read.plan import ReadBounds

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def push(bounds: ReadBounds, filters: Iterable[Any]) -> tuple[ReadBounds, list[Any]]:
    """The bounds with these filters, and the filters that Spark must still apply.

    Filters are PySpark's, known by their class's name; what is not understood is left to Spark.
    """
    left = []
    for filter_ in filters:
        narrowed = _narrow(bounds, filter_)
        if narrowed is None:
            left.append(filter_)
            continue
        bounds = narrowed
        if filter_.attribute == ("timestamp",):
            left.append(filter_)
    return bounds, left


def _narrow(bounds: ReadBounds, one: Any) -> ReadBounds | None:
    """The narrower bounds; None for a filter that narrows nothing."""
    column = getattr(one, "attribute", ())
    kind = type(one).__name__
    value: Any = getattr(one, "value", None)
    if column in (("topic",), ("partition",)) and kind in ("EqualTo", "In"):
        values = value if kind == "In" else (value,)
        if column == ("topic",):
            return bounds.narrowed(topics=values)
        return bounds.narrowed(partitions=values)
    if column == ("offset",) and isinstance(value, int):
        return _offsets(bounds, kind, value)
    lower = kind in ("GreaterThan", "GreaterThanOrEqual", "EqualTo")
    if lower and column == ("timestamp",) and isinstance(value, datetime.datetime):
        return bounds.narrowed(min_timestamp=milliseconds(value))
    return None


def _offsets(bounds: ReadBounds, kind: str, value: int) -> ReadBounds | None:
    if kind == "EqualTo":
        return bounds.narrowed(first=value, end=value + 1)
    if kind == "GreaterThan":
        return bounds.narrowed(first=value + 1)
    if kind == "GreaterThanOrEqual":
        return bounds.narrowed(first=value)
    if kind == "LessThan":
        return bounds.narrowed(end=value)
    if kind == "LessThanOrEqual":
        return bounds.narrowed(end=value + 1)
    return None


def milliseconds(value: datetime.datetime) -> int:
    """A timestamp of Spark's (one without a zone is UTC) in whole milliseconds, rounded down."""
    moment = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // datetime.timedelta(milliseconds=1)
