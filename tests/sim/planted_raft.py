"""Planted bugs of the metadata's Raft, its log and its files (rule 34)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kept.cluster.metadata.wal import HardState
from kept.cluster.raft.messages import NO_NODE, AppendEntriesReply
from kept.cluster.raft.voter_set import check_change, voters_entry
from tests.sim.planted import plant

MEMBER = "kept.cluster.metadata.metadata_node.MetadataNode"
REPLICATOR = "kept.cluster.raft.replicator.Replicator"
ELECTOR = "kept.cluster.raft.elector.Elector"
FOLLOWER = "kept.cluster.raft.follower.Follower"
LOG = "kept.cluster.raft.log.RaftLog"
FILES = "kept.cluster.metadata.metadata_files"
WAL = "kept.cluster.metadata.wal.WriteAheadLog"
VOTER_SET = "kept.cluster.raft.voter_set.VoterSet"
CHANGES = 0.3
"""How much of what clients do is an operator's where voters change."""
PARTED = ("partition", "isolate_leader", "kill", "one_way")


def forget_term(original: Any) -> Any:
    def read(disk: Any, directory: str) -> HardState:
        return HardState()

    return read


def vote_again(original: Any) -> Any:
    def handle_vote(self: Any, request: Any) -> None:
        if self.state.vote != request.sender:
            self.state.vote = NO_NODE
            if not self.state.leads:
                self.state.leader_id = NO_NODE
        original(self, request)

    return handle_vote


def no_sync(_: Any) -> Any:
    def sync(self: Any) -> None:
        return None

    return sync


def any_log_will_do(_: Any) -> Any:
    def is_up_to_date(self: Any, last_index: int, last_term: int) -> bool:
        return True

    return is_up_to_date


def majority_is_one(original: Any) -> Any:
    return property(lambda self: max(1, original.fget(self) - 1))


def uncounted_disk(original: Any) -> Any:
    """The leader's own entries count before they are on its disk."""

    def maybe_commit(self: Any) -> None:
        log = self.state.log
        stable = log.stable_index
        log.stable_index = log.last_index
        try:
            original(self)
        finally:
            log.stable_index = stable

    return maybe_commit


def cut_always(original: Any) -> Any:
    """A delayed append cuts what it matches."""

    def handle_append(self: Any, message: Any) -> None:
        last = message.prev_index + len(message.entries)
        log = self.state.log
        if (
            log.matches(message.prev_index, message.prev_term)
            and message.prev_index >= log.base_index
            and last < log.last_index
        ):
            log.commit_index = min(log.commit_index, last)
            log.truncate_from(last + 1)
            self.state.voter_set.truncate_from(last + 1)
        original(self, message)

    return handle_append


def no_prev_check(original: Any) -> Any:
    def matches(self: Any, index: int, term: int) -> bool:
        found = self.term_at(index)
        return found is not None and (found == term or index > self.commit_index + 1)

    return matches


def ack_all(original: Any) -> Any:
    """A follower acknowledges all that it has, matched or not."""

    def accept(self: Any, message: Any, match_index: int) -> None:
        self.state.send(
            AppendEntriesReply(
                **self.state.head(message.sender),
                accepted=True,
                match_index=self.state.log.last_index,
                round=message.round,
            )
        )

    return accept


def commit_what_is_said(original: Any) -> Any:
    """A follower commits up to the leader's index whatever it holds there."""

    def handle_append(self: Any, message: Any) -> None:
        original(self, message)
        log = self.state.log
        log.commit_to(min(message.commit_index, log.last_index))

    return handle_append


def silent_leader(original: Any) -> Any:
    """Elected, it commits nothing of its term."""

    def start(self: Any) -> None:
        append, self.append_own = self.append_own, lambda data: 0
        original(self)
        self.append_own = append

    return start


def lost_is_not_told(original: Any) -> Any:
    """A replaced proposal counts as done: the index alone is looked at."""

    def lose(self: Any) -> None:
        self._proposals.clear()

    return lose


def last_applied_twice(original: Any) -> Any:
    def done(self: Any, work: Any) -> Any:
        outcome = original(self, work)
        if len(outcome.applied) > 1:
            outcome = replace(outcome, applied=(*outcome.applied, outcome.applied[-1]))
        return outcome

    return done


