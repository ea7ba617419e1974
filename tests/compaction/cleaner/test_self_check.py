"""The check of a pass: what a broken survey or build would put into place is caught before."""

from __future__ import annotations

import struct
from array import array
from collections import Counter

import pytest

from kept.compaction import strategy
from kept.compaction.cleaner import cleaner_run, key_tracker, self_check
from kept.compaction.cleaner.self_check import CheckFailed
from kept.compaction.manifest import follow, follow_worker
from kept.compaction.strategy import Only
from kept.storage import layout
from kept.storage.records import crc32c, headers
from kept.storage.types import Codec
from tests.support.follower_pair import Pair

HOUR_MS = 3_600_000
KEYS = 4
STRATEGIES = {
    "latest": {},
    "latest-n": {"kept.compaction.latest.n": "3"},
    "highest-version": {},
    "by-key-prefix": {"kept.compaction.prefixes": "k0=latest-n:2,k1=highest-version"},
}


class FirstAndLast:
    """A user's strategy: the first record of each key and the last one."""

    def __init__(self, config):
        del config

    def key(self, record):
        return record.key

    def init(self, max_keys):
        return {}

    def reduce(self, state, key, record):
        state.setdefault(key, []).append(record.offset)
        return False

    def collect(self, state):
        return {key: Only(frozenset((o[0], o[-1]))) for key, o in state.items()}


def filled(world, name="latest", raw=None, **changes):
    """Batches of four keys in several segments; the last round of a key is a tombstone for k3."""
    w = world(
        compaction_strategy=name,
        raw=raw or STRATEGIES.get(name, {}),
        segment_bytes=600,
        delete_retention_ms=HOUR_MS,
        index_interval_bytes=100,
        **changes,
    )
    for i in range(20):
        rows = [
            (b"k%d" % k, b"value %d of %d" % (i, k), w.now + (i * 7 + k) % 11) for k in range(KEYS)
        ]
        w.append(*rows)
    w.append((b"k3", None, w.now + 100))
    w.roll()
    return w


def newest(w, key):
    return max(r.offset for r in w.records() if r.key == key)


@pytest.fixture
def broken(monkeypatch):
    """Change what a pass decides or builds, before its check."""

    def survey(change):
        real = cleaner_run.survey

        def changed(*args, **kwargs):
            found = real(*args, **kwargs)
            change(found)
            return found

        monkeypatch.setattr(cleaner_run, "survey", changed)

    def build(change):
        real = cleaner_run.build

        def changed(manifest, groups, directory, config, disk, **kwargs):
            built = real(manifest, groups, directory, config, disk, **kwargs)
            change(built, directory, disk)
            return built

        monkeypatch.setattr(cleaner_run, "build", changed)

    return type("Broken", (), {"survey": staticmethod(survey), "build": staticmethod(build)})


def outputs(found, offset):
    """The output segments of a survey that an offset is in; they are changed in place."""
    for group in found.groups:
        output = group.output
        if output.base_offset <= offset < output.end_offset:
            yield group, output, offset - output.base_offset


def drop(*offsets):
    def change(found):
        for offset in offsets:
            for group, output, relative in outputs(found, offset):
                output.survivors.discard(relative)
                group.changed = True

    return change


def bring_back(*offsets):
    def change(found):
        for offset in offsets:
            for group, output, relative in outputs(found, offset):
                output.survivors.add(relative)
                group.changed = True

    return change


def refused(w, match):
    """A pass is refused, and nothing of the log has changed."""
    before, names = w.pairs(), sorted(w.disk.listdir("/t-0"))
    with pytest.raises(CheckFailed, match=match):
        w.clean()
    cleaner_run.discard("/t-0", w.disk)
    assert w.pairs() == before
    assert sorted(w.disk.listdir("/t-0")) == names
    assert w.state.applied is None or w.state.applied.number == 1


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_sound_pass_is_found_sound(world, name):
    w = filled(world, name)
    assert w.clean().keys_checked == KEYS
    w.append((b"k0", b"newer"), (b"k9", b"new"))
    w.roll()
    assert w.clean().keys_checked >= 1
    w.now += 2 * HOUR_MS
    assert w.clean(on_demand=False).records_removed == 1, "the tombstone"
    assert w.result.keys_checked >= 1


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_latest_record_that_would_be_dropped(world, broken, name):
    w = filled(world, name)
    lost = newest(w, b"k3"), newest(w, b"k2")
    if "version" in name or "prefix" in name:  # of what k1 keeps, by timestamp
        best = max((r for r in w.records() if r.key == b"k1"), key=lambda r: r[1::-1])
        lost = (best.offset, *lost)
    broken.survey(drop(*lost))
    refused(w, "must survive, and is not in the output")


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_an_old_record_that_would_come_back(world, broken, name):
    """It would read as live once the tombstone above it is gone."""
    w = filled(world, name)
    of_key = [r.offset for r in w.records() if r.key == b"k3"]
    broken.survey(bring_back(of_key[-2]))
    refused(w, r"key 'k3', offset .*: it must be gone, and is in the output")


