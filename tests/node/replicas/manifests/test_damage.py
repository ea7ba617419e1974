"""What a replica held cannot be read any more, and an internal topic."""

from __future__ import annotations

import glob
import os
import re

import pytest

from kept.storage.layout import HELD_MANIFEST
from kept.storage.records import headers
from kept.storage.types import TopicPartition
from tests.node.replicas.manifests.trio import trio

pytestmark = pytest.mark.slow


def manifest_of(three, node: int) -> str:
    directory = three.directory(node)
    (name,) = [n for n in os.listdir(directory) if n.startswith("manifest-") and n[9:10].isdigit()]
    return os.path.join(directory, name)


@pytest.mark.parametrize("damage", ["torn", "missing"])
def test_a_replica_whose_manifest_is_damaged_gets_it_from_its_leader(damage):
    with trio() as three:
        three.put((b"gone", b"alive"))
        three.fill(20)
        three.put((b"gone", None))
        three.fill(20, start=20)
        three.clean()
        three.until_applied(0, 1, 2)
        victim = (three.leader + 1) % 3
        path = manifest_of(three, victim)
        three.cluster.stop(victim)
        if damage == "torn":
            with open(path, "r+b") as manifest:
                manifest.truncate(os.path.getsize(path) // 2)
        else:
            os.unlink(path)
        three.cluster.start(victim)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        assert "manifest given up" in three.cluster.log(victim)
        three.until_equal()


@pytest.mark.parametrize("damage", ["torn", "missing"])
def test_a_leader_whose_manifest_is_damaged_makes_another_for_who_comes_back(damage):
    """It runs, and has nothing to clean: who was away could never enter the ISR again."""
    with trio() as three:
        leader = three.leader
        away = (leader + 1) % 3
        three.put((b"gone", b"alive"))
        three.fill(20)
        three.cluster.stop(away)
        three.put((b"gone", None))
        three.fill(20, start=20)
        three.clean()
        three.until_applied(leader, 3 - leader - away)
        path = manifest_of(three, leader)
        if damage == "torn":
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            os.unlink(path)
        three.cluster.start(away)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        assert three.leader == leader
        assert 'event="manifest given up"' in three.cluster.log(leader)
        assert 'why="its manifest cannot be read"' in three.cluster.log(leader)
        assert three.live().keys() == {b"k%d" % i for i in range(7)}
        three.until_equal()


def test_a_leader_whose_manifest_is_damaged_begins_anew_when_there_is_no_other():
    """All were killed at once: the one that is elected then is the whole ISR."""
    with trio() as three:
        three.put((b"gone", b"alive"))
        three.fill(20)
        three.put((b"gone", None))
        three.fill(20, start=20)
        three.clean()
        three.until_applied(0, 1, 2)
        first = three.status(three.leader)["generation"]
        victim = three.leader
        path = manifest_of(three, victim)
        for node in range(3):
            three.cluster.kill(node)
        with open(path, "r+b") as manifest:
            manifest.truncate(10)
        for node in range(3):
            three.cluster.start(node, wait=False)
        three.cluster.await_ready()
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        generation = three.status(three.leader)["generation"]
        assert generation == (
            f"{three.partition().leader_epoch}.0" if three.leader == victim else first
        )
        three.fill(3, start=40)
        three.clean()
        assert b"gone" not in three.live()
        three.until_equal()


@pytest.mark.parametrize("where", ["record", "header"])
def test_a_member_with_a_damaged_record_leaves_the_isr_and_fetches_it_again(where):
    """It is found when a manifest is applied (C17)."""
    with trio() as three:
        victim = (three.leader + 1) % 3
        three.put((b"kept", b"as it was"))
        three.fill(40)
        three.until_in_sync(0, 1, 2)
        first = os.path.join(three.directory(victim), "00000000000000000000.log")
        with open(first, "r+b") as segment:
            segment.seek(segment.read().index(b"as it was") if where == "record" else 16)
            segment.write(b"as it is " if where == "record" else b"\0")
        three.clean()
        three.until(lambda: "log truncated" in three.cluster.log(victim), "its log is cut")
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        changes = re.findall(r'"ISR changed".*isr=\S+', three.cluster.log(three.leader))
        assert any(str(victim) not in line.rpartition("isr=")[2] for line in changes)
        assert "is missing here" in three.cluster.log(victim)
        three.until_equal()
        assert three.live()[b"kept"] == b"as it was"


def cut_out(directory: str, text: bytes) -> None:
    """Take the batch with a text out of a log's first segment, and the indexes, which count its
    bytes.
    """
    path = os.path.join(directory, "00000000000000000000.log")
    with open(path, "rb") as segment:
        data = segment.read()
    batches = [(at, at + header.size_bytes) for at, header in headers(data)]
    ((start, end),) = [(start, end) for start, end in batches if text in data[start:end]]
    with open(path, "wb") as segment:
        segment.write(data[:start] + data[end:])
    for suffix in (".index", ".timeindex"):
        os.unlink(path.removesuffix(".log") + suffix)


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_a_record_it_goes_on_once_what_is_held_is_emptied(replicas):
    """The way that docs/operations.md tells an operator who gives it up (KeptUncleanableLogs); a
    replica that was down and still has it loses it, too.
    """
    with trio(replicas=replicas) as three:
        leader = three.leader
        away = [node for node in three.partition().replicas if node != leader]
        three.fill(3)
        three.put((b"lost", b"as it was"))
        three.fill(40, start=3)
        for node in away:
            three.cluster.stop(node)
        three.until_in_sync(leader)
        three.cluster.stop(leader)
        three.cluster.start(leader, fail_point="held.held")
        three.until_leader(leader)
        three.clean_until_gone(leader)
        cut_out(three.directory(leader), b"as it was")
        three.cluster.start(leader)
        missing = "a record that survives is missing on all replicas in sync"
        three.until(lambda: missing in three.cluster.log(leader), "it lacks a record")
        three.cluster.stop(leader)
        os.truncate(os.path.join(three.directory(leader), HELD_MANIFEST), 0)
        for node in (leader, *away):
            three.cluster.start(node)
        three.until_in_sync(leader, *away)
        three.fill(3, start=43)
        three.clean()
        three.until_applied(leader, *away)
        assert three.live().keys() == {b"k%d" % i for i in range(7)}
        three.until_equal()


@pytest.mark.parametrize("whole", [False, True])
def test_a_compacted_segment_that_is_cut_while_its_node_is_down_is_fetched_again(whole):
    """Between two batches, so that no reader of the files can tell; or the file is removed."""
    with trio() as three:
        victim = (three.leader + 1) % 3
        three.fill(100, keys=50)
        three.clean()
        three.until_applied(0, 1, 2)
        before = three.files(victim)
        three.cluster.stop(victim)
        segments = sorted(glob.glob(os.path.join(three.directory(victim), "*.log")))
        assert len(segments) > 3
        cut = segments[1]  # retention may have taken the first
        with open(cut, "r+b") as segment:
            batches = list(headers(segment.read()))
            assert len(batches) > 1
            segment.truncate(batches[-1][0])
        if whole:
            for suffix in (".log", ".index", ".timeindex"):
                os.unlink(cut.removesuffix(".log") + suffix)
        three.cluster.start(victim)
        three.until(lambda: "is missing here" in three.cluster.log(victim), "it lacks a record")
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        three.until_equal()
        assert three.files(victim) == before
        assert f"{os.path.basename(cut)}: damaged at byte" in three.cluster.log(victim)


def test_a_member_with_damage_below_the_log_start_starts_anew_there_once():
    """Its leader's manifest was made before the records below were deleted, and lists them."""
    with trio({"cleanup.policy": "compact,delete"}) as three:
        victim = (three.leader + 1) % 3
        three.put((b"twice", b"first"))
        three.fill(60, keys=60)  # those behind the damage survive
        three.put((b"twice", b"second"))
        three.until_in_sync(0, 1, 2)
        three.cluster.stop(victim)
        three.until_in_sync(*{0, 1, 2} - {victim})
        three.clean()
        three.client.delete_records({three.tp: 3})
        first = os.path.join(three.directory(victim), "00000000000000000000.log")
        with open(first, "r+b") as segment:
            ((start, _), *_) = list(headers(segment.read()))[1:]
            segment.seek(start + 16)
            segment.write(b"\0")
        three.cluster.start(victim)
        three.until(lambda: "is missing here" in three.cluster.log(victim), "it lacks a record")
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        assert three.cluster.log(victim).count("all from 3 on is fetched again") == 1
        assert min(three.offsets()) >= 3


def test_consumer_offsets_are_compacted_on_all_replicas():
    settings = {"offsets_topic_num_partitions": 1, "log_cleaner_enable": "false"}
    with trio(**settings) as three:
        topic = three.topic
        for position in range(200):
            three.client.commit("group", {TopicPartition(topic, 0): position})
        three.topic = "__consumer_offsets"
        before = len(three.offsets())
        three.clean()
        three.until_applied(0, 1, 2)
        assert before >= 200 and len(three.offsets()) < 5
        three.until_equal()
        tp = TopicPartition(topic, 0)
        assert three.client.committed("group", [tp]) == {tp: 199}
