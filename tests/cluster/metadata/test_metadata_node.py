from __future__ import annotations

from random import Random
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.records import (
    BrokerRecord,
    ClusterRecord,
    ConfigRecord,
    NoOpRecord,
    PartitionRecord,
    TopicRecord,
    VotersRecord,
    encode_batch,
)
from kept.cluster.metadata.snapshot import difference, write_snapshot
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import (
    HARD_STATE_NAME,
    IDENTITY_NAME,
    WAL_NAME,
    Entry,
    HardState,
    WriteAheadLog,
    read_hard_state,
    read_identity,
    write_hard_state,
)
from kept.cluster.raft.formation import Formation
from kept.cluster.raft.messages import LeaderHint
from kept.cluster.raft.ready import RaftSettings, Role
from kept.storage.disk import Disk
from kept.storage.errors import (
    DamagedData,
    DirectoryRefused,
    InvalidRequest,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
    NotController,
)
from tests.support.metadata_cluster import (
    DIR,
    NOWHERE,
    Cluster,
    listed,
    open_member,
    setting,
    settle,
)
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk


def settings_in(image: Image) -> int:
    """How many of the entries 0, 1, 2... are in the image; none may be missing in between."""
    names = sorted(image.config(4, ""))
    assert names == [f"k{number:04d}" for number in range(len(names))]
    return len(names)


def propose(member: MetadataNode, records) -> int:
    index = member.propose(records)
    settle(member)
    assert member.image.index >= index
    return index


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.start(0, 1, 2)
    made.leader()
    return made


# A lone node.


def test_a_lone_node_leads_when_it_is_open(disk) -> None:
    member = open_member(disk, 3)
    assert member.role is Role.LEADER and member.controller_ready and member.leader_id == 3
    assert member.voters == (Voter(3, UUID(int=103)),) and member.image.voters == member.voters
    assert member.cluster_id is not None and len(member.cluster_id) == 22
    assert member.work() is None


def test_each_opening_is_a_new_term_and_the_vote_is_durable(disk) -> None:
    for expected in (1, 2, 3):
        member = open_member(disk, 5)
        assert member.term == expected
        for seed in range(5):
            state = read_hard_state(disk.after_power_loss(seed), DIR)
            assert (state.term, state.vote, state.vote_directory) == (expected, 5, UUID(int=105))


def test_a_proposal_of_a_lone_node_is_one_work(disk) -> None:
    member = open_member(disk)
    index = member.propose(setting(0))
    work = member.work()
    assert work is not None and work.blocks
    assert member.work() is None, "one at a time"
    with pytest.raises(InvariantViolation):
        member.done(work)
    work.run()
    outcome = member.done(work)
    ((image, delta, applied),) = outcome.applied
    assert applied == index and image is member.image and delta.configs == {(4, "")}
    assert member.work() is None
    with pytest.raises(InvariantViolation):
        member.done(work)


def test_what_was_proposed_is_there_after_reopening(tmp_path) -> None:
    path = str(tmp_path / "a" / "meta")
    topic = UUID(int=1)
    for number in range(8):  # raftos cannot read its log back after the fifth write
        member = MetadataNode.open(
            path, Disk(), node_id=0, directory_id=UUID(int=number + 1), random=Random(1).randrange
        )
        assert settings_in(member.image) == number
        assert member.term == number + 1 and member.directory_id == UUID(int=1)
        propose(member, setting(number))
    propose(member, [TopicRecord("t", topic), PartitionRecord(topic, 0, (0,), (0,), 0, 0, 0)])
    again = MetadataNode.open(
        path, Disk(), node_id=0, directory_id=NOWHERE, random=Random(1).randrange
    )
    assert again.image.partition("t", 0) == member.image.partition("t", 0)


def test_several_proposals_under_way_see_each_other(disk) -> None:
    """raftos answers one of ten."""
    member = open_member(disk)
    indexes = [member.propose([TopicRecord(f"t{n}", UUID(int=n + 1))]) for n in range(10)]
    with pytest.raises(InvariantViolation, match="exists"):
        member.propose([TopicRecord("t3", UUID(int=77))])
    (outcome,) = settle(member)
    assert [index for _, _, index in outcome.applied] == indexes
    assert len(member.image.topics) == 10


