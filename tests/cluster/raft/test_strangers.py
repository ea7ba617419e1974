"""What strangers say to a Raft core: nothing of it ends a node, or stays behind.

Strangers know everything but who they are: a stranger has a node id that is no voter's, or a
voter's id with another directory. Somebody who speaks as a voter in every field is none; of that
one only the damage is bounded: no assertion fails, and no term comes from it that cannot be true.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import MAX_ENTRY_BYTES, Entry
from kept.cluster.raft.log import ENTRY_OVERHEAD_BYTES
from kept.cluster.raft.message_guard import (
    MAX_APPEND_ENTRIES,
    MAX_TERM,
    MAX_VOTERS,
    TERM_STEP,
    flaw,
)
from kept.cluster.raft.messages import (
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    LeaderHint,
    Message,
    Observe,
    PreVote,
    PreVoteReply,
    SnapshotReply,
    TimeoutNow,
    Vote,
    VoteReply,
)
from kept.cluster.raft.ready import RaftSettings, Role
from tests.cluster.raft.forged import forged
from tests.cluster.raft.trial import Trial, directory, voter

LARGEST_TERMS = (MAX_TERM, MAX_TERM + 1, 2**63 - 1)


def state(core: Any) -> tuple[Any, ...]:
    log = core.log
    return (
        core.state.hard_state,
        core.role,
        core.leader_id,
        core.commit_index,
        core.voters,
        core.follower.log_regression,
        log.last_index,
        log.last_term,
    )


def settled(voters: int = 3) -> Trial:
    trial = Trial(voters)
    trial.elect(0)
    trial.propose(0, "a", "b", "c")
    trial.deliver()
    trial.tick(4)
    return trial


@pytest.mark.parametrize("seed", range(12))
def test_a_stranger_changes_nothing(seed: int) -> None:
    random = Random(seed)
    trial = settled()
    for _ in range(150):
        to = random.randrange(3)
        core = trial.core(to)
        if random.random() < 0.5:
            head = {
                "sender": random.choice((3, 9, 2**31 - 1, -1, 2**31)),
                "directory_id": directory(9),
            }
        else:
            head = {"sender": (to + 1) % 3, "directory_id": directory(random.randrange(3), 7)}
        before = state(core)
        core.step(forged(random, core, to=to, **head))
        core.check_invariants()
        assert state(core) == before
        if random.random() < 0.3:
            trial.tick()
    assert trial.core(0).role is Role.LEADER and trial.core(0).term == 1
    trial.propose(0, "d")
    trial.tick(8)
    assert {core.commit_index for core in map(trial.core, range(3))} == {5}


@pytest.mark.parametrize("seed", range(12))
def test_whoever_speaks_as_a_voter_does_limited_damage(seed: int) -> None:
    """Single nodes: what is forged here may well contradict what a majority agreed on."""
    random = Random(seed)
    for _ in range(10):
        trial = settled()
        to = random.randrange(3)
        core = trial.core(to)
        for _ in range(6):
            term = core.term
            sender = (to + random.randint(1, 2)) % 3
            core.step(forged(random, core, to=to, sender=sender, directory_id=directory(sender)))
            core.check_invariants()
            assert term <= core.term <= min(term + TERM_STEP, MAX_TERM)


@pytest.mark.parametrize("term", LARGEST_TERMS)
@pytest.mark.parametrize("sender", [1, 9])
def test_a_term_that_cannot_be_true_never_becomes_durable(term: int, sender: int) -> None:
    trial = settled()
    core = trial.core(0)
    head = {"sender": sender, "to": 0, "directory_id": directory(sender)}
    messages = [
        AppendEntries(term=term, prev_index=0, prev_term=0, **head),
        Vote(term=term, last_index=99, last_term=1, transfer=True, **head),
        VoteReply(term=term, granted=False, **head),
        AppendEntriesReply(term=term, accepted=False, match_index=0, **head),
        TimeoutNow(term=term, **head),
        PreVoteReply(term=term, granted=False, **head),
        InstallSnapshot(
            term=term, last_index=99, last_term=1, image_bytes=b"", voters=(voter(1),), **head
        ),
    ]
    for message in messages:
        core.step(message)
        trial.pump(0)
        assert trial.stored[0].hard_state.term <= 1 + len(messages) * TERM_STEP
    if sender == 9:
        assert trial.stored[0].hard_state.term == 1
    trial.tick(400)  # the others are several steps behind
    leader = next(node for node in trial.nodes.values() if node.core.role is Role.LEADER)
    trial.propose(leader.node_id, "later")
    trial.tick(8)
    assert len({core.commit_index for core in map(trial.core, range(3))}) == 1


def test_who_is_many_terms_behind_climbs_and_follows() -> None:
    """Somebody made the others' terms jump while node 2 was away."""
    trial = settled()
    trial.crash(2)
    behind = 5 * TERM_STEP + 3
    for node_id in (0, 1):
        trial.core(node_id).state.become_follower(behind, -1)
    trial.tick(60)
    trial.start(2)
    trial.tick(60)
    assert trial.core(2).term == trial.core(0).term > behind
    assert trial.core(2).commit_index == trial.core(0).commit_index


