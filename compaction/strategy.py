"""Strategies: which records of a key survive.

The contract comes from streambed-logged: a strategy is fed the records of a log in ascending order
of offset and ends with a verdict per key.

- ``key(record)`` names the thing that records are about; usually the record's key.
- ``init(max_keys)`` makes the state of one scan, which holds at most ``max_keys`` keys.
- ``reduce(state, key, record)`` takes in one record. It returns ``True`` (*MaxKeysReached*) when
  the key is new and there is no room for it; keys it knows are still updated then.
- ``collect(state)`` gives a verdict per key: :class:`From` or :class:`Only`.

When a scan reaches the maximum the engine starts anew with ``k`` scans over disjoint classes of key
hashes, so that every verdict is made from *all* records of its key (rule 4a). Whatever a strategy
says, a winning tombstone drops all older records of its key: otherwise they would come back when
it expires. The winner is the newest record that the verdict keeps; every key must have one, or the
pass is given up (:class:`StrategyFailed`).

A strategy runs on the leader only, so one that is not deterministic cannot make replicas differ.
Your own class is found by its entry point in the group ``kept.compaction.strategies`` and made with
the topic's :class:`~kept.storage.types.LogConfig` as its only argument.
``kept.testing.strategies`` tests it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

from kept.storage.errors import InvalidConfig, KeptError
from kept.storage.records import Record
from kept.storage.types import MAX_INT64, LogConfig, decimal_number

ENTRY_POINT_GROUP: Final = "kept.compaction.strategies"
MAX_VERSION_DIGITS: Final = 40
"""A longer version is none: reading it must not cost a cleaner its time."""
MaxKeysReached = bool
"""Result of ``reduce``: a record was refused because its key is new and the state is full."""


class StrategyFailed(KeptError):
    """A strategy broke the law that one record of every key stays. The pass is given up."""


@dataclass(frozen=True, slots=True)
class From:
    """Keep the records of the key at ``offset`` and above."""

    offset: int


@dataclass(frozen=True, slots=True)
class Only:
    """Keep exactly these records of the key."""

    offsets: frozenset[int]


Verdict = From | Only


class Strategy(Protocol):
    """Decides which records of a key survive. Implementations are stateless: all state is what
    ``init`` returned.
    """

    def key(self, record: Record) -> bytes:
        """What the record is about. It has a key: records without one are dropped before."""

    def init(self, max_keys: int) -> Any:
        """An empty state for at most ``max_keys`` keys."""

    def reduce(self, state: Any, key: bytes, record: Record) -> MaxKeysReached:
        """Take in one record; True when its key is new and there is no room for it."""

    def collect(self, state: Any) -> Mapping[bytes, Verdict]:
        """What to keep of each key."""


@dataclass(slots=True)
class _Counted:
    """Keys with what is known of each, and how many may be there."""

    max_keys: int
    keys: dict[bytes, Any]


class _ByRecordKey:
    """What the built-in strategies share: the record's own key, a dictionary as state."""

    def key(self, record: Record) -> bytes:
        """The record's key."""
        return record.key or b""

    def init(self, max_keys: int) -> _Counted:
        """No keys."""
        return _Counted(max_keys, {})


class Latest(_ByRecordKey):
    """The newest record of each key: Kafka's compaction. The engine runs it in the kernel's offset
    map; this class is for composites and for the test kit.
    """

    def reduce(self, state: _Counted, key: bytes, record: Record) -> MaxKeysReached:
        """Note the offset."""
        if key not in state.keys and len(state.keys) >= state.max_keys:
            return True
        state.keys[key] = record.offset
        return False

    def collect(self, state: _Counted) -> Mapping[bytes, Verdict]:
        """From the newest record on."""
        return {key: From(offset) for key, offset in state.keys.items()}


