"""Who may call what over gRPC: every method by every kind of stranger, and logins on a listener
that asks for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.cluster.metadata.records import RemoveScramCredentialRecord, ScramCredentialRecord
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    ANONYMOUS,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramMechanism
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.grpc import call_authorizer
from kept.node.grpc.call_authorizer import METHODS, AuthorizeTopic, CallAuthorizer, check_methods
from kept.node.grpc.callers import Call, Callers
from kept.node.proto import broker_pb2
from kept.node.security import revocation
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.session import ALLOW_ALL, Session
from kept.storage.errors import InvariantViolation
from tests.fuzz import seeds
from tests.support.credentials import credential
from tests.support.given import Given
from tests.support.grpc_calls import basic, call, calling
from tests.support.revocations import Checks
from tests.support.strangers import STRANGERS, stranger

# isort: split
import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
ASKED, KNOWN, OPEN = "asked", "a login", "nothing"
EXPECTED = {
    "/broker.Broker/CreateTopic": ASKED,
    "/broker.Broker/Produce": ASKED,
    "/broker.Broker/Consume": ASKED,
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/List": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": KNOWN,
}
"""By method: what is asked before it is served."""


class Ended(Exception):
    """A call was ended: status and text."""


class Context:
    """Of one call."""

    def __init__(self, request: bytes, logins: tuple[str, ...] = ()) -> None:
        self._request = request
        self._logins = logins

    def peer(self) -> str:
        return "unix:/x/c-0"

    async def read(self) -> bytes:
        return self._request

    def add_done_callback(self, _: Any) -> None:
        pass

    def done(self) -> bool:
        return False

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(("authorization", login) for login in self._logins)

    async def abort(self, status: Any, message: str) -> None:
        raise Ended(status, message)


def called(
    method: str, topic: str, session: Session, logins: tuple[str, ...] = ()
) -> tuple[Any, str] | str:
    """What becomes of a call: the status that ends it and its text, or that it was served. With
    ``logins`` in its metadata one is asked for, and whatever it is it is that of ``session``.
    """

    async def authenticate(*_: Any) -> Session:
        return session

    async def serve(_request: Any, _context: Any) -> str:
        return "served"

    async def continuation(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(serve)

    connection: Any = Given(
        session=session,
        transport=None,
        listener__asks_login=bool(logins),
        listener__authenticate=authenticate,
        listener__http_schemes=("Basic",),
        listener__context__logins__is_revoked=lambda _: False,
    )
    live: Any = Given(
        current__authorizer_class_name=STANDARD_AUTHORIZER,
        current__grpc_max_connections=1,
        current__grpc_max_requests=1,
        current__silent_ms=1000,
        current__request_receive_ms=1000,
    )
    callers = Callers(live)
    caller = callers.enter(connection)
    assert caller is not None and caller.name == "c-0"
    request = broker_pb2.ProduceRequest(topic=topic).SerializeToString()

    async def go() -> tuple[Any, str] | str:
        details = Given(method=method)
        handler = await CallAuthorizer(callers, live).intercept_service(continuation, details)
        try:
            return str(await handler.stream_unary(None, Context(request, logins)))
        except Ended as ended:
            return ended.args[0], ended.args[1]

    return asyncio.run(go())


NEEDED = {
    "CreateTopic": AclOperation.CREATE,
    "Produce": AclOperation.WRITE,
    "Consume": AclOperation.READ,
}


@pytest.mark.parametrize("method", NEEDED)
@pytest.mark.parametrize("operation", list(AclOperation)[2:])
def test_who_may_do_what_a_method_needs_is_served_and_nobody_else(
    method: str, operation: AclOperation
) -> None:
    topic = AclResourceType.TOPIC, "t", PatternType.LITERAL
    given = AclBinding(*topic, "User:ada", "*", operation, AclPermission.ALLOW)
    index = AclIndex().with_changes([given])
    session = Session("User:ada", authorizer=StandardAuthorizer(lambda: index, []))
    outcome = called(f"/broker.Broker/{method}", "t", session)
    if operation in (NEEDED[method], AclOperation.ALL):
        assert outcome == "served"
    else:
        assert outcome[0] is DENIED


def test_a_method_without_a_row_is_served_to_nobody() -> None:
    session = Session("User:ada", authorizer=ALLOW_ALL)
    outcome = called("/broker.Broker/Truncate", "t", session)
    assert outcome == (DENIED, "nothing says who may call this")


def test_a_call_with_two_logins_has_none() -> None:
    """Which of the two counts would be seen differently by a proxy."""
    session = Session("User:ada", authorizer=ALLOW_ALL)
    method, login = "/broker.Broker/Produce", basic("ada", "right")
    assert called(method, "t", session, (login,)) == "served"
    status, _ = called(method, "t", session, (login, basic("bob", "x")))
    assert status is UNAUTHENTICATED


def test_a_login_is_being_checked_until_it_is_refused() -> None:
    told: list[str] = []

    async def authenticate(_transport: Any, _login: bytes, on_refused: Any) -> None:
        told.append("asked")
        on_refused()
        told.append("waits")

    connection: Any = Given(
        session=Session(ANONYMOUS),
        transport=None,
        listener__asks_login=True,
        listener__http_schemes=("Basic",),
        listener__authenticate=authenticate,
        listener__context__logins__is_revoked=lambda _: False,
    )
    live: Any = Given(
        current__authorizer_class_name=STANDARD_AUTHORIZER,
        current__grpc_max_connections=1,
        current__grpc_max_requests=1,
    )

    class Told(Callers):
        def check(self, call: Call) -> None:
            told.append("check")
            super().check(call)

        def refused(self, call: Call) -> None:
            told.append("refused")
            super().refused(call)

    callers = Told(live)
    callers.enter(connection)

    async def continuation(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda *_: None)

    async def go() -> None:
        details = Given(method="/broker.Broker/Produce")
        handler = await CallAuthorizer(callers, live).intercept_service(continuation, details)
        with pytest.raises(Ended):
            await handler.stream_unary(None, Context(b"", ("Basic eDp5",)))

    asyncio.run(go())
    assert told == ["check", "asked", "refused", "waits"]


def test_every_method_has_an_expectation() -> None:
    assert METHODS.keys() == EXPECTED.keys()


def test_a_stream_of_requests_is_not_let_in_by_the_topic_of_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    question = AuthorizeTopic(AclOperation.READ, broker_pb2.ConsumeRequest)
    monkeypatch.setitem(METHODS, stream, question)
    with pytest.raises(InvariantViolation, match="only the first of its requests"):
        check_methods()


def test_a_method_without_a_row_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(METHODS, "/broker.Broker/Consume")
    with pytest.raises(InvariantViolation, match="Consume: nothing says who"):
        check_methods()


@pytest.mark.parametrize("who", STRANGERS)
def test_every_method_refuses_strangers_and_tells_them_nothing(who: str) -> None:
    for method, asked in EXPECTED.items():
        there, absent = (called(method, topic, stranger(who)) for topic in ("veiled", "absent"))
        about = f"{method} for {who}: {there}"
        if asked == OPEN or (asked == KNOWN and who != "nobody"):
            assert there == absent == "served", about
            continue
        assert there[0] is (UNAUTHENTICATED if who == "nobody" else DENIED), about
        assert str(there).replace("veiled", "absent") == str(absent), about


def test_a_session_that_is_over_calls_nothing() -> None:
    for method, asked in EXPECTED.items():
        session = Session("User:admin", expires_at=0.0)
        expected = "served" if asked == OPEN else UNAUTHENTICATED
        told = called(method, "t", session)
        assert (told if asked == OPEN else told[0]) == expected, method


# A listener that asks for a login.

SETTINGS = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl_enabled_mechanisms": "SCRAM-SHA-256,PLAIN",
    "plain_sasl_jaas_config": f'{PLAIN_MODULE} required user_admin="admin-word";',
    "connection_failed_authentication_delay_ms": "0",
}


@pytest.fixture
def secure(lone_node: Any) -> Any:
    """A node with a topic ``t`` and the user ada, who has a SCRAM credential."""

    def start(**settings: str) -> Any:
        lone = lone_node(**SETTINGS, **settings)
        ada = ScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
        lone.run(lone.node.parts.metadata.propose([ada]))
        lone.create("t")
        return lone

    return start


PRODUCE = broker_pb2.ProduceRequest(topic="t", payload=b"v")
CONSUME = broker_pb2.ConsumeRequest(topic="t", partition=0, follow=True)


def test_grpc_logs_in_with_each_call_where_a_login_is_asked_for(secure: Any) -> None:
    lone = secure()
    for login in ("", basic("ada", "x"), basic("nobody", "pencil"), "Bearer x"):
        assert lone.run(call(lone.port, "Produce", PRODUCE, login)) is UNAUTHENTICATED, login
    for number, login in enumerate((basic("ada", "pencil"), basic("admin", "admin-word"))):
        assert lone.run(call(lone.port, "Produce", PRODUCE, login)).offset == number


@pytest.mark.parametrize("authorizer", ["", STANDARD_AUTHORIZER])
def test_a_stream_ends_with_the_credential_of_its_user(
    secure: Any, authorizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first question after that."""
    checks = Checks(monkeypatch, call_authorizer)
    given = {"allow_everyone_if_no_acl_found": "true"} if authorizer else {}
    lone = secure(authorizer_class_name=authorizer, **given)
    login = basic("ada", "pencil")

    async def until_it_ends() -> None:
        async with calling(lone.port, "Consume", CONSUME, login) as stream:
            assert (await call(lone.port, "Produce", PRODUCE, login)).offset == 0
            assert (await stream.read()).payload == b"v"
            gone = RemoveScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256)
            await lone.node.parts.metadata.propose([gone])
            checks.taken()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert ended.value.code() is DENIED
            assert checks.since <= 1

    lone.run(until_it_ends())
    assert lone.run(call(lone.port, "Produce", PRODUCE, login)) is UNAUTHENTICATED


