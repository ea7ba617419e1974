"""Deleted keys stay deleted: three nodes, one of which is away while a tombstone is removed."""

from __future__ import annotations

import os

import pytest

from kept.client.admin import cluster as operations
from kept.storage.errors import KeptError
from kept.storage.layout import HELD_MANIFEST as HELD
from tests.node.replicas.manifests.trio import Trio, trio

pytestmark = pytest.mark.slow


def test_a_replica_that_was_away_does_not_bring_a_deleted_key_back():
    with trio() as three:
        first = three.leader
        others = [node for node in range(3) if node != first]
        three.put((b"gone", b"alive"))
        three.fill(30)
        three.cluster.stop(first)
        three.until_leader(*others)
        three.put((b"gone", None))
        three.fill(30, start=30)
        three.clean()
        three.fill(3, start=60)
        three.clean()
        assert b"gone" not in three.table(), "the tombstone is gone, too"
        three.until_applied(*others)
        three.cluster.start(first)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        three.elect(first)
        assert b"gone" not in three.table()
        assert len(three.live()) == 7
        three.until_equal()


AS_LEADER = ["held.held", "compaction.manifest", "swap.prepared", "swap.deleted", "swap.done"]
AS_FOLLOWER = [
    "held.held",
    "compaction.manifest",
    "swap.renamed",
    "swap.group",
    "compaction.swapped",
    "compaction.marked",
]
"""Where a process dies between what it holds and what it has applied."""


@pytest.mark.parametrize(
    ("victim_leads", "point"),
    [(True, point) for point in AS_LEADER] + [(False, point) for point in AS_FOLLOWER],
)
def test_one_that_is_killed_on_the_way_comes_to_the_same_records(victim_leads, point):
    with trio() as three:
        preferred = three.leader
        victim = preferred if victim_leads else (preferred + 1) % 3
        three.put((b"gone", b"alive"))
        three.fill(20)
        three.put((b"gone", None))
        three.fill(20, start=20)
        three.cluster.stop(victim)
        three.cluster.start(victim, fail_point=point)
        three.until_in_sync(0, 1, 2)
        if victim_leads:
            three.elect(victim)
        three.clean_until_gone(victim)
        rest = [node for node in range(3) if node != victim]
        three.until_leader(*rest)
        three.clean()
        three.fill(3, start=40)
        three.clean()
        assert b"gone" not in three.table()
        three.until_applied(*rest)
        three.cluster.start(victim)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        three.elect_preferred(preferred)
        assert three.live().keys() == {b"k%d" % i for i in range(7)}
        assert b"gone" not in three.table()
        three.until_equal()


@pytest.mark.parametrize("compacted", [True, False])
def test_after_an_unclean_election_a_base_generation_makes_both_equal(compacted):
    """The one that leads lacks what the other has compacted (and may never have compacted)."""
    with trio({"unclean.leader.election.enable": "true"}, replicas=2) as three:
        first = three.leader
        (late,) = (node for node in three.partition().replicas if node != first)
        three.put((b"gone", b"alive"))
        three.fill(20)
        if compacted:
            three.clean()
            three.until_applied(first, late)
        three.put((b"stays", b"in both"))
        three.cluster.kill(late)
        three.until_in_sync(first)
        three.put((b"gone", None))
        three.fill(20, start=20)
        three.clean()
        three.fill(5, start=40)
        three.clean()
        three.cluster.kill(first)
        three.cluster.start(late)
        three.until_leader(late)
        epoch = three.partition().leader_epoch
        three.put((b"new", b"value"))
        three.until(lambda: three.status(late)["generation"] == f"{epoch}.0", "a base is made")
        three.cluster.start(first)
        three.until_in_sync(first, late)
        three.until_applied(first, late)
        assert three.live()[b"gone"] == b"alive", "its deletion was lost with the election"
        three.clean()
        three.until_applied(first, late)
        assert three.live()[b"new"] == b"value"
        three.until_equal()
        assert "is missing here" in three.cluster.log(first)
        reports = [name for name in os.listdir(three.directory(first)) if "lost-" in name]
        assert len(reports) == 1, "what is fetched again is not lost"


