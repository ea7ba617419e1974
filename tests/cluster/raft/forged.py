"""Raft messages of strangers."""

from __future__ import annotations

from random import Random
from typing import Any

from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.message_guard import MAX_TERM, TERM_STEP
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
from tests.cluster.raft.trial import data, voter

EXTREMES = (-(2**63), -1, 0, 1, 2, 3, 5, 8, TERM_STEP, MAX_TERM, MAX_TERM + 1, 2**63 - 1)


def forged(random: Random, core: Any, **head: Any) -> Message:
    """Any message, with fields that are right, nearly right, or as large as they can be."""
    near = (core.log.last_index, core.commit_index, core.term, core.log.last_term)

    def number() -> int:
        return random.choice((*EXTREMES, *(n + random.randint(-2, 2) for n in near)))

    def entries() -> tuple[Entry, ...]:
        first, term = random.choice((number(), core.log.last_index + 1)), number()
        found = [Entry(term, first + n, data("x")) for n in range(random.randrange(4))]
        return tuple(random.sample(found, len(found)) if random.random() < 0.2 else found)

    voters = tuple(voter(random.randrange(5)) for _ in range(random.randrange(4)))
    kind = random.randrange(11)
    made: tuple[type[Message], dict[str, Any]] = (
        (PreVote, {"last_index": number(), "last_term": number(), "suspect": random.randrange(4)}),
        (PreVoteReply, {"granted": random.random() < 0.5}),
        (Vote, {"last_index": number(), "last_term": number(), "transfer": random.random() < 0.5}),
        (VoteReply, {"granted": random.random() < 0.5}),
        (
            AppendEntries,
            {
                "prev_index": number(),
                "prev_term": number(),
                "entries": entries(),
                "commit_index": number(),
                "round": number(),
                "acknowledged": number(),
            },
        ),
        (
            AppendEntriesReply,
            {
                "accepted": random.random() < 0.5,
                "match_index": number(),
                "hint_index": number(),
                "hint_term": number(),
                "round": number(),
            },
        ),
        (
            InstallSnapshot,
            {"last_index": number(), "last_term": number(), "image_bytes": b"", "voters": voters},
        ),
        (SnapshotReply, {"match_index": number(), "round": number()}),
        (TimeoutNow, {}),
        (Observe, {"last_index": number(), "last_term": number()}),
        (
            LeaderHint,
            {
                "leader_id": random.choice((-1, 0, 1, 2, 9, 2**31)),
                "last_index": number(),
                "voters": (9, 1),
                "cluster_id": "x",
            },
        ),
    )[kind]
    return made[0](term=number(), **head, **made[1])
