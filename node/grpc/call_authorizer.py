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

from kept.cluster.controller.topics import MAX_TOPIC_NAME_LENGTH
from kept.cluster.security.acls import ANONYMOUS, AclOperation, AclResourceType
from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.grpc.callers import CALLER
from kept.node.grpc.status_codes import parsed
from kept.node.proto import broker_pb2
from kept.node.security.access import CLUSTER, NO_LOGIN, Known, Open
from kept.node.security.revocation import Revoked, run_while_allowed
from kept.storage.errors import InvalidRequest, InvariantViolation

# isort: split
import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2

if TYPE_CHECKING:
    from kept.node.grpc.callers import Callers
    from kept.node.kafka.listener import HandedOver
    from kept.node.security.session import Session


class OnTopic(Struct, frozen=True):
    """A question about the topic that a request of a kind names. Who may do ``cluster`` on the
    cluster is not asked.
    """

    operation: AclOperation
    kind: Any
    cluster: AclOperation | None = None

    def allows(self, session: Session, topic: str, *, api: str = "", audited: bool = True) -> bool:
        """Whether the call is served; ``audited``: the audit log learns of it, as of ``api``."""
        if self.cluster is not None and session.may(self.cluster, *CLUSTER, audited=False):
            return True
        return session.may(self.operation, AclResourceType.TOPIC, topic, audited=audited, api=api)


METHODS: Final[dict[str, Open | Known | OnTopic]] = {
    "/broker.Broker/CreateTopic": OnTopic(
        AclOperation.CREATE, broker_pb2.CreateTopicRequest, AclOperation.CREATE
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

    def __init__(self, callers: Callers) -> None:
        check_methods()
        self._callers = callers

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
            return await _while_allowed(serve(request, context), still_allowed, context)

        return guarded

    def _generator(self, serve: Any, access: Any, method: str) -> Any:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            _, still_allowed = await self._admit(access, method, request, context)
            messages = serve(request, context)
            while True:
                upcoming = anext(messages, None)
                message = await _while_allowed(upcoming, still_allowed, context)
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
            await _end(context, *_GONE)
        session = await self._session(caller, context)
        loop, logins = asyncio.get_running_loop(), caller.listener.context.logins

        def lasts() -> bool:
            return loop.time() < session.expires_at and not logins.is_revoked(session)

        if not lasts():
            await _end(context, *_login_wanted(caller))
        if session.is_unrestricted:
            return session, lasts
        if isinstance(access, Known):
            if session.principal == ANONYMOUS:
                await _end(context, *_login_wanted(caller))
            return session, lasts
        try:
            topic = parsed(access.kind, request).topic
        except InvalidRequest as error:
            await _end(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not access.allows(session, topic, api=method):
            shown = topic[:MAX_TOPIC_NAME_LENGTH]  # a status that is too long would not arrive
            what = f"{session.principal} may not {access.operation.name.lower()} topic {shown}"
            if session.principal == ANONYMOUS:
                status, how = _login_wanted(caller)
                await _end(context, status, f"{what}; {how}")
            await _end(context, grpc.StatusCode.PERMISSION_DENIED, what)
        return session, lambda: lasts() and access.allows(session, topic, audited=False)

    async def _session(self, caller: HandedOver, context: Any) -> Session:
        listener = caller.listener
        given = [value for key, value in context.invocation_metadata() if key == "authorization"]
        if not listener.asks_login and (not given or caller.session.is_unrestricted):
            return caller.session
        if not given:
            await _end(context, *_login_wanted(caller))
        session: Session | None = None
        if len(given) == 1:
            session = await listener.authenticate(caller.transport, str(given[0]).encode())
        if session is None:
            await _end(context, grpc.StatusCode.UNAUTHENTICATED, "who you are was not believed")
        return session


_GONE: Final = grpc.StatusCode.UNAUTHENTICATED, "the connection of this call is closed"
_TAKEN_AWAY: Final = grpc.StatusCode.PERMISSION_DENIED, "the right to do this was taken away"


def _login_wanted(caller: HandedOver) -> tuple[Any, str]:
    """What ends a call of somebody who has to say who he is."""
    schemes = " or ".join(caller.listener.http_schemes)
    how = f"log in: metadata authorization ({schemes})" if schemes else NO_LOGIN
    return grpc.StatusCode.UNAUTHENTICATED, how


async def _while_allowed(work: Awaitable[Any], still_allowed: Any, context: Any) -> Any:
    """What comes of a part of a call, which ends where it may not go on meanwhile."""
    try:
        return await run_while_allowed(work, still_allowed)
    except Revoked:
        await _end(context, *_TAKEN_AWAY)


async def _refuse(_request: Any, context: Any) -> None:
    await _end(context, grpc.StatusCode.PERMISSION_DENIED, "nothing says who may call this")


async def _end(context: Any, status: Any, message: str) -> NoReturn:
    await context.abort(status, message)
    raise InvariantViolation("abort came back")