def test_a_login_of_a_call_lasts_for_connections_max_reauth_ms(
    secure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour, which the test shortens once a record has come: machines may be slow."""
    monkeypatch.setattr(revocation, "CHECK_S", 0.02)
    lone, login = secure(connections_max_reauth_ms="3600000"), basic("ada", "pencil")
    sessions: list[Session] = []
    logged_in = Callers.logged_in

    def noted(callers: Callers, of: Call, session: Session) -> None:
        sessions.append(session)
        logged_in(callers, of, session)

    monkeypatch.setattr(Callers, "logged_in", noted)

    async def until_it_ends() -> None:
        loop = asyncio.get_running_loop()
        assert (await call(lone.port, "Produce", PRODUCE, login)).offset == 0
        began = loop.time()
        async with calling(lone.port, "Consume", CONSUME, login) as stream:
            assert (await stream.read()).payload == b"v"
            session = sessions[-1]
            assert began + 3600 <= session.expires_at <= loop.time() + 3600
            session.expires_at = loop.time()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert ended.value.code() is DENIED

    lone.run(until_it_ends())


@pytest.mark.parametrize(("check_s", "asks_again"), [(0.02, False), (3600.0, True)])
def test_reflection_ends_with_the_credential_of_its_user(
    secure: Any, monkeypatch: pytest.MonkeyPatch, check_s: float, asks_again: bool
) -> None:
    """While nothing is asked, and when something is."""
    lone = secure()
    monkeypatch.setattr(revocation, "CHECK_S", check_s)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

    async def go() -> None:
        target = f"127.0.0.1:{lone.port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            login = (("authorization", basic("ada", "pencil")),)
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            stream = stub.ServerReflectionInfo(metadata=login, timeout=60)
            await stream.write(question)
            services = (await stream.read()).list_services_response.service
            assert "broker.Broker" in {service.name for service in services}
            gone = RemoveScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256)
            await lone.node.parts.metadata.propose([gone])
            if asks_again:
                await stream.write(question)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert ended.value.code() is DENIED

    lone.run(go())


def test_a_method_that_is_no_text_ends_grpc_for_nobody_for_long(lone_node: Any) -> None:
    """grpcio ends a whole server over it: the next client has another one, and the node stops."""
    lone = lone_node()
    lone.create("t")
    head = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/broker.Brok\x80er/Produce",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    literals = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in head.items()
    )

    async def attack() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        whole = seeds.END_HEADERS | seeds.END_STREAM
        settings, called = (
            seeds.h2_frame(seeds.SETTINGS, 0, 0),
            seeds.h2_frame(seeds.HEADERS, whole, 1, literals),
        )
        writer.write(seeds.PREFACE + settings + called)
        await reader.readuntil(b"Server shutdown")
        writer.close()

    async def produce() -> Any:
        """As a client does: again while there is no server."""
        while (reply := await call(lone.port, "Produce", PRODUCE)) is grpc.StatusCode.UNAVAILABLE:
            await asyncio.sleep(0.01)
        return reply

    offset = lone.run(asyncio.wait_for(produce(), 30)).offset
    for _ in range(3):
        with contextlib.suppress(ConnectionResetError, asyncio.IncompleteReadError):
            lone.run(asyncio.wait_for(attack(), 30))
        last, offset = offset, lone.run(asyncio.wait_for(produce(), 30)).offset
        assert offset > last
    lone.stop()
