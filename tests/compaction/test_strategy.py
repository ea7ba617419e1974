"""The built-in strategies, their settings, the test kit, and a user's own by entry point."""

import importlib.metadata

import pytest

from kept.compaction import strategy as strategies
from kept.compaction.strategy import (
    ByKeyPrefix,
    From,
    HighestVersion,
    Latest,
    LatestN,
    Only,
    StrategyFailed,
    parse_prefixes,
    resolve,
)
from kept.storage.errors import ConfigurationError, InvalidConfig
from kept.storage.records import Record
from kept.storage.types import Codec
from kept.testing.strategies import check_strategy, clean

BUILT_IN = [
    Latest(),
    LatestN(1),
    LatestN(3),
    HighestVersion(),
    HighestVersion("version"),
    parse_prefixes("user.=latest-n:3,cfg.=highest-version:version"),
]


@pytest.mark.parametrize("strategy", BUILT_IN, ids=lambda s: type(s).__name__)
def test_built_in_strategies_keep_the_laws(strategy):
    check_strategy(strategy)


def broken(base, **methods):
    return type("Broken", (base,), methods)()


BROKEN = {
    "winner": broken(Latest, collect=lambda self, state: {}),
    "room": broken(Latest, reduce=lambda self, state, key, record: True),
    "invented": broken(
        Latest, collect=lambda self, state: {k: Only(frozenset((999,))) for k in state.keys}
    ),
    "not stable": broken(
        Latest,
        collect=lambda self, state: {
            k: From(o - 1 if len(state.keys) % 2 else o) for k, o in state.keys.items()
        },
    ),
    "classes": broken(
        Latest,
        collect=lambda self, state: {
            k: From(o if len(state.keys) > 2 else 0) for k, o in state.keys.items()
        },
    ),
}


def forgetful(self, state, key, record):
    """Known keys are not updated once the room is used up."""
    if len(state.keys) >= state.max_keys:
        return True
    state.keys[key] = record.offset
    return False


BROKEN["progress"] = broken(Latest, reduce=forgetful)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_the_kit_finds_a_broken_strategy(name):
    with pytest.raises(AssertionError):
        check_strategy(BROKEN[name])


def record(offset, key=b"k", value=b"v", timestamp=0, **headers):
    found = tuple((name, content) for name, content in headers.items())
    return Record(offset, timestamp, key, value, found)


def offsets(strategy, *log):
    return [r.offset for r in clean(strategy, list(log))]


def test_latest_n_counts_from_the_last_tombstone():
    log = [record(i, value=None if i == 2 else b"v") for i in range(5)]
    assert offsets(LatestN(2), *log) == [3, 4]
    assert offsets(LatestN(9), *log) == [2, 3, 4]


def test_highest_version_by_timestamp_and_by_header():
    assert offsets(HighestVersion(), record(0, timestamp=9), record(1, timestamp=3)) == [0]
    assert offsets(HighestVersion(), record(0, timestamp=9), record(1, timestamp=9)) == [1]
    by_header = HighestVersion("v")
    assert offsets(by_header, record(0, v=b"10"), record(1, v=b"9"), record(2)) == [0]
    assert offsets(by_header, record(0, v=(2**40).to_bytes(8)), record(1, v=b"9")) == [0]
    assert offsets(by_header, record(0, v=b"x"), record(1, v=None)) == [1]
    assert offsets(by_header, record(0, v=b"1"), record(1, v=b"9" * 10_000)) == [0]


def test_a_tombstone_of_the_highest_version_wins():
    log = [record(0, v=b"1"), record(1, v=b"7", value=None), record(2, v=b"3")]
    assert offsets(HighestVersion("v"), *log) == [1]


def test_the_longest_prefix_counts():
    both = parse_prefixes("a=latest-n:2,ab=latest-n:3")
    log = [record(i, key=key) for i, key in enumerate([b"ab1"] * 4 + [b"ax"] * 4 + [b"z"] * 2)]
    assert offsets(both, *log) == [1, 2, 3, 6, 7, 9]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "user.",
        "=latest",
        "a=nonsense",
        "a=latest-n",
        "a=latest,a=latest",
        "a=latest:1",
        "a=latest-n:\u00b2",
        "a=latest-n:\uff12",
        "a=latest-n:" + "1" * 5000,
    ],
)
def test_wrong_prefixes_are_refused(text):
    with pytest.raises(InvalidConfig):
        parse_prefixes(text)


def test_resolve_by_name(kit):
    def by(name, **raw):
        names = {k.replace("_", "."): v for k, v in raw.items()}
        return resolve(kit.config(compaction_strategy=name, raw=names))

    assert type(by("latest")) is Latest
    assert by("latest-n", kept_compaction_latest_n="3").n == 3
    assert by("highest-version", kept_compaction_version_header="v").header == "v"
    assert by("highest-version").header is None
    assert type(by("by-key-prefix", kept_compaction_prefixes="a=latest")) is ByKeyPrefix
    with pytest.raises(InvalidConfig, match=r"needs kept\.compaction\.latest\.n"):
        by("latest-n")
    with pytest.raises(InvalidConfig, match="at least 1"):
        by("latest-n", kept_compaction_latest_n="0")
    with pytest.raises(InvalidConfig, match="there are by-key-prefix, highest-version, latest"):
        by("nobody")


def entry_point(monkeypatch, cls):
    class Found:
        name = "mine"

        def load(self):
            return cls

    def entry_points(group, name=None):
        assert group == strategies.ENTRY_POINT_GROUP
        return [Found()] if name in (None, "mine") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


