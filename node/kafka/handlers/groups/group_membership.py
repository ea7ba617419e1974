"""FindCoordinator, JoinGroup, SyncGroup, Heartbeat, LeaveGroup: taking requests apart and
answering.

``kept.node.coordinator.groups`` decides. FindCoordinator creates ``__consumer_offsets``, or for
transactional ids ``__transaction_state``, on first use and answers when it is served (Kafka answers
COORDINATOR_NOT_AVAILABLE meanwhile, and clients log it).
"""

from __future__ import annotations

import uuid
from collections.abc import Container, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.client.protocol.messages import Values, milliseconds
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.coordinator.groups import events as ev
from kept.node.kafka.handlers.groups.group_requests import HandlerResult, submit
from kept.node.runtime.error_codes import shortened
from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import Pace
from kept.node.security.access import AUTHORIZATION_MESSAGES
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.topic_creation import TopicCreation
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.steps import Steps

KEY_TYPE_GROUP: Final = 0
KEY_TYPE_TRANSACTION: Final = 1
BATCHED_FROM: Final = 4
"""FindCoordinator asks for several keys from this version on."""
NO_NODE: Final = {"node_id": -1, "host": "", "port": -1}

_REFUSALS: Final = {
    # librdkafka asks again after INVALID_REQUEST until its timeout; at this code all clients stop.
    KEY_TYPE_TRANSACTION: (
        ErrorCode.transactional_id_authorization_failed,
        "transactions are not served: not every node of this cluster runs a version that does, or "
        "some registered node has not been seen since the upgrade",
    ),
    2: (
        ErrorCode.invalid_request,
        "this node has no share coordinator: share groups are not served",
    ),
}


