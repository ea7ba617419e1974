"""Planted bugs of ACLs, SCRAM credentials and client quotas (stage ``security``)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kept.cluster.metadata.records import AclRecord
from kept.cluster.security.acls import AclPermission
from tests.sim.planted import plant

STAGE = "security"
INDEX = "kept.cluster.security.acl_index.AclIndex"


def without_acls(original: Any) -> Any:
    def records(self: Any) -> Any:
        return (record for record in original(self) if not isinstance(record, AclRecord))

    return records


def allowed_before_denied(original: Any) -> Any:
    """The first binding that fits decides, and those that allow come first."""

    def decide(self: Any, *asked: Any) -> Any:
        decision = original(self, *asked)
        binding = decision.binding
        if binding is not None and binding.permission is AclPermission.DENY:
            return replace(decision, allowed=True)
        return decision

    return decide


def kept_when_removed(original: Any) -> Any:
    def changed(self: Any, added: Any = (), removed: Any = ()) -> Any:
        return original(self, added)

    return changed


def never_forgotten(original: Any) -> Any:
    """The first record of a user counts for ever."""

    def credential(self: Any, record: Any) -> None:
        if (record.user, record.mechanism) not in self._map("credentials"):
            original(self, record)

    return credential


def principal_lost(original: Any) -> Any:
    """What is sent on once more comes from nobody in particular."""

    async def serve_forwarded(self: Any, request: Any) -> Any:
        if len(request.tries) > 1:
            request = replace(request, principal="")
        return await original(self, request)

    return serve_forwarded


def believed(original: Any) -> Any:
    """What a node sends on, it has decided on."""

    async def serve_forwarded(self: Any, request: Any) -> Any:
        return await original(self, replace(request, by_node=True))

    return serve_forwarded


plant(
    "security-snapshot-without-acls",
    STAGE,
    1,
    "security-differs security-lost",
    "a snapshot holds all bindings",
    ("kept.cluster.metadata.image.Image.records", without_acls),
)
plant(
    "security-allow-before-deny",
    STAGE,
    1,
    "security-decision",
    "a binding that denies decides before those that allow",
    (f"{INDEX}.decide", allowed_before_denied),
)
plant(
    "security-removed-acl-decides",
    STAGE,
    1,
    "security-decision",
    "a node that acted on the removal of a binding does not go by it",
    (f"{INDEX}.with_changes", kept_when_removed),
)
plant(
    "security-deletion-forgotten",
    STAGE,
    1,
    "security-lost",
    "a credential that was deleted is gone",
    ("kept.cluster.metadata.image._Step._credential", never_forgotten),
)
plant(
    "security-principal-lost",
    STAGE,
    4,
    "security-decision",
    "a request that is sent on again has its principal",
    ("kept.node.kafka.request_handlers.RequestHandlers.serve_forwarded", principal_lost),
)
plant(
    "security-forwarded-unasked",
    STAGE,
    1,
    "security-decision",
    "the controller decides on what nodes send on",
    ("kept.node.kafka.request_handlers.RequestHandlers.serve_forwarded", believed),
)
