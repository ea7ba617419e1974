"""What each API, route and method asks before it is served: its access entry, which has no default.

``Open``: nothing. ``Whole``: one question for the request; refused, every item of the response has
``code``. ``Each``: a question for each item; refused items are taken out before the handler sees
the request, and their refusals are merged into its response. ``Own``: the handler asks by itself,
because what it answers depends on it (Metadata filters); who serves it counts the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from kept.cluster.security.acls import CLUSTER_NAME, AclOperation, AclResourceType


class Open(Struct, frozen=True):
    """Whoever reaches it is served."""


class Whole(Struct, frozen=True):
    """One question for the whole request: on the cluster, or on what ``name`` finds in it."""

    operation: AclOperation
    resource_type: AclResourceType = AclResourceType.CLUSTER
    name: Callable[[Any], str] = lambda _: CLUSTER_NAME
    code: int = 31


class Each(Struct, frozen=True):
    """A question for each item that ``items`` finds in the request, by its name."""

    operation: AclOperation
    resource_type: AclResourceType
    items: Callable[[Any], Iterable[str]]
    code: int


class Own(Struct, frozen=True):
    """The handler asks; an answer that was made without a question is a bug, and is not sent."""


Access = Open | Whole | Each | Own
