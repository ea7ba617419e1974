"""What an authorization that failed was about: operation, resource, and what would allow it.

Source of the operations: the authorization table of Kafka's protocol guide. A broker tells a code
only; the resource is what the request named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kept.storage.errors import PeerError

TOPIC: Final = 29
GROUP: Final = 30
CLUSTER: Final = 31
TRANSACTIONAL_ID: Final = 53

_READ, _WRITE, _DESCRIBE, _ALTER, _DELETE = "read", "write", "describe", "alter", "delete"
_IDEMPOTENT_WRITE: Final = "idempotent-write"
_TYPES: Final[Mapping[int, tuple[str, str, str, Mapping[str, str]]]] = {
    TOPIC: (
        "topic",
        "topic",
        _DESCRIBE,
        {
            "Produce": _WRITE,
            "AddPartitionsToTxn": _WRITE,
            "Fetch": _READ,
            "OffsetCommit": _READ,
            "TxnOffsetCommit": _READ,
            "OffsetDelete": _READ,
            "DescribeProducers": _READ,
            "CreateTopics": "create",
            "DeleteTopics": _DELETE,
            "DeleteRecords": _DELETE,
            "CreatePartitions": _ALTER,
            "AlterConfigs": "alter-configs",
            "DescribeConfigs": "describe-configs",
        },
    ),
    GROUP: (
        "group",
        "group",
        _READ,
        {
            "DescribeGroups": _DESCRIBE,
            "OffsetFetch": _DESCRIBE,
            "FindCoordinator": _DESCRIBE,
            "DeleteGroups": _DELETE,
            "OffsetDelete": _DELETE,
            "AlterConfigs": "alter-configs",
            "DescribeConfigs": "describe-configs",
        },
    ),
    CLUSTER: (
        "the cluster",
        "cluster",
        _ALTER,
        {
            "DescribeQuorum": _DESCRIBE,
            "DescribeLogDirs": _DESCRIBE,
            "DescribeAcls": _DESCRIBE,
            "ListPartitionReassignments": _DESCRIBE,
            "DescribeUserScramCredentials": _DESCRIBE,
            "DescribeConfigs": "describe-configs",
            "DescribeClientQuotas": "describe-configs",
            "AlterConfigs": "alter-configs",
            "AlterClientQuotas": "alter-configs",
            "InitProducerId": _IDEMPOTENT_WRITE,
        },
    ),
    TRANSACTIONAL_ID: (
        "transactional id",
        "transactional-id",
        _WRITE,
        {"DescribeTransactions": _DESCRIBE, "FindCoordinator": _DESCRIBE},
    ),
}
"""Error code -> its resource in a sentence and in a rule, the operation that most APIs ask there,
and that of others.
"""
_WHAT: Final = re.compile(r"(?P<api>\w+)(?: (?:of|to|for) (?P<names>.*))?", re.S)
_PARTITION: Final = re.compile(r"([^:]+):\d+")


class NotAuthorized(PeerError):
    """A principal may not do something; ``principal`` is "" where only the server knows it."""

    def __init__(self, code: int, name: str, what: str, principal: str = "", key: str = "") -> None:
        """``name`` of the error code; ``what`` was asked: ``Fetch of orders:0``; ``key``: the group
        or transactional id, whose name may have any characters.
        """
        self.code, self.name, self.what, self.principal, self.key = code, name, what, principal, key
        said, in_rule, usual, others = _TYPES[code]
        found = _WHAT.match(what)
        api, names = (found["api"], found["names"] or "") if found else ("", "")
        operation, resource = others.get(api, usual), _resource(code, names, key)
        who = principal or "this client"
        by = principal or "User:NAME"
        on = f"{said} {resource}".rstrip()
        rule = f"{in_rule}:{resource}" if resource else in_rule
        right = operation.title().replace("-", "")
        if operation == _IDEMPOTENT_WRITE:  # who may write one topic may write it as idempotent
            on, operation, rule = f"{on}, or Write on a topic", _WRITE, "topic:NAME"
        super().__init__(
            f"{what}: {name} ({who} lacks {right} on {on}; an administrator allows it by: "
            f"kept acl add {by} {operation} {rule})"
        )

    def __reduce__(self) -> tuple[type[NotAuthorized], tuple[int, str, str, str, str]]:
        return NotAuthorized, (self.code, self.name, self.what, self.principal, self.key)

    def named(self, principal: str) -> NotAuthorized:
        """The same, of that principal."""
        return NotAuthorized(self.code, self.name, self.what, self.principal or principal, self.key)


def is_about_authorization(code: int) -> bool:
    """Whether an error code says that somebody may not do something."""
    return code in _TYPES


def _resource(code: int, names: str, key: str) -> str:
    """The name of the resource: the key, or the first topic among the names that a request is told
    by, behind its key if it has one; "" for the cluster.
    """
    if code == CLUSTER:
        return ""
    if code != TOPIC:
        return key
    first = names.rpartition(": ")[2].partition(", ")[0]  # no name of a topic has these
    partition = _PARTITION.fullmatch(first)
    return partition[1] if partition else first
