"""DescribeGroups, ListGroups, DeleteGroups."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.client.protocol.messages import LazyArray, Values
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.coordinator.common.shard import coordinator_error
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.group import DEAD_STATE
from kept.node.kafka.handlers.groups.group_requests import HandlerResult
from kept.node.runtime.error_codes import shortened
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kept.node.coordinator.common.shard import MakeEvent, Shard
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.groups.core import GroupCore
    from kept.node.kafka.api import RequestContext
    from kept.steps import Steps

GROUPS_PER_DELETION: Final = 100
"""Groups that one event of a shard deletes, at a stretch."""
NOT_FOUND_FROM: Final = 6
"""DescribeGroups says GROUP_ID_NOT_FOUND from this version on; before, the group is Dead."""


@dataclass(frozen=True, slots=True)
class DescribeGroupsHandler:
    """Groups as a whole."""

    groups: GroupCoordinator

    def describe_groups(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """Groups with their members."""
        with_operations = getattr(request, "include_authorized_operations", False)

        def described(group_id: str) -> dict[str, Any]:
            return self._describe(ctx, group_id, with_operations)

        # What is named twice is answered once: else a small request has an answer without bound.
        return {"groups": LazyArray(tuple(dict.fromkeys(request.groups)), described)}

    def _describe(
        self, ctx: RequestContext, group_id: str, with_operations: bool
    ) -> dict[str, Any]:
        error, message = ev.NO_ERROR, None
        try:
            group = self.groups.describe(group_id)
        except KeptError as refusal:
            error, message = coordinator_error(refusal), shortened(str(refusal))
            group = ev.DescribedGroup(group_id, "")
        if group.state == DEAD_STATE and ctx.api_version >= NOT_FOUND_FROM:
            error, message = ErrorCode.group_id_not_found, shortened(f"Group {group_id} not found.")
        answer: dict[str, Any] = {
            "error_code": error,
            "error_message": message,
            "group_id": group_id,
            "group_state": group.state,
            "protocol_type": group.protocol_type,
            "protocol_data": group.protocol,
            "members": LazyArray(group.members, _member),
        }
        if with_operations and error is ev.NO_ERROR:
            operations = ctx.session.operations(AclResourceType.GROUP, group_id)
            answer["authorized_operations"] = operations
        return answer

    def list_groups(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """All groups of this node, or those in some states and of some types; of those who may not
        describe the cluster those that they may describe.
        """
        states = yield from _in_lower_case(getattr(request, "states_filter", ()))
        types = yield from _in_lower_case(getattr(request, "types_filter", ()))
        try:
            listed = yield from self.groups.list_groups(states, types)
        except KeptError as refusal:
            return {"error_code": coordinator_error(refusal), "groups": ()}
        visible = yield from ctx.permitted(
            AclOperation.DESCRIBE,
            AclResourceType.GROUP,
            (g.group for g in listed),
            cluster=AclOperation.DESCRIBE,
        )
        shown = []
        for g in listed:
            yield
            if g.group in visible:
                shown.append(g)
        return {"error_code": ev.NO_ERROR, "groups": LazyArray(shown, _listed)}

    def delete_groups(self, _ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Delete groups that have no members, with their offsets."""
        by_shard: dict[Shard[GroupCore], list[str]] = {}
        refused: list[tuple[str, ErrorCode]] = []
        for group in dict.fromkeys(request.groups_names):
            yield
            try:
                by_shard.setdefault(self.groups.shards.shard(group), []).append(group)
            except KeptError as refusal:
                refused.append((group, coordinator_error(refusal)))
        results = []
        for shard, groups in by_shard.items():
            for begin in range(0, len(groups), GROUPS_PER_DELETION):
                part = tuple(groups[begin : begin + GROUPS_PER_DELETION])
                try:
                    results.append(shard.submit(_deletion(part)))
                except KeptError as refusal:  # another node leads its partition by now
                    refused += [(group, coordinator_error(refusal)) for group in part]
                yield
        if all(result.done() for result in results):
            done = [result.result() for result in results]
            return _deleted(refused, done)
        return asyncio.ensure_future(_gathered(refused, results))


def _in_lower_case(names: Iterable[str]) -> Steps[set[str]]:
    found = set()
    for name in names:  # each may be of 32 KiB, 16 MiB in all
        yield
        found.add(name.strip().lower())
    return found


def _member(m: ev.DescribedMember) -> Values:
    return {
        "member_id": m.member,
        "group_instance_id": m.group_instance_id,
        "client_id": m.client_id,
        "client_host": m.client_host,
        "member_metadata": m.metadata,
        "member_assignment": m.assignment,
    }


def _listed(g: ev.ListedGroup) -> Values:
    return {
        "group_id": g.group,
        "protocol_type": g.protocol_type,
        "group_state": g.state,
        "group_type": g.group_type,
    }


def _deletion(groups: tuple[str, ...]) -> MakeEvent:
    return lambda number: ev.DeleteGroups(number, groups)


async def _gathered(
    refused: list[tuple[str, ErrorCode]], results: list[asyncio.Future[ev.DeleteGroupsResult]]
) -> dict[str, Any]:
    return _deleted(refused, [await result for result in results])


def _deleted(
    refused: list[tuple[str, ErrorCode]], results: list[ev.DeleteGroupsResult]
) -> dict[str, Any]:
    outcomes = refused + [outcome for result in results for outcome in result.groups]
    return {"results": [{"group_id": g, "error_code": code} for g, code in outcomes]}