class FirstAndLast(Latest):
    """A user's strategy: the oldest and the newest record, by a key of its own."""

    def __init__(self, config=None):
        self.config = config

    def key(self, record):
        return (record.key or b"").lower()

    def reduce(self, state, key, record):
        if key not in state.keys and len(state.keys) >= state.max_keys:
            return True
        first = state.keys.get(key, (record.offset, 0))[0]
        state.keys[key] = (first, record.offset)
        return False

    def collect(self, state):
        return {key: Only(frozenset(pair)) for key, pair in state.keys.items()}


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("buffer_bytes", [1 << 20, 256 * 2, 1])
def test_a_users_strategy_runs_in_any_memory(world, monkeypatch, buffer_bytes):
    entry_point(monkeypatch, FirstAndLast)
    w = world(compaction_strategy="mine", segment_bytes=400)
    keys = [b"a", b"A", b"b", b"C", b"a", b"c", b"B", b"d", b"D", b"d", b"E", b"f"]
    for i, key in enumerate(keys):
        w.append((key, b"%d" % i * 40), codec=list(Codec)[i % 5])
        if i % 3 == 2:
            w.roll()
    w.roll()
    result = w.clean(dedupe_buffer_bytes=buffer_bytes)
    assert w.offsets() == [0, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert (result.scans > 1) is (buffer_bytes < 256 * 6)
    assert w.state.clean_to == w.state.end_offset == 12


@pytest.mark.usefixtures("each_kernel")
def test_a_winning_tombstone_drops_all_older_under_any_strategy(world, monkeypatch):
    entry_point(monkeypatch, FirstAndLast)
    w = world(compaction_strategy="mine", delete_retention_ms=10)
    w.append((b"a", b"1"), (b"a", b"2"), (b"a", None), (b"b", b"1"))
    w.roll()
    w.clean()
    assert w.offsets() == [2, 3]
    w.now += 11
    w.clean(on_demand=False)
    assert w.offsets() == [3], "and it does not come back"


def test_too_little_memory_names_the_setting(world, monkeypatch):
    from kept.compaction.strategies import scans

    entry_point(monkeypatch, FirstAndLast)
    monkeypatch.setattr(scans, "MAX_CLASSES", 4)
    w = world(compaction_strategy="mine")
    w.append(*((b"%d" % i, b"v") for i in range(200)))
    w.roll()
    with pytest.raises(ConfigurationError, match=r"log\.cleaner\.dedupe\.buffer\.size"):
        w.clean(dedupe_buffer_bytes=256)


def test_a_strategy_sees_the_clean_winner(world):
    """Only the whole log says that an old record has the higher version."""
    w = world(compaction_strategy="highest-version")
    w.append((b"a", b"old but high", 100))
    w.roll()
    w.clean()
    w.append((b"a", b"new but low", 50))
    w.roll()
    w.clean()
    assert w.offsets() == [0]


class Everything(Latest):
    """Keeps all records, tombstones included."""

    def __init__(self, config=None):
        self.config = config

    def reduce(self, state, key, record):
        if key not in state.keys and len(state.keys) >= state.max_keys:
            return True
        state.keys.setdefault(key, record.offset)
        return False


def test_a_winning_tombstone_drops_all_older_of_a_verdict_from_an_offset(world, monkeypatch):
    entry_point(monkeypatch, Everything)
    check_strategy(Everything())
    w = world(compaction_strategy="mine")
    w.append((b"a", b"1"), (b"a", b"2"), (b"a", None), (b"b", b"1"), (b"b", b"2"))
    w.roll()
    w.clean()
    assert w.offsets() == [2, 3, 4]


class Broken(Latest):
    """Says of ``b`` what ``said`` makes of its newest offset."""

    said = None

    def __init__(self, config=None):
        self.config = config

    def collect(self, state):
        given = dict(super().collect(state))
        if b"b" in given:  # or it is in another class of keys
            given[b"b"] = Broken.said(given[b"b"].offset)
        return {key: verdict for key, verdict in given.items() if verdict is not None}


@pytest.mark.parametrize("memory", [1 << 20, 1])
@pytest.mark.parametrize(
    "said",
    [
        lambda _: None,
        lambda newest: From(newest + 1),
        lambda _: Only(frozenset()),
        lambda newest: Only(frozenset((newest + 100, 0))),
    ],
    ids=["no verdict", "one too far", "nothing", "another key's"],
)
def test_a_strategy_that_keeps_nothing_of_a_key_is_stopped(world, monkeypatch, said, memory):
    """One mistake in it would lose a key on all replicas, and nobody would hear of it."""
    entry_point(monkeypatch, Broken)
    monkeypatch.setattr(Broken, "said", staticmethod(said))
    w = world(compaction_strategy="mine")
    w.append((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", b"2"), (b"c", b"1"))
    w.roll()
    with pytest.raises(StrategyFailed, match="Broken keeps no record of key b'b', whose newest is"):
        w.clean(dedupe_buffer_bytes=memory)
    assert w.offsets() == [0, 1, 2, 3, 4]
    there = staticmethod(lambda newest: Only(frozenset((1, newest + 100))))
    monkeypatch.setattr(Broken, "said", there)
    w.clean(dedupe_buffer_bytes=memory)
    assert w.offsets() == [1, 2, 4], "one that is not the newest will do"