class LatestN(_ByRecordKey):
    """The newest ``n`` records of each key. A tombstone ends a history: nothing older is kept."""

    def __init__(self, n: int) -> None:
        if n < 1:
            raise InvalidConfig(f"kept.compaction.latest.n is {n}, must be at least 1")
        self.n = n

    def reduce(self, state: _Counted, key: bytes, record: Record) -> MaxKeysReached:
        """Note the offset, and forget the oldest beyond ``n``."""
        offsets = state.keys.get(key)
        if offsets is None:
            if len(state.keys) >= state.max_keys:
                return True
            offsets = state.keys[key] = deque(maxlen=self.n)
        if record.value is None:
            offsets.clear()
        offsets.append(record.offset)
        return False

    def collect(self, state: _Counted) -> Mapping[bytes, Verdict]:
        """From the n-th newest record on."""
        return {key: From(offsets[0]) for key, offsets in state.keys.items()}


class HighestVersion(_ByRecordKey):
    """The record with the highest version of each key; of equal versions the newest record.

    The version is a header (decimal digits, or a big-endian integer of 4 or 8 bytes), a record
    without it is older than all that have one; without a header name it is the record's timestamp.
    """

    def __init__(self, header: str | None = None) -> None:
        self.header = header

    def version(self, record: Record) -> tuple[int, int]:
        """What the records of a key are ordered by."""
        if self.header is None:
            return (1, record.timestamp)
        newest = None
        for name, value in record.headers:
            if name == self.header:
                newest = value
        number = None if newest is None else version_number(newest)
        return (0, 0) if number is None else (1, number)

    def reduce(self, state: _Counted, key: bytes, record: Record) -> MaxKeysReached:
        """Keep the higher version."""
        best = state.keys.get(key)
        if best is None and len(state.keys) >= state.max_keys:
            return True
        version = self.version(record)
        if best is None or version >= best[0]:
            state.keys[key] = (version, record.offset)
        return False

    def collect(self, state: _Counted) -> Mapping[bytes, Verdict]:
        """That record alone."""
        return {key: Only(frozenset((best[1],))) for key, best in state.keys.items()}


def version_number(value: bytes) -> int | None:
    """The number in a version header; None when it is none."""
    if value.isdigit():
        return int(value) if len(value) <= MAX_VERSION_DIGITS else None
    if len(value) in (4, 8):
        return int.from_bytes(value, "big", signed=True)
    return None


