"""Raft's five properties under random faults, one seed one history; and what is not a history."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.core import RaftCore
from kept.cluster.raft.log import RaftLog
from kept.cluster.raft.messages import NO_NODE, AppendEntries, InstallSnapshot
from kept.cluster.raft.progress import Progress, ProgressState
from kept.cluster.raft.ready import RaftSettings, Role, Snapshot
from kept.cluster.raft.voter_set import VoterSet, check_change, voters_entry, voters_in
from kept.storage.errors import InvalidRequest, InvariantViolation, KeptError
from tests.cluster.raft.trial import Trial, data, directory, voter
from tests.support.slow import rest_slow

SEEDS = 150


class Storm:
    """Random events over a :class:`Trial`, which checks the properties after each of them."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        settings = RaftSettings(
            election_ticks=random.choice((5, 10)),
            max_append_bytes=random.choice((60, 400)),
            max_inflight=random.choice((1, 4)),
        )
        self.trial = Trial(
            random.choice((1, 3, 3, 5)),
            random.choice((0, 1)),
            settings=settings,
            random=lambda _, n: random.randrange(n),
        )
        self.all = tuple(self.trial.nodes)
        self.number = 0
        self.wanted: dict[bytes, int] = {}

    def step(self) -> None:
        random, trial = self.random, self.trial
        match random.choices(
            (
                "message",
                "tick",
                "propose",
                "crash",
                "start",
                "cut",
                "heal",
                "slow",
                "compact",
                "evidence",
                "transfer",
            ),
            (60, 40, 8, 1, 3, 1, 2, 2, 1, 1, 1),
        )[0]:
            case "message" if trial.network:
                place = random.randrange(len(trial.network))
                message = trial.network[place]
                if random.random() < 0.9:  # else it arrives again
                    del trial.network[place]
                if random.random() < 0.95:
                    trial.hand(message)
            case "tick" if trial.nodes:
                self.one().core.tick()
            case "propose" if trial.nodes:
                self.number += 1
                try:
                    trial.propose(self.one().node_id, f"p{self.number}")
                except KeptError:
                    return
            case "crash" if len(trial.nodes) > 1:
                trial.crash(self.one().node_id)
            case "start":
                absent = [i for i in self.all if i not in trial.nodes]
                if absent:
                    trial.start(random.choice(absent))
            case "cut":
                trial.cut.add((random.choice(self.all), random.choice(self.all)))
            case "heal":
                trial.cut.clear()
            case "slow" if trial.nodes:
                node = self.one()
                node.slow = not node.slow
            case "compact" if trial.nodes:
                self.compact()
            case "evidence" if trial.nodes:  # right or wrong
                self.one().core.peer_down(random.choice(self.all))
            case "transfer" if trial.nodes:
                try:
                    self.one().core.transfer(random.choice(self.all))
                except KeptError:
                    return
        for node_id in tuple(trial.nodes):
            trial.pump(node_id)
        del trial.network[400:]

    def one(self):
        return self.trial.nodes[self.random.choice(sorted(self.trial.nodes))]

    def compact(self) -> None:
        node = self.one()
        if node.writing is None:
            node.stored.compact(node.applied_to)
            node.core.compact(node.applied_to)

    def heal(self) -> None:
        trial = self.trial
        trial.cut.clear()
        for node_id in self.all:
            if node_id not in trial.nodes:
                trial.start(node_id)
            trial.nodes[node_id].slow = False
            trial.nodes[node_id].core.state.down.clear()
        trial.deliver()


