"""What is asked before a gRPC call is served, and who makes it.

The server sits behind a unix socket (``kept.node.grpc.splice``): each client's connection comes
from a name of its own there, by which gRPC tells it, and :class:`Callers` knows whose it is. A call
may carry a user and a password, or an access token, instead (metadata ``authorization``: Basic or
Bearer).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from grpc_health.v1 import health_pb2
from msgspec import Struct

from kept.cluster.security.acls import ANONYMOUS, AclOperation, AclResourceType
from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.grpc.callers import CALLER
from kept.node.grpc.status_codes import parsed
from kept.node.proto import broker_pb2
from kept.node.security.access import CLUSTER, Known, Open
from kept.storage.errors import InvalidRequest, InvariantViolation

# isort: split
import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2

if TYPE_CHECKING:
    from kept.node.grpc.callers import Callers
    from kept.node.kafka.listener import HandedOver
    from kept.node.security.audit import AuditLog
    from kept.node.security.session import Session

CHECK_S: Final = 1.0
"""How often it is asked anew whether a stream may go on."""


class OnTopic(Struct, frozen=True):
    """A question about the topic that a request of a kind names. Who may do ``cluster`` on the
    cluster is not asked.
    """

    operation: AclOperation
    kind: Any
    cluster: AclOperation | None = None
    is_change: bool = False
    """It changes metadata: the audit log has it."""

    def allows(self, session: Session, topic: str, *, api: str = "", audited: bool = True) -> bool:
        """Whether the call is served; ``audited``: the audit log learns of it, as of ``api``."""
        if self.cluster is not None and session.may(self.cluster, *CLUSTER, audited=False):
            return True
        return session.may(self.operation, AclResourceType.TOPIC, topic, audited=audited, api=api)


METHODS: Final[dict[str, Open | Known | OnTopic]] = {
    "/broker.Broker/CreateTopic": OnTopic(
        AclOperation.CREATE, broker_pb2.CreateTopicRequest, AclOperation.CREATE, is_change=True
    ),
    "/broker.Broker/Produce": OnTopic(AclOperation.WRITE, broker_pb2.ProduceRequest),
    "/broker.Broker/Consume": OnTopic(AclOperation.READ, broker_pb2.ConsumeRequest),
    "/grpc.health.v1.Health/Check": Open(),
    "/grpc.health.v1.Health/List": Open(),
    "/grpc.health.v1.Health/Watch": Open(),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Known(),
}
"""By full name; a method of these services without a row stops the start."""


def check_methods() -> None:
    """Raises InvariantViolation for a method of a service here without a row."""
    for file in (broker_pb2, health_pb2, reflection_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                name = f"/{service.full_name}/{method.name}"
                if name not in METHODS:
                    raise InvariantViolation(f"gRPC method {name}: nothing says who may call it")


class CallAuthorizer(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """See the module."""

    def __init__(self, callers: Callers, audit: AuditLog) -> None:
        check_methods()
        self._callers = callers
        self._audit = audit

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """The handler of a method, which is called once it was asked whether it may be."""
        handler = await continuation(details)
        if handler is None:
            return None
        access = METHODS.get(details.method)
        serve = handler.unary_unary or handler.unary_stream or handler.stream_stream
        if serve is None or access is None:
            return grpc.unary_unary_rpc_method_handler(_refuse)
        make: Any = grpc.stream_stream_rpc_method_handler
        if not handler.request_streaming:
            make = grpc.unary_unary_rpc_method_handler
            if handler.response_streaming:
                make = grpc.unary_stream_rpc_method_handler
        guarded: Any = self._generator(serve, access, details.method)
        if not inspect.isasyncgenfunction(serve):
            guarded = self._coroutine(serve, access, details.method)
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, serve: Any, access: Any, method: str) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            session, still_allowed = await self._admit(access, method, request, context)
            CALLER.set(session)
            call = asyncio.ensure_future(serve(request, context))
            try:
                while not (await asyncio.wait({call}, timeout=CHECK_S))[0]:
                    if not still_allowed():
                        await _end(context, *_TAKEN_AWAY)
                reply = await call
                if session is not None and isinstance(access, OnTopic) and access.is_change:
                    topic = parsed(access.kind, request).topic
                    self._audit.changed(session, method, [topic])
                return reply
            finally:
                call.cancel()

        return guarded

    def _generator(self, serve: Any, access: Any, method: str) -> Any:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            _, still_allowed = await self._admit(access, method, request, context)
            messages = serve(request, context)
            while True:
                upcoming = asyncio.ensure_future(anext(messages, None))
                try:
                    while not (await asyncio.wait({upcoming}, timeout=CHECK_S))[0]:
                        if not still_allowed():
                            await _end(context, *_TAKEN_AWAY)
                    message = await upcoming
                finally:
                    upcoming.cancel()
                if message is None:
                    return
                if not still_allowed():
                    await _end(context, *_TAKEN_AWAY)
                yield message

        return guarded

    async def _admit(
        self, access: Any, method: str, request: Any, context: Any
    ) -> tuple[Session | None, Callable[[], bool]]:
        """Let a call pass, or end it. Gives who calls (None: nobody was asked), and what says
        whether it may still go on.
        """
        if isinstance(access, Open):
            return None, lambda: True
        caller = self._callers.of(context.peer())
        if caller is None:
            await _end(context, *_LOG_IN)
        session = await self._session(caller, context)
        loop, logins = asyncio.get_running_loop(), caller.listener.context.logins

        def lasts() -> bool:
            return loop.time() < session.expires_at and not logins.is_revoked(session)

        if not lasts():
            await _end(context, *_LOG_IN)
        if session.is_unrestricted:
            return session, lasts
        if isinstance(access, Known):
            if session.principal == ANONYMOUS:
                await _end(context, *_LOG_IN)
            return session, lasts
        try:
            topic = parsed(access.kind, request).topic
        except InvalidRequest as error:
            await _end(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not access.allows(session, topic, api=method):
            what = f"{session.principal} may not {access.operation.name.lower()} topic {topic}"
            if session.principal == ANONYMOUS:
                await _end(context, grpc.StatusCode.UNAUTHENTICATED, f"{what}; {_LOG_IN[1]}")
            await _end(context, grpc.StatusCode.PERMISSION_DENIED, what)
        return session, lambda: lasts() and access.allows(session, topic, audited=False)

    async def _session(self, caller: HandedOver, context: Any) -> Session:
        listener = caller.listener
        given = [value for key, value in context.invocation_metadata() if key == "authorization"]
        if not listener.asks_login and (not given or caller.session.is_unrestricted):
            return caller.session
        session: Session | None = None
        if len(given) == 1:
            session = await listener.authenticate(caller.transport, str(given[0]).encode())
        if session is None:
            await _end(context, grpc.StatusCode.UNAUTHENTICATED, "who you are was not believed")
        return session


_LOG_IN: Final = grpc.StatusCode.UNAUTHENTICATED, "log in: metadata authorization"
_TAKEN_AWAY: Final = grpc.StatusCode.PERMISSION_DENIED, "the right to do this was taken away"


async def _refuse(_request: Any, context: Any) -> None:
    await _end(context, grpc.StatusCode.PERMISSION_DENIED, "nothing says who may call this")


async def _end(context: Any, status: Any, message: str) -> NoReturn:
    await context.abort(status, message)
    raise InvariantViolation("abort came back")
