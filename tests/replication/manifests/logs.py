"""Logs and manifest bodies reduced to what compaction is about: keys, tombstones, offsets.

A record is one batch. ``key`` EMPTY is a batch that was kept although its record is gone. Rules of
compaction that the cores do not decide are here (rules 5, 8, 13), with a switch for each mistake.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from kept.replication.manifests_events import ManifestRef

EMPTY = -1
KEYS = 2
_WIRE = struct.Struct(">qib??")

KEEP, HORIZON, EMPTIED = 0, 1, 2
"""What a manifest says of a surviving offset."""


class Violation(AssertionError):
    """A property does not hold; the first word names it."""


class Rec(NamedTuple):
    offset: int
    epoch: int
    key: int
    live: bool
    horizon: bool = False

    def encode(self) -> bytes:
        return _WIRE.pack(*self)

    @staticmethod
    def decode(data: bytes) -> Rec:
        return Rec(*_WIRE.unpack(data))


@dataclass(frozen=True, eq=False)
class Body:
    """A manifest: what survives below ``end_offset``."""

    ref: ManifestRef
    generation: int
    end_offset: int
    clean_to: int
    survivors: dict[int, int]
    low: int = 0
    """First dirty offset of the pass; for mistakes that list survivors from there only."""
    removed: frozenset[int] = frozenset()

    def __deepcopy__(self, memo: object) -> Body:
        return self


def log_end(log: list[Rec]) -> int:
    return log[-1].offset + 1 if log else 0


def view(log: list[Rec], end: int) -> dict[int, Rec]:
    """The table that a reader up to ``end`` sees."""
    found = {}
    for rec in log:
        if rec.offset >= end:
            break
        if rec.key != EMPTY:
            found[rec.key] = rec
    return found


def decide(
    log: list[Rec], start: int, end: int, previous_end: int, *, expire: bool, keep_last: bool = True
) -> tuple[dict[int, int], frozenset[int], int]:
    """Survivors of a pass over ``start..end``: (survivors, removed, b)."""
    latest = {rec.key: rec.offset for rec in log if start <= rec.offset < end and rec.key != EMPTY}
    survivors: dict[int, int] = {}
    removed = []
    for rec in log:
        if rec.offset >= end:
            break
        wins = rec.key != EMPTY and rec.offset >= latest.get(rec.key, -1)
        if wins and rec.live:
            survivors[rec.offset] = KEEP
        elif wins and not expire:
            survivors[rec.offset] = HORIZON
        elif rec.offset == end - 1 and keep_last:
            survivors[rec.offset] = EMPTIED
        else:
            removed.append(rec.offset)
    for rec in log:
        if end <= rec.offset < previous_end:
            survivors[rec.offset] = as_it_is(rec)
    return survivors, frozenset(removed), max(end, previous_end)


def as_it_is(rec: Rec) -> int:
    if rec.key == EMPTY:
        return EMPTIED
    return HORIZON if rec.horizon else KEEP


def apply(log: list[Rec], body: Body, low: int, high: int) -> list[Rec]:
    """The log with ``low..high`` brought to the manifest."""
    out = []
    for rec in log:
        if not low <= rec.offset < min(high, body.end_offset):
            out.append(rec)
            continue
        what = body.survivors.get(rec.offset)
        if what == EMPTIED:
            out.append(Rec(rec.offset, rec.epoch, EMPTY, live=False))
        elif what is not None:
            out.append(rec._replace(horizon=what == HORIZON))
    return out


def missing(log: list[Rec], body: Body) -> int | None:
    """The first survivor that the log does not have."""
    there = {rec.offset: rec for rec in log}
    for offset in sorted(body.survivors):
        rec = there.get(offset)
        if rec is None or (rec.key == EMPTY and body.survivors[offset] != EMPTIED):
            return offset
    return None


@dataclass
class Committed:
    """What was acknowledged, as one who saw it all would know it.

    ``live_since``: where a key that was never deleted since first had a value.
    """

    end: int = 0
    table: dict[int, Rec] = field(default_factory=dict)
    live_since: dict[int, int] = field(default_factory=dict)

    def advance(self, log: list[Rec], end: int) -> None:
        for rec in log:
            if self.end <= rec.offset < end and rec.key != EMPTY:
                self.table[rec.key] = rec
                if rec.live:
                    self.live_since.setdefault(rec.key, rec.offset)
                else:
                    self.live_since[rec.key] = 1 << 60
        self.end = max(self.end, end)
