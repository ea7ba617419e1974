"""What Raft nodes say to each other.

Every message has the same head: ``term`` of the sender (in :class:`PreVote` and in the grant of one
the term that the sender would campaign in), ``sender``, ``to``, and ``directory_id``: the disk that
the sender speaks for, because what a voter promised is promised by its disk. Messages may be lost,
delayed, repeated and reordered; none is trusted to be new.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_DIRECTORY, Entry

NO_NODE: Final = -1
"""Instead of a node's id: nobody."""


class Message(Struct, frozen=True, kw_only=True):
    """The head that all messages share."""

    term: int
    sender: int
    to: int
    directory_id: UUID = NO_DIRECTORY


class PreVote(Message, frozen=True, kw_only=True):
    """Would you vote for me in ``term``? Binds nobody.

    The sender's log ends with ``last_index`` of ``last_term``. ``suspect``: the leader that the
    sender has evidence against (:data:`NO_NODE`: its patience ended); who is asked and has heard
    from that leader probes it.
    """

    last_index: int
    last_term: int
    suspect: int = NO_NODE


class PreVoteReply(Message, frozen=True, kw_only=True):
    """The answer to :class:`PreVote`: with the asked term when granted, else with one's own."""

    granted: bool


class Vote(Message, frozen=True, kw_only=True):
    """Vote for me in ``term``. ``transfer``: the leader asked me to take over."""

    last_index: int
    last_term: int
    transfer: bool = False


class VoteReply(Message, frozen=True, kw_only=True):
    """The answer to :class:`Vote`."""

    granted: bool


class AppendEntries(Message, frozen=True, kw_only=True):
    """From the leader: ``entries`` follow the entry ``prev_index`` of ``prev_term``.

    Empty it is a heartbeat. ``commit_index`` is the leader's. ``round`` counts the leader's
    heartbeats; the answer repeats it, so the leader knows until when it was still followed.
    ``acknowledged``: the disk ``acknowledged_by`` was said in this term to have the entries up to
    there.
    """

    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...] = ()
    commit_index: int = 0
    round: int = 0
    acknowledged: int = 0
    acknowledged_by: UUID | None = None


class AppendEntriesReply(Message, frozen=True, kw_only=True):
    """The answer to :class:`AppendEntries`.

    Accepted: the sender's durable log equals the leader's up to ``match_index``. Refused:
    ``match_index`` is the ``prev_index`` that does not match, and the logs may match at
    ``hint_index``, where the sender has ``hint_term``; or the leader's term is over.
    """

    accepted: bool
    match_index: int
    hint_index: int = 0
    hint_term: int = 0
    round: int = 0


class InstallSnapshot(Message, frozen=True, kw_only=True):
    """From the leader: the image after entry ``last_index`` of ``last_term``, instead of entries
    that the leader no longer has. ``image_bytes`` is the content of a snapshot file, ``voters``
    who votes after that entry.
    """

    last_index: int
    last_term: int
    image_bytes: bytes
    voters: tuple[Voter, ...]
    round: int = 0


class SnapshotReply(Message, frozen=True, kw_only=True):
    """The snapshot is durable, or not needed: the logs are equal up to ``match_index``."""

    match_index: int
    round: int = 0


class TimeoutNow(Message, frozen=True, kw_only=True):
    """From the leader: campaign now, you are to take over."""


class Observe(Message, frozen=True, kw_only=True):
    """From a node that does not vote: send me the log, which here ends with ``last_index`` of
    ``last_term``; and who leads? Anyone answers with :class:`LeaderHint`.
    """

    last_index: int
    last_term: int


class LeaderHint(Message, frozen=True, kw_only=True):
    """The answer to :class:`Observe`.

    ``leader_id`` is :data:`NO_NODE` when the sender knows no leader. ``last_index`` is the end of
    the sender's log, ``voters`` the ids that vote: of its log, or, while that is empty, of the list
    it was started with. ``cluster_id`` is empty while it knows none.
    """

    leader_id: int
    last_index: int
    voters: tuple[int, ...] = ()
    cluster_id: str = ""