def test_what_contradicts_the_image_is_not_written(disk) -> None:
    member = open_member(disk)
    before = disk.read(f"{DIR}/{WAL_NAME}")
    for records, why in (
        ([ClusterRecord("other")], InvariantViolation),
        ([VotersRecord(())], InvalidRequest),
    ):
        with pytest.raises(why):
            member.propose(records)
    assert member.work() is None and disk.read(f"{DIR}/{WAL_NAME}") == before


def test_the_metadata_of_0_1_0_goes_on(disk) -> None:
    """Without voters, identity, or an entry of the last term."""
    disk.ensure_data_directory(DIR)
    write_hard_state(disk, DIR, HardState(1, 0, UUID(int=7)))
    batches = [[ClusterRecord("a-cluster-of-old-times")], setting(0)]
    entries = [Entry(1, n + 1, encode_batch(batch)) for n, batch in enumerate(batches)]
    WriteAheadLog.open(DIR, disk).append(entries)
    member = open_member(disk, 0, listed(0, 1, 2))
    assert member.controller_ready and settings_in(member.image) == 1
    assert member.cluster_id == "a-cluster-of-old-times"
    assert [v.node_id for v in member.image.voters] == [0], "the list is for empty logs"
    assert member.voters[0].host == "node-0"
    again = open_member(disk, 0, listed(0, 1, 2))
    assert again.controller_ready and again.image.voters == member.image.voters


def test_a_log_still_without_voters_is_no_lone_nodes_log(disk) -> None:
    """An observer stops half way through a copy of a log that 0.1.0 began: it must not lead."""
    open_member(disk, 1, listed(0), observer=True)
    WriteAheadLog.open(DIR, disk).append([Entry(1, 1, encode_batch([NoOpRecord()]))])
    member = open_member(disk, 1, listed(0, 1))
    for _ in range(50):
        member.tick()
        settle(member)
    assert member.role is Role.OBSERVER


# Three nodes.


def test_three_empty_nodes_found_a_cluster(cluster) -> None:
    first = cluster.leader()
    assert {m.cluster_id for m in cluster.members.values()} == {first.cluster_id}
    expected = tuple(Voter(i, UUID(int=100 + i), f"node-{i}", 10092) for i in range(3))
    assert all(m.image.voters == expected for m in cluster.members.values())
    propose_to = cluster.leader()
    index = propose_to.propose(setting(0))
    cluster.deliver()
    assert [settings_in(m.image) for m in cluster.members.values()] == [1, 1, 1]
    assert propose_to.commit_index == index
    with pytest.raises(NotController) as refused:
        next(m for m in cluster.members.values() if m is not first).propose(setting(1))
    assert refused.value.leader_id == first.node_id


def test_a_first_start_waits_for_every_voter() -> None:
    cluster = Cluster()
    cluster.start(0, 1)
    cluster.tick(60)
    assert {m.role for m in cluster.members.values()} == {Role.OBSERVER}
    cluster.start(2)
    cluster.tick(6)
    assert cluster.leader().image.index == 1


def test_different_lists_at_the_first_start_are_refused() -> None:
    cluster = Cluster()
    cluster.start(0, 1)
    cluster.listed = listed(0, 1, 2, 4)
    cluster.start(2)
    cluster.tick(4)
    assert all(m.refusal is not None for m in cluster.members.values())
    assert "names the nodes [0, 1, 2] here and [0, 1, 2, 4] at node 2" in str(
        cluster.members[0].refusal
    )
    assert not cluster.members[0].drain_messages()


def test_all_nodes_restart(cluster) -> None:
    cluster.leader().propose(setting(0))
    cluster.deliver()
    before = cluster.leader().cluster_id
    terms = {i: m.term for i, m in cluster.members.items()}
    cluster.disks = {i: disk.after_power_loss(i) for i, disk in cluster.disks.items()}
    cluster.start(0, 1, 2)
    assert all(cluster.members[i].term >= terms[i] for i in terms)
    leader = cluster.leader()
    leader.propose(setting(1))
    cluster.tick(3)
    assert [settings_in(m.image) for m in cluster.members.values()] == [2, 2, 2]
    assert leader.cluster_id == before


