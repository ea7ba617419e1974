"""Groups of three real nodes, while the node that coordinates them dies, stops or stands still.

Commits that were acknowledged are there afterwards, whoever answers; members go on in the
generation that they were in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode

from kept.testing import Cluster
from tests.support.kafka_connection import FETCH, Connection

GROUPS = 8
PARTITIONS = 4
DEADLINE_S = 60.0
RETRIABLE = {
    "UNKNOWN_TOPIC_OR_PART",  # it was created through another node, a moment ago
    "NOT_COORDINATOR",
    "COORDINATOR_NOT_AVAILABLE",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "_WAIT_COORD",
    "_TRANSPORT",
    "_TIMED_OUT",
    "_ALL_BROKERS_DOWN",
}


def consumer(cluster: Cluster, group: str, **settings: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 300,
            "socket.timeout.ms": 5_000,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
            **settings,
        }
    )


def described(cluster: Cluster, group: str) -> Any:
    """A group as its coordinator describes it, asked until there is one that does. By a new client
    each time: librdkafka keeps a coordinator that it was told just before its node was gone.
    """
    end = time.monotonic() + DEADLINE_S
    while True:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
        try:
            found = admin.describe_consumer_groups([group], request_timeout=5)[group].result()
        except KafkaException:
            assert time.monotonic() < end
        else:
            if found.coordinator.id >= 0:
                return found
            assert time.monotonic() < end


class Committer:
    """Commits rising offsets for one group, without being a member; notes what was acknowledged,
    and asks what is committed: it must never be less."""

    def __init__(self, cluster: Cluster, topic: str, group: str) -> None:
        self.group = group
        self.acknowledged = 0
        self.went_back: list[tuple[int, int]] = []
        self.refusals: set[str] = set()
        self._place = (topic, 0)
        self._consumer = consumer(cluster, group)
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._idle = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        offset = 0
        while not self._stop.is_set():
            if not self._goes_on.is_set():
                self._idle.set()
                self._goes_on.wait()
                self._idle.clear()
            offset += 1
            place = TopicPartition(*self._place, offset)
            try:
                self._consumer.commit(offsets=[place], asynchronous=False)
            except KafkaException as error:
                self.refusals.add(error.args[0].name())
            else:
                self.acknowledged = offset

    def pause(self) -> None:
        self._goes_on.clear()
        self._idle.wait()

    def resume(self) -> None:
        self._goes_on.set()

    def look(self) -> None:
        """Ask what is committed until somebody answers."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            try:
                (found,) = self._consumer.committed([TopicPartition(*self._place)], timeout=5)
            except KafkaException:
                continue
            if found.error is None:
                if found.offset < self.acknowledged:
                    self.went_back.append((self.acknowledged, found.offset))
                return
        raise AssertionError(f"nobody says what {self.group} has committed")

    def stop(self) -> None:
        self._stop.set()
        self._goes_on.set()
        self._thread.join()
        self._consumer.close()


@contextmanager
def committing(cluster: Cluster, topic: str) -> Iterator[list[Committer]]:
    committers = [Committer(cluster, topic, f"committer-{i}") for i in range(GROUPS)]
    try:
        yield committers
    finally:
        for committer in committers:
            committer.stop()
    assert [c.went_back for c in committers] == [[]] * GROUPS
    assert set().union(*(c.refusals for c in committers)) <= RETRIABLE


def go_on(cluster: Cluster, committers: list[Committer]) -> None:
    """Every group commits more."""
    before = [c.acknowledged for c in committers]
    cluster.wait_until(
        lambda: all(c.acknowledged > b + 3 for c, b in zip(committers, before, strict=True)),
        "every group commits",
    )


def interrupt(committers: list[Committer], happening: Callable[[], object]) -> None:
    """Right after an acknowledgement, and before the next commit, it happens; then all look.

    Followers learn from their next fetch that what they have is committed: now none has.
    """
    for committer in committers:
        committer.pause()
    happening()
    for committer in committers:
        committer.look()
        committer.resume()


@pytest.mark.slow
def test_no_commit_goes_back_when_the_coordinator_dies(kept_cluster):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic()
    with committing(cluster, topic) as committers:
        go_on(cluster, committers)
        coordinator = described(cluster, committers[0].group).coordinator.id
        interrupt(committers, partial(cluster.kill, coordinator))
        go_on(cluster, committers)
        assert described(cluster, committers[0].group).coordinator.id != coordinator
        cluster.start(coordinator)
        go_on(cluster, committers)


@pytest.mark.slow
def test_no_commit_goes_back_when_all_restart_in_turn(kept_cluster):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic()
    with committing(cluster, topic) as committers:
        for number in (0, 1, 2, 0, 1, 2):
            go_on(cluster, committers)
            end = cluster.stop if number % 2 else cluster.kill
            interrupt(committers, partial(end, number))
            go_on(cluster, committers)
            cluster.start(number)
            cluster.await_ready()


