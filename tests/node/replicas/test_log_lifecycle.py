"""Roles change while the disk makes logs: a failover does not wait for the creation of topics."""

from __future__ import annotations

import asyncio
import os
import threading
from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.records import (
    ConfigRecord,
    PartitionRecord,
    RemoveTopicRecord,
    ResourceType,
    TopicRecord,
)
from kept.node.replicas import closed_replicas, log_lifecycle
from kept.node.replicas.local_replica import LocalDirectory
from kept.node.replicas.log_dir_failures import LogDirFailureChannel
from kept.node.replicas.log_lifecycle import LogLifecycle
from kept.node.replicas.manifests.replica import ReplicaManifests
from kept.node.replicas.replica_table import ReplicaTable
from kept.storage.directory import Checkpoint, ClosedLog, LogDirectory
from kept.storage.disk import Disk
from kept.storage.errors import (
    InvariantViolation,
    KafkaStorageError,
    MachineError,
    NotLeaderOrFollower,
    ResourceExhausted,
    UnknownTopicOrPartition,
)
from kept.storage.log.log import Log
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import LogConfig, TopicPartition
from tests.support.decisions import propose
from tests.support.replicas import FixedMetadata, InlineRuntime, recorded_failures

OPEN = TopicPartition("open", 0)
WAITING = TopicPartition("waiting", 0)
WAIT_S = 20
CLOSED = ClosedLog(WAITING, UUID(int=7), "/d/waiting-0", LogConfig())
EIO = MachineError("/d", "open", OSError(5, "EIO"))


class StalledDisk:
    """Directories of logs whose name begins with ``waiting`` are not made before :attr:`go`."""

    def __init__(self, monkeypatch) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        self.made: list[str] = []
        real = Disk.mkdir

        def mkdir(disk, path):
            if os.path.basename(path).startswith("waiting"):
                self.reached.set()
                assert self.go.wait(WAIT_S)
            self.made.append(os.path.basename(path))
            return real(disk, path)

        monkeypatch.setattr(Disk, "mkdir", mkdir)


@pytest.fixture
def lone(lone_node):
    lone = lone_node()
    lone.create("open")
    return lone


@pytest.fixture
def stalled(monkeypatch, lone):
    disk = StalledDisk(monkeypatch)
    yield disk
    disk.go.set()


def topic(name: str, topic_id: int, partitions: int = 1) -> list:
    return [
        TopicRecord(name, UUID(int=topic_id)),
        *(
            PartitionRecord(UUID(int=topic_id), number, (0,), (0,), 0, 0, 0)
            for number in range(partitions)
        ),
    ]


def elected(node, name: str, number: int = 0) -> PartitionRecord:
    """The next leader epoch of a partition."""
    now = node.parts.metadata.image.partition(name, number)
    epochs = {"leader_epoch": now.leader_epoch + 1, "partition_epoch": now.partition_epoch + 1}
    return replace(now, **epochs)


def play(lone, scene) -> None:
    async def whole() -> None:
        async with asyncio.timeout(WAIT_S):
            await scene(lone.node)

    lone.run(whole())


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_S)


def append(node) -> None:
    partition = node.parts.table.partition(OPEN)
    batch = check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000)
    partition.append(batch, 1000)
    partition.write()


def test_an_open_log_changes_its_role_while_others_wait_for_the_disk(lone, stalled):
    async def scene(node):
        lifecycle = node.parts.replicas.log_lifecycle
        assert lifecycle.is_idle
        creating = propose(node, topic("waiting", 7, partitions=600))
        await reached(stalled.reached)
        assert not lifecycle.is_idle
        await propose(node, [elected(node, "open")])
        partition = node.parts.table.partition(OPEN)
        assert partition.leader_epoch == 1
        await node.parts.replicas.roles.await_elections()
        append(node)
        assert not creating.done()
        with pytest.raises(NotLeaderOrFollower, match=f"{WAITING.place} has no open replica"):
            node.parts.table.partition(WAITING)
        stalled.go.set()
        await creating
        assert lifecycle.is_idle
        assert len(node.parts.table.by_name[b"waiting"].partitions) == 600

    play(lone, scene)


