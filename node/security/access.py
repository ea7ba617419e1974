"""What each API, route and method asks before it is served: its access entry, which has no default.

``Open``: nothing. ``Whole``: one question for the request; refused, every item of the response has
the resource's code. ``Each``: a question for each item; refused items are taken out before the
handler sees the request, and their refusals are merged into its response. ``Own``: the handler asks
by itself, because what it answers depends on it (Metadata filters); who serves it counts the
questions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from kept.cluster.security.acls import CLUSTER_NAME, AclOperation, AclResourceType

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image

Resource = tuple[AclResourceType, str]
"""Type and name of what a question is about."""

CLUSTER: Final[Resource] = AclResourceType.CLUSTER, CLUSTER_NAME

REFUSED: Final = MappingProxyType(
    {
        AclResourceType.TOPIC: 29,
        AclResourceType.GROUP: 30,
        AclResourceType.CLUSTER: 31,
        AclResourceType.TRANSACTIONAL_ID: 53,
    }
)
"""Kafka's error code of what may not be done with a resource of the type."""
MESSAGES: Final = MappingProxyType(
    {
        29: "Topic authorization failed.",
        30: "Group authorization failed.",
        31: "Cluster authorization failed.",
        53: "Transactional Id authorization failed.",
    }
)
"""What Kafka says beside such a code: nothing of the resource."""
NO_LOGIN: Final = "this listener takes no login by HTTP or gRPC"
"""What strangers are told there, where it is no use to ask them who they are."""


class Open(Struct, frozen=True):
    """Whoever reaches it is served."""


class Known(Struct, frozen=True):
    """Whoever has said who he is is served."""


def the_cluster(_: Any) -> Resource:
    """The cluster, whatever is asked for."""
    return CLUSTER


class Whole(Struct, frozen=True):
    """One question for the whole request, about the resource that it names, or the cluster. Who may
    do ``otherwise`` on it is served, too.
    """

    operation: AclOperation
    resource: Callable[[Any], Resource] = the_cluster
    otherwise: AclOperation | None = None


class Each(Struct, frozen=True):
    """A question for each item of the request, about the resource that it names in the image; an
    item that names none (None: an unknown id) is the handler's to answer. Who may do ``cluster`` on
    the cluster is asked nothing else.
    """

    operation: AclOperation
    resource: Callable[[Any, Image], Resource | None]
    cluster: AclOperation | None = None


class Own(Struct, frozen=True):
    """The handler asks; an answer that was made without a question is a bug, and is not sent."""


Access = Open | Whole | Each | Own
