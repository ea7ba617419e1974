"""What of a list may be described by whom it is shown to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.runtime.time_slices import Pace

if TYPE_CHECKING:
    from kept.node.security.session import Session

T = TypeVar("T")


async def describable(
    session: Session,
    resource_type: AclResourceType,
    items: Iterable[T],
    name_of: Callable[[T], str] = str,
) -> list[T]:
    """The items about resources of a type that ``session`` may describe; ``name_of`` has the name
    of an item's resource. The audit log has none of the questions.
    """
    if session.is_unrestricted:
        return list(items)
    pace, seen = Pace(), []
    for item in items:
        if session.may(AclOperation.DESCRIBE, resource_type, name_of(item), audited=False):
            seen.append(item)
        await pace.checkpoint()
    return seen