def test_a_tombstone_that_would_go_before_its_horizon(world, broken):
    w = filled(world)
    w.clean()
    w.append((b"k9", b"new"))
    w.roll()
    w.now += HOUR_MS - 1
    broken.survey(drop(newest(w, b"k3")))
    refused(w, "key 'k3'.*must survive")


def test_a_horizon_that_would_move(world, broken):
    w = filled(world)
    w.clean()
    w.append(*((b"k%d" % i, b"new") for i in range(KEYS - 1)))
    w.roll()

    def later(found):
        for group in found.groups:
            moved = {ms + 1: batches for ms, batches in group.output.horizons.items()}
            if moved:
                group.output.horizons.clear()
                group.output.horizons.update(moved)
                group.changed = True

    broken.survey(later)
    refused(w, "its delete horizon must be")


def rewrite(find, put, crc=True):
    """Other bytes in the new files."""

    def change(built, directory, disk):
        for base in (base for group in built.plan.groups for base in group.output_bases):
            path = layout.segment_file(directory, base, layout.LOG, layout.CLEANED)
            data = bytearray(disk.read(path))
            for at, header in list(headers(bytes(data))):
                whole = bytes(data[at : at + header.size_bytes])
                fixed = bytearray(whole.replace(find, put))
                if crc:
                    struct.pack_into(">I", fixed, 17, crc32c(memoryview(fixed)[21:]))
                data[at : at + header.size_bytes] = fixed
            disk.unlink(path)
            disk.writev(disk.open_new(path), [bytes(data)], 0)

    return change


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((b"value 19", b"value 18", True), "not the same record"),
        ((b"k2", b"k7", True), "not the same record"),
        ((b"value 19", b"value 18", False), "cannot be read: .*CRC does not match"),
    ],
)
def test_wrong_bytes(world, broken, wrong, says):
    w = filled(world)
    broken.build(rewrite(*wrong))
    refused(w, says)