def test_a_bug_at_one_partition_keeps_no_other_from_its_role(lone, monkeypatch, capsys):
    async def scene(node):
        await propose(node, topic("other", 7, partitions=2))
        apply = node.parts.replicas.roles.apply

        def fails_at_first(hosted, record):
            if hosted.partition.topic_partition == TopicPartition("other", 0):
                raise InvariantViolation("leader epoch 0 after 5")
            apply(hosted, record)

        monkeypatch.setattr(node.parts.replicas.roles, "apply", fails_at_first)
        records = [elected(node, "other", number) for number in range(2)]
        await propose(node, [*records, elected(node, "open")])
        partition = node.parts.table.partition
        assert partition(TopicPartition("other", 1)).leader_epoch == 1
        assert partition(OPEN).leader_epoch == 1
        assert "leader epoch 0 after 5" in capsys.readouterr().err

    play(lone, scene)


def test_settings_and_deletions_of_open_logs_are_acted_on_meanwhile(lone, stalled):
    async def scene(node):
        creating = propose(node, topic("waiting", 7))
        await reached(stalled.reached)
        for name in ("open", "waiting"):
            await propose(node, [ConfigRecord(ResourceType.TOPIC, name, "segment.bytes", "4096")])
        assert not creating.done()
        assert node.parts.table.partition(OPEN).config.segment_bytes == 4096
        deleting = propose(
            node, [RemoveTopicRecord(node.parts.metadata.image.topics["open"].topic_id)]
        )
        await node.parts.metadata.acted(node.parts.metadata.image.index + 1)
        with pytest.raises(UnknownTopicOrPartition):
            node.parts.table.partition(OPEN)
        stalled.go.set()
        await asyncio.gather(creating, deleting)
        assert node.parts.table.partition(WAITING).config.segment_bytes == 4096, (
            "set while it was made"
        )

    play(lone, scene)


def test_a_log_takes_the_newest_role_when_it_is_open(lone, stalled):
    async def scene(node):
        creating = propose(node, topic("waiting", 7))
        await reached(stalled.reached)
        elections = []
        for _ in range(3):
            elections.append(propose(node, [elected(node, "waiting")]))
            await node.parts.metadata.acted(node.parts.metadata.image.index + 1)
        stalled.go.set()
        await asyncio.gather(creating, *elections)
        assert node.parts.table.partition(WAITING).leader_epoch == 3

    play(lone, scene)


@pytest.mark.parametrize("begun", [True, False])
def test_a_topic_that_is_deleted_before_its_log_is_made(lone, stalled, monkeypatch, begun):
    """``begun``: a thread is making it. One that waits for its turn is never made."""
    monkeypatch.setattr(log_lifecycle, "PARTITIONS_A_TURN", 1)

    async def scene(node):
        first = propose(node, topic("waiting", 7))
        await reached(stalled.reached)
        other = propose(node, topic("later", 8))
        name, topic_id, created = ("waiting", 7, first) if begun else ("later", 8, other)
        await node.parts.metadata.acted(node.parts.metadata.image.index + 1)
        deleting = propose(node, [RemoveTopicRecord(UUID(int=topic_id))])
        await node.parts.metadata.acted(node.parts.metadata.image.index + 1)
        stalled.go.set()
        await asyncio.gather(created, deleting, first, other)
        await node.parts.replicas.log_lifecycle.done_up_to(node.parts.metadata.image.index)
        assert node.parts.replicas.log_lifecycle.waiting == 0
        (directory,) = node.parts.table.directories
        names = os.listdir(directory.name)
        assert f"{name}-0" not in names
        assert any(one.startswith(f"{name}-0.") for one in names) == begun
        assert (f"{name}-0" in stalled.made) == begun
        assert TopicPartition(name, 0) not in node.parts.table.partitions
        assert directory.count == len(node.parts.table.partitions) == 2

    play(lone, scene)


def test_a_topic_that_is_made_anew_gets_a_log_of_its_own(lone, stalled):
    async def scene(node):
        first = propose(node, topic("waiting", 7))
        await reached(stalled.reached)
        await node.parts.metadata.acted(node.parts.metadata.image.index)
        deleting = propose(node, [RemoveTopicRecord(UUID(int=7))])
        again = propose(node, topic("waiting", 9))
        while (
            node.parts.metadata.image.partition("waiting", 0) is None
            or UUID(int=7) in node.parts.metadata.image.topics_by_id
        ):
            await node.parts.metadata.acted(node.parts.metadata.image.index + 1)
        stalled.go.set()
        await asyncio.gather(first, deleting, again)
        assert node.parts.table.partition(WAITING).topic_id == UUID(int=9)
        assert stalled.made.count("waiting-0") == 2
        (directory,) = node.parts.table.directories
        gone = [name for name in os.listdir(directory.name) if name.startswith("waiting-0.")]
        assert len(gone) == 1 and gone[0].endswith("-delete")

    play(lone, scene)