def test_a_node_that_starts_knows_when_its_image_is_as_new_as_what_it_had_acted_on(cluster) -> None:
    cluster.leader().propose(setting(0))
    cluster.deliver()
    assert settings_in(cluster.leader().image) == 1
    again = open_member(cluster.disks[0].after_kill(), 0, cluster.listed)
    assert settings_in(again.image) == 0 and not again.recovered
    cluster.start(0, 1, 2)
    cluster.leader()
    assert all(m.recovered and settings_in(m.image) == 1 for m in cluster.members.values())


def test_one_node_is_enough_to_start_once_the_cluster_is_founded(cluster) -> None:
    """Two of three, that is: the log knows the voters, nobody asks for the third."""
    del cluster.members[2]
    cluster.start(0, 1)
    assert cluster.leader().role is Role.LEADER


def test_an_empty_disk_of_a_voter_follows_and_does_not_vote(cluster) -> None:
    cluster.leader().propose(setting(0))
    cluster.deliver()
    lost = next(i for i in cluster.members if i != cluster.leader().node_id)
    cluster.disks[lost] = SimulatedDisk()
    cluster.start(lost, directory_id=UUID(int=999))
    cluster.tick(6)
    member = cluster.members[lost]
    assert member.role is Role.OBSERVER and settings_in(member.image) == 1
    leader = cluster.leader()
    assert lost in leader.observers, "a voter by its id, an observer by its disk"
    others = tuple(v for v in leader.voters if v.node_id != lost)
    leader.change_voters(others)
    cluster.tick(3)
    assert lost in leader.observers
    leader.change_voters((*others, Voter(lost, UUID(int=999), "new", 1)))
    cluster.tick(3)
    assert member.role is Role.FOLLOWER
    assert Voter(lost, UUID(int=999), "new", 1) in member.image.voters


def test_the_same_disk_under_an_empty_directory_is_refused(disk) -> None:
    """Whoever deletes the log but not the identity would let a disk promise twice."""
    open_member(disk)
    for name in (WAL_NAME, HARD_STATE_NAME):
        content = disk.read(f"{DIR}/{name}")
        disk.unlink(f"{DIR}/{name}")
        with pytest.raises(DamagedData, match=r"missing.*empty the whole directory"):
            open_member(disk)
        disk.write_file(f"{DIR}/{name}", content)
    open_member(disk)
    disk.flip_bit(f"{DIR}/{IDENTITY_NAME}", 20)
    with pytest.raises(DamagedData, match="CRC"):
        open_member(disk)


def test_observers_follow(cluster) -> None:
    cluster.disks[7] = SimulatedDisk()
    cluster.outcomes[7] = []
    cluster.start(7)
    cluster.tick(4)
    leader, seven = cluster.leader(), cluster.members[7]
    leader.propose(setting(0))
    cluster.tick(2)
    assert seven.role is Role.OBSERVER and seven.leader_id == leader.node_id
    assert settings_in(seven.image) == 1
    assert leader.observers == (7,)
    follower = leader.progress[7]
    assert follower.match_index == leader.last_index and leader.ticks - follower.last_contact < 5
    steps = [index for o in cluster.outcomes[7] for _, _, index in o.applied]
    assert steps == list(range(1, leader.image.index + 1)), "each entry once, in order"


def test_another_cluster_is_refused(cluster) -> None:
    leader = cluster.leader()
    disk = SimulatedDisk()
    stranger = open_member(disk, 9, cluster.listed, observer=True, cluster_id="x" * 22)
    stranger.receive(
        LeaderHint(term=1, sender=0, to=9, leader_id=0, last_index=1, cluster_id=leader.cluster_id)
    )
    assert "belongs to cluster" in str(stranger.refusal)
    with pytest.raises(DirectoryRefused, match="holds the metadata of cluster"):
        snapshots = Cluster(1, snapshot_after_bytes=100)
        snapshots.start(0)
        for number in range(5):
            propose(snapshots.members[0], setting(number, 40))
        open_member(snapshots.disks[0], 0, cluster_id="x" * 22)