@pytest.mark.parametrize("seed", rest_slow(range(SEEDS), 40))
def test_a_storm_breaks_no_property_and_afterwards_all_agree(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(600):
        storm.step()
    storm.heal()
    trial = storm.trial
    for _ in range(300):
        trial.tick()
        leading = [n for n in trial.nodes.values() if n.core.replicator.commits_own_term]
        if leading and len({n.applied_to for n in trial.nodes.values()}) == 1:
            break
    else:
        raise AssertionError("no agreement after the storm")
    (index,) = trial.propose(leading[0].node_id, "last")
    trial.deliver()
    trial.tick(4)
    for node in trial.nodes.values():
        assert node.applied_to >= index
        for at, content in node.applied:
            assert trial.committed[at].data == content
    assert trial.committed[index].data == data("last")


def test_conflicts_are_found_by_term_not_entry_by_entry() -> None:
    """A follower with 500 entries of a term that no majority had: a handful of messages."""
    trial = Trial(3, settings=RaftSettings())
    trial.elect(0)
    trial.cut |= {(0, 1), (0, 2)}
    for number in range(500):
        trial.core(0).propose(data(str(number)))
    trial.deliver()
    trial.cut |= {(1, 0), (2, 0)}
    trial.elect(1)
    for number in range(100):
        trial.core(1).propose(data(str(number)))
    trial.deliver()
    trial.core(1).transfer(2)  # who takes over looks at the end of its log first
    trial.deliver()
    trial.cut.clear()
    appends = 0
    hand = trial.hand

    def counting(message) -> None:
        nonlocal appends
        appends += isinstance(message, AppendEntries) and message.to == 0
        hand(message)

    trial.hand = counting  # type: ignore[method-assign]
    trial.tick(2)
    assert trial.core(0).log.last_index == trial.core(2).log.last_index == 103
    assert appends <= 6


def test_a_follower_that_does_not_answer_gets_no_more_than_the_limit() -> None:
    settings = RaftSettings(max_inflight=3, max_append_bytes=100)
    trial = Trial(3, settings=settings)
    trial.elect(0)
    trial.tick(4)
    trial.keep.add((0, 2))
    for number in range(50):
        trial.propose(0, f"p{number}")
        trial.deliver()
    sent = [m for m in trial.kept if isinstance(m, AppendEntries) and m.entries]
    assert len(sent) == 3
    assert all(len(m.entries) <= 2 for m in sent)
    assert trial.core(0).commit_index == 51


def test_a_snapshot_that_is_not_answered_is_sent_again_but_not_at_once() -> None:
    settings = RaftSettings(snapshot_ticks=30)
    trial = Trial(3, settings=settings)
    trial.elect(0)
    trial.crash(2)
    trial.propose(0, "a", "b")
    trial.deliver()
    trial.core(0).compact(3)
    trial.start(2)
    trial.keep.add((0, 2))

    def snapshots() -> int:
        return sum(isinstance(m, InstallSnapshot) for m in trial.kept)

    trial.kept.clear()
    progress = trial.core(0).state.progress[2]
    progress.probe(1)
    trial.tick(25)
    assert snapshots() == 1
    trial.tick(10)
    assert snapshots() == 2
    # Evidence that it died: what was under way did not arrive.
    trial.core(0).peer_down(2)
    trial.tick(2)
    assert snapshots() == 3


def test_two_leaders_in_a_term_are_not_believed_and_said_so() -> None:
    trial = Trial(3)
    trial.elect(0)
    head = trial.core(1).state.head(0, 1)
    trial.core(0).step(AppendEntries(**head, prev_index=0, prev_term=0))
    ((sender, why),) = trial.core(0).state.refused
    assert sender == 1 and "of term 1, which this node leads" in why
    assert trial.core(0).role is Role.LEADER


def test_messages_for_others_and_from_oneself_are_not_heard() -> None:
    trial = Trial(3)
    core = trial.core(0)
    core.step(AppendEntries(**trial.core(1).state.head(2, 5), prev_index=0, prev_term=0))
    core.step(AppendEntries(**core.state.head(0, 5), prev_index=0, prev_term=0))
    assert core.term == 0


def test_a_node_whose_disk_fails_hands_over_and_does_not_campaign() -> None:
    trial = Trial(3)
    trial.elect(0)
    trial.core(0).resign()
    trial.deliver()
    assert trial.core(1).role is Role.LEADER
    trial.core(2).resign()
    trial.core(2).peer_down(1)
    trial.tick(40, 2)
    assert trial.core(2).role is Role.FOLLOWER


def test_a_second_ready_waits_for_the_first() -> None:
    core = Trial(3).core(0)
    core.elector.campaign()
    ready = core.ready()
    assert not core.has_ready
    with pytest.raises(InvariantViolation):
        core.ready()
    core.advance(ready)
    with pytest.raises(InvariantViolation):
        core.advance(ready)


def test_nothing_that_depends_on_the_disk_leaves_before_it_is_written() -> None:
    trial = Trial(3)
    core: RaftCore = trial.core(0)
    core.elector.campaign()
    assert not core.drain_messages(), "the vote for itself is not durable"
    ready = core.ready()
    assert ready.hard_state is not None and len(ready.messages) == 2
    core.step(
        AppendEntries(
            **trial.core(1).state.head(0, 1),
            prev_index=0,
            prev_term=0,
            entries=(Entry(1, 1, b"x"),),
        )
    )
    assert not core.drain_messages()
    core.advance(ready)
    assert core.role is Role.FOLLOWER, "its own vote came too late"
    second = core.ready()
    assert [m.match_index for m in second.messages] == [1]  # type: ignore[attr-defined]
    assert second.entries == (Entry(1, 1, b"x"),)


def test_a_snapshot_is_acknowledged_when_it_is_written() -> None:
    trial = Trial(3)
    trial.elect(0)
    core = trial.core(1)
    core.step(
        InstallSnapshot(
            **trial.core(0).state.head(1),
            last_index=9,
            last_term=1,
            image_bytes=b"i",
            voters=trial.voters,
        )
    )
    assert not core.drain_messages()
    ready = core.ready()
    assert ready.snapshot is not None and ready.snapshot.index == 9
    assert [m.match_index for m in ready.messages] == [9]  # type: ignore[attr-defined]
    assert core.committed_to == 0
    core.advance(ready)
    assert core.committed_to == 9


def test_a_refusal_of_what_was_accepted_since_is_old_news() -> None:
    progress = Progress(directory(1), 11, 0)
    assert progress.accepted(10, 0) and progress.state is ProgressState.REPLICATE
    progress.sent(20)
    assert not progress.refused(5, 3) and progress.next_index == 21
    assert progress.refused(20, 3) and progress.next_index == 11
    assert progress.state is ProgressState.PROBE and not progress.refused(8, 3)
    assert not progress.refused(10, 3), "it has that: it forgot, and is asked once a heartbeat"
    assert progress.next_index == 11 and progress.paused
    progress.check_invariants()


# The log.


def entries(*terms: int, first: int = 1) -> list[Entry]:
    return [Entry(term, first + n, b"") for n, term in enumerate(terms)]


def test_entries_replaced_while_they_are_written() -> None:
    log = RaftLog(0, 0, entries(1, 1))
    log.append(entries(1, 1, 1, first=3))
    assert log.next_write() == (None, None, tuple(entries(1, 1, 1, first=3)))
    log.truncate_from(4)
    log.append(entries(2, first=4))
    assert log.stable_index == 2
    log.write_done()
    assert log.stable_index == 3
    assert log.next_write() == (None, 4, tuple(entries(2, first=4)))
    log.write_done()
    assert log.stable_index == 4 and not log.has_unwritten


def test_a_snapshot_while_entries_are_written() -> None:
    log = RaftLog(0, 0, [])
    log.append(entries(1, 1))
    log.next_write()
    snapshot = Snapshot(9, 3, b"", ())
    log.restore(snapshot)
    log.append(entries(3, first=10))
    log.write_done()
    assert log.committed_to == 0
    assert log.next_write() == (snapshot, None, tuple(entries(3, first=10)))
    log.write_done()
    assert (log.stable_index, log.committed_to) == (10, 9)


def test_what_is_committed_is_not_replaced() -> None:
    log = RaftLog(0, 0, entries(1, 1, 1))
    log.commit_to(2)
    assert not log.commit_to(1)
    for call in (
        lambda: log.truncate_from(2),
        lambda: log.commit_to(9),
        lambda: log.restore(Snapshot(2, 1, b"", ())),
        lambda: log.entry(4),
        lambda: log.append(entries(1, first=7)),
        lambda: log.append(entries(0, first=4)),
    ):
        with pytest.raises(InvariantViolation):
            call()


@given(st.lists(st.integers(1, 3), max_size=8), st.integers(0, 9), st.integers(0, 4))
def test_last_of_term_is_the_largest_that_may_match(steps, index, term) -> None:
    terms = [sum(steps[: n + 1]) for n in range(len(steps))]
    log = RaftLog(0, 0, entries(*terms))
    fits = [(n, t) for n, t in enumerate([0, *terms]) if n <= index and t <= term]
    assert log.last_of_term(index, term) == max(fits)


def test_compaction_keeps_what_is_not_durable_and_committed() -> None:
    log = RaftLog(0, 0, entries(1, 2, 3))
    log.commit_to(2)
    log.compact(3)
    assert (log.base_index, log.base_term, log.last_index) == (2, 2, 3)
    assert log.term_at(1) is None and log.term_at(2) == 2
    with pytest.raises(InvariantViolation):
        log.entries(2, 4, 1)


# Membership.


def test_voters_are_read_back_and_nothing_else_is_taken_for_them() -> None:
    voters = (voter(0), voter(1, 3))
    assert voters_in(voters_entry(voters)) == voters
    assert voters_in(data("x")) is None
    assert voters_in(b"\0" * 8 + b"\x41") is None
    assert voters_in(b"") is None


def test_changes_that_are_no_single_step() -> None:
    three = (voter(0), voter(1), voter(2))
    check_change(three, three)
    check_change(three, three[:2])
    check_change(three, (*three, voter(3)))
    for new in ((), three[:1], (voter(0), voter(1), voter(3)), (*three[:2], voter(2, 1))):
        with pytest.raises(InvalidRequest):
            check_change(three, new)


def test_a_truncated_change_is_taken_back() -> None:
    voter_set = VoterSet(0, (voter(0),))
    two, three = (voter(0), voter(1)), (voter(0), voter(1), voter(2))
    voter_set.appended([Entry(1, 5, voters_entry(two)), Entry(1, 8, voters_entry(three))])
    assert voter_set.voters == three
    voter_set.truncate_from(8)
    assert voter_set.voters == two
    voter_set.committed(5)
    voter_set.truncate_from(6)
    assert voter_set.voters == two and voter_set.changed_at == 5
    assert voter_set.has(1, voter(1).directory_id)
    assert not voter_set.has(1, voter(1, 1).directory_id)
    assert voter_set.directory_of(NO_NODE) is None