def test_an_output_that_is_cut_off(world, broken):
    w = filled(world)

    def cut(built, directory, disk):
        for base in (base for group in built.plan.groups for base in group.output_bases):
            path = layout.segment_file(directory, base, layout.LOG, layout.CLEANED)
            data = disk.read(path)
            disk.unlink(path)
            disk.writev(disk.open_new(path), [data[: len(data) // 2]], 0)

    broken.build(cut)
    refused(w, "must survive, and is not in the output")


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_scan_that_misses_a_record(world, monkeypatch, name):
    """What was drawn is not among what it saw."""
    w = filled(world, name)
    of_key = [r.offset for r in w.records() if r.key == b"k2"]
    real = key_tracker.KeyTracker.offsets_of

    def half_blind(self, key):
        seen = real(self, key)
        if key != b"k2" or seen is None:
            return seen
        return key_tracker.KeyOffsets([o for o in seen.offsets if o not in of_key[:15]], seen.whole)

    monkeypatch.setattr(key_tracker.KeyTracker, "offsets_of", half_blind)
    refused(w, "key 'k2'.*not among those that the scan saw")


def test_a_map_that_takes_two_keys_for_one(world, monkeypatch):
    """A collision of hashes, which the keyed hash makes unlikely."""
    w = filled(world)
    real = key_tracker.KeyTracker.offsets_of

    def mixed(self, key):
        found, other = real(self, key), real(self, b"k1")
        if key != b"k2" or found is None or other is None:
            return found
        return key_tracker.KeyOffsets(sorted(found.offsets + other.offsets), found.whole)

    monkeypatch.setattr(key_tracker.KeyTracker, "offsets_of", mixed)
    w.append((b"k1", b"newest"))
    w.roll()
    refused(w, "key 'k2'.*it has another one")


def test_a_strategy_of_a_user_is_held_to_what_it_said(world, broken, monkeypatch):
    monkeypatch.setitem(strategy.BUILT_IN, "first-and-last", FirstAndLast)
    w = filled(world, "first-and-last", raw={"-": "-"})
    first = min(r.offset for r in w.records() if r.key == b"k1")
    broken.survey(drop(first))
    refused(w, "key 'k1', offset .* must survive")
    monkeypatch.undo()
    monkeypatch.setitem(strategy.BUILT_IN, "first-and-last", FirstAndLast)
    assert w.clean().keys_checked == KEYS
    assert Counter(k for _, k, _ in w.pairs()) == {b"k0": 2, b"k1": 2, b"k2": 2, b"k3": 1}


def test_aborted_data_that_would_count(world, monkeypatch):
    """A scan that took it for committed would drop the value that it seems to supersede."""
    w = world(segment_bytes=1 << 20)
    w.append(*((b"k%d" % i, b"committed") for i in range(KEYS)))
    for pid in (7, 8):
        w.append(
            *((b"k%d" % i, b"aborted") for i in range(KEYS)),
            pid=pid,
            sequence=0,
            transactional=True,
        )
        w.marker(pid, commit=False)
    w.roll()
    from kept.compaction.cleaner import scan_stats

    monkeypatch.setattr(scan_stats.AbortedIndex, "has", lambda self, header: False)
    refused(w, "its transaction was aborted")


def test_a_base_generation_keeps_everything(world, broken):
    from kept.compaction.cleaner import job_builder
    from kept.compaction.cleaner.planner import Limits
    from kept.storage.types import Generation

    w = filled(world)
    job = job_builder.base_job(w.log, Generation(3, 0), now_ms=w.now, limits=Limits())
    assert cleaner_run.run_pass(job, w.disk).keys_checked >= 3
    cleaner_run.discard("/t-0", w.disk)
    broken.survey(drop(*w.offsets()[: 3 * KEYS * 10]))
    with pytest.raises(CheckFailed, match="must survive"):
        cleaner_run.run_pass(job, w.disk)


def test_none_is_checked_where_none_is_wanted(world, broken):
    w = filled(world)
    broken.survey(drop(newest(w, b"k2")))
    assert w.clean(check_keys=0).keys_checked == 0
    assert b"k2" not in {key for _, key, _ in w.pairs()}


def test_logs_of_many_codecs_and_batches_are_read_by_offset(world):
    w = world(segment_bytes=2000, index_interval_bytes=300)
    for i in range(60):
        rows = [(b"k%02d" % ((i * 7 + j) % 50), b"v" * (i + j)) for j in range(i % 5 + 1)]
        w.append(*rows, codec=list(Codec)[i % 5])
    w.roll()
    assert w.clean(check_keys=255).keys_checked >= 5


def test_a_long_key_is_shown_cut_off():
    assert self_check.shown(b"k\n1") == "'k\\n1'"
    assert self_check.shown(b"\xff") == "'\\\\xff'"
    assert self_check.shown(b"x" * 1000) == repr("x" * 48) + " and 952 bytes more"


# A follower.


def test_an_application_whose_files_are_wrong(kit, monkeypatch):
    both = Pair(kit, segment_bytes=1500)
    for i in range(40):
        both.leader.append((b"k%d" % (i % 5), b"value %d" % i))
    both.leader.roll()
    both.leader.clean()
    both.fetch(roll_at=lambda base: base == 13)
    world, real = both.follower, follow.build
    job = follow.job_for(world.log, both.generation(), None, world.now)
    assert follow_worker.run_here(job, None, world.disk).keys_checked > 0
    cleaner_run.discard("/t-0", world.disk)

    def damaging(manifest, groups, directory, config, disk, **kwargs):
        built = real(manifest, groups, directory, config, disk, **kwargs)
        rewrite(b"value 3", b"value 2")(built, directory, disk)
        return built

    monkeypatch.setattr(follow, "build", damaging)
    with pytest.raises(CheckFailed, match="not the same record"):
        follow_worker.run_here(job, None, world.disk)


# What the scans note.


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", ["latest", "latest-n"])
def test_a_hot_key_costs_no_more_memory(world, monkeypatch, name):
    from kept.compaction.cleaner import survey

    taken = []
    real = survey.merged_offsets
    monkeypatch.setattr(survey, "merged_offsets", lambda *a: taken.append(real(*a)) or taken[-1])
    w = world(compaction_strategy=name, raw=STRATEGIES[name])
    for i in range(30):
        w.append(*((b"hot", b"%d" % (10 * i + j)) for j in range(10)))
    w.roll()
    w.clean()
    assert taken == [key_tracker.KeyOffsets(list(range(300 - key_tracker.RING, 300)), False)]
    w.append((b"hot", b"newest"))
    w.roll()
    w.clean()
    left = [299] if name == "latest" else [297, 298, 299]
    assert taken[1] == key_tracker.KeyOffsets([*left, 300], True)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", ["latest", "latest-n"])
def test_a_small_map_takes_many_scans_and_each_record_is_noted_once(world, name):
    w = world(compaction_strategy=name, raw=STRATEGIES[name], segment_bytes=700)
    for i in range(120):
        w.append((b"k%02d" % (i * 7 % 30), b"%d" % i))
    w.roll()
    result = w.clean(dedupe_buffer_bytes=16 * 24 if name == "latest" else 32 * 20, check_keys=255)
    assert result.scans > 1 and result.keys_checked >= 5


def test_a_watch_with_a_full_table():
    """Keys whose places are taken are not watched, and say so."""
    found = key_tracker.KeyTracker([b"a", b"b", b"a"])
    assert found.keys == [b"a", b"b"]
    found.note(b"a", 5)
    found.note(b"a", 5)
    found.note(b"c", 6)
    assert found.offsets_of(b"a") == ([5], True) and found.offsets_of(b"b") == ([], True)
    assert found.offsets_of(b"c") is None
    found.counts = array("q", [-1, 0])
    assert found.offsets_of(b"a") is None
