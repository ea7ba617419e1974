"""What is asked before a gRPC call is served, who makes it, and for how long it has a place.

The server sits behind a unix socket (``kept.node.grpc.splice``): each client's connection comes
from a name of its own there, by which gRPC tells it, and :class:`Callers` knows whose it is. A call
may carry a user and a password, or an access token, instead (metadata ``authorization``: Basic or
Bearer). A login comes first, then the request is read: one that was announced and does not come
ends its call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from msgspec import Struct

from kept.cluster.controller.topics import MAX_TOPIC_NAME_LENGTH
from kept.cluster.security.acls import ANONYMOUS, AclOperation, AclResourceType
from kept.node.config.security_checks import is_secured
from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.grpc.callers import CALLER, Evicted
from kept.node.grpc.status_codes import end_with, parsed, shortened
from kept.node.proto import broker_pb2
from kept.node.security.access import CLUSTER, NO_LOGIN, PermitAll, RequireLogin
from kept.node.security.password_checks import TooManyLogins
from kept.node.security.revocation import Revoked, run_while_allowed
from kept.storage.errors import InvalidRequest, InvariantViolation

# isort: split
import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.grpc.callers import Call, Callers
    from kept.node.kafka.listener import HandedOver
    from kept.node.security.session import Session


class AuthorizeTopic(Struct, frozen=True):
    """A check of the operation on the topic that a request of a kind names. Who may do ``cluster``
    on the cluster is served, too.
    """

    operation: AclOperation
    kind: Any
    cluster: AclOperation | None = None

    def allows(self, session: Session, topic: str, *, api: str = "", audited: bool = True) -> bool:
        """Whether the call is served; ``audited``: the audit log learns of it, as of ``api``."""
        if self.cluster is not None and session.may(self.cluster, *CLUSTER, audited=False):
            return True
        return session.may(self.operation, AclResourceType.TOPIC, topic, audited=audited, api=api)


METHODS: Final[dict[str, PermitAll | RequireLogin | AuthorizeTopic]] = {
    "/broker.Broker/CreateTopic": AuthorizeTopic(
        AclOperation.CREATE, broker_pb2.CreateTopicRequest, AclOperation.CREATE
    ),
    "/broker.Broker/Produce": AuthorizeTopic(AclOperation.WRITE, broker_pb2.ProduceRequest),
    "/broker.Broker/Consume": AuthorizeTopic(AclOperation.READ, broker_pb2.ConsumeRequest),
    "/grpc.health.v1.Health/Check": PermitAll(),
    "/grpc.health.v1.Health/List": PermitAll(),
    "/grpc.health.v1.Health/Watch": PermitAll(),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": RequireLogin(),
}
"""By full name; a method of these services without a row stops the start."""


def check_methods() -> None:
    """Raises InvariantViolation for a method of a service here without a row, and for one whose row
    asks about the topic of its request while it has a stream of them.
    """
    for file in (broker_pb2, health_pb2, reflection_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                _check_method(f"/{service.full_name}/{method.name}", method.client_streaming)


def _check_method(name: str, client_streaming: bool) -> None:
    if name not in METHODS:
        raise InvariantViolation(f"gRPC method {name}: nothing says who may call it")
    if client_streaming and isinstance(METHODS[name], AuthorizeTopic):
        raise InvariantViolation(
            f"gRPC method {name}: only the first of its requests would be asked about"
        )


class CallAuthorizer(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Authenticates and authorizes each gRPC call before it is served."""

    def __init__(self, callers: Callers, config: LiveConfig) -> None:
        check_methods()
        self._callers = callers
        self._config = config

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """The handler of a method, which is called once it was asked whether it may be. Requests
        are read by it, as of a stream: gRPC would wait for one without end, and ask nobody before.
        """
        handler = await continuation(details)
        if handler is None:
            return None
        access = METHODS.get(details.method)
        serve = handler.unary_unary or handler.unary_stream or handler.stream_stream
        if serve is None or access is None:
            return grpc.stream_unary_rpc_method_handler(_refuse)
        make: Any = grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler

        method = _Method(details.method, access, handler, serve)

        async def guarded(_requests: Any, context: Any) -> Any:
            return await self._in_its_place(method, context)

        return make(guarded, None, handler.response_serializer)

    async def _in_its_place(self, method: _Method, context: Any) -> Any:
        caller = self._callers.of(context.peer())
        if caller is None:
            await _end(context, *_GONE)
        call = self._callers.begin(caller)
        if call is None:
            limit = self._config.current.grpc_max_requests
            why = f"{limit} calls are under way, which is kept.grpc.max.requests"
            await _end(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        context.add_done_callback(lambda _: self._callers.end(call))
        try:
            return await call.run(self._serve(method, call, context))
        except Evicted:
            if not context.done():
                await _end(context, *_EVICTED)
        finally:
            self._callers.served(call)

    async def _serve(self, method: _Method, call: Call, context: Any) -> Any:
        """The response of a call, or None where they are a stream, which is written."""
        request = _Request(method, context)
        session, still_allowed = await self._admit(method, request, call, context)
        await request.receive(self._patience_s(call))
        self._callers.serve(call)
        CALLER.set(session)
        served = method.serve(await request.message(), context)
        if not inspect.isasyncgen(served):
            return await _while_allowed(served, still_allowed, context)
        while True:
            message = await _while_allowed(anext(served, None), still_allowed, context)
            if message is None:
                return None
            if not still_allowed():
                await _end(context, *_TAKEN_AWAY)
            await _while_allowed(context.write(message), still_allowed, context)

    def _patience_s(self, call: Call) -> float:
        """How long a request may take to come in: as long as a stranger may be silent where others
        log in, else as one of a Kafka client.
        """
        config = self._config.current
        is_stranger = not call.has_login and is_secured(config)
        return (config.silent_ms if is_stranger else config.request_receive_ms) / 1000

    async def _admit(
        self, method: _Method, request: _Request, call: Call, context: Any
    ) -> tuple[Session | None, Callable[[], bool]]:
        """Let a call pass, or end it. Gives who calls (None: nobody was asked), and what says
        whether it may still go on.
        """
        access, caller = method.access, call.caller.connection
        if isinstance(access, PermitAll):
            return None, lambda: True
        session = await self._session(call, context)
        loop, logins = asyncio.get_running_loop(), caller.listener.context.logins

        def lasts() -> bool:
            return loop.time() < session.expires_at and not logins.is_revoked(session)

        if not lasts():
            await _end(context, *_login_wanted(caller))
        self._callers.logged_in(call, session)
        if session.is_unrestricted:
            return session, lasts
        if isinstance(access, RequireLogin):
            if session.principal == ANONYMOUS:
                await _end(context, *_login_wanted(caller))
            return session, lasts
        data = await request.receive(self._patience_s(call))
        try:
            topic = parsed(access.kind, data).topic
        except InvalidRequest as error:
            await _end(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not access.allows(session, topic, api=method.name):
            shown = topic[:MAX_TOPIC_NAME_LENGTH]  # so that what follows it arrives
            what = f"{session.principal} may not {access.operation.name.lower()} topic {shown}"
            if session.principal == ANONYMOUS:
                status, how = _login_wanted(caller)
                await _end(context, status, f"{what}; {how}")
            await _end(context, grpc.StatusCode.PERMISSION_DENIED, what)
        return session, lambda: lasts() and access.allows(session, topic, audited=False)

    async def _session(self, call: Call, context: Any) -> Session:
        caller = call.caller.connection
        listener = caller.listener
        given = [value for key, value in context.invocation_metadata() if key == "authorization"]
        if not listener.asks_login and (not given or caller.session.is_unrestricted):
            return caller.session
        if not given:
            await _end(context, *_login_wanted(caller))
        session: Session | None = None
        if len(given) == 1:
            self._callers.check(call)
            login = str(given[0]).encode()
            try:
                session = await listener.authenticate(
                    caller.transport, login, lambda: self._callers.refused(call)
                )
            except TooManyLogins as error:
                await end_with(context, error)
        if session is None:
            await _end(context, grpc.StatusCode.UNAUTHENTICATED, "who you are was not believed")
        return session


class _Method(NamedTuple):
    """What is called: its full name, what is asked before, gRPC's handler of it, and what serves
    it.
    """

    name: str
    access: PermitAll | RequireLogin | AuthorizeTopic
    handler: Any
    serve: Any


class _Request:
    """The request of a call: its first, where they are a stream."""

    def __init__(self, method: _Method, context: Any) -> None:
        self._method = method
        self._context = context
        self._data: bytes | None = None

    async def receive(self, patience_s: float) -> bytes:
        """Its bytes, at most ``patience_s`` from now on; ends a call that sends none."""
        if self._data is None:
            # Not cancelled: bytes that came nevertheless would never be given back.
            reading = asyncio.ensure_future(self._context.read())
            reading.add_done_callback(_retrieve)
            await asyncio.wait({reading}, timeout=patience_s)
            if not reading.done():
                why = f"no request came within {patience_s:g} s"
                await _end(self._context, grpc.StatusCode.DEADLINE_EXCEEDED, why)
            data = reading.result()
            if data is grpc.aio.EOF:
                await _end(self._context, grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
            self._data = data
        return self._data

    async def message(self) -> Any:
        """As the method's own code takes it, or all of them; ends a call whose request is none."""
        if self._method.handler.request_streaming:
            return self._messages()
        return await self._parsed(self._data)

    async def _messages(self) -> AsyncIterator[Any]:
        data: Any = self._data
        while data is not grpc.aio.EOF:
            yield await self._parsed(data)
            data = await self._context.read()

    async def _parsed(self, data: Any) -> Any:
        parse = self._method.handler.request_deserializer
        try:
            return data if parse is None else parse(data)
        except DecodeError as error:
            why = f"this is no request of {self._method.name}: {error}"
            await _end(self._context, grpc.StatusCode.INVALID_ARGUMENT, why)


def _retrieve(reading: asyncio.Future[Any]) -> None:
    """Of what is read when its call has ended nobody wants to know."""
    if not reading.cancelled():
        reading.exception()


_GONE: Final = grpc.StatusCode.UNAUTHENTICATED, "the connection of this call is closed"
_EVICTED: Final = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "its place was given to another call, since it had not logged in, its request had not come, or "
    "its address had more calls than its share; see kept.grpc.max.requests",
)
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
    await context.abort(status, shortened(message))
    raise InvariantViolation("abort came back")