def test_a_broker_has_not_taken_over_what_waits_to_be_opened(lone, stalled):
    """Whoever shuts down waits for that: see ``Sessions._shut_down``."""

    async def scene(node):
        (name, state) = topic("waiting", 7)
        elsewhere = replace(state, leader=-1)
        creating = propose(node, [name, elsewhere])
        await reached(stalled.reached)
        changes, before = node.parts.replicas.log_lifecycle, node.parts.metadata.image.index
        assert changes.led_up_to(before) == before
        leading = propose(node, [replace(elsewhere, leader=0, leader_epoch=1, partition_epoch=1)])
        await node.parts.metadata.acted(before + 1)
        assert changes.led_up_to(node.parts.metadata.image.index) == before
        stalled.go.set()
        await asyncio.gather(creating, leading)
        assert (
            changes.led_up_to(node.parts.metadata.image.index)
            == node.parts.metadata.image.index
            == before + 1
        )

    play(lone, scene)


def test_a_stop_waits_for_what_is_being_made_and_leaves_the_rest_to_the_next_start(
    lone_node, tmp_path, monkeypatch
):
    monkeypatch.setattr(log_lifecycle, "PARTITIONS_A_TURN", 1)
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("open")
    disk = StalledDisk(monkeypatch)

    async def stop(node):
        creating = propose(node, topic("waiting", 7, partitions=3))
        await reached(disk.reached)
        stopping = asyncio.ensure_future(node.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        disk.go.set()
        await stopping
        await asyncio.wait([creating])

    play(lone, stop)
    lone._stopped = True
    assert disk.made == ["waiting-0"]
    again = lone_node(**settings)
    assert set(again.node.parts.table.by_name[b"waiting"].partitions) == {0, 1, 2}


class NoLogs:
    """Opens nothing."""

    left_closed = ()

    def may_open(self) -> list[TopicPartition]:
        return []

    async def open_wanted(self, _: object) -> None:
        pass


def lifecycle(kind=LogLifecycle, failures=None):
    """One whose logs are nobody's; in a running loop."""
    return kind(InlineRuntime(), FixedMetadata(), failures or recorded_failures([]), NoLogs())


class Waiting(LogLifecycle):
    """Its turns are taken by the test."""

    async def _run(self) -> None:
        self.runs = getattr(self, "runs", 0) + 1


def test_who_waits_for_entries_waits_for_the_last_and_no_longer_than_to_a_stop() -> None:
    async def go() -> None:
        changes = lifecycle(Waiting)
        changes.create(WAITING, 5)
        await asyncio.wait_for(changes.done_up_to(4), WAIT_S)
        await asyncio.wait_for(changes.done(4), WAIT_S)
        waiting = [asyncio.ensure_future(one) for one in (changes.done_up_to(5), changes.done(5))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        await changes.stop()
        await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
        changes.create(OPEN, 6)
        assert changes.waiting == 1, "nothing more is changed"

    asyncio.run(go())


def test_a_log_that_nobody_wanted_when_it_was_made_has_its_turn() -> None:
    async def go() -> None:
        changes = lifecycle(Waiting)
        changes.remove_unwanted("directory", CLOSED)
        assert changes.waiting == 1
        await asyncio.sleep(0)
        assert changes.runs == 1

    asyncio.run(go())


def test_who_is_wanted_again_meanwhile_does_not_lead_yet() -> None:
    seen = []

    class Turns(LogLifecycle):
        async def _change(self, turn: list[TopicPartition]) -> None:
            seen.append((turn, self.led_up_to(9)))
            if len(seen) == 1:
                self.create(WAITING, 6, leads=True)

    async def go() -> None:
        changes = lifecycle(Turns)
        changes.create(WAITING, 5, leads=True)
        await asyncio.wait_for(changes.done(6), WAIT_S)
        assert seen == [([WAITING], 4), ([WAITING], 4)]
        assert changes.led_up_to(9) == 9

    asyncio.run(go())


def test_a_disk_that_cannot_rename_a_deleted_log_fails_its_directory() -> None:
    failed = []

    class Pool:
        async def wait_idle(self, _: object) -> None:
            """Nobody uses it."""

        async def run_apart(self, *_: object) -> None:
            raise EIO

    async def go() -> None:
        directory = LocalDirectory(LogDirectory.broken("/d", Disk({}), EIO), Pool(), "/d")
        failures = LogDirFailureChannel(ReplicaTable())
        failures.on_failure = lambda *given: failed.append(given)
        changes = lifecycle(failures=failures)
        changes.remove_unwanted(directory, CLOSED)
        async with asyncio.timeout(WAIT_S):
            while changes.waiting or changes._task is not None:
                await asyncio.sleep(0)
        ((where, error),) = failed
        assert where is directory and error is EIO and not changes._leaving

    asyncio.run(go())


def test_a_deletion_that_finds_no_descriptor_is_finished_later(lone, monkeypatch) -> None:
    """No disk has failed; no other log takes the name, and no file goes, before it is durable."""
    first, scarce, fsync_dir = TopicPartition("first", 0), True, Disk.fsync_dir
    (directory,) = lone.node.parts.table.directories
    monkeypatch.setattr(log_lifecycle, "RETRY_S", 0.01)

    def fsync_or_refuse(disk: Disk, path: str) -> None:
        if scarce and path == directory.name:
            raise ResourceExhausted(path, "open", OSError(24, "EMFILE"))
        fsync_dir(disk, path)

    async def scene(node):
        nonlocal scarce
        await propose(node, topic("first", 7))
        monkeypatch.setattr(Disk, "fsync_dir", fsync_or_refuse)
        await propose(node, [RemoveTopicRecord(UUID(int=7)), *topic("first", 9)])
        assert first not in node.parts.table.partitions and directory.offline is None
        assert not directory.directory.purge(1 << 62)
        scarce = False
        while first not in node.parts.table.partitions:
            await asyncio.sleep(0.001)
        assert directory.directory.purge(1 << 62) == 1

    play(lone, scene)


@pytest.mark.parametrize("where", ["its manifests", "its directory"])
def test_a_bug_at_a_log_that_leaves_keeps_no_other_and_is_tried_again(
    lone, monkeypatch, capsys, where
) -> None:
    first = TopicPartition("first", 0)
    broken = True
    close, mark_all_deleted = ReplicaManifests.close, LogDirectory.mark_all_deleted

    async def close_or_fail(manifests: ReplicaManifests) -> None:
        if broken and where == "its manifests" and manifests._partition.topic_partition == first:
            raise ValueError("a bug")
        await close(manifests)

    def mark_or_fail(directory: LogDirectory, *given: object) -> None:
        if broken and where == "its directory":
            raise ValueError("a bug")
        mark_all_deleted(directory, *given)

    monkeypatch.setattr(ReplicaManifests, "close", close_or_fail)
    monkeypatch.setattr(LogDirectory, "mark_all_deleted", mark_or_fail)

    async def scene(node):
        nonlocal broken
        (directory,) = node.parts.table.directories

        def deleted() -> set[str]:
            names = os.listdir(directory.name)
            return {name.partition(".")[0] for name in names if name.endswith("-delete")}

        await propose(node, [*topic("first", 7), *topic("second", 8)])
        await propose(node, [RemoveTopicRecord(UUID(int=7)), RemoveTopicRecord(UUID(int=8))])
        assert deleted() == ({"second-0"} if where == "its manifests" else set())
        assert "logs not renamed" in capsys.readouterr().err
        await propose(node, topic("first", 9))
        assert first not in node.parts.table.partitions, "the old log has its name"
        broken = False
        changes = node.parts.replicas.log_lifecycle
        assert changes._retry_timer is not None
        changes._retry()
        while first not in node.parts.table.partitions:
            await asyncio.sleep(0.001)
        assert node.parts.table.partition(first).topic_id == UUID(int=9)
        assert deleted() == {"first-0", "second-0"} and not changes._leaving

    play(lone, scene)


def started_again(lone_node, tmp_path, monkeypatch, cause: str):
    """A node over a directory with three logs of a record each, of which two are left closed."""
    settings = {"log_dirs": str(tmp_path / "again")}
    first = lone_node(**settings)
    first.create("open", partitions=3)
    for number in range(3):
        partition = first.node.parts.table.partition(TopicPartition("open", number))
        batch = check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000)
        partition.append(batch, 1000)
        partition.write()
    first.stop()
    if cause == "limit":
        monkeypatch.setattr(closed_replicas, "replica_limit", lambda: 1)
        monkeypatch.setattr(log_lifecycle, "RETRY_S", 0.05)
    else:
        real = Log.open

        def open_log(directory, tp, *arguments, **more):
            if tp.topic == "open" and tp.partition:
                raise ResourceExhausted(directory, "open", OSError(24, "EMFILE"))
            return real(directory, tp, *arguments, **more)

        monkeypatch.setattr(Log, "open", open_log)
    return lone_node(**settings)


@pytest.mark.parametrize("cause", ["limit", "open"])
def test_logs_that_were_left_closed_are_opened_once_there_are_open_files(
    lone_node, tmp_path, monkeypatch, cause
):
    with monkeypatch.context() as few:
        lone = started_again(lone_node, tmp_path, few, cause)
        manager, admin = lone.node.parts.replicas, lone.node.parts.admin.health
        assert len(manager.left_closed) == 2 and "2 replicas were left closed" in admin.unready()
        assert not admin.offline_replicas(), "those are opened later"
        directory = lone.node.parts.table.directories[0]
        kept = dict(directory.directory.recovery_points)
        directory.directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {})
        assert {tp: kept[tp] for tp in manager.left_closed}.items() <= (
            directory.directory.recovery_points.items()
        ), "what is known of a closed log stays known"

    async def scene(node):
        assert manager.log_lifecycle._retry_timer is not None
        if cause == "open":  # not by the timer: it could have tried while there was none
            manager.log_lifecycle._retry()
        while len(node.parts.table.replicas) < 3:
            await asyncio.sleep(0.01)
        for number in range(3):
            assert node.parts.table.partition(TopicPartition("open", number)).log_end_offset == 1
        assert not manager.left_closed and admin.unready() is None
        assert not node.parts.table.by_name[b"open"].offline and directory.count == 3
        nothing: dict[TopicPartition, int] = {}
        directory.directory.write_checkpoints(
            Checkpoint.RECOVERY_POINTS, nothing, directory.directory.version
        )
        assert not directory.directory.recovery_points, "who collects knows all that are open"

    play(lone, scene)


