"""Raft's five properties, judged from outside: what each member holds, after each of its steps.

The names are those of the Raft paper, figure 3. The checkers read a member's log through its
entries and terms only, remember what they saw under their own keys, and share no code with it.
``removed-leads``: whoever knows that it was voted out leads no more (Raft thesis 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from kept.cluster.metadata.records import VotersRecord, decode_batch
from kept.cluster.raft.messages import PreVote, PreVoteReply, Vote, VoteReply
from tests.sim.world import Violation

if TYPE_CHECKING:
    from kept.cluster.raft.log import RaftLog
    from kept.cluster.raft.messages import Message


class LogView(Protocol):
    """A member's log as the checkers see it: indexes ``base+1..last``."""

    base: int
    last: int

    def term(self, index: int) -> int | None: ...
    def data(self, index: int) -> bytes: ...


class View:
    """A core's log as the checkers read it."""

    def __init__(self, log: RaftLog) -> None:
        self.base = log.base_index
        self.last = log.last_index
        self.term = log.term_at
        self._entry = log.entry

    def data(self, index: int) -> bytes:
        return self._entry(index).data


VOTERS_TYPE = 65
TYPE_AT = 8
"""Where the type of an entry's first record stands."""


def voters_of(data: bytes) -> frozenset[int] | None:
    """Who votes by an entry; None: it says nothing of voters."""
    if len(data) <= TYPE_AT or data[TYPE_AT] != VOTERS_TYPE:
        return None
    found = [one for one in decode_batch(data) if isinstance(one, VotersRecord)]
    return frozenset(voter.node_id for one in found[-1:] for voter in one.voters)


@dataclass
class Seen:
    """What one process of a node was seen with last."""

    process: int
    term: int = 0
    leads: int | None = None
    last: int = 0
    last_term: int = 0
    commit: int = 0
    applied: int = 0
    led_last: int = 0


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