def test_a_list_without_a_current_voter_is_refused(cluster) -> None:
    disk = SimulatedDisk()
    cluster.disks[8] = disk
    cluster.outcomes[8] = []
    cluster.start(8)
    cluster.members[8].core.state.contacts = (0, 1, 2)
    cluster.members[8]._listed = listed(5, 6)
    cluster.tick(5)
    assert "names the nodes [5, 6], none of which votes; the voters are [0, 1, 2]" in str(
        cluster.members[8].refusal
    )


def test_a_deposed_leaders_proposal_is_reported_lost(cluster) -> None:
    old = cluster.leader()
    cluster.cut = {old.node_id}
    index = old.propose(setting(0))
    cluster.tick(30)
    assert not old.controller_ready
    new = cluster.leader()
    new.propose(setting(0))
    new.propose([FINAL])
    cluster.cut = set()
    cluster.tick(4)
    outcomes = cluster.outcomes[old.node_id]
    assert [i for o in outcomes for i in o.lost_proposals] == [index]
    position = next(n for n, o in enumerate(outcomes) if o.lost_proposals)
    applied_at = next(n for n, o in enumerate(outcomes) if any(i == index for *_, i in o.applied))
    assert position <= applied_at, "lost before another's entry of that index is applied"
    assert old.image == new.image


FINAL = ConfigRecord(4, "", "k0001", "v")


def test_a_deposed_leaders_proposal_may_still_be_committed() -> None:
    cluster = Cluster()
    cluster.start(0, 1, 2)
    old = cluster.leader()
    index = old.propose(setting(0))
    (messages,) = [old.drain_messages()]
    target = next(m for m in messages if m.to != old.node_id)
    cluster.members[target.to].receive(target)
    cluster.cut = {old.node_id}
    cluster.deliver()
    cluster.tick(40)
    assert not old.controller_ready
    cluster.cut = set()
    cluster.tick(30)
    outcomes = cluster.outcomes[old.node_id]
    assert [i for o in outcomes for *_, i in o.applied].count(index) == 1
    assert not [i for o in outcomes for i in o.lost_proposals]
    assert settings_in(old.image) == 1


def test_reads_and_transfer(cluster) -> None:
    leader = cluster.leader()
    index = leader.propose(setting(0))
    cluster.deliver()
    leader.read_barrier("r")
    cluster.deliver()
    assert ("r", index) in [r for o in cluster.outcomes[leader.node_id] for r in o.reads]
    to = next(i for i in cluster.members if i != leader.node_id)
    leader.transfer(to)
    cluster.deliver()
    assert cluster.members[to].controller_ready
    assert cluster.outcomes[leader.node_id][-1].role_changed or any(
        o.role_changed for o in cluster.outcomes[leader.node_id][-3:]
    )


def hand_over(cluster: Cluster, leader: MetadataNode, ticks: int = 0) -> int:
    """As a node that stops does; how often it was asked again."""
    asked = 0
    while leader.hand_over():
        cluster.deliver()
        cluster.tick(ticks)
        asked += 1
        assert asked < 200
    return asked


def test_a_leader_that_ends_lets_another_one_lead_first(cluster) -> None:
    leader = cluster.leader()
    assert hand_over(cluster, leader) == 1
    assert leader.role is not Role.LEADER
    assert cluster.members[leader.leader_id].controller_ready, "no time has passed"
    assert not leader.hand_over(), "somebody leads"


def test_it_is_handed_to_one_that_is_there(cluster) -> None:
    leader = cluster.leader()
    first, second = (i for i in cluster.members if i != leader.node_id)
    for dead, other in ((first, second), (second, first)):
        assert leader.core.replicator.successor in (first, second)
        leader.peer_down(dead)
        assert leader.core.replicator.successor == other
        leader.core.state.down.clear()
    cluster.cut = {first}
    cluster.tick(leader.core.state.settings.election_ticks + 2)
    assert leader.core.replicator.successor == second, "the first one is silent"


