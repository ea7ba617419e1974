"""The calls between brokers and controller: requests and replies, field for field as in
``node/proto/controller.proto``.

:data:`CALLS` is the table: a method's name to its request and reply. A new method is two classes
here, two messages and a line in the .proto, and a line in the table.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.cluster.controller.brokers import RegisterRequest
from kept.cluster.controller.heartbeats import HeartbeatReply, HeartbeatRequest


class Failure(Struct, frozen=True):
    """An error of kept by its class, as one of several results
    (``kept.node.internode.rpc_errors``); ``leader_id`` is what NotController names.
    """

    error: str
    message: str
    leader_id: int = -1


class RegisterReply(Struct, frozen=True):
    """Registered; it takes part once it is unfenced by a heartbeat."""

    broker_epoch: int


class IsrMember(Struct, frozen=True):
    """A member of the ISR asked for, by its registration."""

    broker_id: int
    broker_epoch: int


class IsrChange(Struct, frozen=True):
    """The ISR that a leader asks for; compare-and-set on ``partition_epoch`` (rule 35).

    ``last_epoch``: of the leader's log, if it is above ``leader_epoch``: then a later leader epoch
    is what is asked for; 0 otherwise.
    """

    topic_id: UUID
    partition: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[IsrMember, ...]
    leader_recovery_state: int = 0
    last_epoch: int = 0


class AlterPartitionsRequest(Struct, frozen=True):
    """ISR changes of one leader's partitions."""

    broker_id: int
    broker_epoch: int
    changes: tuple[IsrChange, ...]


class IsrResult(Struct, frozen=True):
    """What became of a change; the partition as it is now. ``failure`` None: done."""

    topic_id: UUID
    partition: int
    failure: Failure | None = None
    leader_id: int = -1
    leader_epoch: int = -1
    partition_epoch: int = -1
    isr: tuple[int, ...] = ()
    leader_recovery_state: int = 0


class AlterPartitionsReply(Struct, frozen=True):
    """One result for each change, in their order."""

    results: tuple[IsrResult, ...]


class AllocateProducerIdsRequest(Struct, frozen=True):
    """A broker wants producer ids."""

    broker_id: int
    broker_epoch: int


class AllocateProducerIdsReply(Struct, frozen=True):
    """``first`` and the ``count - 1`` ids above it, given to nobody else ever."""

    first: int
    count: int


class ForwardRequest(Struct, frozen=True):
    """A client's admin request for the controller to answer: ``body`` without the header.

    ``tries`` are random ids of the attempts so far, this one's last: a controller that is asked
    again recognizes what was done for an earlier one. The controller decides what ``principal`` may
    do; a request that is ``by_node`` is the sender's own.
    """

    api_key: int
    version: int
    body: bytes
    listener: str
    client_id: str | None = None
    client_host: str = ""
    tries: tuple[UUID, ...] = ()
    principal: str = ""
    mechanism: str = ""
    by_node: bool = False


class ForwardReply(Struct, frozen=True):
    """The response's body, without its header; ``index`` of the controller's image by then."""

    body: bytes
    index: int = 0


class ChangeVotersRequest(Struct, frozen=True):
    """Add or remove one voter. ``directory_id`` None: the one that the node presents."""

    add: bool
    node_id: int
    directory_id: UUID | None = None
    host: str = ""
    port: int = 0


class ChangeVotersReply(Struct, frozen=True):
    """Index of the entry that holds the change."""

    index: int


class ConfirmRequest(Struct, frozen=True):
    """A broker asks whether its metadata is current: one that was replaced does not answer."""

    broker_id: int
    broker_epoch: int


class ConfirmReply(Struct, frozen=True):
    """What was committed before the question is in the image of this ``index``."""

    index: int


class PeerHttpRequest(Struct, frozen=True):
    """A request to a node's ``/api/v1/`` that came to another node. ``query`` and
    ``body`` are JSON objects.
    """

    method: str
    path: str
    query: str
    body: str


class PeerHttpReply(Struct, frozen=True):
    """The answer: an HTTP status, and the JSON that goes with it."""

    status: int
    body: bytes


CALLS: Final[dict[str, tuple[type, type]]] = {
    "Register": (RegisterRequest, RegisterReply),
    "Heartbeat": (HeartbeatRequest, HeartbeatReply),
    "AlterPartitions": (AlterPartitionsRequest, AlterPartitionsReply),
    "AllocateProducerIds": (AllocateProducerIdsRequest, AllocateProducerIdsReply),
    "Forward": (ForwardRequest, ForwardReply),
    "ChangeVoters": (ChangeVotersRequest, ChangeVotersReply),
    "Confirm": (ConfirmRequest, ConfirmReply),
    "PeerHttp": (PeerHttpRequest, PeerHttpReply),
}
"""Methods that brokers and the active controller serve."""
