"""Decides by ACL bindings who may do what, as Apache Kafka's ``StandardAuthorizer`` does.

Super users and this cluster's own nodes may do everything. Else the bindings of the metadata image
decide (:mod:`kept.cluster.security.acl_index`); a resource that no binding names at all is for
everybody if ``allow.everyone.if.no.acl.found`` is set, else for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import AclBinding, AclOperation, AclResourceType

if TYPE_CHECKING:
    from kept.node.security.session import Grants, Session


class Rule(StrEnum):
    """Why something is allowed or denied."""

    NODE = "node of the cluster"
    SUPER_USER = "super user"
    BINDING = "binding"
    NO_BINDING_FITS = "no binding fits"
    NO_BINDING = "no binding names the resource"


class Ruling(Struct, frozen=True):
    """A decision and what it rests on; ``binding`` where that is one."""

    allowed: bool
    rule: Rule
    binding: AclBinding | None = None


class AccessEvent(Struct, frozen=True):
    """That somebody was allowed or denied something."""

    principal: str
    host: str
    listener: str
    mechanism: str
    api: str
    operation: AclOperation
    resource_type: AclResourceType
    name: str
    ruling: Ruling


class Auditor(Protocol):
    """Who is told of decisions."""

    records_allowed: bool
    """Whether it is also told of what was allowed."""

    def decided(self, event: AccessEvent) -> None:
        """Something was denied, or allowed."""


class StandardAuthorizer:
    """Decides by ACL bindings who may do what. ``index`` gives the bindings as they are now."""

    def __init__(
        self,
        index: Callable[[], AclIndex],
        super_users: Collection[str],
        auditor: Auditor | None = None,
        *,
        allow_if_no_acl: bool = False,
    ) -> None:
        self._index = index
        self._super_users = frozenset(super_users)
        self._auditor = auditor
        self._allow_if_no_acl = allow_if_no_acl

    def rule(
        self, session: Session, operation: AclOperation, resource_type: AclResourceType, name: str
    ) -> Ruling:
        """The decision, of which nobody is told."""
        if session.is_node:
            return Ruling(allowed=True, rule=Rule.NODE)
        if session.principal in self._super_users:
            return Ruling(allowed=True, rule=Rule.SUPER_USER)
        decision = self._index().decide(
            session.principal, session.host, operation, resource_type, name
        )
        if decision.allowed is None:
            return Ruling(allowed=self._allow_if_no_acl, rule=Rule.NO_BINDING)
        rule = Rule.NO_BINDING_FITS if decision.binding is None else Rule.BINDING
        return Ruling(decision.allowed, rule, decision.binding)

    def allows(
        self,
        session: Session,
        operation: AclOperation,
        resource_type: AclResourceType,
        name: str,
        *,
        audited: bool = True,
        api: str = "",
    ) -> bool:
        """Whether it may; ``audited``: the auditor is told if not, and of which ``api``."""
        ruling = self.rule(session, operation, resource_type, name)
        auditor = self._auditor
        if audited and auditor and (auditor.records_allowed or not ruling.allowed):
            auditor.decided(
                AccessEvent(
                    session.principal,
                    session.host,
                    session.listener,
                    session.mechanism,
                    api,
                    operation,
                    resource_type,
                    name,
                    ruling,
                )
            )
        return ruling.allowed

    def allows_any(
        self, session: Session, operation: AclOperation, resource_type: AclResourceType
    ) -> bool:
        """Whether it may on at least one resource of the type. As in Kafka the auditor hears
        nothing of it.
        """
        if session.is_node or session.principal in self._super_users:
            return True
        index = self._index()
        if self._allow_if_no_acl and not index.has_wildcard(resource_type):
            return True  # there is a name that no binding names
        return index.allows_any(session.principal, session.host, operation, resource_type)

    def grants(self) -> Grants:
        """Nothing: what is granted is found out by asking."""
        return set()