def test_nobody_campaigns_beyond_the_last_term() -> None:
    trial = Trial(1)
    core = trial.core(0)
    core.state.become_follower(MAX_TERM, -1)
    trial.tick(60)
    assert core.term == MAX_TERM and core.role is not Role.LEADER


# A log that lags does not know all voters: nobody that it needs is taken for a stranger.


def with_a_new_voter(knows: tuple[int, ...], tail: tuple[int, ...]) -> Trial:
    """Voters 0 to 2 got a fourth, 3; of that ``knows`` have heard, and of an entry after it
    ``tail``. The leader was 0, and is dead."""
    trial = Trial(3, 1)
    trial.elect(0)
    trial.tick(12)
    away = {node for node in (1, 2, 3) if node not in knows}
    trial.cut = {(0, node) for node in away} | {(node, 0) for node in away}
    trial.core(0).change_voters((*trial.voters, voter(3)))
    trial.deliver()
    late = {node for node in (1, 2, 3) if node not in tail}
    trial.cut |= {(0, node) for node in late} | {(node, 0) for node in late}
    trial.propose(0, "tail")
    trial.deliver()
    trial.crash(0)
    trial.cut = set()
    return trial


def test_the_only_one_that_can_be_elected_is_unknown_to_a_voter_that_lags() -> None:
    trial = with_a_new_voter(knows=(1, 3), tail=(3,))
    assert [v.node_id for v in trial.core(2).voters] == [0, 1, 2]
    trial.tick(80)
    assert trial.core(3).role is Role.LEADER
    assert {len(trial.core(node).voters) for node in (1, 2, 3)} == {4}
    assert trial.core(2).commit_index == trial.core(3).commit_index


def test_a_leader_that_is_unknown_to_a_voter_that_comes_back() -> None:
    trial = Trial(3, 1)
    trial.elect(0)
    trial.tick(12)
    trial.crash(2)
    trial.core(0).change_voters((*trial.voters, voter(3)))
    trial.deliver()
    trial.core(0).transfer(3)
    trial.deliver()
    trial.tick(4)
    assert trial.core(3).role is Role.LEADER
    trial.start(2)
    trial.tick(40)
    assert trial.core(2).leader_id == 3
    assert trial.core(2).commit_index == trial.core(3).commit_index


def test_a_voter_whose_disk_was_replaced_leads_one_that_lags() -> None:
    """Node 4 of five was away while node 3 left and joined again with another disk."""
    trial = Trial(5)
    trial.elect(0)
    trial.tick(4)
    trial.crash(4)
    trial.crash(3)
    trial.core(0).change_voters(tuple(v for v in trial.voters if v.node_id != 3))
    trial.deliver()
    trial.wipe(3)
    trial.start(3)
    trial.tick(20)
    anew = (*(v for v in trial.voters if v.node_id != 3), voter(3, disk=1))
    trial.core(0).change_voters(anew)
    trial.deliver()
    trial.core(0).transfer(3)
    trial.deliver()
    trial.tick(4)
    assert trial.core(3).role is Role.LEADER
    trial.start(4)
    trial.tick(40)
    assert trial.core(4).leader_id == 3
    assert trial.core(4).commit_index == trial.core(3).commit_index


def test_a_stranger_cannot_vouch_for_itself() -> None:
    trial = settled()
    core = trial.core(2)
    core.state.leader_id, core.state.election.elapsed = -1, 99
    for sender, disk in ((9, 0), (1, 7)):
        head = {"sender": sender, "to": 2, "directory_id": directory(sender, disk)}
        core.step(
            LeaderHint(term=1, leader_id=sender, last_index=10**9, voters=(sender, 9), **head)
        )
        core.step(Vote(term=2, last_index=99, last_term=1, transfer=True, **head))
        assert core.term == 1 and core.state.vote != sender
        assert not core.state.vouched and not core.state.vouched_disks


def test_what_was_said_of_others_counts_until_a_known_leader_is_heard() -> None:
    trial = settled()
    trial.crash(0)
    core, last = trial.core(2), trial.core(1).log.last_index
    core.state.leader_id, core.state.election.elapsed = -1, 99
    head = {"sender": 1, "to": 2, "directory_id": directory(1)}
    core.step(LeaderHint(term=1, leader_id=1, last_index=last + 9, voters=(0, 1, 2), **head))
    assert core.state.vouched_disks == {0, 1}
    core.step(AppendEntries(term=2, prev_index=0, prev_term=0, **head))
    assert not core.state.vouched_disks and not core.state.vouched
    before = state(core)
    head["directory_id"] = directory(1, 7)
    core.step(AppendEntries(term=3, prev_index=0, prev_term=0, **head))
    assert state(core) == before


