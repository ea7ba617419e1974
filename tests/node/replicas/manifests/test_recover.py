"""What a start makes of what it finds of a replica's manifests; the files are made up."""

from __future__ import annotations

from typing import Any

import pytest

from kept.compaction.manifest import apply, manifest_store
from kept.compaction.manifest.manifest import BitMap, OutputSegment
from kept.node.replicas.manifests import recover
from kept.node.replicas.manifests.status import ManifestStatus
from kept.replication.manifests_events import ManifestRef
from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.types import Generation
from tests.support.given import Given
from tests.support.simulated_disk import SimulatedDisk

PATH = "/d/t-0"
OLD = ManifestRef(Generation(3, 1), 100)
NEW = ManifestRef(Generation(3, 2), 200)


def body(ref: ManifestRef, *segments: OutputSegment) -> Any:
    """A manifest of that name."""
    return Given(generation=ref.generation, end_offset=ref.end_offset, segments=segments)


def opened(end: int, sizes: dict[int, int] | None = None, start: int = 0) -> Any:
    """A log with segments of these sizes."""
    segments = [Given(base_offset=base, size_bytes=size) for base, size in (sizes or {}).items()]
    return Given(segments=segments, log_start_offset=start, log_end_offset=end)


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.mkdir("/d")
    disk.mkdir(PATH)
    return disk


def test_a_log_that_was_never_compacted_has_lost_nothing(disk):
    assert recover.before_opening(PATH, disk, alone=False) == (None, ManifestStatus())
    assert not ManifestStatus().lost


@pytest.mark.parametrize("swapping", [False, True])
def test_a_plan_that_cannot_be_read_is_needed_only_where_a_swap_was_under_way(
    disk, monkeypatch, swapping
):
    def damaged(*_: Any) -> None:
        raise DamagedData(PATH, 0, -1, "torn")

    monkeypatch.setattr(apply, "load_state", damaged)
    disk.write_atomic(f"{PATH}/{layout.HELD_MANIFEST}", b"junk")
    if swapping:
        disk.write_atomic(f"{PATH}/{0:020}.log{layout.SWAP}", b"")
        with pytest.raises(DamagedData):
            recover.before_opening(PATH, disk, alone=False)
    else:
        assert recover.before_opening(PATH, disk, alone=False) == (None, ManifestStatus(lost=True))


@pytest.mark.parametrize(
    ("found", "log_end", "lost"),
    [
        ((None, None), 0, False),
        ((OLD, NEW), 200, False),
        ((OLD, NEW), 199, True),
        ((OLD, OLD), 100, False),
        ((None, NEW), 150, True),
        ((None, NEW), 200, False),
    ],
)
def test_what_is_applied_or_held_counts_up_to_the_logs_end(disk, monkeypatch, found, log_end, lost):
    applied, held = found
    marked: list[Generation] = []
    generation = None if applied is None else applied.generation
    state: Any = Given(applied=generation)
    monkeypatch.setattr(apply, "complete_swap", lambda *_: state)
    monkeypatch.setattr(manifest_store, "remove_applied", lambda *given: marked.append(given[2]))
    monkeypatch.setattr(manifest_store, "read_manifest", lambda *_: body(applied))
    monkeypatch.setattr(manifest_store, "load", lambda *_: held)
    left, status = recover.after_opening(PATH, disk, state, False, opened(log_end))
    assert status == (ManifestStatus(lost=True) if lost else ManifestStatus(held, applied))
    assert left is (None if lost or applied is None else state)
    assert marked == ([] if applied is None else [applied.generation])


