"""The built-in strategies over a whole log: the specification of
``compaction/kernels/_strategies.pyx``.

A :class:`RuleMap` holds, for each key of a range of hash classes, what its rule needs; there are
2^32 classes. A :class:`RuleScan` puts the records of one segment into it. When the map is full it
gives up the upper half of its classes: what is left was seen from the first record on, and further
scans take the rest. A second scan of the segments, with ``keep``, asks the finished map which
records stay. A slot needs a word for each of these, at any ``n``:

- the key's hash, 128 bits (keyed, see ``offset_map.py``): two words;
- the offset of the winner; for ``latest-n`` how many records of the key must go (all stay after
  these, so the second scan counts down);
- ``latest-n``: how many stay; by timestamp: the winner's; by a header: its version, 3 words.

A :class:`RecordScan` hands the records to a strategy that is not built in, as objects, a batch at a
time. Both scans leave compressed, transactional and control batches to the caller, as a
``SegmentScan`` does.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from kept.compaction.cleaner.key_tracker import KeyTracker
from kept.compaction.kernels.kernel import CLASSES, WORD_BYTES
from kept.compaction.strategy import Rule, RuleKind, version_number
from kept.storage.errors import CorruptMessage
from kept.storage.records import Record
from kept.storage.records.build import read_varint, wrap64
from kept.storage.records.header import BatchHeader, Buffer, read_header
from kept.storage.types import TimestampType
from tests.reference.batches import Batches


class RuleMap:
    """The map of the built-in strategies in plain Python. ``rules``: the first whose prefix a key
    has counts, the last has none.

    ``key`` is 16 random bytes; ``low..high`` are the classes it takes. ``full``: not even one class
    fits, so that what it says is worth nothing.
    """

    def __init__(
        self, slots: int, load_factor: float, key: bytes, rules: Iterable[Rule], words: int
    ) -> None:
        if len(key) != 16:
            raise ValueError("the hash key has 16 bytes")
        self.slots, self.words = slots, words
        self.capacity = min(int(slots * load_factor), slots - 1) if slots else 0
        self.low, self.high = 0, CLASSES
        self.full = False
        self._key, self._rules = key, tuple(rules)
        self._slots: dict[bytes, _Slot] = {}

    @property
    def size(self) -> int:
        """Keys in the map."""
        return len(self._slots)

    @property
    def size_bytes(self) -> int:
        """Memory of the table."""
        return self.slots * self.words * WORD_BYTES

    def begin(self, low: int, high: int) -> None:
        """Forget everything; take the keys whose class is in ``low..high``."""
        self._slots = {}
        self.low, self.high, self.full = low, high, False

    def _class_of(self, key: bytes) -> int:
        digest = hashlib.blake2b(key, digest_size=4, key=self._key).digest()
        return int.from_bytes(digest, "big")

    def _rule_of(self, key: bytes) -> Rule:
        return next(rule for rule in self._rules if key.startswith(rule.prefix))

    def _narrow(self, class_: int) -> None:
        """Give up the upper half of the classes, until there is room or ``class_`` is given up."""
        while self.size >= self.capacity and class_ < self.high:
            if self.high - self.low < 2:
                self.full = True
                return
            self.high = self.low + (self.high - self.low) // 2
            self._slots = {k: s for k, s in self._slots.items() if s.class_ < self.high}

    def add(self, record: Record) -> None:
        """Take in a record, if its class is taken and there is room."""
        key = record.key or b""
        class_ = self._class_of(key)
        if not self.low <= class_ < self.high:
            return
        slot = self._slots.get(key)
        if slot is None and self.size >= self.capacity:
            self._narrow(class_)
            if self.full or class_ >= self.high:
                return
        rule = self._rule_of(key)
        if slot is None:
            slot = self._slots[key] = _Slot(class_)
        slot.add(rule, record)

    def keeps(self, record: Record) -> bool:
        """Whether a record stays; ask in the order of the log, and about every record."""
        key = record.key or b""
        slot = self._slots.get(key)
        if slot is None:
            return False
        if self._rule_of(key).kind != RuleKind.LATEST_N:
            return slot.winner == record.offset
        slot.going -= 1
        return slot.going < 0


class _Slot:
    """What is known of a key."""

    __slots__ = ("class_", "going", "staying", "version", "winner")

    def __init__(self, class_: int) -> None:
        self.class_ = class_
        self.going = self.staying = 0
        self.winner = -1
        self.version: tuple[int, int] | None = None

    def add(self, rule: Rule, record: Record) -> None:
        """Take in a record by its rule."""
        if rule.kind == RuleKind.LATEST:
            self.winner = record.offset
        elif rule.kind == RuleKind.LATEST_N:
            if record.value is None:
                self.going += self.staying
                self.staying = 1
            elif self.staying < rule.n:
                self.staying += 1
            else:
                self.going += 1
        else:
            version = _version(rule, record)
            if self.version is None or version >= self.version:
                self.version, self.winner = version, record.offset


def _version(rule: Rule, record: Record) -> tuple[int, int]:
    if rule.kind == RuleKind.TIMESTAMP:
        return (1, record.timestamp)
    name = rule.header.decode()
    found = next((value for key, value in reversed(record.headers) if key == name), None)
    number = None if found is None else version_number(found)
    return (0, 0) if number is None else (1, number)


class RuleScan(Batches):
    """The records of one segment, from ``first`` on, put into a map or (``keep``) asked of it, and
    noted in ``watch``.
    """

    def __init__(
        self,
        base_offset: int,
        map: RuleMap,  # noqa: A002
        *,
        first: int = 0,
        keep: bool = False,
        watch: KeyTracker | None = None,
    ) -> None:
        super().__init__()
        self.base_offset = base_offset
        self._first, self._map, self._keep, self._watch = first, map, keep, watch
        self._kept = array("I")

    def feed_batch(self, header: Buffer, area: Buffer, aborted: bool) -> None:
        """One batch that ``feed`` left to the caller: its header, its records inflated."""
        if not aborted:
            self._batch(read_header(header), memoryview(area))

    def skip(self, offset: int, next_offset: int, size_bytes: int, present: bool) -> None:
        """A control batch: no strategy sees it."""

    def _batch(self, header: BatchHeader, area: memoryview) -> None:
        found, self.fault = _keyed(header, area, self._first)
        for record in found:
            if self._watch is not None:
                self._watch.note(record.key or b"", record.offset)
            if not self._keep:
                self._map.add(record)
            elif self._map.keeps(record):
                self._kept.append(record.offset - self.base_offset)

    def kept(self) -> array[int]:
        """Records that stay, relative to the base, ascending."""
        return self._kept


class RecordScan(Batches):
    """The records of one segment, from ``first`` on, for ``use``, a batch at a time.

    ``wanted`` (relative to the base, ascending) limits them to these.
    """

    def __init__(
        self,
        base_offset: int,
        use: Callable[[list[Record]], Any],
        *,
        first: int = 0,
        wanted: array[int] | None = None,
    ) -> None:
        super().__init__()
        self.base_offset = base_offset
        self._first, self._use = first, use
        self._wanted = None if wanted is None else set(wanted)

    def feed_batch(self, header: Buffer, area: Buffer, aborted: bool) -> None:
        """See :meth:`RuleScan.feed_batch`."""
        if not aborted:
            self._batch(read_header(header), memoryview(area))

    def skip(self, offset: int, next_offset: int, size_bytes: int, present: bool) -> None:
        """A control batch: no strategy sees it."""

    def _batch(self, header: BatchHeader, area: memoryview) -> None:
        found, self.fault = _keyed(header, area, self._first)
        if self._wanted is not None:
            found = [r for r in found if r.offset - self.base_offset in self._wanted]
        if found:
            self._use(found)


def _keyed(header: BatchHeader, area: memoryview, first: int) -> tuple[list[Record], str | None]:
    """The records with a key from ``first`` on, and what is damaged."""
    try:
        found = _records(header, bytes(area))
    except (CorruptMessage, ValueError):
        return [], "a record is damaged"
    if found is None:
        return [], "record count does not match"
    return [r for r in found if r.key is not None and r.offset >= first], None


def _records(header: BatchHeader, area: bytes) -> list[Record] | None:
    """The records in an area; None when there are more or fewer than the header says."""
    found = []
    at, end = 0, len(area)
    for _ in range(header.record_count):
        length, at = read_varint(area, at, end)
        after = at + length
        if length < 6 or after > end:
            raise ValueError("a record's length is wrong")
        timestamp, at = read_varint(area, at + 1, after, 64)
        delta, at = read_varint(area, at, after)
        key, at = _field(area, at, after)
        value, at = _field(area, at, after)
        appended = header.timestamp_type == TimestampType.LOG_APPEND_TIME
        found.append(
            Record(
                header.base_offset + delta,
                header.max_timestamp if appended else wrap64(header.base_timestamp + timestamp),
                key,
                value,
                _headers(area, at, after),
            )
        )
        at = after
    return found if at == end else None


def _field(area: bytes, at: int, after: int) -> tuple[bytes | None, int]:
    size, at = read_varint(area, at, after)
    if size > after - at:
        raise ValueError("a field is cut off")
    return (None, at) if size < 0 else (area[at : at + size], at + size)


def _headers(area: bytes, at: int, after: int) -> tuple[tuple[str, bytes | None], ...]:
    found = []
    count, at = read_varint(area, at, after)
    if not 0 <= count <= after - at:
        raise ValueError("headers are cut off")
    for _ in range(count):
        name, at = _field(area, at, after)
        if name is None:
            raise ValueError("a header has no key")
        value, at = _field(area, at, after)
        found.append((str(name, "utf-8", "replace"), value))
    if at != after:
        raise ValueError("a record's length is wrong")
    return tuple(found)


def class_of(hash_key: bytes, key: bytes, classes: int) -> int:
    """Which of the disjoint classes a key is in."""
    digest = hashlib.blake2b(key, digest_size=8, key=hash_key).digest()
    return int.from_bytes(digest, "big") % classes
