"""What a start makes of what it finds of a replica's manifests; the files are made up."""

from __future__ import annotations

from typing import Any

import pytest

from kept.compaction.manifest import apply, manifest_store
from kept.node.replicas.manifests import recover
from kept.node.replicas.manifests.status import ManifestStatus
from kept.replication.manifests_events import ManifestRef
from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.types import Generation
from tests.support.parts import Given
from tests.support.simulated_disk import SimulatedDisk

PATH = "/d/t-0"
OLD = ManifestRef(Generation(3, 1), 100)
NEW = ManifestRef(Generation(3, 2), 200)


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.mkdir("/d")
    disk.mkdir(PATH)
    return disk


def test_a_log_that_was_never_compacted_has_lost_nothing(disk):
    assert recover.before(PATH, disk, alone=False) == (None, ManifestStatus())
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
            recover.before(PATH, disk, alone=False)
    else:
        assert recover.before(PATH, disk, alone=False) == (None, ManifestStatus(lost=True))


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
    state: Any = Given(applied=None if applied is None else applied.generation)
    monkeypatch.setattr(apply, "complete_swap", lambda *_: state)
    monkeypatch.setattr(manifest_store, "applied", lambda *given: marked.append(given[2]))
    monkeypatch.setattr(manifest_store, "body", lambda *_: applied)
    monkeypatch.setattr(manifest_store, "load", lambda *_: held)
    left, status = recover.after(PATH, disk, state, False, log_end)
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
    monkeypatch.setattr(manifest_store, "applied", lambda *_: None)
    monkeypatch.setattr(manifest_store, "body", lambda *_: applied)
    monkeypatch.setattr(manifest_store, "load", lambda *_: NEW)
    monkeypatch.setattr(manifest_store, "is_complete", lambda *_: True)
    _, status = recover.after(PATH, disk, state, False, log_end)
    assert status.complete is complete
