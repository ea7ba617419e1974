"""ACL bindings: who may do what on which resource. Numbers and names are Kafka's.

A binding names a resource (type, name, pattern), a principal, a host, an operation, and whether it
allows or denies. Source: ``org.apache.kafka.common.acl`` and ``common.resource`` of Kafka 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

CLUSTER_NAME: Final = "kafka-cluster"
"""The name of the one resource of type CLUSTER."""
WILDCARD: Final = "*"
"""As a LITERAL name every resource of the type, as a host every host."""
WILDCARD_PRINCIPAL: Final = "User:*"
"""Everybody."""
ANONYMOUS: Final = "User:ANONYMOUS"
"""The principal where nobody was asked who he is."""


class AclResourceType(IntEnum):
    """What a binding is about."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """How a binding's resource name is compared; ANY and MATCH are for filters only."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class AclOperation(IntEnum):
    """What is done with a resource."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


_CONFIGS: Final = (AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER_CONFIGS)
_READ: Final = (AclOperation.READ, AclOperation.DELETE, AclOperation.DESCRIBE)
_ALTER: Final = (AclOperation.CREATE, AclOperation.ALTER)
OPERATIONS: Final[Mapping[AclResourceType, tuple[AclOperation, ...]]] = MappingProxyType(
    {
        AclResourceType.TOPIC: (*_READ, *_ALTER, *_CONFIGS, AclOperation.WRITE),
        AclResourceType.GROUP: (*_READ, *_CONFIGS),
        AclResourceType.CLUSTER: (
            *_ALTER,
            *_CONFIGS,
            AclOperation.DESCRIBE,
            AclOperation.CLUSTER_ACTION,
            AclOperation.IDEMPOTENT_WRITE,
        ),
    }
)
"""What can be done with a resource of a type that a client asks this of (``AclEntry``)."""


class AclPermission(IntEnum):
    """Whether a binding allows or denies."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


class AclBinding(Struct, frozen=True, order=True):
    """One rule. ``principal`` is ``Type:name``, ``host`` an address or ``*``."""

    resource_type: AclResourceType
    name: str
    pattern: PatternType
    principal: str
    host: str
    operation: AclOperation
    permission: AclPermission
