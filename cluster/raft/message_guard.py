"""What no honest node says: messages that are refused before they move anything. Pure.

Raft tolerates nodes that crash and messages that are lost; it is not made for nodes that lie. But
what one message can do must be bounded: it must neither end a node nor leave behind what ends it at
each start. So a message whose fields contradict each other or cannot be true is dropped whole
(:func:`flaw`), and terms are bounded:

- **A term above** :data:`MAX_TERM` **is never entered.** An election makes one term; at a thousand
  elections a second it takes 146 million years to get there. Terms are int64 on disk and on the
  wire, so even ``term + 1`` of the largest one is a number that both can hold.
- **One message raises the term by** :data:`TERM_STEP` **at most.** A voter that was away is behind
  by as many terms as there were elections, and pre-votes make no terms: 2^20 are twelve days of one
  election a second. Nodes that are further apart than that still come together: each message of
  a voter takes the one behind a step on, and does nothing else (to enter a later term, without a
  vote in it, is always safe). Forged terms would need 2^42 messages to use the terms up. A node
  that does not vote takes no step while it hears a leader: nobody would follow it there.
"""

from __future__ import annotations

from typing import Final

from kept.cluster.metadata.wal import MAX_ENTRY_BYTES
from kept.cluster.raft.messages import (
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    LeaderHint,
    Message,
    Observe,
    PreVote,
    SnapshotReply,
    Vote,
)

MAX_TERM: Final = 1 << 62
"""No election has a later term."""
TERM_STEP: Final = 1 << 20
"""So much later may a message's term be than one's own to be believed."""
MAX_INDEX: Final = 1 << 62
"""No log has more entries."""
MAX_APPEND_ENTRIES: Final = 1 << 15
"""More are in no append: 29,127 of the smallest fill ``RaftSettings.max_append_bytes``."""
MAX_NODE_ID: Final = (1 << 31) - 1
MAX_VOTERS: Final = 1024
"""More are in no voters' record, and in no message."""


def flaw(message: Message) -> str:
    """Why a message cannot be true, whatever the state of the node that gets it; empty if it can.

    The time it takes is that of looking at each entry once.
    """
    if not 0 <= message.sender <= MAX_NODE_ID:
        return f"node id {message.sender}"
    if not 0 <= message.term <= MAX_TERM:
        return f"term {message.term}"
    match message:
        case AppendEntries():
            return _flaw_of_append(message)
        case InstallSnapshot():
            ids = {voter.node_id for voter in message.voters}
            if len(ids) != len(message.voters) or len(ids) > MAX_VOTERS:
                return f"voters {[voter.node_id for voter in message.voters[:MAX_VOTERS]]}"
            return _flaw_of_end(message.last_index, message.last_term, message.term) or _negative(
                round=message.round
            )
        case Vote() | PreVote() | Observe():
            return _flaw_of_end(message.last_index, message.last_term, message.term)
        case AppendEntriesReply():
            return _negative(
                match_index=message.match_index,
                hint_index=message.hint_index,
                hint_term=message.hint_term,
                round=message.round,
            )
        case SnapshotReply():
            return _negative(match_index=message.match_index, round=message.round)
        case LeaderHint():
            if len(message.voters) > MAX_VOTERS:
                return f"{len(message.voters)} voters"
            return _negative(last_index=message.last_index)
    return ""


def _negative(**fields: int) -> str:
    return next((f"{name} {value}" for name, value in fields.items() if value < 0), "")


def _flaw_of_end(last_index: int, last_term: int, term: int) -> str:
    """A log ends no later than its node's term."""
    if not 0 <= last_index <= MAX_INDEX or not 0 <= last_term <= term:
        return f"a log that ends with entry {last_index} of term {last_term} in term {term}"
    return ""


def _flaw_of_append(message: AppendEntries) -> str:
    wrong = _flaw_of_end(message.prev_index, message.prev_term, message.term) or _negative(
        commit_index=message.commit_index, round=message.round, acknowledged=message.acknowledged
    )
    if wrong:
        return wrong
    if len(message.entries) > MAX_APPEND_ENTRIES:
        return f"{len(message.entries)} entries; at most {MAX_APPEND_ENTRIES} are in one append"
    index, term = message.prev_index, message.prev_term
    for entry in message.entries:
        index += 1
        if entry.index != index or not term <= entry.term <= message.term:
            return f"entry {entry.index} of term {entry.term} after {index - 1} of {term}"
        if len(entry.data) > MAX_ENTRY_BYTES:
            return f"entry {entry.index} of {len(entry.data)} bytes"
        term = entry.term
    return ""