@pytest.mark.slow
def test_a_coordinator_that_stood_still_tells_nothing_old(kept_cluster):
    """It wakes as the leader that it was, with clients connected that it may not answer."""
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic()
    with committing(cluster, topic) as committers:
        go_on(cluster, committers)
        coordinator = described(cluster, committers[0].group).coordinator.id
        group = committers[0]
        old = Connection(f"localhost:{cluster.port(coordinator)}")
        # Who has not said a word by the time it wakes is hung up on.
        old.send(FETCH, 7, group_id=group.group, topics=None, require_stable=False)
        assert old.receive().error_code is ErrorCode.none
        interrupt(committers, partial(cluster.pause, coordinator))
        go_on(cluster, committers)
        group.pause()
        old.send(FETCH, 7, group_id=group.group, topics=None, require_stable=False)
        cluster.resume(coordinator)
        answer = old.receive()
        told = [p.committed_offset for t in answer.topics for p in t.partitions]
        assert answer.error_code is not ErrorCode.none or told == [group.acknowledged]
        old.close()
        group.resume()
        go_on(cluster, committers)


class Member:
    """A member of a group that reads, commits what it read, and counts what it loses."""

    def __init__(self, cluster: Cluster, topic: str, group: str, **settings: Any) -> None:
        self.read: list[int] = []
        self.revoked = 0
        self.assigned: set[int] = set()
        self._consumer = consumer(cluster, group, **settings)
        self._consumer.subscribe(
            [topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _assigned(self, _: Consumer, places: list[TopicPartition]) -> None:
        self.assigned |= {place.partition for place in places}

    def _revoked(self, _: Consumer, places: list[TopicPartition]) -> None:
        if not self._stop.is_set():
            self.revoked += 1
        self.assigned -= {place.partition for place in places}

    def _run(self) -> None:
        while not self._stop.is_set():
            got = [m for m in self._consumer.consume(100, 0.05) if m.error() is None]
            self.read += [int(m.value()) for m in got]
            if got:
                try:
                    self._consumer.commit(asynchronous=False)
                except KafkaException:
                    continue  # committed with the next ones
        self._consumer.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Numbers:
    """Numbers to a topic, as many as are asked for."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.sent = 0
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "enable.idempotence": True,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )

    def send(self, count: int = 200) -> None:
        for number in range(self.sent, self.sent + count):
            self._producer.produce(self._topic, str(number), partition=number % PARTITIONS)
        self.sent += count
        assert self._producer.flush(DEADLINE_S) == 0


@pytest.mark.slow
def test_members_go_on_without_a_rebalance_when_the_coordinator_dies(kept_cluster):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic(partitions=PARTITIONS)
    numbers = Numbers(cluster, topic)
    members = [
        Member(cluster, topic, "team"),
        Member(cluster, topic, "team", **{"group.instance.id": "static"}),
    ]

    def go_on() -> None:
        numbers.send()
        cluster.wait_until(
            lambda: set().union(*(m.read for m in members)) >= set(range(numbers.sent)),
            "everything is read",
        )

    try:
        cluster.wait_until(
            lambda: all(len(m.assigned) == PARTITIONS // 2 for m in members), "halves"
        )
        go_on()
        shares = [set(m.assigned) for m in members]
        rebalanced = [m.revoked for m in members]
        ids = {m.member_id for m in described(cluster, "team").members}
        coordinator = described(cluster, "team").coordinator.id
        cluster.kill(coordinator)
        go_on()
        found = described(cluster, "team")
        assert found.coordinator.id != coordinator
        assert {m.member_id for m in found.members} == ids
        cluster.start(coordinator)
        go_on()
        assert [m.revoked for m in members] == rebalanced
        assert [m.assigned for m in members] == shares
        everything = [number for m in members for number in m.read]
        assert len(everything) == numbers.sent, "something was read twice"
    finally:
        for member in members:
            member.stop()
    # Who was killed before the end of the group does not bring it back.
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    coordinator = described(cluster, "team").coordinator.id
    cluster.wait_until(lambda: deleted(admin, "team"), "the group is deleted")
    cluster.kill(coordinator)
    found = described(cluster, "team")
    assert (found.coordinator.id != coordinator, found.state.name) == (True, "DEAD")


def deleted(admin: AdminClient, group: str) -> bool:
    """Static members do not leave: whether the last one's session is over and the group is gone."""
    try:
        admin.delete_consumer_groups([group], request_timeout=DEADLINE_S)[group].result()
    except KafkaException as error:
        assert error.args[0].name() == "NON_EMPTY_GROUP", error
        return False
    return True
