"""A crash at every call of a cut, killed or with the power cut, leaves what a start brings in line.

The cut is the product's own: the follower's, with all that its node does about it at once (recovery
point, manifests). The log has producers, aborted transactions and leader epochs, was compacted, and
holds a manifest that it has not applied. What comes of the start is a log without a hole, whose
producers, transactions and manifests are those of its records; and it can be fetched to its end.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

import pytest

from kept.compaction.manifest import manifest_store
from kept.node.replicas.local_replica import LocalDirectory, LocalReplica
from kept.node.replicas.manifests import recover
from kept.node.replicas.manifests.replica import ReplicaManifests
from kept.node.replicas.role_changes import RoleChanges
from kept.node.runtime.counters import Counters
from kept.replication.manifests import ManifestCore, ManifestRole
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition import Partition
from kept.storage.directory import Checkpoint
from kept.storage.log import missing_files
from kept.storage.records import build_batch
from kept.storage.types import Generation
from tests.support.given import Given
from tests.support.installing import log_directory
from tests.support.replicas import InlinePool, manifest, manifest_context
from tests.support.simulated_disk import SimulatedCrash
from tests.support.slow import rest_slow

HELD = Generation(0, 9)


def fetched(w, pid: int, number: int, epoch: int, *, transactional: bool = False) -> None:
    data = build_batch(
        [(w.now, b"k%d" % (number % 3), b"%d" % number * 30, ())],
        producer_id=pid,
        producer_epoch=0,
        base_sequence=number,
        is_transactional=transactional,
        leader_epoch=epoch,
        base_offset=w.log.log_end_offset,
    )
    w.log.append_as_follower(data, w.now)
    w.log.write()


def prepared(world):
    """Generation 1 ends at 12; above are two segments and the active one, each with its epoch."""
    w = world(delete_retention_ms=1000, segment_bytes=100_000)
    for number in range(12):
        fetched(w, 4, number, 0)
    w.roll()
    w.clean()
    for epoch in range(1, 4):
        for number in range(3):
            fetched(w, 4, 9 + 3 * epoch + number, epoch)
            fetched(w, 9, 3 * epoch + number, epoch, transactional=True)
        w.marker(9, commit=epoch == 2)
        if epoch < 3:
            w.roll()
    w.log.flush()
    w.disk.fsync_dir("/t-0")
    directory, end = log_directory("/t-0", w.disk), w.log.log_end_offset
    tp = w.log.topic_partition
    directory.state_recovery_point(tp, end, directory.version)
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {tp: end})
    manifest_store.store("/t-0", w.disk, manifest(HELD, end), None, complete=True)
    return w


def follower(w) -> LocalReplica:
    """Replica 1 of the log, which follows node 2 and has applied what it has applied."""
    disk, calls = w.disk, []
    _, status = opened(w, disk)
    core = ManifestCore(
        1,
        status.held,
        status.applied,
        complete=status.complete,
        role=ManifestRole.FOLLOWER,
        leader_epoch=5,
    )
    partition = Partition(w.log, 1, high_watermark=12, applied_end=12, manifests=core)
    context = manifest_context(calls, disk=disk)
    given: Any = Given(on_still_lost=None, on_later_epoch_answered=None)
    roles = RoleChanges(
        runtime=context.runtime,
        metadata=context.metadata,
        identity=context.identity,
        table=context.table,
        failures=context.failures,
        counters=Counters(),
        fetchers=context.fetchers,
        alter_partition=given,
        notifier=context.notifier,
    )
    of_log = log_directory(w.log.directory, disk)
    w.log.before_cut = partial(of_log.lower_checkpoints, w.log.topic_partition)
    directory = LocalDirectory(of_log, cast("Any", InlinePool()), "/")
    hosted = LocalReplica(partition, directory, cast("Any", roles))
    hosted.manifests = ReplicaManifests(context, hosted)
    partition.listener = hosted
    partition.become_follower(2, 5, 1, (1, 2), (1, 2), 0)
    return hosted


def opened(w, disk):
    """What a start finds of manifests; ``w`` is the log as it was opened."""
    state, known = recover.before_opening("/t-0", disk, False)
    if state is None:
        return state, known
    return recover.after_opening("/t-0", disk, state, False, w.log)


def reopened(world, w, disk):
    again = world.__new__(world)
    again.disk, again.now, again.config, again.seed = disk, w.now + 1, w.config, w.seed
    return again.open()


def batches_of(w):
    return [bytes(data) for _, data in w.read()]


def knowledge(w):
    """What a log knows that it was not told anew: producers, aborted transactions, epochs."""
    log = w.log
    producers = {
        pid: (state.epoch, state.last_sequence, state.txn_first_offset)
        for pid, state in log.producers.items()
    }
    end = log.log_end_offset
    epochs = [entry for entry in log.leader_epochs.entries if entry[1] < end]
    return producers, log.aborted_transactions(0, end), epochs


def check_manifests(status, end: int) -> None:
    """What is relied on does not reach above the log."""
    if status.lost:
        assert (status.held, status.applied) == (None, None)
        return
    assert all(ref.end_offset <= end for ref in (status.held, status.applied) if ref is not None)
    assert not status.complete or status.held == ManifestRef(HELD, 33)


def check_fetched_again(world, again, disk, batches: list[bytes], *, flushed: bool) -> None:
    """It fetches the rest, and power fails: what was not durable is not relied on."""
    missing = batches[len(batches_of(again)) :]
    for data in missing:
        again.log.append_as_follower(data, again.now)
        again.log.write()
    if flushed:
        again.log.flush()
    left = disk.after_power_loss(len(missing))
    found = batches_of(reopened(world, again, left))
    assert found == batches[: len(found)]
    assert not flushed or found == batches


@pytest.mark.parametrize("offset", rest_slow([28, 23, 15, 5], 2))
@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_crash_at_every_call_of_a_cut(world, caplog, how, offset) -> None:
    """No start after a kill says that records are lost; one after a power cut may: a name that was
    removed comes back."""
    whole = prepared(world)
    batches, known = batches_of(whole), {}
    for end in (0, *(header.next_offset for header in whole.headers())):
        w = prepared(world)
        follower(w).partition.follower.truncate_to(end)
        known[w.log.log_end_offset] = knowledge(w)
    ends = set()
    for call in range(1, 1000):
        w = prepared(world)
        hosted = follower(w)
        w.disk.crash_at(w.disk.calls + call)
        try:
            hosted.partition.follower.truncate_to(offset)
        except SimulatedCrash:
            disk = w.disk.after_kill() if how == "kill" else w.disk.after_power_loss(call)
        else:
            break
        caplog.clear()
        traces = missing_files.find_traces(disk, "/t-0")
        directory, tp = log_directory("/t-0", disk), w.log.topic_partition
        again = reopened(world, w, disk)
        missing_files.report_missing(
            again.log, traces, directory.high_watermarks[tp], directory.recovery_points[tp]
        )
        assert "though everything below" not in caplog.text
        assert how == "power" or not any(r.levelno >= logging.ERROR for r in caplog.records)
        found, end = batches_of(again), again.log.log_end_offset
        assert found == batches[: len(found)]
        assert knowledge(again) == known[end]
        _, status = opened(again, disk)
        check_manifests(status, end)
        check_fetched_again(world, again, disk, batches, flushed=call % 2 == 1)
        ends.add(end)
    assert call > 6, "there is something to interrupt"
    assert len(ends) > 1 and max(ends) == 33


@pytest.mark.parametrize("offset", rest_slow([28, 23, 15, 5], 2))
@pytest.mark.parametrize("how", ["kill", "power"])
def test_what_comes_after_a_cut_is_not_taken_for_what_was_there(world, how, offset) -> None:
    """Other records, not durable yet, are where the recovery point and snapshots were."""
    for seed in range(4):
        w = prepared(world)
        follower(w).partition.follower.truncate_to(offset)
        known = {w.log.log_end_offset: knowledge(w)}
        for number in range(40):
            if number == 2:
                w.roll()
            fetched(w, 30 + number % 2, number // 2, 4)
            known[w.log.log_end_offset] = knowledge(w)
        batches = batches_of(w)
        disk = w.disk.after_kill() if how == "kill" else w.disk.after_power_loss(seed)
        again = reopened(world, w, disk)
        found = batches_of(again)
        assert found == batches[: len(found)]
        assert knowledge(again) == known[again.log.log_end_offset]
        _, status = opened(again, disk)
        check_manifests(status, again.log.log_end_offset)
        assert not status.complete
        assert how == "power" or found == batches