def test_nobody_is_there_to_hand_over_to(cluster) -> None:
    leader = cluster.leader()
    follower = next(m for m in cluster.members.values() if m is not leader)
    assert not follower.hand_over(), "it does not lead"
    for node in cluster.members:
        leader.peer_down(node)
    assert not leader.hand_over()
    alone = Cluster(1)
    alone.start(0)
    assert not alone.members[0].hand_over()


def test_handing_over_is_tried_again_when_it_came_to_nothing(cluster) -> None:
    leader = cluster.leader()
    cluster.cut = {i for i in cluster.members if i != leader.node_id}
    assert leader.hand_over()
    cluster.deliver()  # what was sent is lost
    cluster.cut = set()
    assert hand_over(cluster, leader, ticks=1) > 0
    assert cluster.leader() is not leader


def test_who_is_left_leads_as_soon_as_one_with_an_older_log_comes_back() -> None:
    cluster = Cluster(raft=RaftSettings(election_ticks=200))
    cluster.start(0, 1, 2)
    dead = cluster.leader().node_id
    back, left = (i for i in range(3) if i != dead)
    del cluster.members[back]
    cluster.leader().propose(setting(0))
    cluster.deliver()
    del cluster.members[dead]
    cluster.members[left].peer_down(dead)
    cluster.tick(450)  # it has long given up to ask
    assert cluster.members[left].leader_id is None
    cluster.start(back)
    cluster.tick(8)
    assert cluster.members[left].controller_ready
    assert settings_in(cluster.members[back].image) == 1


def test_evidence_of_a_leaders_death_is_acted_on_without_a_tick(cluster) -> None:
    leader = cluster.leader()
    cluster.cut = {leader.node_id}
    dead = cluster.members.pop(leader.node_id)
    first, second = cluster.members.values()
    first.peer_down(dead.node_id)
    cluster.deliver()
    assert second.drain_probes() == {dead.node_id} and second.drain_probes() == frozenset()
    second.peer_down(dead.node_id)
    cluster.deliver()
    cluster.tick(0)
    assert any(m.controller_ready for m in cluster.members.values())


# Snapshots.


def test_a_follower_that_was_away_gets_a_snapshot() -> None:
    cluster = Cluster(snapshot_after_bytes=300)
    cluster.start(0, 1, 2)
    leader = cluster.leader()
    away = next(i for i in cluster.members if i != leader.node_id)
    cluster.members.pop(away)
    topic = UUID(int=5)
    leader.propose([TopicRecord("t", topic), PartitionRecord(topic, 0, (0,), (0,), 0, 0, 0)])
    for number in range(30):
        leader.propose(setting(number, 30))
        cluster.deliver()
    assert leader.core.log.base_index > 10
    cluster.outcomes[away] = []
    cluster.start(away)
    cluster.tick(5)
    member = cluster.members[away]
    assert member.image == leader.image and member.image.index == leader.image.index
    steps = [(index, delta) for o in cluster.outcomes[away] for _, delta, index in o.applied]
    assert steps[0][0] > 1 and [t.name for t in steps[0][1].topics_created] == ["t"]
    disk = cluster.disks[away].after_power_loss(3)
    again = open_member(disk, away, cluster.listed)
    assert again.image.index >= steps[0][0] and again.image.voters == leader.image.voters
    assert again.commit_index == again.image.index


def test_a_snapshot_of_a_lone_node_and_what_is_kept(disk) -> None:
    member = open_member(disk, snapshot_after_bytes=400)
    for number in range(60):
        propose(member, setting(number, 20))
        settle(member)
    assert disk.stat(f"{DIR}/{WAL_NAME}").size_bytes < 6000
    log = member.core.log
    assert 0 < log.base_index < member._files.wal.base_index, "one log more than on disk"
    again = open_member(disk, snapshot_after_bytes=400)
    assert settings_in(again.image) == 60


