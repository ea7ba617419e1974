"""Sessions of whoever has no right to what he asks for."""

from __future__ import annotations

from typing import Any

from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.session import Session


def binding(operation: str, permission: str, host: str = "*", principal: str = "User:ada") -> Any:
    """On whatever topic, group, id, and on the cluster."""
    return [
        AclBinding(
            kind,
            "kafka-cluster" if kind is AclResourceType.CLUSTER else "*",
            PatternType.LITERAL,
            principal,
            host,
            AclOperation[operation],
            AclPermission[permission],
        )
        for kind in (
            AclResourceType.TOPIC,
            AclResourceType.GROUP,
            AclResourceType.CLUSTER,
            AclResourceType.TRANSACTIONAL_ID,
        )
    ]


STRANGERS: dict[str, tuple[str, list[AclBinding]]] = {
    "nobody": ("User:ANONYMOUS", []),
    "without rights": ("User:ada", binding("ALL", "ALLOW", principal="User:bob")),
    "denied beside allowed": (
        "User:ada",
        binding("ALL", "ALLOW") + binding("ALL", "DENY"),
    ),
    "from elsewhere": ("User:ada", binding("ALL", "ALLOW", host="10.9.9.9")),
}


def stranger(name: str) -> Session:
    principal, rules = STRANGERS[name]
    index = AclIndex().with_changes(rules, [])
    authorizer = StandardAuthorizer(lambda: index, ["User:admin"])
    return Session(principal, "10.0.0.1", "PLAINTEXT", authorizer=authorizer)