def tail_dropped(original: Any) -> Any:
    """Every start forgets the last entry, as if it were torn."""

    def load(self: Any, data: bytes, applied_index: int) -> None:
        original(self, data, applied_index)
        if self.last_index > self.base_index + 1:
            self.truncate_from(self.last_index)

    return load


def snapshot_skips(original: Any) -> Any:
    """A snapshot says it holds one entry more than it does."""

    def take(self: Any) -> Any:
        found = original(self)
        if self.core.log.term_at(found.index + 1) is None:
            return found
        return replace(found, index=found.index + 1)

    return take


def drops_its_last(original: Any) -> Any:
    """A leader takes back what it has not committed."""

    def tick(self: Any) -> None:
        log = self.state.log
        if log.last_index > max(log.commit_index, self.first_of_term):
            log.truncate_from(log.last_index)
        original(self)

    return tick


def another_cluster(original: Any) -> Any:
    """A member takes its own cluster for another one once it is in the log."""

    def check(self: Any) -> None:
        original(self)
        if self.image.cluster_id is not None:
            self.refusal = "it belongs to another cluster"

    return check


plant(
    "term-forgotten",
    "raft",
    3,
    "term-forgotten double-vote election-safety",
    "terms are on disk (34)",
    (f"{FILES}.read_hard_state", forget_term),
)
plant(
    "vote-again",
    "raft",
    30,
    "double-vote election-safety",
    "one vote a term (Raft 5.2)",
    (f"{ELECTOR}.handle_vote", vote_again),
)
plant(
    "no-fsync",
    "raft",
    3,
    "leader-completeness committed-differs committed-lost state-machine-safety",
    "entries are fsynced (34)",
    (f"{WAL}._sync", no_sync),
)
plant(
    "any-log-wins",
    "raft",
    10,
    "leader-completeness",
    "the log decides (Raft 5.4.1)",
    (f"{LOG}.is_up_to_date", any_log_will_do),
)
plant(
    "small-majority",
    "raft",
    1,
    "election-safety leader-completeness committed-differs",
    "a majority of the voters",
    (f"{VOTER_SET}.quorum", majority_is_one),
)
plant(
    "own-disk-uncounted",
    "raft",
    781,
    "leader-completeness committed-differs committed-lost",
    "a leader counts its own entries when they are durable",
    (f"{REPLICATOR}.maybe_commit", uncounted_disk),
)
plant(
    "append-cuts-matching",
    "raft",
    13,
    "commit-back leader-completeness committed-differs",
    "a delayed append never truncates what matches (34)",
    (f"{FOLLOWER}.handle_append", cut_always),
)
plant(
    "no-consistency-check",
    "raft",
    22,
    "log-matching committed-differs leader-completeness",
    "entries follow what they followed at the leader (Raft 5.3)",
    (f"{LOG}.matches", no_prev_check),
)
plant(
    "acknowledges-all",
    "raft",
    172,
    "committed-differs leader-completeness committed-lost commit-beyond-log",
    "a match index is what matched (Raft 5.3)",
    (f"{FOLLOWER}._accept", ack_all),
)
plant(
    "commits-what-is-said",
    "raft",
    22,
    "committed-differs state-machine-safety",
    "a follower commits what it was sent (Raft 5.3)",
    (f"{FOLLOWER}.handle_append", commit_what_is_said),
)
plant(
    "no-no-op",
    "raft",
    1,
    "liveness",
    "a no-op on election (34)",
    (f"{REPLICATOR}.start_leading", silent_leader),
)
plant(
    "lost-is-not-told",
    "raft",
    3,
    "committed-lost",
    "who waits for a replaced entry is told",
    (f"{MEMBER}._lose_replaced", lost_is_not_told),
)
plant(
    "applied-twice",
    "raft",
    1,
    "metadata-back",
    "entries are applied once, in order (35)",
    (f"{MEMBER}.done", last_applied_twice),
)
plant(
    "tail-dropped",
    "raft",
    5,
    "leader-completeness committed-differs committed-lost",
    "only a torn tail is cut (34)",
    (f"{WAL}._load", tail_dropped),
)
plant(
    "snapshot-skips",
    "raft",
    6,
    # whoever is sent such a snapshot refuses it, and does not catch up
    "invariants state-machine-safety metadata-back liveness",
    "a snapshot holds what it says (35)",
    (f"{MEMBER}._take_snapshot", snapshot_skips),
)


