"""Places in a log as users type them: offsets, counts from the end, and times."""

from __future__ import annotations

import datetime
import enum
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kept.client.consume import positions
from kept.storage.types import decimal_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kept.client.client import Client
    from kept.storage.types import IsolationLevel, TopicPartition

_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AGO: Final = re.compile(r"-([0-9]{1,9})([smhd])", re.ASCII)


def time_ms(text: str, now_ms: int) -> int:
    """A time as milliseconds since 1970: ``2026-01-31T12:00:00Z`` (without a zone local time),
    ``1767225600000``, or ``-90m`` (s, m, h, d) before ``now_ms``. ValueError for any other text.
    """
    if ago := _AGO.fullmatch(text):
        return now_ms - int(ago[1]) * _UNITS_MS[ago[2]]
    if (milliseconds := decimal_number(text)) is not None:
        return milliseconds
    try:
        return round(datetime.datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time: give one such as 2026-01-31T12:00:00Z, -90m (s, m, h, d ago) or "
            "milliseconds since 1970"
        ) from None


class PositionKind(enum.Enum):
    """What the number of a :class:`Position` counts."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    BEFORE_END = "before the end"
    TIME = "time"


class Position(msgspec.Struct, frozen=True):
    """A place in the log of any partition. ``number``: an offset, how many offsets before the end,
    or milliseconds since 1970.
    """

    kind: PositionKind
    number: int = 0


EARLIEST: Final = Position(PositionKind.EARLIEST)
LATEST: Final = Position(PositionKind.LATEST)
_NAMES: Final = {
    "earliest": EARLIEST,
    "beginning": EARLIEST,
    "start": EARLIEST,
    "latest": LATEST,
    "end": LATEST,
}


def position(text: str, now_ms: int) -> Position:
    """``earliest``, ``latest``, an offset, ``-N`` from the end, or ``@TIME``; without ``@``, too,
    unless it is in milliseconds. ValueError for any other text.
    """
    if text in _NAMES:
        return _NAMES[text]
    if text.startswith("@"):
        return Position(PositionKind.TIME, time_ms(text[1:], now_ms))
    if (number := decimal_number(text)) is not None:
        return Position(PositionKind.OFFSET, number)
    if text.startswith("-") and (number := decimal_number(text[1:])) is not None:
        return Position(PositionKind.BEFORE_END, number)
    with suppress(ValueError):
        return Position(PositionKind.TIME, time_ms(text, now_ms))
    raise ValueError(
        f"{text!r} is neither an offset, -N (the last N of each partition), @TIME, earliest nor "
        "latest"
    )


def offsets_at(
    client: Client,
    partitions: Iterable[TopicPartition],
    wanted: Position,
    isolation: IsolationLevel,
) -> dict[TopicPartition, int]:
    """The offset of ``wanted`` in each partition, none above its end; where no record is as new as
    a time, the end. An OFFSET is taken as it is.
    """
    tps = list(partitions)
    if wanted.kind is PositionKind.OFFSET:
        return dict.fromkeys(tps, wanted.number)
    if wanted.kind is PositionKind.EARLIEST:
        return {
            tp: at.offset
            for tp, at in client.list_offsets(dict.fromkeys(tps, positions.EARLIEST)).items()
        }
    ends = {
        tp: at.offset
        for tp, at in client.list_offsets(dict.fromkeys(tps, positions.LATEST), isolation).items()
    }
    if wanted.kind is PositionKind.LATEST:
        return ends
    if wanted.kind is PositionKind.TIME:
        located = client.list_offsets(dict.fromkeys(tps, wanted.number), isolation)
        return {
            tp: ends[tp] if at.offset < 0 else min(at.offset, ends[tp])
            for tp, at in located.items()
        }
    starts = client.list_offsets(dict.fromkeys(tps, positions.EARLIEST))
    return {tp: max(starts[tp].offset, ends[tp] - wanted.number) for tp in tps}


class PositionType(click.ParamType):  # type: ignore[type-arg]
    """What :func:`position` takes, as a :class:`Position`."""

    name = "position"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Position:
        """The position; a usage error for any other text."""
        if isinstance(value, Position):
            return value
        try:
            return position(str(value), _now_ms())
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TimeType(click.ParamType):  # type: ignore[type-arg]
    """What :func:`time_ms` takes, with or without an ``@`` before it, as milliseconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Milliseconds since 1970; a usage error for any other text, and for the future."""
        if isinstance(value, int):
            return value
        now_ms = _now_ms()
        try:
            at = time_ms(str(value).removeprefix("@"), now_ms)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if at > now_ms:
            self.fail(f"{value!r} is in the future", param, ctx)
        return at


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