def test_a_snapshot_ahead_of_the_log_counts_as_committed() -> None:
    """The process dies between writing a snapshot and dropping the log before it."""
    cluster = Cluster(snapshot_after_bytes=1000)
    cluster.start(0, 1, 2)
    leader, number = cluster.leader(), 0
    disk = cluster.disks[leader.node_id]
    while leader._files.wal.base_index == 0:
        wal = disk.read(f"{DIR}/{WAL_NAME}")
        leader.propose(setting(number, 60))
        cluster.deliver()
        number += 1
    disk.write_file(f"{DIR}/{WAL_NAME}", wal)
    again = open_member(disk, leader.node_id, cluster.listed)
    again.check_invariants()
    assert again._files.wal.base_index == 0 < again.image.index == again.commit_index
    cluster.members[leader.node_id] = again
    cluster.leader().propose(setting(number))
    cluster.tick(30)
    assert settings_in(again.image) == number + 1


def test_a_difference_is_what_several_deltas_tell() -> None:
    topics = [UUID(int=n) for n in range(1, 5)]
    before, _ = Image().apply(
        [
            TopicRecord("a", topics[0]),
            PartitionRecord(topics[0], 0, (0,), (0,), 0, 0, 0),
            TopicRecord("b", topics[1]),
            PartitionRecord(topics[1], 0, (0,), (0,), 0, 0, 0),
            *setting(0),
        ]
    )
    after, _ = Image().apply(
        [
            TopicRecord("a", topics[0]),
            PartitionRecord(topics[0], 0, (0,), (0,), 0, 1, 1),
            PartitionRecord(topics[0], 1, (0,), (0,), 0, 0, 0),
            TopicRecord("b", topics[2]),
            PartitionRecord(topics[2], 0, (0,), (0,), 0, 0, 0),
            BrokerRecord(1, 1, topics[3], ()),
            VotersRecord((Voter(0, NOWHERE),)),
        ]
    )
    delta = difference(before, after)
    assert [t.topic_id for t in delta.topics_created] == [topics[2]]
    assert [t.topic_id for t in delta.topics_deleted] == [topics[1]]
    assert [(str(c.topic_partition), c.before is None) for c in delta.partitions] == [
        ("a-0", False),
        ("a-1", True),
        ("b-0", True),
    ]
    assert delta.configs == {(4, "")} and delta.brokers == {1} and delta.voters
    assert difference(after, after) == type(delta)()


def test_a_log_that_went_apart_from_the_snapshot_is_dropped(disk) -> None:
    """The process dies between writing the leader's snapshot and emptying its own log."""
    member = open_member(disk, 1, listed(0, 1, 2), observer=True)
    WriteAheadLog.open(DIR, disk).append(
        [Entry(1, n, encode_batch(setting(90 + n))) for n in range(1, 6)]
    )
    image, _ = Image().apply(setting(0))
    write_snapshot(disk, DIR, replace(image, index=3), 7)
    again = open_member(disk, 1, listed(0, 1, 2), observer=True)
    assert settings_in(again.image) == 1
    assert (again.last_index, again.commit_index) == (3, 3) and again.term == 7
    assert again.directory_id == member.directory_id


def test_who_hears_of_a_log_founds_nothing() -> None:
    me = Voter(0, UUID(int=1))

    def hint(sender: int, last_index: int, *ids: int) -> LeaderHint:
        return LeaderHint(
            term=0,
            sender=sender,
            to=0,
            leader_id=-1,
            directory_id=UUID(int=50 + sender),
            last_index=last_index,
            voters=ids,
        )

    formation = Formation(me, listed(0, 1, 2))
    formation.learn(hint(1, 0, 0, 1, 2))
    formation.learn(hint(7, 0, 0, 1, 2))
    assert formation.founders is None, "a stranger's answer is none"
    formation.learn(hint(2, 3, 0, 1, 2))
    assert formation.joins and formation.founders is None
    formation.learn(hint(2, 0, 0, 1, 2))
    assert formation.founders is None
    fresh = Formation(me, listed(0, 1))
    fresh.learn(hint(1, 0, 1, 0))
    assert [v.directory_id for v in fresh.founders or ()] == [UUID(int=1), UUID(int=51)]
    fresh.learn(hint(1, 0, 0))
    assert fresh.refusal is not None and fresh.founders is None