class ByKeyPrefix(_ByRecordKey):
    """Another strategy per prefix of the key; the longest matching one counts, else ``latest``."""

    def __init__(self, parts: Mapping[bytes, Strategy]) -> None:
        self._parts = sorted(parts.items(), key=lambda item: -len(item[0]))
        self._parts.append((b"", Latest()))

    @property
    def parts(self) -> Sequence[tuple[bytes, Strategy]]:
        """(prefix, strategy) in the order in which they are tried; the last prefix is empty."""
        return self._parts

    def _part(self, key: bytes) -> int:
        return next(i for i, (prefix, _) in enumerate(self._parts) if key.startswith(prefix))

    def init(self, max_keys: int) -> Any:
        """A state per prefix; they share the room for keys."""
        share = max(1, max_keys // len(self._parts))
        return [strategy.init(share) for _, strategy in self._parts]

    def reduce(self, state: Any, key: bytes, record: Record) -> MaxKeysReached:
        """Hand the record to the strategy of its prefix."""
        part = self._part(key)
        return self._parts[part][1].reduce(state[part], key, record)

    def collect(self, state: Any) -> Mapping[bytes, Verdict]:
        """The verdicts of all."""
        by_key: dict[bytes, Verdict] = {}
        for (_, strategy), part in zip(self._parts, state, strict=True):
            by_key.update(strategy.collect(part))
        return by_key


class RuleKind(IntEnum):
    """What a :class:`Rule` orders the records of a key by."""

    LATEST = 0
    LATEST_N = 1
    TIMESTAMP = 2
    VERSION = 3


class Rule(NamedTuple):
    """A built-in strategy, for the keys with a prefix, as the kernel knows it."""

    prefix: bytes
    kind: RuleKind
    n: int = 1
    header: bytes = b""


def rules(strategy: Strategy) -> tuple[Rule, ...] | None:
    """A strategy as rules for the kernel, the first matching one counts; None: not built in."""
    parts = strategy.parts if type(strategy) is ByKeyPrefix else [(b"", strategy)]
    kernel_rules = [_rule(prefix, part) for prefix, part in parts]
    return (
        None if None in kernel_rules else tuple(rule for rule in kernel_rules if rule is not None)
    )


def _rule(prefix: bytes, strategy: Strategy) -> Rule | None:
    if type(strategy) is Latest:
        return Rule(prefix, RuleKind.LATEST)
    if type(strategy) is LatestN:
        return Rule(prefix, RuleKind.LATEST_N, min(strategy.n, MAX_INT64))
    if type(strategy) is not HighestVersion:
        return None
    if strategy.header is None:
        return Rule(prefix, RuleKind.TIMESTAMP)
    name = strategy.header.encode("utf-8", "surrogatepass")
    if "\ufffd" in name.decode("utf-8", "replace"):  # it stands for anything that is not UTF-8
        return None
    return Rule(prefix, RuleKind.VERSION, 1, name)


def parse(text: str) -> Strategy:
    """``latest``, ``latest-n:3`` or ``highest-version[:header]``. Raises InvalidConfig."""
    name, _, argument = text.strip().partition(":")
    if name == "latest" and not argument:
        return Latest()
    if name == "latest-n" and (count := decimal_number(argument)) is not None:
        return LatestN(count)
    if name == "highest-version":
        return HighestVersion(argument or None)
    raise InvalidConfig(
        f"{text!r} is no strategy for a key prefix: latest, latest-n:N or highest-version[:HEADER]"
    )


def parse_prefixes(text: str) -> ByKeyPrefix:
    """``"user.=latest-n:3,cfg.=latest"``. Raises InvalidConfig."""
    parts: dict[bytes, Strategy] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        prefix, equals, strategy = item.rpartition("=")
        if not equals or not prefix:
            raise InvalidConfig(f"kept.compaction.prefixes: {item!r} is not PREFIX=STRATEGY")
        if prefix.encode() in parts:
            raise InvalidConfig(f"kept.compaction.prefixes: {prefix!r} is given twice")
        parts[prefix.encode()] = parse(strategy)
    if not parts:
        raise InvalidConfig(
            'kept.compaction.prefixes is empty, e.g. "user.=latest-n:3,cfg.=latest"'
        )
    return ByKeyPrefix(parts)


def _setting(config: LogConfig, name: str) -> str:
    value = config.raw.get(name)
    if not value:
        raise InvalidConfig(f"kept.compaction.strategy={config.compaction_strategy} needs {name}")
    return value


def _latest(config: LogConfig) -> Strategy:
    del config
    return Latest()


def _latest_n(config: LogConfig) -> Strategy:
    value = _setting(config, "kept.compaction.latest.n")
    count = decimal_number(value)
    if count is None:
        raise InvalidConfig(f"kept.compaction.latest.n is {value!r}, not a number")
    return LatestN(count)


BUILT_IN: Final[dict[str, Callable[[LogConfig], Strategy]]] = {
    "latest": _latest,
    "latest-n": _latest_n,
    "highest-version": lambda config: HighestVersion(
        config.raw.get("kept.compaction.version.header") or None
    ),
    "by-key-prefix": lambda config: parse_prefixes(_setting(config, "kept.compaction.prefixes")),
}


def resolve(config: LogConfig) -> Strategy:
    """The strategy of a topic. Raises InvalidConfig for a name that nobody provides."""
    name = config.compaction_strategy
    if name in BUILT_IN:
        return BUILT_IN[name](config)
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        strategy: Strategy = entry_point.load()(config)
        return strategy
    names = sorted({*BUILT_IN, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP))})
    raise InvalidConfig(f"no compaction strategy {name!r}; there are {', '.join(names)}")
