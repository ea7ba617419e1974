"""ACL bindings: operations without I/O (see :mod:`kept.client.admin.topics`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kept.client.admin.topics import Operation
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Call, ToController
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError

ANY: Final = 1
"""In a filter, of whatever kind: all."""
MATCH: Final = 2
"""As a filter's pattern: whatever would decide on the name."""


@dataclass(frozen=True, slots=True)
class Acl:
    """A binding, or a filter: there :data:`ANY` and None stand for all. Numbers are Kafka's."""

    resource_type: int = ANY
    name: str | None = None
    pattern: int = ANY
    principal: str | None = None
    host: str | None = None
    operation: int = ANY
    permission: int = ANY


def create_acls(acls: Sequence[Acl]) -> Operation[None]:
    """Create bindings; those that are there already stay."""
    creations = [
        {
            "resource_type": acl.resource_type,
            "resource_name": acl.name,
            "resource_pattern_type": acl.pattern,
            "principal": acl.principal,
            "host": acl.host,
            "operation": acl.operation,
            "permission_type": acl.permission,
        }
        for acl in acls
    ]
    yield [_call(ApiKey.CREATE_ACLS, {"creations": creations}, "CreateAcls", "results")]


def delete_acls(filters: Sequence[Acl]) -> Operation[list[Acl]]:
    """Delete what the filters find; returns that."""
    values = {"filters": [_filter(wanted) for wanted in filters]}
    (response,) = yield [_call(ApiKey.DELETE_ACLS, values, "DeleteAcls", "filter_results")]
    return [
        Acl(
            int(acl.resource_type),
            acl.resource_name,
            int(acl.pattern_type),
            acl.principal,
            acl.host,
            int(acl.operation),
            int(acl.permission_type),
        )
        for result in response.filter_results
        for acl in result.matching_acls
    ]


def describe_acls(wanted: Acl) -> Operation[list[Acl]]:
    """The bindings that a filter finds."""
    what = "DescribeAcls"
    (response,) = yield [
        Call(
            ApiKey.DESCRIBE_ACLS,
            _filter(wanted),
            ToController(),
            what=what,
            check=lambda r: failure(int(r.error_code), what, r.error_message),
        )
    ]
    return [
        Acl(
            int(found.resource_type),
            found.resource_name,
            int(found.pattern_type),
            acl.principal,
            acl.host,
            int(acl.operation),
            int(acl.permission_type),
        )
        for found in response.resources
        for acl in found.acls
    ]


def _filter(wanted: Acl) -> dict[str, Any]:
    return {
        "resource_type_filter": wanted.resource_type,
        "resource_name_filter": wanted.name,
        "pattern_type_filter": wanted.pattern,
        "principal_filter": wanted.principal,
        "host_filter": wanted.host,
        "operation": wanted.operation,
        "permission_type": wanted.permission,
    }


def _call(key: ApiKey, values: dict[str, Any], what: str, results: str) -> Call:
    def check(response: Any) -> KeptError | None:
        for result in getattr(response, results):
            if error := failure(int(result.error_code), what, result.error_message):
                return error
        return None

    return Call(key, values, ToController(), what=what, check=check)