# Faults.


def test_a_full_disk_is_tried_again_and_nothing_is_written_twice(disk) -> None:
    member = open_member(disk)
    member.propose(setting(0))
    work = member.work()
    assert work is not None
    disk.fail("write", WAL_NAME, partial=True)
    with pytest.raises(MachineError):
        work.run()
    member.disk_failed()
    assert not member.controller_ready
    for _ in range(30):
        member.tick()
    assert member.role is Role.FOLLOWER, "it does not campaign meanwhile"
    work.run()
    member.done(work)
    for _ in range(30):
        member.tick()
        settle(member)
    assert member.controller_ready and settings_in(member.image) == 1
    assert settings_in(open_member(disk).image) == 1


def test_after_a_failed_fsync_nothing_is_accepted(disk) -> None:
    member = open_member(disk)
    member.propose(setting(0))
    work = member.work()
    assert work is not None
    disk.fail("fsync", WAL_NAME)
    with pytest.raises(MachineError):
        work.run()
    with pytest.raises(KafkaStorageError):
        work.run()


def test_an_entry_of_a_newer_kept_is_refused(disk) -> None:
    member = open_member(disk)
    WriteAheadLog.open(DIR, disk).append(
        [Entry(member.term, member.last_index + 1, b"\0\0\0\1\0\0\0\2\xc8\0")]
    )
    with pytest.raises(DirectoryRefused, match="metadata record of type 200"):
        open_member(disk)


def test_an_entry_that_is_no_batch_is_damage(disk) -> None:
    member = open_member(disk)
    index = member.last_index + 1
    WriteAheadLog.open(DIR, disk).append([Entry(member.term, index, b"\0\0\0\1")])
    with pytest.raises(DamagedData, match=f"entry {index}"):
        open_member(disk)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 120), st.integers(0, 2**31), st.booleans(), st.sampled_from([150, 100_000]))
def test_a_crash_at_any_call_loses_nothing_acknowledged(call, seed, power, limit) -> None:
    disk = SimulatedDisk(seed=seed)
    disk.crash_at(call)
    acknowledged = 0
    term = 0
    try:
        member = open_member(disk, snapshot_after_bytes=limit)
        for number in range(12):
            if number == 6:
                member = open_member(disk, snapshot_after_bytes=limit)
            term = member.term
            propose(member, setting(number, size=20))
            acknowledged = number + 1
    except SimulatedCrash:
        pass
    after = disk.after_power_loss(seed) if power else disk.after_kill()
    again = open_member(after, snapshot_after_bytes=limit)
    found = settings_in(again.image)
    assert acknowledged <= found <= acknowledged + 1
    assert again.term > term
    propose(again, setting(found))
    last = open_member(after.after_power_loss(seed + 1), snapshot_after_bytes=limit)
    assert settings_in(last.image) == found + 1
    assert read_hard_state(after, DIR).term >= again.term
    identity = read_identity(after, DIR)
    assert identity is not None and identity.directory_id == UUID(int=100)


def test_a_candidate_begins_again_sooner_than_a_follower_begins() -> None:
    cluster = Cluster(raft=RaftSettings(election_ticks=100, candidate_ticks=5))
    cluster.start(0, 1, 2)
    left = cluster.leader().node_id
    cluster.members = {left: cluster.members[left]}
    core = cluster.members[left].core
    cluster.tick(101)
    assert core.role is Role.FOLLOWER and core.state.election.timeout >= 100, "check-quorum"
    cluster.tick(200)
    assert core.role is Role.PROSPECTIVE and 5 <= core.state.election.timeout < 10
    assert core.state.election.elapsed < core.state.election.timeout


def test_settings_reach_the_core() -> None:
    member = open_member(SimulatedDisk(), raft=RaftSettings(election_ticks=33))
    assert member.core.state.settings.election_ticks == 33