def test_who_formed_the_cluster_believes_no_other_disk() -> None:
    """Founders vouch for one another before there is a log that names disks."""
    trial = settled()
    for node_id, core in ((n, trial.core(n)) for n in range(3)):
        core.state.vouched |= {0, 1, 2} - {node_id}
        sender = (node_id + 1) % 3
        head = {"sender": sender, "to": node_id, "directory_id": directory(sender, 7)}
        before = state(core)
        core.step(AppendEntries(term=2, prev_index=0, prev_term=0, **head))
        core.step(Vote(term=2, last_index=99, last_term=1, transfer=True, **head))
        assert state(core) == before


def test_who_leads_knows_all_voters() -> None:
    trial = settled()
    trial.core(1).state.vouched_disks = trial.core(1).state.vouched = frozenset({0, 2})
    trial.core(0).transfer(1)
    trial.deliver()
    assert trial.core(1).role is Role.LEADER
    assert not trial.core(1).state.vouched_disks and not trial.core(1).state.vouched


def test_an_observer_that_hears_a_leader_takes_no_step() -> None:
    """Nobody would follow it into the later term, and it would follow nobody."""
    trial = Trial(3, 1)
    trial.elect(0)
    trial.tick(12)
    core = trial.core(3)
    head = {"sender": 1, "to": 3, "directory_id": directory(1)}
    core.step(VoteReply(term=2 * TERM_STEP, granted=False, **head))
    assert core.term == 1 and core.leader_id == 0
    core.state.election.elapsed = 99
    core.step(VoteReply(term=2 * TERM_STEP, granted=False, **head))
    assert core.term == 1 + TERM_STEP


def test_a_stranger_gets_no_promise_of_a_vote() -> None:
    trial = settled()
    core = trial.core(2)
    core.state.leader_id, core.state.election.elapsed = -1, 99
    core.drain_messages()
    for sender, disk in ((9, 0), (1, 7)):
        head = {"sender": sender, "to": 2, "directory_id": directory(sender, disk)}
        core.step(PreVote(term=2, last_index=99, last_term=1, **head))
    assert not [m for m in core.drain_messages() if isinstance(m, PreVoteReply)]


def test_a_leader_follows_nobody_in_its_own_term() -> None:
    trial = settled()
    leader = trial.core(0)
    before = state(leader)
    head = {"sender": 1, "to": 0, "directory_id": directory(1)}
    leader.step(AppendEntries(term=1, prev_index=0, prev_term=0, **head))
    leader.step(
        InstallSnapshot(term=1, last_index=9, last_term=1, image_bytes=b"", voters=(), **head)
    )
    assert state(leader) == before
    leader.check_invariants()


def test_the_largest_that_honest_nodes_send_pass() -> None:
    entry = Entry(3, 2, bytes(MAX_ENTRY_BYTES))
    full = tuple(Voter(n, directory(n)) for n in range(MAX_VOTERS))
    head = {"term": 3, "sender": 1, "to": 0, "last_index": 1}
    assert not flaw(
        AppendEntries(term=3, sender=1, to=0, prev_index=1, prev_term=1, entries=(entry,))
    )
    assert not flaw(InstallSnapshot(last_term=3, image_bytes=b"", voters=full, **head))
    assert not flaw(LeaderHint(leader_id=1, voters=tuple(range(MAX_VOTERS)), **head))
    smallest = RaftSettings().max_append_bytes // ENTRY_OVERHEAD_BYTES
    for count, why in (
        (smallest, ""),
        (MAX_APPEND_ENTRIES + 1, "32769 entries; at most 32768 are in one append"),
    ):
        entries = tuple(Entry(3, 2 + n, b"") for n in range(count))
        many = AppendEntries(term=3, sender=1, to=0, prev_index=1, prev_term=1, entries=entries)
        assert flaw(many) == why


def test_asking_who_a_stranger_is_has_its_measure() -> None:
    trial = settled()
    core = trial.core(2)
    core.state.leader_id, core.state.election.elapsed = -1, 99
    core.drain_messages()
    head = {"sender": 9, "to": 2, "directory_id": directory(9)}
    for _ in range(1000):
        core.step(Vote(term=2, last_index=99, last_term=1, **head))
    assert [type(m) for m in core.drain_messages()] == [Observe, Observe]
    assert len(core.state.refused) <= 16


