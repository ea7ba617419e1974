"""A partition as follower: roles, what a fetcher brings, readers, retention, ISR requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kept.replication.events import CommitAdvanced, EligibleBrokersChanged, ProposeIsr
from kept.replication.fetcher import FetcherCore, RequestAbandoned
from kept.replication.follower import NO_LEADER, AppendBatches, FetchAgain, StartAt, TruncateTo
from kept.replication.follower_replica import perform_all
from kept.replication.isr import REFUSED_PAUSE_MS
from kept.replication.manifests_events import (
    BaseGenerationCreated,
    DivergenceChecked,
    ManifestRef,
    PassCompleted,
    PullFailed,
    PullResponse,
    PullResponseReceived,
    StartedFollowing,
)
from kept.replication.partition import ENOUGH_BYTES, Partition
from kept.storage.errors import (
    CorruptMessage,
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidUpdateVersion,
    InvariantViolation,
    KafkaStorageError,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    OffsetOutOfRange,
    ReplicaNotAvailable,
    RequestTimedOut,
    RetriableError,
    UnknownLeaderEpoch,
)
from kept.storage.producers import cut_preparation, producer_state_manager
from kept.storage.records import build_batch
from kept.storage.types import Generation, LogConfig
from tests.support import partitions as tools
from tests.support.listener import RecordedListener


def batches(*spans: tuple[int, int, int]) -> bytes:
    """(base offset, next offset, leader epoch) each."""
    return b"".join(
        build_batch(
            [(1000, b"k", b"v" * 20, ())] * (end - base), base_offset=base, leader_epoch=epoch
        )
        for base, end, epoch in spans
    )


@pytest.fixture
def follower(disk) -> Partition:
    """Node 0 follows node 1 in epoch 3 and is in the ISR; it has 0..10, committed to 6."""
    made = Partition(tools.open_log(disk), 0)
    made.become_follower(1, 3, 7, (1, 0), (1, 0, 2), 0)
    made.follower.append_fetched(batches((0, 5, 1), (5, 10, 3)), 6, 0, 0)
    return made


def stale_pull(follower: Partition) -> PullResponseReceived:
    """A leader publishes a manifest up to 11, for a request that claims a log up to there."""
    follower.step(StartedFollowing(3), 0)
    follower.step(DivergenceChecked(3, agreed=True), 0)
    request = follower.core.manifests.start_pull(11)
    ref = ManifestRef(Generation(3, 1), 11)
    return PullResponseReceived(request, PullResponse(ref, ref, (ref,)))


def above_log(follower: Partition) -> list:
    ref = ManifestRef(Generation(3, 1), 11)
    return [CommitAdvanced(11), BaseGenerationCreated(ref), stale_pull(follower)]


@pytest.mark.parametrize("which", range(3))
def test_what_would_commit_above_the_log_is_refused_before_anything_changes(follower, which):
    event = above_log(follower)[which]
    core = follower.core
    before = repr(core)
    with pytest.raises(OffsetOutOfRange, match="up to 11, the log ends at 10"):
        follower.step(event, 0)
    assert repr(core) == before and core.high_watermark == 6
    follower.check_invariants()


def test_a_late_pull_above_the_log_is_ignored(follower):
    event = stale_pull(follower)
    follower.step(PullFailed(event.request), 0)
    follower.step(event, 0)
    assert follower.core.manifests.leader_published is None and follower.high_watermark == 6


@pytest.mark.parametrize("epoch", [4, 3])
def test_a_pass_above_the_log_is_refused_in_its_epoch_only(follower, epoch):
    follower.become_leader(4, 8, (0,), (1, 0, 2), 0)
    event = PassCompleted(ManifestRef(Generation(epoch, 1), 11), epoch, None)
    if epoch == 3:
        follower.step(event, 0)
        return
    with pytest.raises(OffsetOutOfRange, match="up to 11, the log ends at 10"):
        follower.step(event, 0)


# Roles.


def test_it_is_a_follower(follower) -> None:
    assert follower.is_follower and not follower.is_leader and follower.replicated
    assert (follower.leader_id, follower.leader_epoch, follower.partition_epoch) == (1, 3, 7)
    assert (follower.isr, follower.in_sync) == ((1, 0), True)
    assert (follower.latest_epoch, follower.follower.own_end_offset(1)) == (3, (1, 5))
    follower.check_invariants()


def test_a_fresh_replica_is_neither(disk) -> None:
    fresh = Partition(tools.open_log(disk), 0)
    assert not fresh.is_follower and not fresh.is_leader and not fresh.replicated
    assert fresh.latest_epoch == -1


def test_only_a_new_leader_or_epoch_is_news_for_the_fetcher(follower) -> None:
    become = follower.become_follower
    assert not become(1, 3, 8, (1,), (1, 0, 2), 0)
    assert (follower.partition_epoch, follower.in_sync) == (8, False)
    assert become(2, 4, 9, (1,), (1, 0, 2), 0)
    assert become(NO_LEADER, 5, 10, (1,), (1, 0, 2), 0)
    with pytest.raises(InvariantViolation, match="leader epoch 4 after 5"):
        become(1, 4, 9, (1,), (1, 0, 2), 0)


def test_a_deposed_leader_tells_who_waits(replicated) -> None:
    told: list = []
    tools.produce(replicated, 2)
    replicated.when_committed(2, told.append)
    assert replicated.become_follower(1, 4, 1, (0, 1), (0, 1, 2), 0)
    assert [type(error) for error in told] == [NotLeaderOrFollower]
    with pytest.raises(NotLeaderOrFollower):
        replicated.append(tools.checked(), tools.NOW)
    with pytest.raises(NotLeaderOrFollower):
        replicated.fetch(0, 100, replica_id=1)
    replicated.when_committed(1, told.append)
    assert len(told) == 2


def test_a_follower_becomes_leader_with_the_high_watermark_it_knew(follower) -> None:
    tools.lead(follower, 4, (1, 0, 2), (0, 1), 8)
    assert (follower.high_watermark, follower.log_end_offset, follower.leader_id) == (6, 10, 0)
    assert follower.core.epoch_start_offset == 10
    with pytest.raises(OffsetNotAvailable):
        follower.list_offset(-1)
    follower.fetch(10, 100, replica_id=1, current_leader_epoch=4, last_fetched_epoch=3)
    assert follower.high_watermark == 10


# What a fetcher brings.


def test_appending_follows_high_watermark_and_log_start(follower) -> None:
    woken: list[int] = []
    follower.add_waiter(lambda: woken.append(follower.high_watermark))
    info = follower.follower.append_fetched(batches((10, 12, 3), (15, 18, 3)), 16, 0, 0)
    assert (info.base_offset, info.last_offset) == (10, 17), "gaps are fine"
    assert (follower.log_end_offset, follower.high_watermark) == (18, 16)
    follower.follower.append_fetched(b"", 30, 4, 0)
    assert (follower.high_watermark, follower.log_start_offset) == (18, 4)
    follower.follower.append_fetched(b"", 2, 1, 0)
    assert (follower.high_watermark, follower.log_start_offset) == (18, 4), "never back"
    assert woken == [16, 18]


def test_overlaps_and_damage_are_refused_whole(follower) -> None:
    with pytest.raises(OffsetOutOfRange, match="overlaps"):
        follower.follower.append_fetched(batches((9, 12, 3)), 20, 0, 0)
    damaged = bytearray(batches((10, 12, 3), (12, 14, 3)))
    damaged[-1] ^= 1
    with pytest.raises(CorruptMessage):
        follower.follower.append_fetched(damaged, 20, 0, 0)
    assert (follower.log_end_offset, follower.high_watermark) == (10, 6)


def test_a_batch_that_is_cut_off_is_left_for_the_next_answer(follower) -> None:
    follower.follower.append_fetched(batches((10, 12, 3), (12, 14, 3))[:-1], 20, 0, 0)
    assert follower.log_end_offset == 12


def test_batches_of_later_epochs_were_not_there_when_it_was_answered(follower) -> None:
    """KAFKA-18723: the leader was deposed and cut after its answer, before its file was read."""
    follower.follower.append_fetched(batches((10, 12, 3), (12, 14, 4), (14, 16, 3)), 20, 0, 0)
    assert (follower.log_end_offset, follower.latest_epoch) == (12, 3)
    assert follower.follower.append_fetched(batches((12, 14, 4)), 20, 0, 0) is None


def test_an_answer_is_written_at_once_and_without_a_flush(follower, disk) -> None:
    before = len(disk.trace)
    follower.follower.append_fetched(batches(*((i, i + 1, 3) for i in range(10, 20))), 0, 0, 0)
    assert [call.split()[0] for call in disk.trace[before:]] == ["write"]
    follower.follower.append_fetched(batches((20, 21, 3)), 0, 0, 0)


def test_the_epochs_are_durable_before_the_recovery_point_passes_them(follower, disk):
    follower.log.flush()
    follower.become_follower(2, 4, 8, (1, 0), (1, 0, 2), 0)
    follower.follower.append_fetched(batches((10, 12, 4)), 0, 0, 0)
    follower.log.roll(tools.NOW)
    follower.follower.append_fetched(batches((12, 13, 4)), 0, 0, 0)
    assert follower.log.leader_epochs.dirty
    ticket = follower.log.flush_ticket()
    ticket.run()
    ticket.done()
    for seed in range(6):
        again = tools.open_log(disk.after_power_loss(seed), recovery_point=13)
        assert again.leader_epochs.entries == [(1, 0), (3, 5), (4, 10)]


def test_only_followers_of_somebody_append(follower) -> None:
    follower.become_follower(NO_LEADER, 4, 8, (1, 0), (1, 0, 2), 0)
    with pytest.raises(NotLeaderOrFollower):
        follower.follower.append_fetched(b"", 0, 0, 0)
    tools.lead(follower, 5, (1, 0, 2), (0,), 9)
    with pytest.raises(NotLeaderOrFollower):
        follower.follower.append_fetched(b"", 0, 0, 0)
    for cut in (follower.follower.truncate_to, follower.follower.start_at):
        with pytest.raises(InvariantViolation, match="never cuts"):
            cut(2)


def test_effects_are_performed(follower) -> None:
    before = follower.size_bytes
    follower.follower.perform(FetchAgain(), 0)
    data = batches((10, 12, 3))
    follower.follower.perform(AppendBatches(data, 0, 0), 0)
    assert follower.size_bytes == before + len(data)
    follower.follower.perform(TruncateTo(7), 0)
    assert follower.log_end_offset == 5
    follower.follower.perform(StartAt(90), 0)
    assert (follower.log_start_offset, follower.log_end_offset, follower.latest_epoch) == (
        90,
        90,
        -1,
    )


def test_a_failing_disk_takes_the_partition_offline_and_its_follower_with_it(
    follower, disk
) -> None:
    tp = follower.topic_partition
    fetcher = FetcherCore(1)
    fetcher.add(tp, follower.topic_id, follower, 3)
    disk.fail("write", ".log")
    work = ((tp, (AppendBatches(batches((10, 12, 3)), 0, 0),)),)
    perform_all(fetcher, work, {tp: follower}, 0, 0)
    assert follower.offline is not None
    assert fetcher.next_request(10**9) is None
    with pytest.raises(KafkaStorageError):
        follower.follower.truncate_to(1)
    with pytest.raises(KafkaStorageError):
        follower.become_follower(1, 9, 9, (1,), (1, 0), 0)
    perform_all(fetcher, work, {}, 0, 0)


class BusyListener(RecordedListener):
    """Files are worked on that a cut would change."""

    def check_cut(self) -> None:
        raise ReplicaNotAvailable("the cut waits")


def test_a_cut_that_waits_is_tried_again_soon_and_nobody_is_alarmed(follower, caplog) -> None:
    tp = follower.topic_partition
    follower.listener = BusyListener()
    fetcher = FetcherCore(1)
    fetcher.add(tp, follower.topic_id, follower.follower, 3)
    for now_ms in (0, 100, 200):
        assert fetcher.next_request(now_ms) is not None
        fetcher.step(RequestAbandoned(fetcher.in_flight), now_ms)
        work = ((tp, (TruncateTo(7), FetchAgain())),)
        perform_all(fetcher, work, {tp: follower}, now_ms, 0)
        assert fetcher.next_request(now_ms + 99) is None
    assert (follower.log_end_offset, caplog.messages) == (10, [])


class PreparingListener(RecordedListener):
    """Keeps what it is to run in a thread."""

    def prepare_cut(self, preparation) -> None:
        self.effects.append(preparation)


def test_a_cut_waits_until_a_thread_has_read_its_producers(disk, monkeypatch) -> None:
    monkeypatch.setattr(cut_preparation, "INLINE_BYTES", 0)
    replica = Partition(tools.open_log(disk), 0)
    replica.become_follower(1, 3, 7, (1, 0), (1, 0, 2), 0)
    for sequence in range(10):
        data = build_batch(
            [(1000, b"k", b"v", ())],
            base_offset=sequence,
            leader_epoch=3,
            producer_id=7,
            producer_epoch=0,
            base_sequence=sequence,
        )
        replica.follower.append_fetched(data, 0, 0, 0)
    replica.listener = PreparingListener()
    for _ in range(2):
        with pytest.raises(ReplicaNotAvailable, match="until producers are read"):
            replica.follower.truncate_to(6)
    (preparation,) = replica.listener.effects
    assert replica.log_end_offset == 10
    preparation.run()
    monkeypatch.setattr(producer_state_manager, "replay", None)
    replica.follower.truncate_to(6)
    assert (replica.log_end_offset, replica.log.producers.get(7).last_sequence) == (6, 5)


@pytest.mark.parametrize(
    ("leader", "leader_epoch", "kept"),
    [(1, 3, True), (1, 4, False), (2, 4, False), (NO_LEADER, 3, False)],
)
def test_what_was_read_for_a_cut_goes_with_the_leader_who_asked_for_it(
    follower, *, leader, leader_epoch, kept
) -> None:
    """Nobody else may ever cut there, and producers that were read count in no quota."""
    follower.log.preparation = preparation = object()
    follower.become_follower(leader, leader_epoch, 8, (1, 0), (1, 0, 2), 0)
    assert (follower.log.preparation is preparation) is kept
    assert kept or follower.log.preparation is None


def test_a_bug_of_ours_is_no_fault_of_a_partition(follower) -> None:
    """It is for the log with its traceback, not one of many reasons to fetch again."""
    tp = follower.topic_partition
    fetcher = FetcherCore(1)
    fetcher.add(tp, follower.topic_id, follower, 3)
    tools.lead(follower, 5, (1, 0, 2), (0,), 9)
    with pytest.raises(InvariantViolation, match="never cuts"):
        perform_all(fetcher, ((tp, (TruncateTo(7),)),), {tp: follower}, 0, 0)


def test_flush_messages_holds_the_acknowledgement_back(disk) -> None:
    partition = Partition(tools.open_log(disk, config=LogConfig(flush_messages=1)), 0)
    partition.become_follower(1, 3, 7, (1, 0), (1, 0), 0)
    assert not partition.follower.awaits_flush
    partition.follower.append_fetched(batches((0, 2, 3)), 0, 0, 0)
    assert partition.follower.awaits_flush
    ticket = partition.log.flush_ticket()
    ticket.run()
    ticket.done()
    assert not partition.follower.awaits_flush


# Consumers at followers (KIP-392).


def test_consumers_read_from_a_follower_in_sync_up_to_its_high_watermark(follower) -> None:
    fetched = follower.fetch(0, 10_000, from_follower=True, current_leader_epoch=3)
    assert tools.offsets(follower, fetched) == [0, 1, 2, 3, 4], "the next batch ends above HW"
    assert follower.fetch(8, 100, from_follower=True).slice is None
    with pytest.raises(OffsetNotAvailable, match="not here yet"):
        follower.fetch(11, 100, from_follower=True)
    with pytest.raises(OffsetOutOfRange):
        follower.fetch(-1, 100, from_follower=True)
    with pytest.raises(NotLeaderOrFollower):
        follower.fetch(0, 100)
    with pytest.raises(NotLeaderOrFollower):
        follower.fetch(0, 100, from_follower=True, replica_id=2)
    with pytest.raises(FencedLeaderEpoch):
        follower.fetch(0, 100, from_follower=True, current_leader_epoch=2)
    with pytest.raises(UnknownLeaderEpoch):
        follower.fetch(0, 100, from_follower=True, current_leader_epoch=4)
    assert 0 < follower.readable_bytes(0) < ENOUGH_BYTES


def test_a_follower_outside_of_the_isr_sends_them_to_the_leader(follower) -> None:
    follower.become_follower(1, 3, 8, (1,), (1, 0, 2), 0)
    with pytest.raises(NotLeaderOrFollower, match="not in sync"):
        follower.fetch(0, 100, from_follower=True)
    assert follower.readable_bytes(0) == ENOUGH_BYTES, "who is parked is answered, and told"


def test_who_may_serve_a_consumer(replicated) -> None:
    tools.produce(replicated, 3)
    replicated.fetch(2, 100, replica_id=1)
    assert replicated.readable_replicas(2) == (0, 1)
    assert replicated.readable_replicas(3) == (0,)


def test_replicas_are_woken_by_the_log_end_and_consumers_by_the_high_watermark(replicated) -> None:
    heard: list[str] = []
    replicated.add_waiter(lambda: heard.append("consumer"))
    replica = lambda: heard.append("replica")  # noqa: E731
    replicated.add_waiter(replica, replica=True)
    tools.produce(replicated, 2)
    assert heard == ["replica"]
    assert replicated.readable_bytes(0) == 0 < replicated.readable_bytes(0, replica=True)
    replicated.fetch(2, 100, replica_id=1)
    assert heard == ["replica", "consumer"]
    replicated.remove_waiter(replica)
    replicated.resign()
    assert heard == ["replica", "consumer", "consumer"]
    assert replicated.readable_bytes(0, replica=True) == ENOUGH_BYTES


# Suspension.


def test_a_suspended_leader_serves_nobody_until_it_is_resumed(replicated) -> None:
    told: list = []
    tools.produce(replicated, 2)
    replicated.when_committed(2, told.append)
    replicated.suspend()
    replicated.suspend()
    calls = (
        lambda: replicated.append(tools.checked(), tools.NOW),
        lambda: replicated.fetch(0, 100),
        lambda: replicated.fetch(0, 100, replica_id=1),
        lambda: replicated.list_offset(-1),
        lambda: replicated.delete_records(0),
    )
    for call in calls:
        with pytest.raises(NotLeaderOrFollower):
            call()
    replicated.tick(10**9)
    assert replicated.core.pending_isr is None, "a stalled leader proposes nothing"
    assert replicated.retention(10**15) == [] and told == []
    replicated.resume()
    for call in calls:
        call()
    replicated.write()
    replicated.fetch(3, 100, replica_id=1)
    assert told == [None]


def test_an_epoch_that_becomes_durable_during_a_suspension(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    ticket = partition.become_leader(2, 0, (0,), (0,), 0)
    partition.suspend()
    ticket.run()
    ticket.done()
    with pytest.raises(NotLeaderOrFollower):
        partition.append(tools.checked(), tools.NOW)
    partition.resume()
    tools.produce(partition)


def test_a_suspended_follower_serves_no_consumer(follower) -> None:
    follower.suspend()
    with pytest.raises(NotLeaderOrFollower):
        follower.fetch(0, 100, from_follower=True)
    follower.follower.append_fetched(batches((10, 11, 3)), 11, 0, 0)
    follower.resume()
    assert follower.fetch(10, 100, from_follower=True).slice is not None


# Retention, rule 43.


def test_a_follower_deletes_only_what_lies_below_its_leaders_start(disk) -> None:
    config = LogConfig(segment_bytes=2000, retention_bytes=1, retention_ms=1)
    partition = Partition(tools.open_log(disk, config=config), 0)
    partition.become_follower(1, 3, 7, (1, 0), (1, 0), 0)
    for base in range(0, 200, 20):
        partition.follower.append_fetched(batches((base, base + 20, 3)), 200, 0, tools.NOW)
    bases = [segment.base_offset for segment in partition.segments()]
    assert len(bases) > 2
    assert partition.retention(10**15) == []
    partition.follower.append_fetched(b"", 200, bases[1] - 1, tools.NOW)
    assert partition.retention(10**15) == []
    partition.follower.append_fetched(b"", 200, bases[1], tools.NOW)
    assert partition.retention(10**15) == [(0, "below log start offset")]
    partition.mark_offline("gone")
    assert partition.retention(10**15) == []


# The ISR.


@pytest.fixture
def growing(disk):
    """Leader 0 alone in its ISR; follower 1, broker epoch 5, has just caught up."""
    effects: list = []
    partition = Partition(tools.open_log(disk), 0, listener=RecordedListener(effects))
    tools.lead(partition, 1, (0, 1, 2), (0,), 4)
    partition.step(EligibleBrokersChanged(frozenset({1, 2}), ((1, 5), (2, 6))), 0)
    partition.fetch(0, 100, replica_id=1, broker_epoch=5, now_ms=tools.NOW)
    assert effects == [ProposeIsr((0, 1), 1, 4)]
    return partition


def test_the_request_names_members_with_their_broker_epochs(growing) -> None:
    item = growing.alter_isr_request()
    assert (item.topic_id, item.partition) == (growing.topic_id, 0)
    assert (item.leader_epoch, item.partition_epoch) == (1, 4)
    assert item.isr == ((0, -1), (1, 5)) and item.base_published
    assert growing.alter_isr_request() == item, "nobody has answered"


def test_a_member_that_restarts_before_the_answer_is_named_as_it_was(growing) -> None:
    tools.produce(growing, 3)
    growing.step(EligibleBrokersChanged(frozenset({1, 2}), ((1, 9), (2, 6))), 0)
    growing.fetch(0, 100, replica_id=1, broker_epoch=9, now_ms=tools.NOW)
    assert growing.alter_isr_request().isr == ((0, -1), (1, 5))
    with pytest.raises(NotLeaderOrFollower, match="broker epoch 5: it is 9"):
        growing.fetch(3, 100, replica_id=1, broker_epoch=5, now_ms=tools.NOW)


@pytest.mark.parametrize("epoch", [-1, 0, 4, 6, 2**62])
def test_a_broker_epoch_that_is_not_the_images_moves_nothing(growing, epoch) -> None:
    """Neither the high watermark, nor when the follower was there, nor who may fetch next."""
    growing.become_leader(1, 5, (0, 1), (0, 1, 2), 0)
    tools.produce(growing, 3)
    before = replace(growing.core.followers[1])
    with pytest.raises(NotLeaderOrFollower, match=f"broker epoch {epoch}: it is 5"):
        growing.fetch(3, 100, replica_id=1, broker_epoch=epoch, now_ms=tools.NOW + 1)
    assert growing.core.followers[1] == before and growing.high_watermark == 0
    growing.fetch(3, 100, replica_id=1, broker_epoch=5, now_ms=tools.NOW + 1)
    assert growing.high_watermark == 3, "the replica itself is not locked out"


def test_a_replica_whose_broker_the_image_does_not_know_moves_nothing(growing) -> None:
    growing.step(EligibleBrokersChanged(frozenset({2}), ((2, 6),)), 0)
    with pytest.raises(NotLeaderOrFollower, match="it is -1"):
        growing.fetch(0, 100, replica_id=1, broker_epoch=5, now_ms=tools.NOW)


def test_a_follower_that_the_image_shows_late_goes_on_when_it_does(growing) -> None:
    growing.become_leader(1, 5, (0, 1), (0, 1, 2), 0)
    tools.produce(growing, 3)
    with pytest.raises(NotLeaderOrFollower) as refused:
        growing.fetch(3, 100, replica_id=1, broker_epoch=8, now_ms=tools.NOW)
    assert isinstance(refused.value, RetriableError), "the follower tries again"
    growing.step(EligibleBrokersChanged(frozenset({1, 2}), ((1, 8), (2, 6))), 0)
    growing.fetch(3, 100, replica_id=1, broker_epoch=8, now_ms=tools.NOW)
    assert growing.high_watermark == 3


def test_an_accepted_change_holds_when_the_image_has_it(growing) -> None:
    growing.alter_isr_completed(growing.alter_isr_request(), None)
    assert growing.alter_isr_request() is None
    assert (growing.isr, growing.core.pending_isr) == ((0,), (0, 1))
    tools.produce(growing, 1)
    assert growing.high_watermark == 0, "the proposed member counts already"
    growing.become_leader(1, 5, (0, 1), (0, 1, 2), 0)
    assert (growing.isr, growing.core.pending_isr) == ((0, 1), None)


@pytest.mark.parametrize("error", [InvalidUpdateVersion, FencedLeaderEpoch, NotLeaderOrFollower])
def test_an_overtaken_change_waits_for_the_image(growing, error) -> None:
    growing.alter_isr_completed(growing.alter_isr_request(), error("late"))
    assert growing.alter_isr_request() is None
    assert growing.core.pending_isr == (0, 1)


def test_a_late_answer_is_not_taken_for_that_of_the_next_proposal(growing) -> None:
    first = growing.alter_isr_request()
    growing.become_leader(1, 5, (0, 1), (0, 1, 2), 0)
    growing.fetch(0, 100, replica_id=2, broker_epoch=6, now_ms=tools.NOW)
    assert growing.core.pending_isr == (0, 1, 2)
    growing.alter_isr_completed(first, IneligibleReplica("late"))
    assert growing.core.pending_isr == (0, 1, 2)


def test_an_unknown_outcome_stays_pending_and_is_asked_again(growing) -> None:
    item = growing.alter_isr_request()
    growing.alter_isr_completed(item, RequestTimedOut("who knows"))
    assert growing.core.pending_isr == (0, 1)
    assert growing.alter_isr_request() == item


def test_a_member_refused_is_not_proposed_again_at_once(growing) -> None:
    item = growing.alter_isr_request()
    growing.alter_isr_completed(item, IneligibleReplica("fenced"))
    assert growing.core.pending_isr is None and growing.alter_isr_request() is None
    now = tools.NOW
    growing.fetch(0, 100, replica_id=1, broker_epoch=5, now_ms=now + REFUSED_PAUSE_MS - 1)
    assert growing.core.pending_isr is None
    growing.alter_isr_completed(item, RequestTimedOut("late"))
    growing.fetch(0, 100, replica_id=1, broker_epoch=5, now_ms=now + REFUSED_PAUSE_MS)
    assert growing.core.pending_isr == (0, 1)


def test_brokers_that_become_eligible_join_without_another_fetch(growing) -> None:
    growing.alter_isr_completed(growing.alter_isr_request(), IneligibleReplica("fenced"))
    growing.step(EligibleBrokersChanged(frozenset({2}), ((1, 5), (2, 6))), 0)
    assert growing.core.pending_isr is None, "1 is not eligible, 2 never fetched"
    growing.step(EligibleBrokersChanged(frozenset({1}), ((1, 8),)), 0)
    assert growing.core.pending_isr is None, "that is another life of broker 1"
    growing.step(EligibleBrokersChanged(frozenset({1}), ((1, 5),)), 0)
    assert growing.core.pending_isr == (0, 1)


def test_who_said_that_it_follows_no_more_joins_when_it_fetches(growing) -> None:
    """A replica whose log directory failed: what was known of it holds no more."""
    growing.alter_isr_completed(growing.alter_isr_request(), IneligibleReplica("fenced"))
    growing.follower_stopped(1)
    growing.follower_stopped(9)
    growing.step(EligibleBrokersChanged(frozenset({1}), ((1, 5),)), 0)
    assert growing.core.pending_isr is None
    growing.fetch(0, 100, replica_id=1, broker_epoch=5, now_ms=tools.NOW + REFUSED_PAUSE_MS)
    assert growing.core.pending_isr == (0, 1)


def test_a_replica_of_another_broker_epoch_may_not_join(growing) -> None:
    growing.alter_isr_completed(growing.alter_isr_request(), IneligibleReplica("x"))
    late = tools.NOW + 10_000
    with pytest.raises(NotLeaderOrFollower):
        growing.fetch(0, 100, replica_id=1, broker_epoch=6, now_ms=late)
    assert growing.core.pending_isr is None
    growing.fetch(0, 100, replica_id=2, broker_epoch=6, now_ms=late)
    assert growing.core.pending_isr == (0, 2)


def test_a_suspended_leader_asks_for_nothing(growing) -> None:
    growing.suspend()
    assert growing.alter_isr_request() is None
    told: list = []
    growing.listener = RecordedListener(told)
    growing.resume()
    assert growing.alter_isr_request() is not None
    assert told == [ProposeIsr((0, 1), 1, 4)], "the shell forgot it meanwhile"
    growing.resume()
    assert len(told) == 1
