"""Torn and rotten files of every kind at start: the log comes up right, or says what is wrong."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.inspect.check import check_partition
from kept.storage.inspect.dump import entries
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedDisk

CONFIG = LogConfig(segment_bytes=900, index_interval_bytes=100)
DIRECTORY = "/d/t-0"


def written(kit, *, close: bool = True) -> tuple[SimulatedDisk, list]:
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=CONFIG)
    for n in range(40):
        kit.append(
            log,
            kit.batch(2, mark=n, timestamp=kit.NOW + n, pid=3, epoch=0, sequence=2 * n),
            leader_epoch=n // 10,
        )
    contents = kit.contents(log)
    if close:
        log.close()
    return disk, contents


def files(disk: SimulatedDisk, *suffixes: str) -> list[str]:
    return [path for path, _ in disk.files() if path.endswith(suffixes)]


def reopen(kit, disk: SimulatedDisk, *, clean: bool = True):
    return kit.open_log(disk, config=CONFIG, clean=clean, recovery_point=80 if clean else 0)


DAMAGES = {
    "removed": lambda data: None,
    "empty": lambda data: b"",
    "torn": lambda data: data[: len(data) // 2 + 1],
    "zeros behind": lambda data: data + bytes(24 * 10),
    "rot in the middle": lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :],
    "rot at the start": lambda data: b"\xff\xff\xff\xff" + data[4:],
    "garbage": lambda data: b"\x07garbage" * 9,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".snapshot", "leader-epoch-checkpoint"])
@pytest.mark.parametrize("clean", [True, False])
def test_what_follows_from_the_log_is_made_anew(kit, suffix, damage, clean) -> None:
    disk, contents = written(kit)
    for path in files(disk, suffix):
        changed = DAMAGES[damage](disk.read(path))
        disk.unlink(path)
        if changed is not None:
            disk.write_file(path, changed)
    log = reopen(kit, disk, clean=clean)
    log.check_invariants()
    assert kit.contents(log, 200) == contents
    for n in range(80):
        found = disk.pread(*log.read(n, 1, 80))
        assert int.from_bytes(found[:8], "big") == n // 2 * 2
        at = log.offset_for_timestamp(kit.NOW + n // 2)
        assert at is not None and at.timestamp >= kit.NOW + n // 2
    assert log.leader_epochs.entries == [(0, 0), (1, 20), (2, 40), (3, 60)]
    kit.append(log, kit.batch(1, pid=3, epoch=0, sequence=80), leader_epoch=9)


def test_a_wrong_index_is_found_at_the_look_up(kit, caplog) -> None:
    """Entries that pass the test at open but lead elsewhere: rule 23."""
    disk, contents = written(kit)
    for path in files(disk, ".index"):
        data = bytearray(disk.read(path))
        for at in range(0, len(data), 8):
            offset = int.from_bytes(data[at : at + 4], "big") - 2
            data[at : at + 4] = max(offset, 1).to_bytes(4, "big")
        disk.write_file(path, data)
    log = reopen(kit, disk)
    with caplog.at_level(logging.WARNING):
        assert kit.contents(log, 200) == contents
        for n in range(79, -1, -1):
            found = disk.pread(*log.read(n, 1, 80))
            assert int.from_bytes(found[:8], "big") == n // 2 * 2
    assert "rebuilding the indexes" in caplog.text


@pytest.mark.parametrize("interval", [200, 6_000, 25_000])
@pytest.mark.parametrize("wrong", [None, (0, -1), (0, 1), (4, -1)], ids=str)
def test_large_batches_are_found_by_their_own_entry_or_without_it(kit, caplog, interval, wrong):
    """Batches of 1 to 40 KB: with a large interval some have no entry, and the next leads past."""
    disk = SimulatedDisk()
    config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=interval)
    log = kit.open_log(disk, config=config)
    for n in range(60):
        kit.append(log, kit.batch(1 + n % 3, size=(n * 7919) % 13_000))
    starts = [(first, last) for first, last, _ in kit.contents(log)]
    log.close()
    if wrong is not None:
        (path,) = files(disk, ".index")
        data = bytearray(disk.read(path))
        field, by = wrong  # of each entry: the offset or the position, so much off
        for at in range(field, len(data), 8):
            data[at : at + 4] = (int.from_bytes(data[at : at + 4], "big") + by).to_bytes(4, "big")
        disk.write_file(path, data)
    log = kit.open_log(disk, config=config, clean=True, recovery_point=log.log_end_offset)
    read: list[int] = []
    pread = disk.pread
    disk.pread = lambda file, position, size: read.append(position) or pread(file, position, size)
    with caplog.at_level(logging.WARNING):
        for first, last in reversed(starts):
            for offset in (last, first):
                read.clear()
                piece = log.read(offset, 1, log.log_end_offset)
                assert piece is not None and int.from_bytes(pread(*piece)[:8], "big") == first
                if wrong is None and interval == 200 and piece.size_bytes > 20_000:
                    assert len(read) <= 2, "its own entry leads to it"
    assert bool(caplog.text) == (wrong is not None)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(where=st.floats(0, 0.9999), bit=st.integers(0, 7), which=st.integers(0, 100))
def test_one_flipped_bit_of_a_log_after_a_crash_leaves_a_prefix(kit, where, bit, which) -> None:
    disk, contents = written(kit, close=False)
    logs = files(disk, ".log")
    path = logs[which % len(logs)]
    position = int(where * disk.stat(path).size_bytes)
    disk.flip_bit(path, position, bit)
    log = reopen(kit, disk, clean=False)
    log.check_invariants()
    found = kit.contents(log)
    parsed = layout.parse_segment_file(path.rpartition("/")[2])
    before = [c for c in contents if c[0] < parsed.base_offset]
    assert len(found) >= len(before)
    different = [(o, t) for o, t in zip(found, contents, strict=False) if o != t]
    assert len(different) <= 1
    for ours, theirs in different:
        assert ours[2][16:] == theirs[2][16:], "only base offset or epoch, which no CRC covers"


@pytest.mark.parametrize("junk", [b"\0", b"\0" * 61, b"\0" * 5000, b"\xff" * 100, b"junk" * 50])
@pytest.mark.parametrize("clean", [True, False])
def test_junk_behind_the_last_batch_is_cut(kit, junk, clean) -> None:
    disk, contents = written(kit)
    path = files(disk, ".log")[-1]
    disk.write_file(path, disk.read(path) + junk)
    log = reopen(kit, disk, clean=clean)
    assert kit.contents(log) == contents
    kit.append(log, kit.batch(1, pid=3, epoch=0, sequence=80), leader_epoch=9)
    assert kit.contents(reopen(kit, disk, clean=False))[:-1] == contents


def test_a_batch_that_claims_to_be_huge_is_cut(kit) -> None:
    disk, contents = written(kit)
    path = files(disk, ".log")[-1]
    huge = (80).to_bytes(8, "big") + (2**31 - 20).to_bytes(4, "big") + bytes(80)
    disk.write_file(path, disk.read(path) + huge)
    assert kit.contents(reopen(kit, disk, clean=False)) == contents


def test_strays_are_removed(kit) -> None:
    disk, contents = written(kit)
    for name in (
        "00000000000000000017.snapshot",
        "00000000000000000500.snapshot",
        "00000000000000000033.index",
        "00000000000000000034.txnindex",
    ):
        disk.write_file(f"{DIRECTORY}/{name}", b"")
    disk.write_file(f"{DIRECTORY}/manifest-1-2", b"stays")
    disk.write_file(f"{DIRECTORY}/unknown", b"stays")
    log = reopen(kit, disk)
    assert kit.contents(log) == contents
    names = disk.listdir(DIRECTORY)
    assert "manifest-1-2" in names and "unknown" in names
    bases = {s.base_offset for s in log.segments}
    for name in names:
        parsed = layout.parse_segment_file(name)
        assert parsed is None or parsed.base_offset in bases | {80}


@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex", ".snapshot", "checkpoint"])
def test_check_and_dump_see_damage(kit, suffix) -> None:
    disk, _ = written(kit)
    assert check_partition(DIRECTORY, disk) == []
    path = files(disk, suffix)[1 if suffix != "checkpoint" else 0]
    before = list(entries(path, disk))
    assert before and not any(entry.kind == "damage" for entry in before)
    disk.flip_bit(path, disk.stat(path).size_bytes // 2 - 2, 6)
    damaged = [f for f in check_partition(DIRECTORY, disk) if f.path == path]
    assert damaged and (suffix == ".timeindex" or damaged[0].damaged), "and it names the file"
    assert str(damaged[0]).startswith(path)
    assert list(entries(path, disk)) != before


def test_check_calls_a_torn_tail_a_note(kit) -> None:
    disk, _ = written(kit, close=False)
    path = files(disk, ".log")[-1]
    disk.write_file(path, disk.read(path)[:-5])
    (finding,) = check_partition(DIRECTORY, disk)
    assert not finding.damaged and "cuts the log here" in finding.why


def test_check_calls_an_unfinished_snapshot_a_note(kit) -> None:
    """The process was killed between its creation and its writing."""
    disk, _ = written(kit, close=False)
    older, newest = files(disk, ".snapshot")[-2:]
    disk.write_file(newest, b"")
    (finding,) = check_partition(DIRECTORY, disk)
    assert not finding.damaged and "the next start makes it anew" in finding.why
    disk.write_file(older, b"")
    assert [f.path for f in check_partition(DIRECTORY, disk) if f.damaged] == [older]
    disk.write_file("/d/.kafka_cleanshutdown", b"")
    damaged = {f.path for f in check_partition(DIRECTORY, disk) if f.damaged}
    assert damaged >= {older, newest}


@pytest.mark.parametrize("what", ["rot", "torn"])
def test_after_a_clean_stop_a_bad_end_is_damage(kit, what) -> None:
    disk, _ = written(kit, close=False)
    path = files(disk, ".log")[-1]
    if what == "rot":
        disk.flip_bit(path, disk.stat(path).size_bytes - 4, 1)
    else:
        disk.write_file(path, disk.read(path)[:-5])
    assert not any(f.damaged for f in check_partition(DIRECTORY, disk))
    disk.write_file("/d/.kafka_cleanshutdown", b"")
    (finding,) = [f for f in check_partition(DIRECTORY, disk) if f.path == path]
    assert finding.damaged and "cuts the log" not in finding.why


@pytest.mark.parametrize("where", [8, 10, 40, 70])
def test_a_bad_batch_with_whole_ones_behind_it_is_damage(kit, where) -> None:
    """Whatever of it is wrong: its length, its header, its records."""
    disk, contents = written(kit, close=False)
    path = files(disk, ".log")[-1]
    base = layout.parse_segment_file(path.rpartition("/")[2]).base_offset
    behind = sum(c[0] >= base for c in contents) - 1
    assert behind > 1
    disk.flip_bit(path, where, 3)
    (finding,) = [f for f in check_partition(DIRECTORY, disk) if f.path == path]
    assert finding.damaged and finding.position == 0
    assert f"{behind} whole batches behind it" in finding.why


COMPACT = LogConfig(segment_bytes=900, cleanup_policy=frozenset({"compact"}))
MAY_BE_COMPACTION = {
    "flushed": lambda third: {"recovery_point": third},
    "policy, no recovery point": lambda third: {"config": COMPACT},
    "manifest, no recovery point": lambda third: {},
    "journal, no recovery point": lambda third: {},
    "compacted_to": lambda third: {"recovery_point": 0, "compacted_to": third},
}
IS_A_LOSS = {
    "nothing": lambda third: {"recovery_point": 0},
    "no recovery point": lambda third: {},
    "policy": lambda third: {"recovery_point": third - 1, "config": COMPACT},
    "manifest": lambda third: {"recovery_point": third - 1},
    "compacted_to": lambda third: {"recovery_point": 0, "compacted_to": third - 1},
    "compacted_to, no recovery point": lambda third: {"compacted_to": third - 1, "config": COMPACT},
}


@pytest.mark.parametrize(
    ("known", "cut"),
    [*[(known, False) for known in MAY_BE_COMPACTION], *[(known, True) for known in IS_A_LOSS]],
)
def test_a_hole_between_segments_is_cut_unless_compaction_may_have_left_it(kit, known, cut) -> None:
    disk, contents = written(kit, close=False)
    second = files(disk, ".log")[1]
    base = int(second.rpartition("/")[2][:20])
    third = int(files(disk, ".log")[2].rpartition("/")[2][:20])
    size = len(contents[0][2])
    disk.write_file(second, disk.read(second)[:-size])
    if known.startswith("manifest"):
        disk.write_file(f"{DIRECTORY}/manifest-0-1", b"")
    if known.startswith("journal"):
        disk.write_file(f"{DIRECTORY}/removals-1-0-1", b"")
    options = (IS_A_LOSS if cut else MAY_BE_COMPACTION)[known](third)
    log = kit.open_log(disk, **{"config": CONFIG, **options})
    found = kit.contents(log)
    if cut:
        assert found == [c for c in contents if c[0] < third - 2]
        assert log.log_end_offset == third - 2 > base
    else:
        assert found == [c for c in contents if c[0] != third - 2]


@pytest.mark.timeout(60)
def test_a_log_whose_trusted_file_was_cut_in_a_batch_says_so(kit) -> None:
    """A disk that lied about what is durable, or somebody with ``truncate``."""
    disk, _ = written(kit)
    for path in files(disk, ".snapshot")[1:]:
        disk.unlink(path)
    path = files(disk, ".log")[2]
    disk.write_file(path, disk.read(path)[:-40])
    with pytest.raises(DamagedData, match=re.escape(f"{path}: damaged at byte")):
        reopen(kit, disk)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("clean", [True, False])
def test_a_closed_segment_that_was_cut_at_the_end_of_a_batch_says_so(kit, caplog, compact, clean):
    """It opens, as whole batches are left; only compaction may have taken records there. A check
    says the same, and does not know the policy.
    """
    disk, contents = written(kit)
    path = files(disk, ".log")[2]
    base, after = (int(files(disk, ".log")[n].rpartition("/")[2][:20]) for n in (2, 3))
    last = [c for c in contents if base <= c[0] < after][-1]
    disk.write_file(path, disk.read(path)[: -len(last[2])])
    policy = frozenset({"compact" if compact else "delete"})
    config = replace(CONFIG, cleanup_policy=policy)
    disk.write_file("/d/.kafka_cleanshutdown", b"")
    (finding,) = [one for one in check_partition(DIRECTORY, disk) if "the next" in one.why]
    log = kit.open_log(disk, config=config, clean=clean, recovery_point=80)
    assert kit.contents(log) == [c for c in contents if c != last]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    told = f"{path}: it ends at {last[0]}, the next segment begins at {after}"
    assert [line.startswith(told) for line in said] == [True] * (not compact)
    assert not finding.damaged
    assert said == [f"{finding.path}: it {finding.why}"] * (not compact)
