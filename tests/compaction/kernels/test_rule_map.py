"""The built-in strategies in the kernel: what their classes in Python say, over both kernels."""

import random
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kept.compaction.kernels import kernel
from kept.compaction.kernels.kernel import CLASSES, slot_words
from kept.compaction.strategy import (
    ByKeyPrefix,
    HighestVersion,
    Latest,
    LatestN,
    Rule,
    RuleKind,
    parse_prefixes,
    rules,
    version_number,
)
from kept.storage.errors import ConfigurationError
from kept.storage.records import Record, build_batch, read_header, records
from kept.storage.types import Codec, TimestampType
from kept.testing.strategies import clean
from tests.support.slow import rest_slow

KEY = bytes(range(16))
PREFIXES = "user.=latest-n:2,user.a=highest-version:version,cfg.=highest-version,x=latest"
STRATEGIES = {
    "latest-n": {"kept.compaction.latest.n": "3"},
    "highest-version": {},
    "by header": {"kept.compaction.version.header": "version"},
    "by-key-prefix": {"kept.compaction.prefixes": PREFIXES},
}
OBJECTS = {
    "latest-n": LatestN(3),
    "highest-version": HighestVersion(),
    "by header": HighestVersion("version"),
    "by-key-prefix": parse_prefixes(PREFIXES),
}
versions = st.one_of(
    st.none(),
    st.integers(0, 10**41).map(lambda n: b"%d" % n),
    st.integers(0, 30).map(lambda n: b"%030d" % n),
    st.integers(-(2**31), 2**31 - 1).map(lambda n: n.to_bytes(4, signed=True)),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: n.to_bytes(8, signed=True)),
    st.sampled_from([b"", b"x", b"1x", b"+1", b" 1", b"\xd9\xa1", b"9" * 40, b"1" + b"0" * 18]),
)
names = st.sampled_from(["version", "version", "Version", "v", "versión", ""])
rows = st.lists(
    st.tuples(
        st.sampled_from([None, b"", b"a", b"x", b"user.", b"user.a", b"user.b", b"cfg.1", b"u"]),
        st.sampled_from([None, b"", b"v", b"w" * 200]),
        st.integers(0, 3),
        st.lists(st.tuples(names, versions), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=8,
)
batches = st.lists(st.tuples(rows, st.sampled_from(list(Codec))), min_size=1, max_size=10)
quick = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("examples", rest_slow([quick.max_examples, 200], 1))
@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.usefixtures("each_kernel")
def test_a_pass_equals_the_strategy_in_python(world, name, examples):
    """Whatever the codec, the memory, the kind of timestamp and the segments."""

    @settings(quick, max_examples=examples)
    @given(batches, st.sampled_from([0, 2, 3, 6]), st.booleans())
    def check(log, room, append_time):
        strategy = "highest-version" if name == "by header" else name
        w = world(
            compaction_strategy=strategy,
            raw=STRATEGIES[name],
            message_timestamp_type=TimestampType(int(append_time)),
        )
        for i, (given_rows, codec) in enumerate(log):
            full = [(k, v, w.now - ago, headers) for k, v, ago, headers in given_rows]
            w.append(*full, codec=codec)
            w.now += 1
            if i % 4 == 3:
                w.roll()
        w.roll()
        before = [r for r in w.records() if r.key is not None]
        words = slot_words(rules(OBJECTS[name]))
        limits = {"dedupe_buffer_bytes": room * words * 8} if room else {}
        w.clean(**limits)
        assert w.records() == clean(OBJECTS[name], before)
        if room and len({r.key for r in before}) > room:
            assert w.result.scans > 1
        assert w.result.keys == len({r.key for r in before})

    check()


@pytest.mark.usefixtures("each_kernel")
@quick
@given(st.lists(versions, min_size=2, max_size=6))
def test_versions_are_compared_as_numbers(found):
    """Of one key; the newest of equal ones; none is lower than all."""
    rule = Rule(b"", RuleKind.VERSION, 1, b"version")
    map_ = kernel.RuleMap(10, 0.9, KEY, [rule], slot_words([rule]))
    data = build_batch([(0, b"k", b"v", (("version", value),)) for value in found])
    kernel.RuleScan(0, map_).feed(data)
    scan = kernel.RuleScan(0, map_, keep=True)
    assert scan.feed(data) == len(data)

    def order(i):
        number = None if found[i] is None else version_number(found[i])
        return (number is not None, number or 0, i)

    assert list(scan.kept()) == [max(range(len(found)), key=order)]


@pytest.mark.usefixtures("each_kernel")
@settings(quick, max_examples=25)
@given(
    st.integers(2, 40),
    st.integers(1, 100),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.sampled_from([RuleKind.LATEST, RuleKind.LATEST_N, RuleKind.TIMESTAMP]),
)
def test_ranges_of_classes_cover_every_key_once(slots, keys, n, seed, kind):
    """However small the map, the scans together keep what one scan keeps."""
    draw = random.Random(seed)
    rows = [
        (draw.randrange(5), b"%d" % draw.randrange(keys), draw.choice((b"v", b"v", None)), ())
        for _ in range(2 * keys)
    ]
    data = build_batch(rows)
    rule = Rule(b"", kind, n)
    whole = kernel.RuleMap(4 * keys + 2, 0.9, KEY, [rule], slot_words([rule]))
    small = kernel.RuleMap(slots, 0.9, KEY, [rule], slot_words([rule]))
    assert small.size_bytes == slots * 8 * slot_words([rule])

    def kept(map_):
        kernel.RuleScan(0, map_).feed(data)
        scan = kernel.RuleScan(0, map_, keep=True)
        scan.feed(data)
        assert not map_.full and map_.size <= map_.capacity
        return list(scan.kept())

    found, size, low = [], 0, 0
    while low < CLASSES:
        small.begin(low, CLASSES)
        found += kept(small)
        assert small.low == low < small.high <= CLASSES
        low, size = small.high, size + small.size
    assert sorted(found) == kept(whole)
    assert size == whole.size == len({row[1] for row in rows})


@pytest.mark.usefixtures("each_kernel")
def test_a_map_whose_one_class_is_too_large_says_so():
    rule = Rule(b"", RuleKind.LATEST)
    none = kernel.RuleMap(1, 0.9, KEY, [rule], 3)
    assert none.capacity == 0
    data = build_batch([(0, b"k", b"v", ())])
    scans_, low = 0, 0
    while not none.full:
        none.begin(low, CLASSES)
        kernel.RuleScan(0, none).feed(data)
        assert none.size == 0 and (not none.full or none.high - none.low == 1)
        low, scans_ = none.high, scans_ + 1
        assert scans_ <= 33
    none.begin(0, 1)
    assert not none.full


@pytest.mark.usefixtures("each_kernel")
def test_too_little_memory_names_the_setting(world, monkeypatch):
    from kept.compaction.strategies import scans as survey_strategy

    monkeypatch.setattr(survey_strategy, "MAX_CLASSES", 4)
    w = world(compaction_strategy="highest-version")
    w.append(*((b"%d" % i, b"v") for i in range(200)))
    w.roll()
    for memory in (32 * 10, 32, 1):
        with pytest.raises(ConfigurationError, match=r"log\.cleaner\.dedupe\.buffer\.size"):
            w.clean(dedupe_buffer_bytes=memory)


def test_rules_are_of_built_in_strategies_only():
    class Mine(Latest):
        pass

    assert rules(Mine()) is None
    assert rules(ByKeyPrefix({b"a": Mine()})) is None
    assert rules(HighestVersion("not \ufffd utf-8")) is None
    assert rules(LatestN(1 << 80)) == (Rule(b"", RuleKind.LATEST_N, 2**63 - 1),)
    assert rules(parse_prefixes("a=latest-n:2,ab=highest-version:h")) == (
        Rule(b"ab", RuleKind.VERSION, 1, b"h"),
        Rule(b"a", RuleKind.LATEST_N, 2),
        Rule(b"", RuleKind.LATEST),
    )


@pytest.mark.usefixtures("each_kernel")
@quick
@given(rows, st.integers(0, 9), st.one_of(st.none(), st.sets(st.integers(0, 9))))
def test_a_scan_makes_the_records_that_reading_makes(given_rows, first, wanted):
    data = build_batch([(ago, k, v, headers) for k, v, ago, headers in given_rows])
    found = []
    scan = kernel.RecordScan(
        0, found.extend, first=first, wanted=None if wanted is None else array("I", sorted(wanted))
    )
    assert scan.feed(data + data[:66]) == len(data) and scan.fault is None
    assert all(type(record) is Record for record in found)
    assert found == [
        r
        for r in records(data)
        if r.key is not None and r.offset >= first and (wanted is None or r.offset in wanted)
    ]


def scans(*, used=None):
    rule = Rule(b"", RuleKind.VERSION, 1, b"h")
    map_ = kernel.RuleMap(10, 0.9, KEY, [rule], 6)
    yield kernel.RuleScan(0, map_)
    yield kernel.RecordScan(0, [].extend if used is None else used)


@pytest.mark.usefixtures("each_kernel")
def test_damage_is_a_fault():
    data = build_batch([(0, b"k", b"v", (("h", b"1"),)) for _ in range(3)])
    for at, to, why in ((16, 1, "magic"), (70, 99, "CRC"), (11, 3, "length"), (60, 2, "CRC")):
        broken = bytearray(data)
        broken[at] = to
        if why == "length":
            broken[8:12] = bytes(4)
        for scan in scans():
            assert scan.feed(broken) == 0
            assert scan.fault is not None and (why in scan.fault or why == "length")
    head, area = data[:61], bytearray(data[61:])
    for cut in range(1, len(area)):
        for scan in scans():
            scan.feed_batch(head, area[:cut], False)
            assert scan.fault in ("a record is damaged", "record count does not match"), cut
    for at in range(len(area)):
        for byte in (0, 1, 3, 127, 128, 255):
            broken = bytearray(area)
            broken[at] = byte
            faults = {type(scan.feed_batch(head, broken, False)) and scan.fault for scan in scans()}
            assert len(faults) == 1, "both scans read records alike"


@pytest.mark.usefixtures("each_kernel")
def test_special_batches_are_the_callers_and_aborted_ones_nobodys():
    plain = build_batch([(0, b"k", b"v", ())])
    packed = build_batch([(0, b"k", b"v", ())], codec=Codec.ZSTD, base_offset=1)
    found = []
    for scan in scans(used=found.extend):
        assert scan.feed(plain + packed) == len(plain)
        assert scan.special and scan.fault is None
        head = plain[:61]
        scan.feed_batch(head, plain[61:], True)
        scan.skip(0, 1, 61, True)
    assert read_header(packed).codec == Codec.ZSTD
    assert [r.offset for r in found] == [0]


@pytest.mark.usefixtures("each_kernel")
def test_classes_depend_on_the_hash_key():
    keys = [b"key-%d" % i for i in range(300)]
    one, other = ([kernel.class_of(k, key, 3) for key in keys] for k in (KEY, bytes(16)))
    assert set(one) == set(other) == {0, 1, 2}
    assert one != other and one == [kernel.class_of(KEY, key, 3) for key in keys]