def test_a_retry_while_the_start_opens_logs_goes_by_the_limit(lone_node, tmp_path, monkeypatch):
    """The start counts though nothing of it is open yet."""
    retried, real_open, real_retry = threading.Event(), Log.open, LogLifecycle._retry

    def open_log(directory, tp, *arguments, **more):
        if tp.topic == "open" and closed_replicas.replica_limit() == 1:  # not the node before
            assert retried.wait(WAIT_S)
        return real_open(directory, tp, *arguments, **more)

    def retry(lifecycle):
        real_retry(lifecycle)
        retried.set()

    monkeypatch.setattr(LogLifecycle, "_retry", retry)
    with monkeypatch.context() as slow:
        slow.setattr(Log, "open", open_log)
        lone = started_again(lone_node, tmp_path, monkeypatch, "limit")

    async def scene(node):
        manager = node.parts.replicas
        while manager.log_lifecycle._task is not None:
            await asyncio.sleep(0.001)
        assert len(node.parts.table.replicas) == 1 and len(manager.left_closed) == 2
        assert retried.is_set() and not manager.left_closed.begun

    play(lone, scene)


async def moved(node, number: int, *replicas: int) -> None:
    """A partition of the topic open gets other replicas, and broker 5 leads it."""
    now = elected(node, "open", number)
    await propose(node, [replace(now, replicas=replicas, isr=(5,), leader=5)])


