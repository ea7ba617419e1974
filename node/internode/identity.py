"""Who a node is to its peers, and whom it refuses. Pure.

Every stream begins with a :class:`Hello` in each direction, and so does a probe. A stranger is
refused with a message that says what would be right (rule 34): another cluster, another version of
the protocol, this node's own id, an id that was not the one wanted, voter lists that disagree.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.cluster.raft.message_guard import MAX_NODE_ID, MAX_VOTERS
from kept.node.config.listeners import ConfiguredVoter
from kept.storage.errors import CorruptMessage

MAX_PORT: Final = 65_535
MAX_HOST_CHARS: Final = 255
"""A name of the DNS has no more."""
PROTOCOL_VERSION: Final = 2
"""Of the frames between nodes (1 was gRPC); nodes of different versions refuse each other."""


class Hello(Struct, frozen=True):
    """How a node presents itself.

    ``cluster_id`` is empty until it has heard of one; ``voters`` are those of its metadata log,
    else of its settings; ``has_log`` whether that log holds anything; ``wanted`` the node that it
    means to reach, None for whoever answers; ``refusal`` why it refuses the other, or empty;
    ``host`` and ``port`` where its own node listener is reached, if it says so.
    """

    cluster_id: str
    node_id: int
    incarnation: UUID
    voters: tuple[ConfiguredVoter, ...] = ()
    has_log: bool = False
    directory_id: UUID | None = None
    wanted: int | None = None
    refusal: str = ""
    protocol: int = PROTOCOL_VERSION
    host: str = ""
    port: int = 0


def check(hello: Hello) -> None:
    """Raises CorruptMessage for a Hello that no node says: what it tells is remembered, and its
    addresses are dialled.
    """
    places = [(hello.node_id, hello.host, hello.port)]
    places += [(voter.node_id, voter.host, voter.port) for voter in hello.voters]
    if len(hello.voters) > MAX_VOTERS:
        raise CorruptMessage(f"a Hello with {len(hello.voters)} voters; at most {MAX_VOTERS}")
    for node_id, host, port in places:
        if not 0 <= node_id <= MAX_NODE_ID:
            raise CorruptMessage(f"a Hello with the node id {node_id}")
        if not 0 <= port <= MAX_PORT or len(host) > MAX_HOST_CHARS or not host.isprintable():
            raise CorruptMessage(f"a Hello with the address {host[:MAX_HOST_CHARS]!r}:{port}")


def unnamed_cluster(own: Hello, other: Hello) -> str:
    """Why a stream or call that names no cluster is refused; empty when it may: there is none yet.

    A greeting may leave it out: its answer tells the id to a node that is new.
    """
    if own.cluster_id and not other.cluster_id:
        return (
            f"node {other.node_id} names no cluster, node {own.node_id} belongs to "
            f"{own.cluster_id}: a node that is new asks for the id first"
        )
    return ""


def refusal(own: Hello, other: Hello) -> str:
    """Why ``own`` does not speak with ``other``; empty when it does."""
    if own.protocol != other.protocol:
        return (
            f"node {other.node_id} speaks version {other.protocol} of the protocol between nodes, "
            f"node {own.node_id} version {own.protocol}: run the same version of kept on both"
        )
    if own.cluster_id and other.cluster_id and own.cluster_id != other.cluster_id:
        return (
            f"node {other.node_id} belongs to cluster {other.cluster_id}, node {own.node_id} to "
            f"{own.cluster_id}: correct controller.quorum.voters, or start the one that is wrong "
            "with empty directories"
        )
    if own.node_id == other.node_id and own.incarnation != other.incarnation:
        return (
            f"node id {own.node_id} is used twice: give one of the two another node.id, and name "
            "it so in controller.quorum.voters"
        )
    if other.wanted is not None and other.wanted != own.node_id:
        return (
            f"this is node {own.node_id}, not node {other.wanted}: correct its address in "
            "controller.quorum.voters or advertised.listeners"
        )
    return _voters_disagree(own, other)


def node_id_taken(node_id: int) -> str:
    """What a process hears whose node id belongs to another one, which answered a probe."""
    return (
        f"node id {node_id} belongs to another process that is alive: give this one another node.id"
    )


def _voters_disagree(own: Hello, other: Hello) -> str:
    if not own.voters or not other.voters:
        return ""
    if not own.has_log and not other.has_log:
        if sorted(own.voters) == sorted(other.voters):
            return ""
        return (
            f"controller.quorum.voters of node {other.node_id} is {_listed(other.voters)}, of node "
            f"{own.node_id} {_listed(own.voters)}: give every node the same list at the first start"
        )
    settled, fresh = (own, other) if own.has_log else (other, own)
    if fresh.has_log:
        return ""
    current = {voter.node_id for voter in settled.voters}
    if current.isdisjoint(voter.node_id for voter in fresh.voters):
        return (
            f"controller.quorum.voters of node {fresh.node_id} names no current voter: the cluster "
            f"has {_listed(settled.voters)}"
        )
    return ""


def _listed(voters: tuple[ConfiguredVoter, ...]) -> str:
    return ",".join(str(voter) for voter in sorted(voters))
