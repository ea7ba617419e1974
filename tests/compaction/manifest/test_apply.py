"""What a start reads back of compaction."""

from __future__ import annotations

from typing import Any

import pytest
from pyroaring import BitMap

from kept.compaction.manifest import apply
from kept.compaction.manifest.manifest import OutputSegment
from kept.node.replicas.log_opener import LogOpener, Opening
from kept.node.replicas.manifests.status import ManifestStatus
from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.log.log import Log
from kept.storage.types import Generation
from tests.support.given import Given
from tests.support.installing import log_directory
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk


def test_a_mark_without_its_manifest_is_damage_and_can_be_cleared() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/t-0")
    apply.write_mark("/t-0", disk, Generation(0, 7))
    with pytest.raises(DamagedData, match=r"manifest-0-7.*missing"):
        apply.load_state("/t-0", disk)
    apply.clear("/t-0", disk)
    assert apply.load_state("/t-0", disk) == apply.CompactionState()
    assert apply.read_mark("/t-0", disk) is None


@pytest.mark.parametrize(
    ("retired", "back", "start"),
    [
        ({10: 300, 20: 300}, {0: 300}, 30),
        ({10: 300}, {0: 300}, 20),  # the next one is missing, and nothing tells why
        ({20: 300}, {0: 300}, 30),  # retention takes the oldest: 10 went before it
        ({20: 300}, {}, 30),
        ({}, {0: 300}, 0),
        ({0: 300, 30: 300}, {0: 300}, 0),  # names that are there, too
        ({10: 301, 20: 299}, {0: 300}, 0),  # inputs of a swap
        ({10: 300, 20: 300}, {0: 0}, 0),  # the log was begun anew there
        ({10: 300, 20: 300}, {25: 0}, 0),
        ({10: 300, 20: 300}, {0: 500}, 0),  # it has what is left of the others
    ],
)
def test_where_a_log_starts_by_what_retention_was_taking(retired, back, start) -> None:
    outputs = [
        OutputSegment(base, end, BitMap([1]), size_bytes=300)
        for base, end in ((0, 10), (10, 20), (20, 30), (30, 100))
    ]
    found: Any = Given(segments=outputs)
    assert apply._log_start(found, back | {30: 300, 40: 0}, retired) == start


def start_of(w, disk) -> tuple[Log, ManifestStatus]:
    """A node's start."""
    opener: Any = LogOpener(
        Given(disk=disk, now_ms=lambda: w.now),
        Given(current__producer_id_expiration_ms=1000),
        Given(node_id=1),
    )
    log = w.log
    record = Given(replicas=(1, 2), isr=(1, 2))
    opening = Opening(log.topic_partition, log.topic_id, record, w.config)
    opening.directory = Given(directory=log_directory(w.log.directory, disk))
    opened, _, status = opener._open(opening)
    return opened, status


@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_start_completes_retention_that_a_power_cut_half_undid(world, how) -> None:
    """The first segment's name is back, the second one is still on its way out. It is told no more
    once that file is gone, so the log start is durable before, wherever the start ends.
    """
    call = 0
    while True:
        call += 1
        w = world(cleanup_policy=frozenset({"compact", "delete"}), segment_bytes=100)
        for number in range(4):
            w.append((b"k%d" % number, b"v"))
            w.roll()
        w.clean()
        assert w.log.segments.bases == [0, 1, 2, 3, 4]
        w.log.segments[1].rename("", layout.DELETED)
        w.disk.fsync_dir(w.log.directory)
        w.disk.crash_at(w.disk.calls + call)
        try:
            start_of(w, w.disk)
            crashed = False
        except SimulatedCrash:
            crashed = True
        disk = w.disk.after_kill() if how == "kill" else w.disk.after_power_loss(call)
        log, status = start_of(w, disk)
        assert not status.lost and status.applied is not None
        assert log.segments.bases == [0, 2, 3, 4] and log.log_start_offset == 2
        log.delete_old_segments(w.now, log.log_end_offset, by_policy=False)
        assert log.segments.bases == [2, 3, 4]
        log.check_invariants()
        log, status = start_of(w, disk.after_kill())
        assert not status.lost and log.segments.bases == [2, 3, 4]
        if not crashed:
            break
    assert call > 10


def test_an_input_whose_output_waits_is_no_trace_of_retention(world) -> None:
    """Both are of one size where only delete horizons were set; what is below stays."""
    w = world(segment_bytes=100, delete_retention_ms=1)  # so that sizes stay as they are
    w.append((b"other", b"v"))
    w.roll()
    w.append((b"deleted", None))
    w.roll()
    w.log.flush()
    size = w.log.segments[1].size_bytes
    w.clean()
    segment = w.log.segments[1]
    assert w.log.segments.bases == [0, 1, 2] and segment.size_bytes == size
    segment.rename("", layout.SWAP)  # as if it was not in place yet
    w.disk.fsync_dir(w.log.directory)
    assert w.disk.exists(segment.path(layout.LOG, layout.DELETED))
    log, status = start_of(w, w.disk.after_kill())
    assert status.applied is not None and log.log_start_offset == 0
    assert log.segments.bases == [0, 1, 2] and log.segments[1].size_bytes == size


@pytest.mark.parametrize("offset", [0, 1])
def test_a_log_that_was_begun_anew_below_what_retention_took_starts_there(world, offset) -> None:
    """After an unclean election it follows a leader that still has what went here. A kill comes
    before the manifest is forgotten: the log would start above what its leader has.
    """
    w = world(cleanup_policy=frozenset({"compact", "delete"}), segment_bytes=100)
    for number in range(4):
        w.append((b"k%d" % number, b"v"))
        w.roll()
    w.clean()
    w.log.advance_log_start(2)
    w.log.delete_old_segments(w.now, w.log.log_end_offset, by_policy=False)
    assert w.disk.exists(layout.segment_file("/t-0", 1, layout.LOG, layout.DELETED))
    w.log.truncate_fully_and_start_at(offset)
    log, status = start_of(w, w.disk.after_kill())
    assert (log.log_start_offset, log.log_end_offset) == (offset, offset)
    assert status.lost


def test_a_log_that_was_cut_below_an_input_on_its_way_out_starts_where_it_did(world) -> None:
    """Delete horizons were set in a segment, which kept its size, and a cut took it away. A kill
    comes before the manifest is forgotten: all that is left would be taken for expired.
    """
    w = world(segment_bytes=100, delete_retention_ms=1)
    for row in ((b"other", b"v"), (b"deleted", b"v"), (b"deleted", None)):
        w.append(row)
        w.roll()
    w.log.flush()
    size = w.log.segments[2].size_bytes
    w.clean()
    segment = w.log.segments[w.log.segments.floor(2)]
    assert (segment.base_offset, segment.size_bytes) == (2, size)
    assert w.disk.exists(segment.path(layout.LOG, layout.DELETED))
    w.log.truncate_to(1)
    log, status = start_of(w, w.disk.after_kill())
    assert (log.log_start_offset, log.log_end_offset) == (0, 1)
    assert status.lost
