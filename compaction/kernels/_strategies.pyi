from array import array
from collections.abc import Callable, Iterable
from typing import Any

from kept.compaction.cleaner.key_tracker import KeyTracker
from kept.compaction.strategy import Rule
from kept.storage.records import Record
from kept.storage.records.header import Buffer

class RuleMap:
    """What the rules need of each key of a range of hash classes, ``low..high``.

    ``rules``: the first whose prefix a key has counts, the last has none. ``key`` is 16 random
    bytes. When it is full it gives up the upper half of its classes; ``full``: not even one class
    fits, so that what it says is worth nothing.
    """

    slots: int
    words: int
    capacity: int
    size: int
    low: int
    high: int
    full: bool
    def __init__(
        self, slots: int, load_factor: float, key: bytes, rules: Iterable[Rule], words: int
    ) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    def begin(self, low: int, high: int) -> None: ...

class RuleScan:
    """The records of one segment, put into a map or (``keep``) asked of it."""

    base_offset: int
    special: bool
    fault: str | None
    def __init__(
        self,
        base_offset: int,
        map: RuleMap,
        *,
        first: int = ...,
        keep: bool = ...,
        watch: KeyTracker | None = ...,
    ) -> None: ...
    def feed(self, data: Buffer) -> int: ...
    def feed_batch(self, header: Buffer, area: Buffer, aborted: bool) -> None: ...
    def skip(self, offset: int, next_offset: int, size_bytes: int, present: bool) -> None: ...
    def kept(self) -> array[int]: ...

class RecordScan:
    """The records of one segment as objects, for ``use``, a batch at a time."""

    base_offset: int
    special: bool
    fault: str | None
    def __init__(
        self,
        base_offset: int,
        use: Callable[[list[Record]], Any],
        *,
        first: int = ...,
        wanted: array[int] | None = ...,
    ) -> None: ...
    def feed(self, data: Buffer) -> int: ...
    def feed_batch(self, header: Buffer, area: Buffer, aborted: bool) -> None: ...
    def skip(self, offset: int, next_offset: int, size_bytes: int, present: bool) -> None: ...

def class_of(hash_key: bytes, key: bytes, classes: int) -> int: ...