def test_another_disk_under_a_voters_id_does_not_take_its_place() -> None:
    trial = settled()
    leader = trial.core(0)
    before = leader.state.progress[1]
    head = {"sender": 1, "to": 0, "directory_id": directory(1, 7)}
    leader.step(AppendEntriesReply(term=1, accepted=True, match_index=4, **head))
    leader.step(Observe(term=1, last_index=0, last_term=0, **head))
    assert leader.state.progress[1] is before and before.directory_id == directory(1)


# Each field.

HEAD: dict[str, Any] = {"term": 3, "sender": 1, "to": 0}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (TimeoutNow(term=1, sender=-1, to=0), "node id -1"),
        (TimeoutNow(term=1, sender=2**31, to=0), "node id"),
        (TimeoutNow(term=-1, sender=1, to=0), "term -1"),
        (TimeoutNow(term=MAX_TERM + 1, sender=1, to=0), "term"),
        (Vote(term=3, sender=1, to=0, last_index=1, last_term=4), "ends with"),
        (Vote(term=3, sender=1, to=0, last_index=-1, last_term=1), "ends with"),
        (PreVote(term=3, sender=1, to=0, last_index=2**63 - 1, last_term=1), "ends with"),
        (Observe(term=3, sender=1, to=0, last_index=1, last_term=-1), "ends with"),
        (AppendEntries(term=3, sender=1, to=0, prev_index=-1, prev_term=0), "ends with"),
        (AppendEntries(term=3, sender=1, to=0, prev_index=1, prev_term=4), "ends with"),
        (AppendEntries(**HEAD, prev_index=1, prev_term=1, commit_index=-1), "commit"),
        (AppendEntries(term=3, sender=1, to=0, prev_index=1, prev_term=1, round=-1), "round"),
        (AppendEntries(**HEAD, prev_index=1, prev_term=1, acknowledged=-1), "acknow"),
        (
            AppendEntries(**HEAD, prev_index=1, prev_term=1, entries=(Entry(3, 3, b""),)),
            "entry 3 of term 3 after 1",
        ),
        (
            AppendEntries(**HEAD, prev_index=1, prev_term=1, entries=(Entry(4, 2, b""),)),
            "entry 2 of term 4",
        ),
        (
            AppendEntries(**HEAD, prev_index=1, prev_term=2, entries=(Entry(1, 2, b""),)),
            "entry 2 of term 1 after 1 of 2",
        ),
        (
            AppendEntries(
                term=3,
                sender=1,
                to=0,
                prev_index=1,
                prev_term=1,
                entries=(Entry(3, 2, bytes(MAX_ENTRY_BYTES + 1)),),
            ),
            "bytes",
        ),
        (AppendEntriesReply(**HEAD, accepted=False, match_index=-1), "match_index -1"),
        (AppendEntriesReply(**HEAD, accepted=False, match_index=0, hint_index=-1), "hint"),
        (AppendEntriesReply(**HEAD, accepted=False, match_index=0, hint_term=-1), "hint"),
        (AppendEntriesReply(**HEAD, accepted=False, match_index=0, round=-1), "round"),
        (SnapshotReply(term=3, sender=1, to=0, match_index=-1), "match_index"),
        (
            InstallSnapshot(
                term=3, sender=1, to=0, last_index=1, last_term=4, image_bytes=b"", voters=()
            ),
            "ends with",
        ),
        (
            InstallSnapshot(
                term=3,
                sender=1,
                to=0,
                last_index=1,
                last_term=3,
                image_bytes=b"",
                voters=(voter(1), voter(1, 1)),
            ),
            "voters",
        ),
        (
            InstallSnapshot(
                term=3,
                sender=1,
                to=0,
                last_index=1,
                last_term=3,
                image_bytes=b"",
                voters=tuple(map(Voter, range(MAX_VOTERS + 1), [directory(0)] * (MAX_VOTERS + 1))),
            ),
            "voters",
        ),
        (LeaderHint(term=3, sender=1, to=0, leader_id=1, last_index=-1), "last_index"),
        (
            LeaderHint(
                term=3,
                sender=1,
                to=0,
                leader_id=1,
                last_index=1,
                voters=tuple(range(MAX_VOTERS + 1)),
            ),
            "voters",
        ),
    ],
)
def test_what_no_honest_node_says(message: Message, why: str) -> None:
    assert why in flaw(message)


@pytest.mark.parametrize("bound", ["node id", "voters"])
def test_what_is_just_within_a_bound_can_be_true(bound) -> None:
    def said(sender: int = 1, voters: int = 1) -> str:
        hint = LeaderHint(
            term=1, sender=sender, to=0, leader_id=1, voters=tuple(range(voters)), last_index=0
        )
        return flaw(hint)

    largest = {"node id": {"sender": 2**31 - 1}, "voters": {"voters": 1024}}[bound]
    beyond = {name: number + 1 for name, number in largest.items()}
    assert not said() and not said(**largest) and said(**beyond)
    assert (TERM_STEP, MAX_TERM) == (2**20, 2**62)
