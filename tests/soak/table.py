"""What a compacted topic promises about each key, and what a reader of all of it must have seen."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

KEPT: Final = 3
"""Records of a key that a topic of strategy latest-n keeps."""


class Read(NamedTuple):
    """A record that was read: the number in its value (None: a tombstone)."""

    number: int | None
    timestamp: int


@dataclass(slots=True)
class Key:
    """What was sent of one key: the newest numbers (None: a tombstone), the one with the highest
    timestamp, and which number came first after the last tombstone.
    """

    newest: deque[int | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    best: tuple[int, int] = (-1, -1)
    alive_from: int = 0

    def sent(self, number: int, timestamp: int, *, tombstone: bool) -> None:
        """A record was sent; numbers rise."""
        if tombstone:
            self.newest.clear()
            self.alive_from = number
            self.best = (-1, -1)
        self.newest.append(None if tombstone else number)
        if not tombstone and timestamp >= self.best[0]:
            self.best = (timestamp, number)

    @property
    def deleted(self) -> bool:
        """Its newest record is a tombstone."""
        return bool(self.newest) and self.newest[-1] is None

    def promised(self, strategy: str) -> list[int]:
        """The numbers that must be there, ascending."""
        if strategy == "highest-version":
            return [self.best[1]] if self.best[1] >= 0 and not self.deleted else []
        alive = [number for number in self.newest if number is not None]
        return alive if strategy == "latest-n" else alive[-1:]


def strategy_of(strategy: str, key: str) -> str:
    """The strategy that counts for a key."""
    if strategy != "by-key-prefix":
        return strategy
    return {"n": "latest-n", "v": "highest-version"}.get(key[0], "latest")


PREFIXES: Final = f"n=latest-n:{KEPT},v=highest-version"


def wrong(strategy: str, key: Key, read: list[Read], *, cleaned: bool) -> str | None:
    """What contradicts the promise; None when nothing does. ``cleaned``: nothing else is left."""
    numbers = [one.number for one in read if one.number is not None]
    promised = key.promised(strategy)
    last_tombstone = max((i for i, one in enumerate(read) if one.number is None), default=-1)
    back = [
        one.number
        for one in read[last_tombstone + 1 :]
        if one.number is not None and one.number < key.alive_from
    ]
    if back:
        return f"{back} were deleted before {key.alive_from} and are back"
    if strategy == "highest-version":
        missing = [number for number in promised if number not in numbers]
    else:
        missing = [] if numbers[len(numbers) - len(promised) :] == promised else promised
        if key.deleted and read and read[-1].number is not None:
            return f"it was deleted, and {read[-1].number} is its newest"
    if missing:
        return f"{missing} must be the newest, found {numbers[-5:]}"
    if numbers != sorted(set(numbers)):
        return f"{numbers} do not rise"
    if cleaned and numbers != promised:
        return f"only {promised} are to be left, there are {numbers[:10]}"
    return None