def test_two_of_three_go_on_before_they_have_applied_what_they_hold():
    """All are killed, a follower first, which builds segments at 20 kB a second, for minutes."""
    config = {"min.insync.replicas": "2", "segment.bytes": "1000000"}
    with trio(config) as three:
        first = three.leader
        slow = [node for node in range(3) if node != first]
        for node in slow:
            three.cluster.stop(node)
            three.cluster.start(node, log_cleaner_io_max_bytes_per_second=20_000)
        three.until_in_sync(0, 1, 2)
        for i in range(80):
            three.put((b"k%d" % (i % 40), b"%06d" % i * 10_000))
        three.put((b"k0", None))
        three.clean()
        held = [os.path.join(three.directory(node), HELD) for node in slow]
        three.until(lambda: all(map(os.path.exists, held)), "the followers hold it")
        three.cluster.kill(slow[0])
        three.until_in_sync(first, slow[1])
        three.cluster.kill(slow[1])
        three.cluster.kill(first)
        three.cluster.start(first, wait=False)
        three.cluster.start(slow[0])
        three.until(lambda: written(three, (b"k1", b"back")), "two acknowledge a record")
        assert sorted(three.partition().isr) == sorted((first, slow[0]))
        assert os.path.exists(held[0]), "it has not applied it"
        assert three.status(slow[0])["generation"] != three.status(first)["generation"]
        live = three.live()
        assert live.keys() == {b"k%d" % i for i in range(1, 40)} and live[b"k1"] == b"back"


def written(three: Trio, row: tuple[bytes, bytes]) -> bool:
    """Whether all that must have acknowledged a record did."""
    try:
        three.put(row)
    except (KeptError, OSError):
        return False
    return True


def test_a_log_whose_start_has_moved_meanwhile():
    """One that was away finds its log to lie below the leader's: it starts anew, and applies."""
    config = {"cleanup.policy": "compact,delete", "retention.bytes": "9000"}
    settings = {"log_retention_check_interval_ms": "300"}
    with trio(config, **settings) as three:
        three.fill(30, keys=1000)
        three.clean()
        three.until_applied(0, 1, 2)
        away = (three.leader + 1) % 3
        end = three.client.bounds(three.topic)[0][1]
        three.cluster.stop(away)
        three.fill(150, keys=1000, start=30)
        three.until(lambda: three.client.bounds(three.topic)[0][0] > end, "the log start moved")
        three.put((b"k100", None))
        three.clean()
        three.fill(5, keys=1000, start=180)
        three.clean()
        three.cluster.start(away)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        three.fill(60, keys=1000, start=200)
        three.clean()
        three.until_applied(0, 1, 2)
        assert b"k100" not in three.live()
        three.until_equal()


def test_replicas_that_are_added_begin_with_the_newest_generation():
    with trio(replicas=1) as three:
        first = three.leader
        three.fill(30)
        three.put((b"k0", None))
        three.clean()
        three.fill(3, start=100)
        three.clean()
        assert b"k0" not in three.table() or three.table()[b"k0"] is not None
        order = [first, *(node for node in range(3) if node != first)]
        three.client.run(operations.reassign({three.tp: order}, timeout_ms=10_000))
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        assert three.status(order[1])["generation"] == three.status(first)["generation"]
        three.fill(10, start=200)
        three.clean()
        three.until_applied(0, 1, 2)
        three.until_equal()
        three.client.run(operations.reassign({three.tp: [order[1]]}, timeout_ms=10_000))
        three.until(lambda: three.partition().replicas == (order[1],), "one replica is left")
        three.until_leader(order[1])
        three.fill(10, start=300)
        assert three.clean()["done"]
