"""A pass whose disk fails, and manifests that were torn."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kept.compaction.cleaner.planner import PassSkipped
from kept.node.replicas.manifests import store, workers
from kept.node.replicas.manifests.errors import PassFailed
from kept.storage import layout
from kept.storage.errors import MachineError
from tests.support.cleaned_logs import TP, clean, filled, newest


def again(lone, lone_node):
    """The node after a stop."""
    config = lone.node.config
    lone.stop()
    return lone_node(
        log_dirs=config.log_dirs[0],
        metadata_log_dir=config.metadata_log_dir,
        log_cleaner_enable="false",
    )


@pytest.mark.parametrize(
    ("call", "suffix"),
    [
        ("rename", ".swap"),
        ("rename", "manifest-0-1"),
        ("rename", ".deleted"),
        ("fsync_dir", "t-0"),
        ("write_atomic", "manifest-applied"),
        ("write_atomic", "replication-offset-checkpoint"),
    ],
)
def test_a_disk_error_while_a_pass_is_put_into_place(lone_node, monkeypatch, call, suffix):
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    expected, disk = newest(hosted), lone.node.parts.runtime.disk
    real = getattr(disk, call)

    def failing(*args):
        if any(isinstance(arg, str) and arg.endswith(suffix) for arg in args):
            raise MachineError(args[0], call, OSError(errno.EIO, "I/O error"))
        return real(*args)

    monkeypatch.setattr(disk, call, failing, raising=False)
    with pytest.raises(MachineError, match="I/O error"):
        clean(lone)
    assert "I/O error" in lone.node.parts.table.directories[0].offline
    assert TP not in lone.node.parts.table.replicas
    monkeypatch.setattr(disk, call, real)
    restarted = again(lone, lone_node)
    hosted = restarted.node.parts.table.replicas[TP]
    hosted.partition.log.check_invariants()
    assert newest(hosted) == expected
    clean(restarted)
    assert newest(hosted) == expected and hosted.compaction.clean_to == 40


@pytest.mark.parametrize("fault", ["eio", "enospc", "emfile"])
def test_a_disk_error_in_a_worker_is_one_of_the_node(lone_node, monkeypatch, fault):
    """A device that fails takes the directory offline; a pass that lacks room is only given up."""
    lone = lone_node(log_cleaner_enable="false")
    expected = newest(filled(lone))
    monkeypatch.setenv("KEPT_FAIL_POINT", f"compaction.surveyed={fault}")
    directory = lone.node.parts.table.directories[0]
    if fault == "eio":
        with pytest.raises(MachineError, match=r"compaction.surveyed: .*Input/output error"):
            clean(lone)
        assert "Input/output error" in directory.offline
        assert TP not in lone.node.parts.table.replicas
        return
    with pytest.raises(PassFailed):
        clean(lone)
    assert directory.offline is None
    monkeypatch.undo()
    assert clean(lone).records_removed == 37
    assert newest(lone.node.parts.table.replicas[TP]) == expected


def test_a_segment_that_a_worker_misses_was_taken_from_under_the_node(lone_node):
    lone = lone_node(log_cleaner_enable="false")
    log = filled(lone).partition.log
    os.unlink(log.segments[1].path(layout.LOG))
    with pytest.raises(MachineError, match="removed, moved, replaced"):
        clean(lone)
    assert "removed, moved, replaced" in lone.node.parts.table.directories[0].offline


def test_why_a_pass_failed_is_told_without_paths_and_logged_with_them(lone_node, capfd):
    lone = lone_node(log_cleaner_enable="false")
    log = filled(lone).partition.log
    path = log.segments[0].path(layout.LOG)
    with open(path, "r+b") as file:
        file.seek(30)
        file.write(b"damaged")
    with pytest.raises(PassFailed, match=path):
        clean(lone)
    status = lone.node.parts.cleaner.started.status(TP)
    assert status.failure.reason.startswith(f"{0:020}.log: damaged at byte 0")
    assert log.directory not in status.failure.reason
    assert f"{path}: damaged" in capfd.readouterr().err


def test_a_torn_manifest_of_a_pass_costs_the_pass_and_nothing_more(lone_node, monkeypatch):
    from kept.compaction.manifest import manifest
    from kept.storage.errors import DamagedData

    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    expected, decode = newest(hosted), manifest.decode
    monkeypatch.setattr(manifest, "decode", lambda path, data: decode(path, data[: len(data) // 2]))
    with pytest.raises(DamagedData):
        clean(lone)
    assert lone.node.parts.table.directories[0].offline is None
    assert newest(hosted) == expected and len(hosted.partition.log.segments) > 3
    monkeypatch.undo()
    assert clean(lone).records_removed == 37
    assert newest(hosted) == expected


def test_a_bug_of_ours_while_a_manifest_is_stored_keeps_nobody_waiting(lone_node, monkeypatch):
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    expected = newest(hosted)

    async def broken(self, newest, told, *, complete):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(store.ManifestFiles, "store", broken)
    with pytest.raises(PassFailed, match="a bug"):
        clean(lone)
    assert hosted.compaction is None and newest(hosted) == expected
    monkeypatch.undo()
    assert clean(lone).records_removed == 37
    assert newest(hosted) == expected


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_a_torn_manifest_at_start_is_given_up_and_the_log_cleaned_anew(lone_node, left):
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    clean(lone)
    expected, directory = newest(hosted), Path(hosted.partition.log.directory)
    config = lone.node.config
    lone.stop()
    path = directory / "manifest-0-1"
    path.write_bytes(path.read_bytes()[:left])
    restarted = lone_node(
        log_dirs=config.log_dirs[0],
        metadata_log_dir=config.metadata_log_dir,
        log_cleaner_enable="false",
    )
    hosted = restarted.node.parts.table.replicas[TP]
    assert hosted.compaction is None and newest(hosted) == expected
    clean(restarted)
    assert newest(hosted) == expected
    epoch, generation = hosted.compaction.applied
    assert generation == 1
    names = sorted(name for name in os.listdir(directory) if name.startswith("removals-"))
    assert names == ["removals-1-0-1", f"removals-2-{epoch}-1"]


def begin_at(lone, offset):
    """As DeleteRecords and retention do it."""
    log = lone.node.parts.table.replicas[TP].partition.log
    log.advance_log_start(offset)
    log.delete_old_segments(lone.node.parts.runtime.now_ms(), log.log_end_offset)
    log.delete_expired(1 << 60)


@pytest.mark.parametrize("when", ["while it reads", "when it has read"])
def test_segments_that_are_deleted_during_a_pass_end_it_in_order(lone_node, monkeypatch, when):
    """It is no failure: the log is cleaned at once, as it is now."""
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    run, middle = workers.ManifestWork.run, hosted.partition.log.segments[2].base_offset

    async def deleting(self, command, question):
        if when == "while it reads":
            begin_at(lone, middle)
        result = await run(self, command, question)
        begin_at(lone, middle)
        return result

    monkeypatch.setattr(workers.ManifestWork, "run", deleting)
    said = clean(lone)
    assert isinstance(said, PassSkipped) and said.reason.endswith("were deleted meanwhile")
    assert lone.node.parts.counters.failed_compactions == 0
    assert lone.node.parts.cleaner.started.status(TP).failure is None
    monkeypatch.undo()
    expected = newest(hosted)
    assert clean(lone).clean_to == 40 and newest(hosted) == expected


def test_segments_that_are_deleted_before_a_generation_is_applied(lone_node, monkeypatch):
    """What the pass made does not fit any more, so it is built again from what is left."""
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    middle = hosted.partition.log.segments[2].base_offset
    apply = store.ManifestFiles.apply

    async def deleting(self, *args):
        begin_at(lone, middle)
        return await apply(self, *args)

    monkeypatch.setattr(store.ManifestFiles, "apply", deleting)
    expected = newest(hosted)
    assert clean(lone).clean_to == 40
    assert newest(hosted) == expected and hosted.partition.log.log_start_offset == middle
    assert hosted.manifests.retry_schedule.count == 0