@pytest.mark.parametrize("cause", ["limit", "open"])
def test_a_replica_that_was_left_closed_and_moves_away_and_back_is_made_anew(
    lone_node, tmp_path, monkeypatch, cause
):
    tp = TopicPartition("open", 1)
    with monkeypatch.context() as few:
        lone = started_again(lone_node, tmp_path, few, cause)
        manager, table = lone.node.parts.replicas, lone.node.parts.table
        directory = table.directories[0]

        async def away_and_back(node):
            await moved(node, 1, 5)
            assert set(manager.left_closed) == {TopicPartition("open", 2)}
            assert not os.path.exists(directory.directory.log_path(tp))
            assert tp not in directory.directory.unopened and directory.count == 2
            assert not node.parts.metadata.raft_node.history.removed
            with pytest.raises(NotLeaderOrFollower):
                table.partition(tp)
            await moved(node, 1, 0, 5)
            assert set(manager.left_closed) == {tp, TopicPartition("open", 2)}
            with pytest.raises(KafkaStorageError, match=r"left closed|EMFILE"):
                table.partition(tp)

        play(lone, away_and_back)
        assert directory.count == 3 and not lone.node.parts.admin.health.offline_replicas()

    async def opened(node):
        manager.log_lifecycle._retry()
        while len(table.replicas) < 3:
            await asyncio.sleep(0.01)
        assert table.partition(tp).leader_id == 5 and table.partition(tp).log_end_offset == 0
        assert table.partition(TopicPartition("open", 2)).log_end_offset == 1
        assert not manager.left_closed and not table.by_name[b"open"].offline

    play(lone, opened)


