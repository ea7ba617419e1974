"""The handlers of this node's APIs, built at their first request from its collaborators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.client.protocol import messages as protocol
from kept.cluster.security.acls import ANONYMOUS
from kept.node.internode import controller_rpc
from kept.node.kafka import api, audited_changes, request_authorizer
from kept.node.security.session import Session, node_session
from kept.storage.errors import NotController, UnsupportedVersion

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.controller.controller import Controller
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.producer_ids import ProducerIds
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.coordinator.transactions.marker_writer import MarkerWriter
    from kept.node.coordinator.transactions.verifier import Verifier
    from kept.node.kafka.fetch_sessions import FetchSessions
    from kept.node.kafka.forwarding_manager import ForwardingManager
    from kept.node.kafka.metadata_changes import MetadataChanges
    from kept.node.kafka.topic_creation import TopicCreation
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.cluster_link import ClusterLink
    from kept.node.metadata.failure_detector import FailureDetector
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.audit import AuditLog
    from kept.node.security.client_quotas import ClientQuotas
    from kept.node.security.logins import Logins
    from kept.node.security.session import Authorizer

Handler = Callable[[api.RequestContext, Any], api.HandlerResult]


@dataclass(frozen=True, slots=True)
class Collaborators:
    """What handlers may name in their constructors; each gets those that it names."""

    runtime: Runtime
    config: LiveConfig
    open_files: OpenFiles
    metadata: MetadataLog
    addresses: AddressBook
    cluster_link: ClusterLink
    barrier: LeadershipBarrier
    detector: FailureDetector
    controller: Controller
    table: ReplicaTable
    fetch_sessions: FetchSessions
    groups: GroupCoordinator
    transactions: TransactionCoordinator
    marker_writer: MarkerWriter
    verifier: Verifier
    producer_ids: ProducerIds
    metadata_changes: MetadataChanges
    topics: TopicCreation
    counters: Counters
    logins: Logins
    quotas: ClientQuotas
    inflating: BudgetShare


class RequestHandlers:
    """Serves the requests of every API but Produce, Fetch and ApiVersions."""

    def __init__(
        self,
        collaborators: Collaborators,
        forwarding: ForwardingManager,
        authorizer: Authorizer,
        audit: AuditLog,
    ) -> None:
        self._audit = audit
        self._collaborators = collaborators
        self._authorizer = authorizer
        self._forwarding = forwarding
        self._handlers: dict[int, Handler] = {}

    def _handler(self, served: api.Api) -> Handler:
        """The method that serves an API: only :meth:`_serve` calls it."""
        key = served.key
        handler = self._handlers.get(key)
        if handler is None:
            cls = api.handler_class(served)
            names = inspect.signature(cls).parameters
            made = cls(**{name: getattr(self._collaborators, name) for name in names})
            handler = self._handlers[key] = getattr(made, served.name)
        return handler

    def handle(
        self, context: api.RequestContext, body: memoryview, request: Any
    ) -> api.HandlerResult:
        """Serve a client's request, here or at the active controller. ``body`` is the request's."""
        if context.api_key in api.FORWARDED and not self._collaborators.config.current.alone:
            return self._forwarding.respond(context, bytes(body), request)
        return self._serve(context, request)

    def _serve(self, context: api.RequestContext, request: Any) -> api.HandlerResult:
        served = api.served()[context.api_key]
        image = self._collaborators.metadata.image
        answer = request_authorizer.serve(served, context, request, self._handler(served), image)
        if not self._audit.is_on:
            return answer
        return audited_changes.recorded(self._audit, context, request, answer)

    async def complete(self, context: api.RequestContext, request: Any) -> Any:
        """The values of the response to a request that is served here. Raises TypeError where its
        handler gives none.
        """
        answer: Any = self._serve(context, request)
        while not isinstance(answer, dict):
            if isinstance(answer, Generator):
                answer = await self._collaborators.runtime.slices.finish(answer)
            else:
                answer = await answer
        return answer

    async def serve_forwarded(
        self, request: controller_rpc.ForwardRequest
    ) -> controller_rpc.ForwardReply:
        """Serve what another node sent on, as the active controller. Raises NotController, and
        UnsupportedVersion for a request that nodes do not send on.
        """
        metadata, config = self._collaborators.metadata, self._collaborators.config.current
        if not metadata.leads:
            raise NotController(f"node {config.node_id} is not the active controller")
        key, version = request.api_key, request.version
        served = api.served().get(key) if key in api.FORWARDED else None
        if served is None or not served.min_version <= version <= served.max_version:
            raise UnsupportedVersion(f"API {key} v{version} is not sent on to the controller")
        session = node_session(request.listener)
        if not request.by_node:
            session = Session(
                request.principal or ANONYMOUS,
                request.client_host,
                request.listener,
                request.mechanism,
                authorizer=self._authorizer,
            )
        context = api.RequestContext(key, version, request.client_id, session, request.tries)
        limit = config.request_max_entries
        message = protocol.decode_request(key, version, request.body, 0, limit)
        values = await self.complete(context, message)
        steps = protocol.body_steps(key, version, values)
        body = await self._collaborators.runtime.slices.finish(steps)
        return controller_rpc.ForwardReply(body, metadata.image.index)
