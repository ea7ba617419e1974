"""Before the first swap the high watermark is at the manifest's end, and on disk (rule 12)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kept.compaction.manifest import apply as applying
from kept.node.replicas.manifests.workers import ManifestWork
from kept.storage import layout
from kept.storage.checkpoints import read_offsets
from kept.storage.directory import Checkpoint
from kept.storage.errors import InvariantViolation
from tests.support.cleaned_logs import TP, clean, filled, newest

BEHIND = 7
"""Below the end of every manifest here: what a replica knows that heard nothing since."""


@pytest.fixture
def behind(lone_node):
    """A node whose one log has been compacted in part; its high watermark lags."""
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    lone.node.parts.maintenance.stop()  # it would flush what rolls meanwhile
    hosted.partition.core.high_watermark = BEHIND
    checkpointed(lone, write=True)
    return lone, hosted


def checkpointed(lone, *, write=False):
    """What the checkpoint in the directory says of the log; ``write``: let it say what is known."""
    directory = lone.node.parts.table.directories[0]
    path = f"{directory.name}/{layout.HIGH_WATERMARKS}"
    if write:
        known = lone.node.parts.table.replicas[TP].partition.high_watermark
        directory.directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: known})
    return read_offsets(lone.node.parts.runtime.disk, path)[TP]


def names(hosted):
    return sorted(path.name for path in Path(hosted.partition.log.directory).glob("*.log*"))


def watched(lone, monkeypatch):
    """What was known, in memory and on disk, when the first swap began."""
    seen = []
    real = applying.begin

    def begin(log, installable):
        partition = lone.node.parts.table.replicas[TP].partition
        seen.append((partition.high_watermark, checkpointed(lone), installable.manifest.end_offset))
        return real(log, installable)

    monkeypatch.setattr(applying, "begin", begin)
    return seen


def test_a_base_generation_is_committed_and_checkpointed_before_its_first_swap(behind, monkeypatch):
    lone, hosted = behind
    expected = newest(hosted)
    end = hosted.partition.log.log_end_offset
    seen = watched(lone, monkeypatch)
    name = (hosted.partition.leader_epoch, 1)

    async def go():
        return await asyncio.wait_for(
            hosted.manifests._files.create_base(ManifestWork(), name, lambda: True), 60
        )

    state = lone.run(go())
    assert seen == [(end, end, end)]
    assert state.end_offset == end and newest(hosted) == expected


def test_a_base_generation_is_made_though_retention_takes_what_it_is_made_of(behind, monkeypatch):
    lone, hosted = behind
    log_, end = hosted.partition.log, hosted.partition.log.log_end_offset
    taken: list[int] = []
    real = ManifestWork.run

    async def run(work, command, question):
        log_.advance_log_start(log_.segments[1].base_offset)
        now_ms = lone.node.parts.runtime.now_ms()
        taken.append(len(log_.delete_old_segments(now_ms, end, by_policy=False)))
        log_.delete_expired(now_ms + log_.config.file_delete_delay_ms)
        return await real(work, command, question)

    monkeypatch.setattr(ManifestWork, "run", run)
    name = (hosted.partition.leader_epoch, 1)

    async def go():
        return await asyncio.wait_for(
            hosted.manifests._files.create_base(ManifestWork(), name, lambda: True), 60
        )

    assert lone.run(go()).end_offset == end
    assert taken == [1, 0] and not log_.holds_segments


def test_a_pass_is_checkpointed_before_its_first_swap(lone_node, monkeypatch):
    lone = lone_node(log_cleaner_enable="false")
    filled(lone)
    directory = lone.node.parts.table.directories[0].directory
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: BEHIND})
    assert checkpointed(lone) == BEHIND
    seen = watched(lone, monkeypatch)
    clean(lone)
    ((known, on_disk, end),) = seen
    assert on_disk == known >= end > BEHIND


def test_nothing_is_swapped_above_the_high_watermark(behind, monkeypatch):
    """What lies above it may still be truncated, and a manifest covers it."""
    lone, hosted = behind
    before = names(hosted)
    seen = watched(lone, monkeypatch)
    monkeypatch.setattr(type(hosted.partition), "raise_high_watermark", lambda *_: None)
    name = (hosted.partition.leader_epoch, 1)

    async def go():
        await asyncio.wait_for(
            hosted.manifests._files.create_base(ManifestWork(), name, lambda: True), 60
        )

    with pytest.raises(InvariantViolation, match=f"high watermark is {BEHIND}, the manifest ends"):
        lone.run(go())
    assert seen == []
    assert set(before) <= set(names(hosted)), "only the roll of the base job joined"


def test_nothing_is_swapped_above_what_is_durable(behind, monkeypatch):
    """What lies above it may be gone after a power cut, and a start would take it for compacted."""
    lone, hosted = behind
    before = names(hosted)
    seen = watched(lone, monkeypatch)

    def flushed(self, end_offset):
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)  # without a word to the disk
        return done

    monkeypatch.setattr(type(hosted), "flushed", flushed)
    point, name = hosted.partition.log.recovery_point, (hosted.partition.leader_epoch, 1)
    end = hosted.partition.log.log_end_offset

    async def go():
        await asyncio.wait_for(
            hosted.manifests._files.create_base(ManifestWork(), name, lambda: True), 60
        )

    told = f"durable to {point}, the manifest ends at {end}"
    with pytest.raises(InvariantViolation, match=told):
        lone.run(go())
    assert point < end and seen == [] and checkpointed(lone) == BEHIND
    assert set(before) <= set(names(hosted)), "only the roll of the base job joined"
