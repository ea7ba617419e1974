"""DescribeAcls, CreateAcls and DeleteAcls; without an authorizer they answer SECURITY_DISABLED."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import LazyArray, Values
from kept.cluster.controller import acl_changes
from kept.cluster.controller.acl_changes import AclFilter, enum_member
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import AclRecord, RemoveAclRecord
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.runtime.error_codes import error_values
from kept.node.runtime.ids import new_id
from kept.node.runtime.time_slices import Pace
from kept.steps import Steps
from kept.storage.errors import InvalidRequest, SecurityDisabled, UnsupportedVersion

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import Decided, MetadataChanges
    from kept.node.metadata.metadata_log import MetadataLog

REFUSED: Final = (InvalidRequest, UnsupportedVersion, SecurityDisabled)
"""What a whole request is refused with."""


@dataclass(frozen=True, slots=True)
class AclsHandler:
    """Who may do what: the bindings, new ones, and none any more."""

    config: LiveConfig
    metadata: MetadataLog
    metadata_changes: MetadataChanges

    def _check_authorizer(self, where: str = "") -> None:
        if not self.config.current.authorizer_class_name:
            raise SecurityDisabled(f"No Authorizer is configured{where}")

    def describe_acls(self, _ctx: RequestContext, request: Any) -> Steps[Values]:
        """DescribeAcls v1-3: the bindings that a filter finds, by what they name."""
        try:
            self._check_authorizer(" on the broker")
            bindings = self.metadata.image.acls.values()
            found = yield from acl_changes.describe_acls(bindings, _filter(request))
        except REFUSED as error:
            return {**error_values(error), "resources": ()}
        resources = []
        for (resource_type, name, pattern), described in found.items():
            entries = []
            for binding in described:
                yield
                entries.append(_entry(binding))
            resources.append(
                {
                    "resource_type": resource_type,
                    "resource_name": name,
                    "pattern_type": pattern,
                    "acls": entries,
                }
            )
        return {"error_code": 0, "error_message": "", "resources": resources}

    async def create_acls(self, _ctx: RequestContext, request: Any) -> Values:
        """CreateAcls v1-3: each binding is created, is there already, or is refused by itself."""
        pace = Pace()
        bindings = []
        for asked in request.creations:
            bindings.append(_binding(asked))
            await pace.checkpoint()

        def decision(image: Image) -> Steps[Decided[Sequence[InvalidRequest | None]]]:
            self.metadata_changes.check_security(image)
            created = yield from acl_changes.create_acls(image.acl_index, bindings)
            records = []
            for binding in created.added:
                yield
                records.append(AclRecord(new_id(), binding))
            return created.results, records

        try:
            self._check_authorizer(".")
            results = await self.metadata_changes.decide(decision)
        except REFUSED as error:
            return {"results": [error_values(error) for _ in bindings]}
        return {
            "results": [
                {"error_code": 0, "error_message": ""} if error is None else error_values(error)
                for error in results
            ]
        }

    async def delete_acls(self, _ctx: RequestContext, request: Any) -> Values:
        """DeleteAcls v1-3: removes what filters find, and says what that was."""
        pace = Pace()
        filters = []
        for asked in request.filters:
            filters.append(_filter(asked))
            await pace.checkpoint()

        def decision(
            image: Image,
        ) -> Steps[Decided[Sequence[InvalidRequest | Sequence[AclBinding]]]]:
            self.metadata_changes.check_security(image)
            deleted = yield from acl_changes.delete_acls(image.acls, filters)
            return deleted.results, [RemoveAclRecord(acl_id) for acl_id in deleted.removed]

        try:
            self._check_authorizer(".")
            results = await self.metadata_changes.decide(decision)
        except REFUSED as error:
            refused = {**error_values(error), "matching_acls": ()}
            return {"filter_results": [refused for _ in filters]}
        answers = []
        for result in results:
            await pace.checkpoint()
            if isinstance(result, InvalidRequest):
                answers.append({**error_values(result), "matching_acls": ()})
                continue
            answers.append({**error_values(None), "matching_acls": LazyArray(result, _matching)})
        return {"filter_results": answers}


def _binding(asked: Any) -> AclBinding:
    return AclBinding(
        enum_member(AclResourceType, asked.resource_type),
        asked.resource_name,
        enum_member(PatternType, asked.resource_pattern_type),
        asked.principal,
        asked.host,
        enum_member(AclOperation, asked.operation),
        enum_member(AclPermission, asked.permission_type),
    )


def _filter(asked: Any) -> AclFilter:
    return AclFilter(
        enum_member(AclResourceType, asked.resource_type_filter),
        asked.resource_name_filter,
        enum_member(PatternType, asked.pattern_type_filter),
        asked.principal_filter,
        asked.host_filter,
        enum_member(AclOperation, asked.operation),
        enum_member(AclPermission, asked.permission_type),
    )


def _matching(binding: AclBinding) -> Values:
    return {**error_values(None), **_resource(binding)}


def _entry(binding: AclBinding) -> dict[str, Any]:
    return {
        "principal": binding.principal,
        "host": binding.host,
        "operation": binding.operation,
        "permission_type": binding.permission,
    }


def _resource(binding: AclBinding) -> dict[str, Any]:
    return {
        "resource_type": binding.resource_type,
        "resource_name": binding.name,
        "pattern_type": binding.pattern,
        **_entry(binding),
    }
