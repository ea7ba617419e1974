"""A node whose disk is older than what it has acknowledged: a copy, or an fsync that lied."""

from __future__ import annotations

from uuid import UUID

from kept.cluster.raft.ready import Role
from tests.support.metadata_cluster import Cluster, setting
from tests.support.simulated_disk import SimulatedDisk


def copied(disk: SimulatedDisk) -> SimulatedDisk:
    """What is durable, as it is now."""
    return disk.after_kill()


def test_a_voter_with_an_old_copy_of_its_disk_ends_and_says_why() -> None:
    cluster = Cluster()
    cluster.start(0, 1, 2)
    leader = cluster.leader()
    old = next(i for i in cluster.members if i != leader.node_id)
    copy = copied(cluster.disks[old])
    for number in range(3):
        leader.propose(setting(number))
        cluster.deliver()
    cluster.tick(5)
    kept = cluster.members[old].last_index
    assert kept == leader.last_index

    cluster.disks[old] = copy
    cluster.start(old)
    behind = cluster.members[old]
    cluster.tick(30)
    assert behind.refusal is not None
    assert f"ends at entry {behind.last_index}, but" in behind.refusal
    assert f"acknowledged entry {kept} to node {leader.node_id}" in behind.refusal
    assert f"kept cluster voter add {old}" in behind.refusal
    assert leader.role is Role.LEADER and leader.controller_ready


def test_a_voter_that_was_away_is_not_taken_for_one() -> None:
    cluster = Cluster()
    cluster.start(0, 1, 2)
    leader = cluster.leader()
    away = next(i for i in cluster.members if i != leader.node_id)
    del cluster.members[away]
    for number in range(3):
        leader.propose(setting(number))
        cluster.deliver()
    cluster.start(away)
    cluster.tick(30)
    assert cluster.members[away].refusal is None
    assert cluster.members[away].last_index == leader.last_index


def test_a_voter_with_an_empty_disk_follows_without_a_vote() -> None:
    cluster = Cluster()
    cluster.start(0, 1, 2)
    leader = cluster.leader()
    new = next(i for i in cluster.members if i != leader.node_id)
    leader.propose(setting(1))
    cluster.deliver()
    cluster.tick(5)
    cluster.disks[new] = SimulatedDisk()
    cluster.start(new, directory_id=UUID(int=999))
    cluster.tick(60)
    assert cluster.members[new].refusal is None
    assert cluster.members[new].role is Role.OBSERVER
    assert cluster.members[new].last_index == leader.last_index