def test_a_log_that_was_left_closed_is_opened_when_another_one_goes(
    lone_node, tmp_path, monkeypatch
):
    lone = started_again(lone_node, tmp_path, monkeypatch, "limit")
    lone.node.parts.replicas.log_lifecycle._retry_timer.cancel()

    async def scene(node):
        table = node.parts.table
        (tp,) = table.replicas
        await moved(node, tp.partition, 5)
        while not table.replicas:
            await asyncio.sleep(0.01)
        assert tp not in table.replicas and len(node.parts.replicas.left_closed) == 1

    play(lone, scene)


def test_a_topic_has_new_logs_where_those_of_its_namesake_were_left_closed(
    lone_node, tmp_path, monkeypatch
):
    with monkeypatch.context() as few:
        lone = started_again(lone_node, tmp_path, few, "limit")

    async def scene(node):
        old = node.parts.metadata.image.topics["open"].topic_id
        await propose(node, [RemoveTopicRecord(old)])
        await propose(node, topic("open", 9, partitions=3))
        for number in range(3):
            partition = node.parts.table.partition(TopicPartition("open", number))
            assert (partition.topic_id, partition.log_end_offset) == (UUID(int=9), 0)

    play(lone, scene)


@pytest.mark.parametrize("then", ["made later", "not wanted any more"])
def test_a_log_that_cannot_be_made_for_want_of_descriptors_is_made_later(lone, monkeypatch, then):
    parts, tp = lone.node.parts, TopicPartition("second", 0)
    resigned = []
    monkeypatch.setattr(parts.alter_partition, "resign", lambda tp, _: resigned.append(tp))

    async def refused(node):
        with monkeypatch.context() as few:
            few.setattr(Log, "open", exhausted)
            led_by_5 = replace(topic("second", 7)[1], replicas=(0, 5), isr=(0, 5), leader=5)
            await propose(node, [topic("second", 7)[0], led_by_5])
        assert set(parts.replicas.left_closed) == {tp} and not parts.table.failed
        assert parts.admin.health.unready().startswith("1 replica was left closed")
        assert resigned == [tp], "it leaves the ISR"

    async def made(node):
        parts.replicas.log_lifecycle._retry()
        while tp not in parts.table.partitions:
            await asyncio.sleep(0.01)

    async def removed(node):
        path = parts.table.directories[0].directory.log_path(tp)
        assert os.path.exists(path), "it is half made"
        await propose(node, [RemoveTopicRecord(UUID(int=7))])
        assert not os.path.exists(path)

    play(lone, refused)
    play(lone, made if then == "made later" else removed)
    assert not parts.replicas.left_closed and parts.admin.health.unready() is None
    assert parts.table.directories[0].count == (2 if then == "made later" else 1)


def exhausted(directory, *_arguments, **_more):
    raise ResourceExhausted(directory, "open", OSError(24, "EMFILE"))


@pytest.mark.parametrize("opens", [False, True])
def test_a_log_that_was_left_closed_and_moves_away_while_it_is_opened_goes(
    lone_node, tmp_path, monkeypatch, opens
):
    with monkeypatch.context() as few:
        lone = started_again(lone_node, tmp_path, few, "limit")
    opening, go, real = threading.Event(), threading.Event(), Log.open

    def open_log(directory, tp, *arguments, **more):
        opening.set()
        assert go.wait(WAIT_S)
        return (real if opens or tp.partition != 1 else exhausted)(
            directory, tp, *arguments, **more
        )

    async def scene(node):
        manager, directory = node.parts.replicas, node.parts.table.directories[0]
        (closed,) = (tp for tp in manager.left_closed if tp.partition == 1)
        with monkeypatch.context() as slow:
            slow.setattr(Log, "open", open_log)
            manager.log_lifecycle._want(closed, None)
            await reached(opening)
            assert closed in manager.left_closed and closed not in manager.may_open()
            moving = propose(node, [replace(elected(node, "open", 1), replicas=(5,), isr=(5,))])
            while node.parts.metadata.image.partition("open", 1).replicas != (5,):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            go.set()
            await moving
        assert not os.path.exists(directory.directory.log_path(closed)) and directory.count == 2
        await moved(node, 1, 0, 5)
        assert node.parts.table.partition(closed).log_end_offset == 0

    play(lone, scene)


