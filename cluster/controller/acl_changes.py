"""Decisions on ACL bindings: what may be created, and which a filter finds. Pure functions.

Rules as in ``AclControlManager`` and ``AclApis`` of Kafka 4.3; all refusals are INVALID_REQUEST.
Codes that no enum knows are refused with an answer, where Kafka closes the connection. A request
changes at most 10,000 bindings, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import Final, TypeVar
from uuid import UUID

from msgspec import Struct

from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.steps import Steps
from kept.storage.errors import InvalidRequest

MAX_CHANGES: Final = 10_000
"""Bindings that one request creates or deletes (Kafka's ``MAX_RECORDS_PER_USER_OP``)."""

MAX_SCANS: Final = 1_000
"""Filters of one request that are compared with every binding: a decision holds up all others, and
each of these takes some milliseconds of it with 10,000 bindings. Kafka has no bound."""

MAX_MATCHES: Final = 4 * MAX_CHANGES
"""Bindings that all filters of one request find together, those that several find counted for each:
the answer names them all."""

E = TypeVar("E", bound=IntEnum)


def enum_member(kind: type[E], code: int) -> E:
    """The member with a code of the wire, or the one that is called UNKNOWN."""
    try:
        return kind(code)
    except ValueError:
        return kind(0)


class AclFilter(Struct, frozen=True):
    """Which bindings are meant: None and ANY stand for all. Principal and host are compared as
    text, as in Kafka.
    """

    resource_type: AclResourceType = AclResourceType.ANY
    name: str | None = None
    pattern: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: AclOperation = AclOperation.ANY
    permission: AclPermission = AclPermission.ANY

    @property
    def single_binding(self) -> AclBinding | None:
        """The one binding that it can match; None if it may match several."""
        if (
            self.name is None
            or self.principal is None
            or self.host is None
            or self.pattern not in (PatternType.LITERAL, PatternType.PREFIXED)
            or AclResourceType.ANY is self.resource_type
            or AclOperation.ANY is self.operation
            or AclPermission.ANY is self.permission
        ):
            return None
        return AclBinding(
            self.resource_type,
            self.name,
            self.pattern,
            self.principal,
            self.host,
            self.operation,
            self.permission,
        )

    def matches(self, binding: AclBinding) -> bool:
        """Whether it matches a binding."""
        return (
            (self.principal is None or self.principal == binding.principal)
            and self.resource_type in (AclResourceType.ANY, binding.resource_type)
            and self._matches_name(binding)
            and (self.host is None or self.host == binding.host)
            and self.operation in (AclOperation.ANY, binding.operation)
            and self.permission in (AclPermission.ANY, binding.permission)
        )

    def _matches_name(self, binding: AclBinding) -> bool:
        if self.pattern is PatternType.MATCH and self.name is not None:
            if binding.pattern is PatternType.PREFIXED:
                return self.name.startswith(binding.name)
            return binding.name in (self.name, WILDCARD)
        return self.pattern in (PatternType.ANY, PatternType.MATCH, binding.pattern) and (
            self.name is None or self.name == binding.name
        )


def check_binding(binding: AclBinding) -> None:
    """Raises InvalidRequest for a binding that cannot be created."""
    for value, legal in (
        (binding.resource_type, binding.resource_type > AclResourceType.ANY),
        (binding.pattern, binding.pattern > PatternType.MATCH),
        (binding.operation, binding.operation > AclOperation.ANY),
        (binding.permission, binding.permission > AclPermission.ANY),
    ):
        if not legal:
            raise InvalidRequest(f"{value.name} is no {_FIELDS[type(value)]} of a binding")
    if not binding.name:
        raise InvalidRequest("the name of a binding's resource is empty")
    if binding.resource_type is AclResourceType.CLUSTER and binding.name != CLUSTER_NAME:
        raise InvalidRequest(
            f"the only resource of type CLUSTER is {CLUSTER_NAME}, not {binding.name}"
        )
    if ":" not in binding.principal:
        raise InvalidRequest(
            f"principal {binding.principal!r} has no type: write Type:name, as User:ada"
        )


_FIELDS: Final[Mapping[type[IntEnum], str]] = {
    AclResourceType: "resource type",
    PatternType: "pattern type",
    AclOperation: "operation",
    AclPermission: "permission",
}


def check_filter(wanted: AclFilter) -> None:
    """Raises InvalidRequest for a filter with a part that is not known."""
    for value in (wanted.resource_type, wanted.pattern, wanted.operation, wanted.permission):
        if not value:
            raise InvalidRequest(f"the {_FIELDS[type(value)]} of a filter is not known")


class AclCreations(Struct, frozen=True):
    """``results`` are those of the bindings asked for, in their order: None, or why not. ``added``
    are those that were not there yet.
    """

    results: tuple[InvalidRequest | None, ...]
    added: tuple[AclBinding, ...]


def create_acls(index: AclIndex, bindings: Sequence[AclBinding]) -> Steps[AclCreations]:
    """What creating ``bindings`` adds; what is there already is a success. Raises InvalidRequest
    for more than a request may create.
    """
    if len(bindings) > MAX_CHANGES:
        raise InvalidRequest(f"{len(bindings)} bindings; a request creates at most {MAX_CHANGES}")
    results: list[InvalidRequest | None] = []
    added: dict[AclBinding, None] = {}
    for binding in bindings:
        yield
        try:
            check_binding(binding)
        except InvalidRequest as error:
            results.append(error.without_frames())
            continue
        results.append(None)
        if binding not in index:
            added[binding] = None
    return AclCreations(tuple(results), tuple(added))


class AclDeletions(Struct, frozen=True):
    """``results`` are those of the filters, in their order: what each found, sorted, or why it was
    refused. ``removed`` are the ids of all that was found.
    """

    results: tuple[InvalidRequest | tuple[AclBinding, ...], ...]
    removed: tuple[UUID, ...]


def delete_acls(
    acls: Mapping[UUID, AclBinding], filters: Sequence[AclFilter]
) -> Steps[AclDeletions]:
    """What deleting by ``filters`` removes; two may find the same. Raises InvalidRequest for more
    than a request may delete, for more than :data:`MAX_SCANS` filters that may each find several,
    and for more than :data:`MAX_MATCHES` that they find together: then nothing is removed.
    """
    scans = sum(wanted.single_binding is None for wanted in filters)
    if scans > MAX_SCANS:
        raise InvalidRequest(
            f"{scans} filters that leave a part open; a request has at most {MAX_SCANS} of these"
        )
    results: list[InvalidRequest | tuple[AclBinding, ...]] = []
    removed: dict[UUID, None] = {}
    found = 0
    ids: dict[AclBinding, list[UUID]] = {}
    if any(wanted.single_binding for wanted in filters):
        for acl_id, binding in acls.items():
            yield
            ids.setdefault(binding, []).append(acl_id)
    for wanted in filters:
        yield
        try:
            check_filter(wanted)
        except InvalidRequest as error:
            results.append(error.without_frames())
            continue
        single = wanted.single_binding
        if single is not None:
            matching = {single: ids[single]} if single in ids else {}
        else:
            matching = {}
            for acl_id, each in acls.items():
                yield
                if wanted.matches(each):
                    matching.setdefault(each, []).append(acl_id)
                    if len(matching) > MAX_CHANGES:
                        break
        found += len(matching)
        if found > MAX_MATCHES:
            raise InvalidRequest(
                f"the filters find more than {MAX_MATCHES} bindings, which is what an answer "
                "names; what several of them find counts for each: use filters that find different "
                "ones"
            )
        removed.update(dict.fromkeys(chain.from_iterable(matching.values())))
        if len(removed) > MAX_CHANGES:
            raise InvalidRequest(
                f"the filters find more than {MAX_CHANGES} bindings, which is what a request may "
                "delete: delete them in parts, by resource or by principal"
            )
        results.append(tuple(sorted(matching)))
    return AclDeletions(tuple(results), tuple(removed))


def describe_acls(
    bindings: Iterable[AclBinding], wanted: AclFilter
) -> Steps[Mapping[tuple[AclResourceType, str, PatternType], Collection[AclBinding]]]:
    """The bindings that a filter finds, by what they name, in no order. Raises InvalidRequest for a
    filter with a part that is not known.
    """
    check_filter(wanted)
    resources: dict[tuple[AclResourceType, str, PatternType], dict[AclBinding, None]] = {}
    for binding in bindings:
        yield
        if wanted.matches(binding):
            key = (binding.resource_type, binding.name, binding.pattern)
            resources.setdefault(key, {})[binding] = None
    return resources