@dataclass
class RaftChecks:
    """One per history. ``look`` after every step of a member, ``applied`` for what it applied."""

    seen: dict[int, Seen] = field(default_factory=dict)
    leaders: dict[int, tuple[int, int]] = field(default_factory=dict)
    entries: dict[tuple[int, int], tuple[int | None, bytes]] = field(default_factory=dict)
    committed: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    committed_to: int = 0
    images: dict[int, bytes] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)
    votes: dict[tuple[int, int], int] = field(default_factory=dict)
    """(voter, term) -> the candidate."""
    voters: tuple[int, frozenset[int]] | None = None
    """The newest committed change: its entry, and who votes since."""

    def look(
        self, node: int, process: int, *, term: int, leads: bool, commit: int, log: LogView
    ) -> None:
        """Judge one member as it is now."""
        seen = self.seen.get(node)
        if seen is None or seen.process != process:
            seen = self.seen[node] = Seen(process)
            self._terms(node, term)
        if term < seen.term:
            raise Violation("term-forgotten", f"n{node}: term {term} after {seen.term}")
        if commit < seen.commit:
            raise Violation("commit-back", f"n{node}: commit {commit} after {seen.commit}")
        self._matching(node, seen, log)
        if leads:
            self._leader(node, process, seen, term, log)
        seen.leads = term if leads else None
        seen.term = term
        self._commit(node, seen, commit, log)
        if leads:
            self._still_votes(node, term, commit, log)

    def _still_votes(self, node: int, term: int, commit: int, log: LogView) -> None:
        """A later change of voters counts as soon as it is in the log, and may bring it back."""
        changed_at, voters = self.voters or (commit + 1, frozenset[int]())
        if commit < changed_at or node in voters:
            return
        later = range(max(changed_at, log.base) + 1, log.last + 1)
        if all(voters_of(log.data(index)) is None for index in later):
            raise Violation(
                "removed-leads",
                f"n{node} leads term {term}, and votes no more since entry "
                f"{changed_at}, which it knows to be committed; {sorted(voters)} do",
            )

    def _terms(self, node: int, term: int) -> None:
        known = self.terms.get(node, 0)
        if term < known:
            raise Violation("term-forgotten", f"n{node} restarts in term {term}, was in {known}")

    def said(self, node: int, message: Message) -> None:
        """A message leaves: what it promises holds for ever. A node is never in a lower term again,
        and a voter's vote of a term goes to one candidate, whatever happens to it.
        """
        if not isinstance(message, PreVote | PreVoteReply):
            self.terms[node] = max(self.terms.get(node, 0), message.term)
        if isinstance(message, Vote):
            candidate = node
        elif isinstance(message, VoteReply) and message.granted:
            candidate = message.to
        else:
            return
        known = self.votes.setdefault((node, message.term), candidate)
        if known != candidate:
            raise Violation(
                "double-vote",
                f"n{node} votes for n{candidate} in term {message.term}, after n{known}",
            )

    def _matching(self, node: int, seen: Seen, log: LogView) -> None:
        """Log matching: one (index, term) has one content and one predecessor, everywhere."""
        last, last_term = log.last, log.term(log.last)
        if (last, last_term) == (seen.last, seen.last_term):
            return
        index = last
        while index > log.base:
            term = log.term(index)
            assert term is not None
            key = (index, term)
            found = (log.term(index - 1), digest(log.data(index)))
            known = self.entries.get(key)
            if known is None:
                self.entries[key] = found
            elif known[1] != found[1] or (
                None not in (known[0], found[0]) and known[0] != found[0]
            ):
                raise Violation(
                    "log-matching",
                    f"n{node}: entry {index} of term {term} after term {found[0]} with content "
                    f"{found[1].hex()}; elsewhere after term {known[0]} with {known[1].hex()}",
                )
            elif known[0] == found[0]:
                break  # what precedes it was judged with it
            index -= 1
        seen.last, seen.last_term = last, last_term or 0

    def _leader(self, node: int, process: int, seen: Seen, term: int, log: LogView) -> None:
        """Election safety, leader completeness, leader append-only."""
        known = self.leaders.setdefault(term, (node, process))
        if known != (node, process):
            raise Violation(
                "election-safety",
                f"n{node} (process {process}) leads in term {term}, as n{known[0]} "
                f"(process {known[1]}) did",
            )
        if seen.leads != term:
            self._complete(node, term, log)
        elif log.last < seen.led_last:
            raise Violation(
                "leader-append-only",
                f"n{node} leads in term {term}; its log ended at {seen.led_last}, now {log.last}",
            )
        elif seen.led_last > log.base and log.term(seen.led_last) != seen.led_term:
            raise Violation("leader-append-only", f"n{node} replaced entry {seen.led_last}")
        seen.led_last = log.last
        seen.led_term = log.term(log.last)

    def _complete(self, node: int, term: int, log: LogView) -> None:
        for index in range(max(log.base + 1, self.committed_to - 300), self.committed_to + 1):
            entry = self.committed.get(index)
            if entry is not None and entry[0] < term and log.term(index) != entry[0]:
                raise Violation(
                    "leader-completeness",
                    f"n{node} leads in term {term} without entry {index} of term {entry[0]}, "
                    f"which was committed; it has term {log.term(index)} there",
                )

    def _commit(self, node: int, seen: Seen, commit: int, log: LogView) -> None:
        """What two members hold committed at an index is the same."""
        if commit > log.last:
            raise Violation("commit-beyond-log", f"n{node}: commit {commit}, log ends {log.last}")
        for index in range(max(seen.commit, log.base) + 1, commit + 1):
            term = log.term(index)
            assert term is not None
            entry = (term, digest(log.data(index)))
            if index not in self.committed:
                voters = voters_of(log.data(index))
                if voters is not None:
                    self.voters = index, voters
            known = self.committed.setdefault(index, entry)
            if known != entry:
                raise Violation(
                    "committed-differs",
                    f"n{node} holds entry {index} of term {term} for committed; it was committed "
                    f"with term {known[0]}",
                )
        self.committed_to = max(self.committed_to, commit)
        seen.commit = commit

    def applied(self, node: int, process: int, index: int, content: Any) -> None:
        """State machine safety, and metadata that only moves forward, one entry at a time."""
        seen = self.seen.setdefault(node, Seen(process))
        if seen.process != process:
            seen = self.seen[node] = Seen(process)
        if index <= seen.applied:
            raise Violation("metadata-back", f"n{node} applies {index} after {seen.applied}")
        seen.applied = index
        mark = digest(repr(content).encode())
        known = self.images.setdefault(index, mark)
        if known != mark:
            raise Violation(
                "state-machine-safety", f"n{node} applies something else at {index} than others did"
            )
