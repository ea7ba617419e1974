"""Raft by scripted histories: ``histories/*.txt``.

A line at the margin is what happens; the indented lines under it are the nodes that it changed,
or what was answered. The words are the methods ``do_...`` below.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from kept.cluster.metadata.records import ConfigRecord, encode_batch
from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.messages import (
    AppendEntries,
    AppendEntriesReply,
    Message,
    PreVoteReply,
    TimeoutNow,
    Vote,
    VoteReply,
)
from kept.cluster.raft.ready import RaftSettings
from kept.storage.errors import InvariantViolation, KeptError
from tests.cluster.raft.trial import Trial, data, directory, voter
from tests.support.histories import check_history

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.txt"))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def large(number: int, size: int) -> bytes:
    """An entry of about so many bytes."""
    part = min(size, 60_000)
    records = [ConfigRecord(4, "", f"{number}-{i}", "v" * part) for i in range(size // part)]
    return encode_batch(records)


class History:
    """The cluster of a history, and the words of its lines."""

    def __init__(self) -> None:
        self.trial = Trial(1)
        self.before: dict[int, str] = {}
        self.said: list[str] = []

    def run(self, line: str) -> list[str]:
        word, *rest = line.split()
        words = dict(part.split("=", 1) for part in rest if "=" in part)
        self.said = []
        try:
            getattr(self, f"do_{word}")(*[part for part in rest if "=" not in part], **words)
        except (KeptError, InvariantViolation) as error:
            self.said.append(f"{type(error).__name__}: {error}")
        now = {i: self.describe(i) for i in sorted(self.trial.nodes)}
        if word != "cluster":
            self.said += [text for i, text in now.items() if self.before.get(i) != text]
        self.before = now
        return self.said

    def describe(self, node_id: int) -> str:
        core = self.trial.core(node_id)
        terms = [
            core.log.term_at(i) for i in range(core.log.base_index + 1, core.log.last_index + 1)
        ]
        runs = " ".join(f"{term}x{len(list(run))}" for term, run in groupby(terms))
        after = f"after {core.log.base_index} " if core.log.base_index else ""
        follows = f" of {core.leader_id}" if core.leader_id not in (-1, node_id) else ""
        return (
            f"{node_id} {core.role.value}{follows} in term {core.term}, "
            f"log {after}{runs or 'empty'}, commit {core.commit_index}"
        )

    # What can happen.

    def do_cluster(self, voters: str, observers: str = "0", **limits: str) -> None:
        settings = RaftSettings(**{name: int(value) for name, value in limits.items()})
        self.trial = Trial(int(voters), int(observers), settings=settings)

    def do_tick(self, count: str = "1", *nodes: str) -> None:
        self.trial.tick(int(count), *map(int, nodes))

    def do_elect(self, node: str) -> None:
        self.trial.elect(int(node))

    def do_propose(self, node: str, *texts: str) -> None:
        self.trial.propose(int(node), *texts)
        self.trial.deliver()

    def do_fill(self, node: str, count: str, size: str) -> None:
        for number in range(int(count)):
            self.trial.core(int(node)).propose(large(number, int(size)))
        self.trial.deliver()

    def do_cut(self, *links: str) -> None:
        """``cut 0`` from everybody; ``cut 0>1`` one way."""
        for link in links:
            if ">" in link:
                a, b = link.split(">")
                self.trial.cut.add((int(a), int(b)))
            else:
                for other in self.trial.disks:
                    self.trial.cut |= {(int(link), other), (other, int(link))}

    def do_heal(self) -> None:
        self.trial.cut.clear()
        self.trial.mute.clear()

    def do_mute(self, node: str) -> None:
        """What it appends reaches nobody; its votes do."""
        self.trial.mute.add(int(node))

    def do_crash(self, *nodes: str) -> None:
        for node in nodes:
            self.trial.crash(int(node))

    def do_restart(self, *nodes: str) -> None:
        for node in nodes:
            self.trial.start(int(node))
        self.trial.deliver()

    def do_wipe(self, node: str) -> None:
        self.trial.crash(int(node))
        self.trial.wipe(int(node))
        self.trial.start(int(node))

    def do_down(self, node: str, at: str) -> None:
        """Evidence that a node died, for the nodes ``at``, one after the other."""
        for other in numbers(at):
            self.trial.core(other).peer_down(int(node))
        self.trial.deliver()

    def do_probes(self, node: str) -> None:
        self.said.append(f"to probe: {sorted(self.trial.core(int(node)).state.to_probe)}")

    def do_keep(self, *links: str) -> None:
        """From now on, messages of these links are kept back."""
        for link in links:
            a, b = link.split(">")
            self.trial.keep.add((int(a), int(b)))

    def do_release(self, times: str = "1") -> None:
        """What was kept back arrives, perhaps several times."""
        kept, self.trial.kept = self.trial.kept, []
        self.trial.keep.clear()
        for message in kept * int(times):
            self.trial.hand(message)
        self.trial.deliver()

    def do_disk(self, node: str, how: str) -> None:
        """``disk 1 slow``: it finishes nothing; ``disk 1 fast``: it finishes."""
        self.trial.nodes[int(node)].slow = how == "slow"
        self.trial.deliver()

    def do_transfer(self, node: str, to: str) -> None:
        self.trial.core(int(node)).transfer(int(to))
        self.trial.deliver()

    def do_resign(self, node: str) -> None:
        """Its disk takes nothing."""
        self.trial.core(int(node)).resign()
        self.trial.deliver()

    def do_voters(self, node: str, *ids: str) -> None:
        """``voters 0 0 1 2``; a replaced disk is ``2/1``."""
        voters = []
        for text in ids:
            node_id, _, disk = text.partition("/")
            voters.append(voter(int(node_id), int(disk or 0)))
        self.trial.core(int(node)).change_voters(tuple(voters))
        self.trial.deliver()

    def do_compact(self, node: str) -> None:
        one = self.trial.nodes[int(node)]
        one.core.compact(one.applied_to)
        one.stored.compact(one.applied_to)

    def do_read(self, node: str, token: str) -> None:
        self.trial.core(int(node)).read_barrier(token)
        self.trial.deliver()
        self.do_answers(node)

    def do_answers(self, node: str) -> None:
        one = self.trial.nodes[int(node)]
        self.said += [f"read {token}: entry {index}" for token, index in one.reads]
        self.said += [f"read {token}: lost" for token in one.lost_reads]
        one.reads, one.lost_reads = [], []

    def do_receive(self, node: str, kind: str, **fields: str) -> None:
        """A message as it may come from anywhere; the answers are shown, and lost."""
        to = int(node)
        for message in [self.message(to, kind, dict(fields))] * int(fields.pop("times", 1)):
            self.trial.core(to).step(message)
        self.said += [self.short(m) for m in self.trial.nodes[to].pump()]

    def message(self, to: int, kind: str, fields: dict[str, str]) -> Message:
        entries = fields.pop("entries", "")
        node_id, _, disk = fields.pop("sender").partition("/")
        granted = fields.pop("granted", "")
        fields.pop("times", "")
        head = {
            "to": to,
            "sender": int(node_id),
            "directory_id": directory(int(node_id), int(disk or 0)),
        }
        more = {name: int(value) for name, value in fields.items()}
        match kind:
            case "append":
                terms = numbers(entries)
                made = tuple(
                    Entry(term, more["prev_index"] + n + 1, data("x"))
                    for n, term in enumerate(terms)
                )
                return AppendEntries(**head, **more, entries=made)
            case "append_reply":
                return AppendEntriesReply(**head, **more, accepted=granted != "no")
            case "vote":
                return Vote(**head, **more)
            case "vote_reply":
                return VoteReply(**head, **more, granted=granted == "yes")
            case "pre_vote_reply":
                return PreVoteReply(**head, **more, granted=granted == "yes")
            case "timeout_now":
                return TimeoutNow(**head, **more)
        raise AssertionError(kind)

    def short(self, message: Message) -> str:
        head = f"to {message.to}: {type(message).__name__} term {message.term}"
        match message:
            case AppendEntriesReply(accepted=True):
                return f"{head}, matches to {message.match_index}"
            case AppendEntriesReply():
                return f"{head}, refused, {message.hint_term}@{message.hint_index}"
            case VoteReply() | PreVoteReply():
                return f"{head}, {'granted' if message.granted else 'refused'}"
        return head

    def do_log(self, node: str) -> None:
        """What is committed there, but for the leaders' first entries."""
        log = self.trial.core(int(node)).log
        texts = [
            log.entry(i).data[-1:].decode()
            for i in range(log.base_index + 1, log.commit_index + 1)
            if len(log.entry(i).data) > 12
        ]
        self.said.append(f"committed: {' '.join(texts)}")


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check_history(path, History().run, indent="    ")
