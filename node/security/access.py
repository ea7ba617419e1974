"""How each API, route and method is authorized: its access entry, which has no default.

``PermitAll``: not at all. ``AuthorizeRequest``: one check for the request; if it is refused, every
item of the response has the resource's code. ``AuthorizeEach``: a check for each item; refused
items are taken out before the handler sees the request, and their refusals are merged into its
response. ``AuthorizedByHandler``: the handler checks by itself, because its answer depends on it
(Metadata filters); who serves it counts the checks.
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
"""Type and name of what an operation is on."""

CLUSTER: Final[Resource] = AclResourceType.CLUSTER, CLUSTER_NAME

AUTHORIZATION_CODES: Final = MappingProxyType(
    {
        AclResourceType.TOPIC: 29,
        AclResourceType.GROUP: 30,
        AclResourceType.CLUSTER: 31,
        AclResourceType.TRANSACTIONAL_ID: 53,
    }
)
"""Kafka's error code of what may not be done with a resource of the type."""
AUTHORIZATION_MESSAGES: Final = MappingProxyType(
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


class PermitAll(Struct, frozen=True):
    """Everybody is served."""


class RequireLogin(Struct, frozen=True):
    """Everybody who has logged in is served."""


def the_cluster(_: Any) -> Resource:
    """The cluster, whatever is asked for."""
    return CLUSTER


class AuthorizeRequest(Struct, frozen=True):
    """One check for the whole request, of the operation on the resource that it names, or on the
    cluster. Who may do ``otherwise`` on it is served, too.
    """

    operation: AclOperation
    resource: Callable[[Any], Resource] = the_cluster
    otherwise: AclOperation | None = None


class AuthorizeEach(Struct, frozen=True):
    """A check for each item of the request, of the operation on the resource that the item names in
    the image; an item that names none (None: an unknown id) is the handler's to answer. Who may do
    ``cluster`` on the cluster may do it with all.
    """

    operation: AclOperation
    resource: Callable[[Any, Image], Resource | None]
    cluster: AclOperation | None = None


class AuthorizedByHandler(Struct, frozen=True):
    """The handler checks; an answer that was made without a check is a bug, and is not sent."""


Access = PermitAll | AuthorizeRequest | AuthorizeEach | AuthorizedByHandler
