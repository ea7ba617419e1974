"""Checkers of ACLs, SCRAM credentials and client quotas.

- ``security-differs``: two nodes do not have the same of them after the same entry, however they
  came there: entry by entry, by a snapshot of their own, or by one of the leader's;
- ``security-lost``: what was acknowledged to an administrator, who alone changes it, is not in an
  image from then on;
- ``security-decision``: a node's authorizer decides otherwise than its bindings say, by a scan of
  them that shares no code with it: one that acted on the removal of a binding does not go by it;
  or somebody changed what he had no right to since before he asked, wherever he asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kept.cluster.metadata.image import Image
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.security.session import Authorizer, Session
from tests.sim.world import Violation

Key = tuple[Any, ...]
"""What one administrator changes: a binding, a user's password, a quota."""
IMPLIES: Final = {
    AclOperation.READ: {AclOperation.READ, AclOperation.ALL},
    AclOperation.DESCRIBE: {
        AclOperation.DESCRIBE,
        AclOperation.ALL,
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.DELETE,
        AclOperation.ALTER,
    },
}


def content(image: Image) -> dict[Key, Any]:
    """What an image holds, by its keys."""
    found: dict[Key, Any] = {("acl", binding): True for binding in image.acls.values()}
    found |= {("scram", *key): known.salt for key, known in image.credentials.items()}
    if image.decoy_credential is not None:
        found["decoys",] = image.decoy_credential.server_key
    for entity, quotas in image.quotas.items():
        found |= {("quota", entity, name): value for name, value in quotas.items()}
    return found


class SecurityChecks:
    """What every node must have, and what administrators were told."""

    def __init__(self) -> None:
        self.newest = 0
        """The largest index that any node has applied."""
        self.compared = self.decisions = 0
        self._contents: dict[int, dict[Key, Any]] = {}
        self._pinned: dict[Key, tuple[int, Any]] = {}

    def image(self, who: str, image: Image) -> None:
        """A node has this image."""
        found = content(image)
        known = self._contents.setdefault(image.index, found)
        if known is not found:
            self.compared += bool(known)
            if known != found:
                raise Violation(
                    "security-differs",
                    f"{who} after entry {image.index}: {set(known.items()) ^ set(found.items())}",
                )
        self.newest = max(self.newest, image.index)
        for key, (since, value) in self._pinned.items():
            if image.index >= since and found.get(key) != value:
                raise Violation(
                    "security-lost",
                    f"{who} after entry {image.index}: {key} is {found.get(key)}, but {value} was "
                    f"acknowledged by entry {since}",
                )

    def begins(self, key: Key) -> None:
        """Its administrator is about to change it."""
        self._pinned.pop(key, None)

    def acknowledged(self, key: Key, value: Any) -> None:
        """It was told that this is so; None: that it is gone."""
        self._pinned[key] = (self.newest, value)

    def pinned(self, key: Key) -> tuple[int, Any] | None:
        """Since which entry, and what its administrator was told; None while that is open."""
        return self._pinned.get(key)

    @property
    def expected(self) -> Mapping[Key, Any]:
        """What must be there, or must not (None)."""
        return {key: value for key, (_, value) in self._pinned.items()}

    def decided(self, who: str, image: Image, authorizer: Authorizer, principal: str) -> None:
        """A node's authorizer, by an image that the node has."""
        session = Session(principal, "10.0.9.9", authorizer=authorizer)
        names = {binding.name for binding in image.acls.values()}
        for name in sorted({*names, *(f"{name}x" for name in names), "other"}):
            for operation in IMPLIES:
                decision = authorizer.allows(
                    session, operation, AclResourceType.TOPIC, name, audited=False
                )
                self.decisions += 1
                if decision != _scanned(image, principal, operation, name):
                    raise Violation(
                        "security-decision",
                        f"{who} after entry {image.index}: {principal} may {operation.name} topic "
                        f"{name}: {decision}; bindings: {sorted(image.acls.values())}",
                    )


def _scanned(image: Image, principal: str, operation: AclOperation, name: str) -> bool:
    """The decision, binding by binding."""
    fitting: list[AclBinding] = [
        binding
        for binding in image.acls.values()
        if binding.resource_type is AclResourceType.TOPIC
        and binding.principal in (principal, "User:*")
        and (
            binding.name in (name, "*")
            if binding.pattern is PatternType.LITERAL
            else name.startswith(binding.name)
        )
    ]
    if any(
        binding.permission is AclPermission.DENY
        and binding.operation in (operation, AclOperation.ALL)
        for binding in fitting
    ):
        return False
    return any(
        binding.permission is AclPermission.ALLOW and binding.operation in IMPLIES[operation]
        for binding in fitting
    )