@dataclass(frozen=True, slots=True)
class GroupMembershipHandler:
    """Members of groups and their coordinators."""

    config: LiveConfig
    metadata: MetadataLog
    addresses: AddressBook
    groups: GroupCoordinator
    transactions: TransactionCoordinator
    topics: TopicCreation

    def find_coordinator(
        self, ctx: RequestContext, request: Any
    ) -> Steps[Coroutine[Any, Any, Values]]:
        """Which node coordinates a group or a transactional id, or each of several."""
        key_type = getattr(request, "key_type", KEY_TYPE_GROUP)
        keys = request.coordinator_keys if ctx.api_version >= BATCHED_FROM else (request.key,)
        resource_type = AclResourceType.GROUP
        if key_type == KEY_TYPE_TRANSACTION:
            resource_type = AclResourceType.TRANSACTIONAL_ID
        visible = yield from ctx.permitted(AclOperation.DESCRIBE, resource_type, keys, audited=True)
        return self._coordinators(ctx, key_type, keys, visible)

    async def _coordinators(
        self, ctx: RequestContext, key_type: int, keys: Sequence[str], visible: Container[object]
    ) -> dict[str, Any]:
        coordinates: GroupCoordinator | TransactionCoordinator = self.groups
        batched, forbidden = ctx.api_version >= BATCHED_FROM, ErrorCode.group_authorization_failed
        if key_type == KEY_TYPE_TRANSACTION:
            coordinates = self.transactions
            forbidden = ErrorCode.transactional_id_authorization_failed
        if key_type != KEY_TYPE_GROUP and not (
            key_type == KEY_TYPE_TRANSACTION and self.transactions.is_served
        ):
            unknown = f"key type {key_type} does not exist; 0 is a group's"
            code, why = _REFUSALS.get(key_type, (ErrorCode.invalid_request, unknown))
            coordinators = [(code, why, NO_NODE)] * len(keys)
        else:
            permitted = [key for key in keys if key in visible]
            if permitted:
                await self._ensure_topic(coordinates.topic)
                await coordinates.shards.wait_for(permitted)
            coordinators, pace = [], Pace()
            refused = forbidden, "" if batched else AUTHORIZATION_MESSAGES[forbidden], NO_NODE
            for key in keys:
                shown = key in visible
                coordinators.append(self._coordinator(ctx, coordinates, key) if shown else refused)
                await pace.checkpoint()
        if batched:
            return {
                "coordinators": [
                    {"key": key, "error_code": code, "error_message": message, **node}
                    for key, (code, message, node) in zip(keys, coordinators, strict=True)
                ]
            }
        code, message, node = coordinators[0]
        # Up to v3 Kafka answers the name of "no error" where there is none.
        return {"error_code": code, "error_message": message or "NONE", **node}

    async def _ensure_topic(self, name: str) -> None:
        if name in self.metadata.image.topics:
            return
        try:
            await self.topics.create_internal(name)
        except KeptError as error:
            log.error("topic not created", topic=name, error=str(error))

    def _coordinator(
        self,
        ctx: RequestContext,
        coordinates: GroupCoordinator | TransactionCoordinator,
        key: str,
    ) -> tuple[ErrorCode, str, dict[str, Any]]:
        leader = coordinates.shards.leader_of(key)
        endpoint = None if leader is None else self.addresses.broker(leader, ctx.session.listener)
        if leader is None or endpoint is None:
            why = f"{coordinates.topic} has no leader for {key!r}"
            return ErrorCode.coordinator_not_available, shortened(why), NO_NODE
        host, port = endpoint
        return ev.NO_ERROR, "", {"node_id": leader, "host": host, "port": port}

    def join_group(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """Become, or stay, a member; answered when the generation begins."""
        version = ctx.api_version
        config = self.config.current
        session_ms = milliseconds(request.session_timeout)
        # v0 has no rebalance timeout: the session's counts.
        rebalance_ms = milliseconds(request.rebalance_timeout) if version >= 1 else session_ms

        def answer(result: ev.JoinResult) -> dict[str, Any]:
            return _joined(result, version)

        def refuse(error: ErrorCode) -> dict[str, Any]:
            return answer(ev.JoinResult(error, request.member_id))

        longest, shortest = config.group_max_session_timeout_ms, config.group_min_session_timeout_ms
        if request.group_id and not shortest <= session_ms <= longest:
            return refuse(ErrorCode.invalid_session_timeout)
        instance = getattr(request, "group_instance_id", None)
        protocols = tuple((p.name, bytes(p.metadata)) for p in request.protocols)
        groups = self.groups

        def event(number: int) -> ev.Join:
            return ev.Join(
                number,
                request.group_id,
                request.member_id,
                ctx.client_id or "",
                f"/{ctx.session.host}",
                session_ms,
                rebalance_ms,
                request.protocol_type,
                protocols,
                str(uuid.uuid4()),
                instance,
                requires_known_member_id=version >= 4,
                supports_skipping_assignment=version >= 9,
            )

        def given_up(result: Any) -> None:
            groups.join_abandoned(request.group_id, result)

        return submit(
            self.groups.shards, ctx, request.group_id, event, answer, refuse, given_up=given_up
        )

    def sync_group(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """Assign partitions (the leader), or wait for one's part; it is in the log then."""
        protocol_type = getattr(request, "protocol_type", None)
        protocol = getattr(request, "protocol_name", None)

        def refuse(error: ErrorCode) -> dict[str, Any]:
            return _synced(ev.SyncResult(error))

        if ctx.api_version >= 5 and (protocol_type is None or protocol is None):
            return refuse(ErrorCode.inconsistent_group_protocol)
        assignments = tuple((a.member_id, bytes(a.assignment)) for a in request.assignments)

        def event(number: int) -> ev.Sync:
            return ev.Sync(
                number,
                request.group_id,
                request.member_id,
                request.generation_id,
                assignments,
                getattr(request, "group_instance_id", None),
                protocol_type,
                protocol,
            )

        return submit(self.groups.shards, ctx, request.group_id, event, _synced, refuse)

    def heartbeat(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """Stay a member; the error says when to rejoin."""

        def event(number: int) -> ev.Heartbeat:
            return ev.Heartbeat(
                number,
                request.group_id,
                request.member_id,
                request.generation_id,
                getattr(request, "group_instance_id", None),
            )

        def refuse(error: ErrorCode) -> dict[str, Any]:
            # While the group is being read its members are as good as alive.
            loading = error is ErrorCode.coordinator_load_in_progress
            return {"error_code": ev.NO_ERROR if loading else error}

        return submit(
            self.groups.shards,
            ctx,
            request.group_id,
            event,
            lambda r: {"error_code": r.error},
            refuse,
        )

    def leave_group(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """Leave, alone (up to v2) or several at once, also by instance id."""
        batched = ctx.api_version >= 3
        if batched:
            members = tuple((m.member_id, m.group_instance_id) for m in request.members)
        else:
            members = ((request.member_id, None),)

        def answer(result: ev.LeaveResult) -> dict[str, Any]:
            error = result.error
            if not batched and error is ev.NO_ERROR and len(result.members) == 1:
                error = result.members[0][2]
            return {
                "error_code": error,
                "members": [
                    {"member_id": member, "group_instance_id": instance, "error_code": code}
                    for member, instance, code in result.members
                ],
            }

        def event(number: int) -> ev.Leave:
            return ev.Leave(number, request.group_id, members)

        return submit(
            self.groups.shards,
            ctx,
            request.group_id,
            event,
            answer,
            lambda error: answer(ev.LeaveResult(error)),
        )


def _joined(result: ev.JoinResult, version: int) -> dict[str, Any]:
    return {
        "error_code": result.error,
        "generation_id": result.generation,
        "protocol_type": result.protocol_type,
        # Null is possible from v7 on.
        "protocol_name": result.protocol or (None if version >= 7 else ""),
        "leader": result.leader,
        "skip_assignment": result.skip_assignment,
        "member_id": result.member,
        "members": [
            {
                "member_id": member.member,
                "group_instance_id": member.group_instance_id,
                "metadata": member.metadata,
            }
            for member in result.members
        ],
    }


def _synced(result: ev.SyncResult) -> dict[str, Any]:
    return {
        "error_code": result.error,
        "protocol_type": result.protocol_type,
        "protocol_name": result.protocol,
        "assignment": result.assignment,
    }