@pytest.mark.parametrize(
    ("applied", "log_end", "complete"), [(OLD, 200, True), (NEW, 200, False), (OLD, 199, False)]
)
def test_whether_the_log_is_complete_is_known_of_what_is_held_and_not_applied(
    disk, monkeypatch, applied, log_end, complete
):
    state: Any = Given(applied=applied.generation)
    monkeypatch.setattr(apply, "complete_swap", lambda *_: state)
    monkeypatch.setattr(manifest_store, "remove_applied", lambda *_: None)
    monkeypatch.setattr(manifest_store, "read_manifest", lambda *_: body(applied))
    monkeypatch.setattr(manifest_store, "load", lambda *_: NEW)
    monkeypatch.setattr(manifest_store, "is_complete", lambda *_: True)
    _, status = recover.after_opening(PATH, disk, state, False, opened(log_end))
    assert status.complete is complete


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({0: 500, 40: 300, 100: 7}, None),
        ({40: 300, 100: 7}, None),  # retention took the first
        ({40: 301, 100: 7}, None),
        ({0: 500, 40: 299, 100: 7}, (40, 299)),
        ({0: 500, 100: 7}, (40, 0)),
        ({0: 0, 40: 300}, (0, 0)),
    ],
)
def test_a_segment_that_was_cut_since_it_was_compacted_is_noticed(
    disk, monkeypatch, capsys, sizes, wrong
):
    """Its gaps tell nothing, so that nobody else would notice."""
    outputs = [
        OutputSegment(0, 40, BitMap([1]), size_bytes=500),
        OutputSegment(40, 100, BitMap([1]), size_bytes=300),
    ]
    state: Any = Given(applied=OLD.generation)
    monkeypatch.setattr(apply, "complete_swap", lambda *_: state)
    monkeypatch.setattr(manifest_store, "remove_applied", lambda *_: None)
    monkeypatch.setattr(manifest_store, "read_manifest", lambda *_: body(OLD, *outputs))
    monkeypatch.setattr(manifest_store, "load", lambda *_: OLD)
    left, status = recover.after_opening(PATH, disk, state, False, opened(100, sizes))
    said = capsys.readouterr().err
    if wrong is None:
        assert left is state and status == ManifestStatus(OLD, OLD) and not said
    else:
        base, size = wrong
        assert left is None and status == ManifestStatus(lost=True)
        assert f"{base:020}.log: damaged at byte {size}" in said and "records are lost" in said


@pytest.mark.parametrize("log_end", [40, 60])
def test_a_cut_of_the_log_is_no_damage_of_what_was_compacted(disk, monkeypatch, capsys, log_end):
    """A start after a kill between the cut and the note that nothing is applied any more."""
    outputs = [
        OutputSegment(0, 40, BitMap([1]), size_bytes=500),
        OutputSegment(40, 100, BitMap([1]), size_bytes=300),
    ]
    state: Any = Given(applied=OLD.generation)
    monkeypatch.setattr(apply, "complete_swap", lambda *_: state)
    monkeypatch.setattr(manifest_store, "remove_applied", lambda *_: None)
    monkeypatch.setattr(manifest_store, "read_manifest", lambda *_: body(OLD, *outputs))
    monkeypatch.setattr(manifest_store, "load", lambda *_: OLD)
    sizes = {0: 500, 40: 100} if log_end > 40 else {0: 500}
    left, status = recover.after_opening(PATH, disk, state, False, opened(log_end, sizes))
    said = capsys.readouterr().err
    assert left is None and status == ManifestStatus(lost=True)
    assert "log ends below its manifest" in said and "level=error" not in said


@pytest.mark.parametrize(("start", "lost"), [(30, None), (25, 20), (0, 10)])
def test_what_is_missing_below_the_log_start_is_lost_to_nobody(
    disk, monkeypatch, capsys, start, lost
):
    outputs = [
        OutputSegment(base, end, BitMap([1]), size_bytes=300)
        for base, end in ((0, 10), (10, 20), (20, 30), (30, 100))
    ]
    state: Any = Given(applied=OLD.generation)
    monkeypatch.setattr(manifest_store, "remove_applied", lambda *_: None)
    monkeypatch.setattr(manifest_store, "read_manifest", lambda *_: body(OLD, *outputs))
    monkeypatch.setattr(manifest_store, "load", lambda *_: OLD)
    monkeypatch.setattr(apply, "complete_swap", lambda *_: state)
    log = opened(100, {0: 300, 30: 300, 40: 0}, start)
    left, status = recover.after_opening(PATH, disk, state, False, log)
    said = capsys.readouterr().err
    if lost is None:
        assert left is state and status == ManifestStatus(OLD, OLD) and not said
    else:
        assert left is None and status == ManifestStatus(lost=True)
        assert f"{lost:020}.log: damaged at byte 0" in said
