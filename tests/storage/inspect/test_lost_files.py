"""Files that are gone, or were cut at the end of a batch, are found before a start says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.storage import checkpoints, layout
from kept.storage.disk import Disk
from kept.storage.inspect.check import check_directory
from kept.storage.inspect.findings import Finding
from kept.storage.types import TopicPartition

SEGMENTS, RECORDS = 7, 3
"""Segments of the log, and records in each but the last, which has two."""
END = (SEGMENTS - 1) * RECORDS + 2
TP = TopicPartition("t", 0)
JOURNAL = "removals-1-0-1"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An entry of log.dirs with one log, after a clean stop."""
    from kept.testing import Cluster

    target = tmp_path_factory.mktemp("stopped") / "log"
    with Cluster(log_segment_bytes=2000) as cluster, cluster.client() as client:
        client.create_topic("t", partitions=1)
        for n in range(END):
            client.produce("t", [OutRecord(b"%d" % n, bytes(500))])
        client.delete_records({TP: 1})
        cluster.stop()
        shutil.copytree(cluster.log_dir(), target)
    assert len([*(target / "t-0").glob("*.log")]) == SEGMENTS
    return target


@pytest.fixture
def directory(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "log"))


def crashed(directory: Path, recovery_point: int) -> None:
    """As a killed process leaves it, which has flushed so far."""
    (directory / layout.CLEAN_SHUTDOWN).unlink()
    path = directory / layout.RECOVERY_POINTS
    checkpoints.write_offsets(Disk(), str(path), {TP: recovery_point})


def written_by_kafka(directory: Path) -> None:
    meta = directory / layout.META_PROPERTIES
    meta.write_text(meta.read_text().replace("kept=1\n", ""))


def found(directory: Path) -> list[Finding]:
    return check_directory(str(directory))


def segment(directory: Path, number: int, kind: str = layout.LOG) -> Path:
    return directory / "t-0" / f"{number * RECORDS:020d}{kind}"


def without(directory: Path, *numbers: int, kinds: tuple[str, ...] = (layout.LOG,)) -> None:
    for number in numbers:
        for kind in kinds:
            segment(directory, number, kind).unlink(missing_ok=True)


ALL = (*layout.SEGMENT_SUFFIXES, layout.SNAPSHOT)


@pytest.mark.parametrize(
    ("remove", "first", "end"),
    [
        (lambda d: without(d, 2), 6, 9),
        (lambda d: without(d, 5, 6), 15, END),
        (lambda d: without(d, 5, 6, kinds=ALL), 15, END),
        (lambda d: os.truncate(segment(d, 2), 0), 6, 9),
        (lambda d: os.truncate(segment(d, 6), 0), 18, END),
        (lambda d: shutil.rmtree(d / "t-0"), 1, END),
    ],
    ids=["log", "last-logs", "last-segments", "cut", "cut-last", "partition"],
)
@pytest.mark.parametrize("clean", [True, False])
def test_what_was_durable_and_is_gone_is_damage(
    directory: Path, remove: Callable[[Path], None], first: int, end: int, clean: bool
) -> None:
    if not clean:
        crashed(directory, recovery_point=END)
    assert found(directory) == []
    remove(directory)
    damaged = [one for one in found(directory) if one.damaged]
    assert first in {one.offset for one in damaged}
    assert all("lost here" in one.why and first <= one.offset < end for one in damaged), damaged


def test_what_a_power_cut_took_is_a_note(directory: Path) -> None:
    """It was written, and not flushed."""
    crashed(directory, recovery_point=15)
    without(directory, 6, kinds=ALL)
    (finding,) = found(directory)
    assert not finding.damaged
    assert finding.why == (
        f"ends at 18, and was at {END} by replication-offset-checkpoint: "
        f"records from 18 to {END - 1} are lost here"
    )
    os.truncate(segment(directory, 5), 0)
    assert {(one.damaged, one.offset) for one in found(directory)} == {(False, 15)}


def test_a_snapshot_proves_how_far_a_log_was(directory: Path) -> None:
    (directory / layout.HIGH_WATERMARKS).unlink()
    (directory / layout.RECOVERY_POINTS).unlink()
    without(directory, 5, 6, kinds=layout.SEGMENT_SUFFIXES)
    (finding,) = found(directory)
    assert finding.damaged and f"{END:020d}.snapshot" in finding.why


def test_compaction_leaves_gaps_that_are_none(directory: Path) -> None:
    os.truncate(segment(directory, 2), 0)
    assert any(one.damaged for one in found(directory))
    path = directory / layout.CLEANER_OFFSETS
    checkpoints.write_offsets(Disk(), str(path), {TP: 9})
    assert not any(one.damaged for one in found(directory))
    path.unlink()
    for name in ("manifest-0-1", "manifest-applied", "held-manifest", "told-manifest", JOURNAL):
        assert any(one.damaged for one in found(directory))
        file = directory / "t-0" / name
        file.write_bytes(b"")
        assert found(directory) == [], name
        file.unlink()


def test_a_gap_of_which_nothing_tells_is_a_note(directory: Path) -> None:
    """A whole segment is not there: compaction may have removed it, and been forgotten since."""
    without(directory, 2, kinds=ALL)
    (finding,) = found(directory)
    assert not finding.damaged and finding.offset == 6
    assert finding.why == (
        "ends at 6, the next segment begins at 9: records from 6 to 8 are lost here; "
        "a file was cut or removed, or the topic was compacted once and nothing tells of it any "
        "more"
    )


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_gap_that_apache_kafka_may_have_left_is_a_note(directory: Path, is_adopted: bool) -> None:
    """Its follower of a compacted log begins a segment where the next batch does."""
    os.truncate(segment(directory, 2), 0)
    assert any(one.damaged for one in found(directory))
    written_by_kafka(directory)
    if is_adopted:
        (directory / layout.ADOPTED).touch()
    findings = found(directory)
    assert "ends at 6, the next segment begins at 9" in "".join(one.why for one in findings)
    assert not any(one.damaged for one in findings)


def test_what_retention_leaves_over_is_a_note(directory: Path) -> None:
    """A crash between the files of a segment that goes."""
    without(directory, 0)
    assert not any(one.damaged for one in found(directory))


def test_a_log_that_was_set_aside_is_no_other_one(directory: Path) -> None:
    (directory / "t-0").rename(directory / f"t-0.{'0' * 32}-stray")
    assert not any(one.damaged for one in found(directory))


def test_a_log_of_apache_kafkas_may_have_been_deleted_before_a_crash(directory: Path) -> None:
    shutil.rmtree(directory / "t-0")
    written_by_kafka(directory)
    assert [one.damaged for one in found(directory) if "is not there" in one.why] == [True]
    crashed(directory, recovery_point=END)
    assert [one.damaged for one in found(directory) if "is not there" in one.why] == [False]
