"""Keep the first and the newest record of every key; a tombstone starts the history anew."""

from __future__ import annotations

from kept.compaction.strategy import Only
from kept.storage.records import Record
from kept.storage.types import LogConfig


class FirstAndLatest:
    """A compaction strategy: see README.md beside this file."""

    def __init__(self, config: LogConfig | None = None) -> None:
        """Made with the settings of the topic; own settings are in ``config.raw``."""
        self.config = config

    def key(self, record: Record) -> bytes:
        """What the record is about."""
        return record.key or b""

    def init(self, max_keys: int) -> tuple[int, dict[bytes, tuple[int, int]]]:
        """Room for ``max_keys`` keys: (first offset, newest offset) of each."""
        return max_keys, {}

    def reduce(
        self, state: tuple[int, dict[bytes, tuple[int, int]]], key: bytes, record: Record
    ) -> bool:
        """Take in one record; True says that there is no room for a new key."""
        max_keys, found = state
        if key not in found and len(found) >= max_keys:
            return True
        first = record.offset
        if key in found and record.value is not None:
            first = found[key][0]
        found[key] = (first, record.offset)
        return False

    def collect(self, state: tuple[int, dict[bytes, tuple[int, int]]]) -> dict[bytes, Only]:
        """What stays of each key."""
        return {key: Only(frozenset(offsets)) for key, offsets in state[1].items()}