def forget_vote(original: Any) -> Any:
    def read(disk: Any, directory: str) -> HardState:
        return HardState(term=original(disk, directory).term)

    return read


def reads_at_once(_: Any) -> Any:
    """Nobody is asked whether it still leads."""

    def confirm(self: Any) -> None:
        self.state.reads.confirmed += (
            (token, index) for token, index, _ in self.state.reads.pending
        )
        self.state.reads.pending.clear()

    return confirm


plant(
    "vote-forgotten",
    "raft",
    20,
    "double-vote election-safety",
    "votes are on disk (34)",
    (f"{FILES}.read_hard_state", forget_vote),
)
plant(
    "reads-at-once",
    "raft",
    94,
    "stale-read",
    "a read waits until a majority still follows (read barrier)",
    (f"{REPLICATOR}._confirm_reads", reads_at_once),
)
plant(
    "leader-takes-back",
    "raft",
    2,
    "leader-append-only",
    "a leader never changes its own log (Raft 5.3)",
    (f"{REPLICATOR}.tick", drops_its_last),
)
plant(
    "foreign-to-itself",
    "raft",
    1,
    "refusal",
    "a member is refused by what it is, not by chance (34)",
    (f"{MEMBER}._check_identity", another_cluster),
)


# Voters that join and leave.


def while_one_is_under_way(original: Any) -> Any:
    """A leader takes a change of voters though the one before is not committed."""

    def change_voters(self: Any, voters: Any) -> Any:
        old = self.state.voter_set.voters
        if not self.commits_own_term or len(voters) > len(old):
            return original(self, voters)
        self._check_leads()
        check_change(old, voters)
        return self.append_own(voters_entry(voters))

    return change_voters


def before_its_own_term(_: Any) -> Any:
    """A new leader changes the voters before an entry of its term is committed. The voters that it
    knows may be of a change that is not committed, and there may be another such change.
    """

    def change_voters(self: Any, voters: Any) -> Any:
        self._check_leads()
        check_change(self.state.voter_set.voters, voters)
        return self.append_own(voters_entry(voters))

    return change_voters


def before_it_decides(_: Any) -> Any:
    """The same of the member around it, which takes no decisions before that either."""

    def change_voters(self: Any, voters: Any) -> Any:
        return self.core.change_voters(voters)

    return change_voters


def cut_and_kept(_: Any) -> Any:
    """Who cuts its log goes on with the voters of a change that was in what it cut."""

    def truncate_from(self: Any, index: int) -> None:
        return None

    return truncate_from


def goes_on_leading(original: Any) -> Any:
    """A leader that was voted out leads on."""

    def hand_over(self: Any) -> None:
        if self.state.is_voter:
            original(self)

    return hand_over


SPLIT = "election-safety leader-completeness committed-differs committed-lost"
plant(
    "voters-two-at-once",
    "raft",
    38,
    SPLIT,
    "one change of voters at a time (Raft thesis 4.1)",
    (f"{REPLICATOR}.change_voters", while_one_is_under_way),
    kinds=PARTED,
    changes=CHANGES,
)
plant(
    "voters-cut-and-kept",
    "raft",
    209,
    f"{SPLIT} liveness",
    "a change of voters that is cut from the log is taken back (Raft thesis 4.1)",
    (f"{VOTER_SET}.truncate_from", cut_and_kept),
    kinds=PARTED,
    changes=CHANGES,
)
plant(
    "voters-before-own-term",
    "raft",
    1,
    SPLIT,
    "a leader changes the voters behind an entry of its own term (Raft, single-server changes)",
    (f"{REPLICATOR}.change_voters", before_its_own_term),
    (f"{MEMBER}.change_voters", before_it_decides),
    kinds=("jump",),
    splits=True,
)
plant(
    "voters-removed-leads",
    "raft",
    1,
    "removed-leads",
    "a leader that was voted out steps down once that is committed (Raft thesis 4.2.2)",
    (f"{REPLICATOR}.hand_over", goes_on_leading),
    changes=CHANGES,
)
plant(
    "nodes-voters-removed-leads",
    "nodes",
    3,
    "removed-leads",
    "the same where the product's own nodes change their voters",
    (f"{REPLICATOR}.hand_over", goes_on_leading),
    voters=True,
)