def test_a_replica_is_told_of_by_its_directory_once_that_is_offline(
    lone_node, tmp_path, monkeypatch
):
    """One that an error did not let open, and one that was left closed."""
    dirs = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    first = lone_node(log_dirs=dirs)
    first.create("t", partitions=6)
    first.stop()
    real = Log.open

    def open_log(directory, tp, *arguments, **more):
        if tp.partition < 4 and tp.topic == "t":
            raise ValueError("a bug") if tp.partition < 2 else exhausted_error(directory)
        return real(directory, tp, *arguments, **more)

    def exhausted_error(directory):
        return ResourceExhausted(directory, "open", OSError(24, "EMFILE"))

    monkeypatch.setattr(Log, "open", open_log)
    lone = lone_node(log_dirs=dirs)
    parts, health = lone.node.parts, lone.node.parts.admin.health
    one, two = parts.table.directories
    assert health.offline_replicas() == ["t:0", "t:1"] and health.left_closed() == ["t:2", "t:3"]
    lost = {number for number in range(4) if os.path.exists(f"{one.name}/t-{number}")}
    assert len(lost) == 2, "one of each"

    async def scene(node):
        parts.replicas.log_lifecycle._failures.fail(one, EIO)

    play(lone, scene)
    assert health.offline_replicas() == [f"t:{n}" for n in range(2) if n not in lost]
    assert health.left_closed() == [f"t:{n}" for n in range(2, 4) if n not in lost]
    for number in lost:
        with pytest.raises(KafkaStorageError, match="its log directory is offline"):
            parts.table.partition(TopicPartition("t", number))
    assert two.offline is None


def test_a_replica_whose_log_an_error_does_not_let_open_is_told_of(
    lone_node, tmp_path, monkeypatch
):
    settings = {"log_dirs": str(tmp_path / "again")}
    first = lone_node(**settings)
    first.create("t", partitions=2)
    first.stop()
    real = Log.open

    def open_log(directory, tp, *arguments, **more):
        if tp == TopicPartition("t", 1):
            raise ValueError("a bug")
        return real(directory, tp, *arguments, **more)

    monkeypatch.setattr(Log, "open", open_log)
    lone = lone_node(**settings)
    parts, health = lone.node.parts, lone.node.parts.admin.health
    assert health.offline_replicas() == ["t:1"]
    assert health.unready() is None and not parts.replicas.left_closed
    assert parts.table.partition(TopicPartition("t", 0)).is_leader

    async def scene(node):
        """It moves away, back and away, and the topic is made anew."""

        async def move(*replicas: int) -> None:
            now = elected(node, "t", 1)
            await propose(node, [replace(now, replicas=replicas, isr=(5,), leader=5)])

        await move(5)
        assert health.offline_replicas() == []
        await move(0, 5)
        assert health.offline_replicas() == ["t:1"], "its log is still not open"
        with pytest.raises(KafkaStorageError):
            parts.table.partition(TopicPartition("t", 1))
        await move(5)
        await propose(node, [RemoveTopicRecord(parts.metadata.image.topics["t"].topic_id)])
        await propose(node, topic("t", 9))
        assert not parts.table.failed

    play(lone, scene)


def test_a_log_that_was_left_closed_and_is_deleted_is_not_opened(lone_node, tmp_path, monkeypatch):
    with monkeypatch.context() as few:
        lone = started_again(lone_node, tmp_path, few, "limit")

        async def scene(node):
            await propose(
                node, [RemoveTopicRecord(node.parts.metadata.image.topics["open"].topic_id)]
            )
            assert not node.parts.replicas.left_closed and not node.parts.table.replicas

        play(lone, scene)
    assert lone.node.parts.admin.health.unready() is None
