"""What the audit log says of requests that change metadata: the names that were changed, no values.

A change is recorded where it was made, which is at the active controller, whichever protocol it was
asked for by; what was refused, item by item, is not, nor what was only validated, nor what a node
asks for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import Values
from kept.cluster.controller.acl_changes import enum_member
from kept.cluster.security.acls import AclOperation, AclPermission, AclResourceType, PatternType
from kept.node.kafka import request_authorizer
from kept.steps import Steps

if TYPE_CHECKING:
    from kept.node.kafka.api import HandlerResult, RequestContext
    from kept.node.security.audit import AuditLog

_Names = Callable[[Any, Values], Iterable[str]]


def _items(array: str, field: str) -> _Names:
    """The names of those items of the response that have no error."""

    def names(_: Any, answer: Values) -> Iterable[str]:
        return (str(item[field]) for item in answer[array] if not item.get("error_code"))

    return names


def _settings(request: Any, answer: Values) -> Iterable[str]:
    done = {
        (int(item["resource_type"]), item["resource_name"])
        for item in answer["responses"]
        if not item.get("error_code")
    }
    return (
        f"{resource.resource_type}:{resource.resource_name}:{config.name}"
        for resource in request.resources
        if (int(resource.resource_type), resource.resource_name) in done
        for config in resource.configs
    )


def _created_acls(request: Any, answer: Values) -> Iterable[str]:
    return (
        _acl(asked.resource_pattern_type, _fields(asked))
        for asked, result in zip(request.creations, answer["results"], strict=True)
        if not result.get("error_code")
    )


def _deleted_acls(_: Any, answer: Values) -> Iterable[str]:
    return (
        _acl(acl["pattern_type"], acl)
        for result in answer["filter_results"]
        for acl in result["matching_acls"]
    )


def _fields(asked: Any) -> Values:
    """The fields of a binding in a request."""
    names = ("resource_type", "resource_name", "principal", "host", "operation", "permission_type")
    return {name: getattr(asked, name) for name in names}


def _acl(pattern: int, fields: Values) -> str:
    return " ".join(
        (
            enum_member(AclPermission, fields["permission_type"]).name,
            fields["principal"],
            f"from {fields['host']}",
            enum_member(AclOperation, fields["operation"]).name,
            enum_member(AclResourceType, fields["resource_type"]).name,
            enum_member(PatternType, pattern).name,
            fields["resource_name"],
        )
    )


def _quotas(_: Any, answer: Values) -> Iterable[str]:
    return (
        ",".join(f"{part['entity_type']}={part['entity_name']}" for part in entry["entity"])
        for entry in answer["entries"]
        if not entry.get("error_code")
    )


def _reassigned(_: Any, answer: Values) -> Iterable[str]:
    return (
        f"{topic['name']}-{partition['partition_index']}"
        for topic in answer["responses"]
        for partition in topic["partitions"]
        if not partition.get("error_code")
    )


def _elected(_: Any, answer: Values) -> Iterable[str]:
    return (
        f"{topic['topic']}-{partition['partition_id']}"
        for topic in answer["replica_election_results"]
        for partition in topic["partition_result"]
        if not partition.get("error_code")
    )


_CHANGES: Final[Mapping[int, _Names]] = {
    ApiKey.CREATE_TOPICS: _items("topics", "name"),
    ApiKey.DELETE_TOPICS: _items("responses", "name"),
    ApiKey.CREATE_PARTITIONS: _items("results", "name"),
    ApiKey.ALTER_CONFIGS: _settings,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _settings,
    ApiKey.CREATE_ACLS: _created_acls,
    ApiKey.DELETE_ACLS: _deleted_acls,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _items("results", "user"),
    ApiKey.ALTER_CLIENT_QUOTAS: _quotas,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: _reassigned,
    ApiKey.ELECT_LEADERS: _elected,
    ApiKey.UNREGISTER_BROKER: lambda request, _: [str(request.broker_id)],
    ApiKey.ADD_RAFT_VOTER: lambda request, _: [str(request.voter_id)],
    ApiKey.REMOVE_RAFT_VOTER: lambda request, _: [str(request.voter_id)],
}


def recorded(
    audit: AuditLog, context: RequestContext, request: Any, answer: HandlerResult
) -> HandlerResult:
    """``answer``, which the audit log learns of, if the request is one that changes something."""
    names = _CHANGES.get(context.api_key)
    if names is None or context.session.is_node or getattr(request, "validate_only", False):
        return answer

    def finish(values: Values) -> Steps[Values]:
        changed = []
        for name in () if values.get("error_code") else names(request, values):
            yield
            changed.append(name)
        if changed:
            audit.changed(context.session, context.api_name, changed)
        return values

    return request_authorizer.then(answer, finish)
