"""A SASL listener over real sockets: who gets in, what closes, and what strangers can hold.

Anchors: SaslAuthenticatorTest, SaslServerAuthenticatorTest, NioEchoServer's delays of Kafka 4.3.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.plain import PlainClient
from kept.client.security.scram import ScramClient
from kept.cluster.metadata.records import RemoveScramCredentialRecord, ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from kept.node.http.response_limiter import MOST
from tests.support.credentials import credential
from tests.support.loops import turns, until
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, METADATA, VERSIONS, RawClient
from tests.support.request_values import fetch_values
from tests.support.token_issuer import Issuer

PRODUCE = 0
SOFTWARE = {"client_software_name": "x", "client_software_version": "1"}
SETTINGS = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl_enabled_mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    "plain_sasl_jaas_config": f'{PLAIN_MODULE} required user_ada="pencil" user_root="\\"r=;";',
    "connection_failed_authentication_delay_ms": "0",
    "sasl_server_max_receive_size": "2048",
}
FAILED = (
    "Authentication failed during authentication due to invalid credentials with SASL mechanism "
)


@pytest.fixture
def secure(lone_node: Any) -> Any:
    def start(**settings: str) -> Any:
        lone = lone_node(**{**SETTINGS, **settings})
        records = [
            ScramCredentialRecord(user, mechanism, credential("pencil", mechanism.text))
            for user in ("ada", "sue")
            for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
        ]
        lone.run(lone.node.parts.metadata.propose(records))
        return lone

    return start


def listener_of(lone: Any) -> Any:
    return lone.node.parts.listeners[0]


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize(
    ("mechanism", "client"),
    [
        ("PLAIN", PlainClient("root", '"r=;')),
        ("SCRAM-SHA-256", ScramClient("SCRAM-SHA-256", "sue", "pencil")),
        ("SCRAM-SHA-512", ScramClient("SCRAM-SHA-512", "ada", "pencil")),
    ],
)
def test_who_logs_in_has_a_session(secure, mechanism, client, version) -> None:
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            versions = await peer.ask(VERSIONS, 3, **SOFTWARE)
            assert {17, 36, 0, 1} <= {int(k.api_key) for k in versions.api_keys}
            fresh = type(client)(*client_arguments(client))
            response = await peer.login(fresh, mechanism, version=version)
            assert response.error_code.name == "none"
            assert await peer.is_in()
            (connection,) = listener_of(lone).connections
            session = connection.session
            assert (session.user, session.mechanism, session.host) == (
                client_arguments(client)[-2],
                mechanism,
                "127.0.0.1",
            )
            assert not listener_of(lone).logging_in
            # No lifetime was told: whoever is in has no business with SASL any more.
            again = await peer.ask(HANDSHAKE, 1, mechanism=mechanism)
            assert again.error_code.name == "illegal_sasl_state"
            again = await peer.ask(AUTHENTICATE, 2, auth_bytes=b"x")
            assert again.error_code.name == "illegal_sasl_state"
            assert await peer.is_in()
        await until(lambda: not listener_of(lone).quota.count)

    lone.run(go())
    assert (lone.node.parts.counters.logins, lone.node.parts.counters.failed_logins) == (1, 0)


def test_what_strangers_send_draws_on_a_budget_of_their_own(secure) -> None:
    """It drew on none: a thousand of them held what a thousand of the largest requests do."""
    lone = secure(
        sasl_server_max_receive_size="524288",
        kept_inflight_max_bytes=str(16 << 20),
        kept_silent_ms="600000",
    )
    logins, listener = lone.node.parts.memory.logins, listener_of(lone)
    assert logins.limit_bytes == 1 << 20
    announced = struct.pack(">i", 524_288)

    async def held(peer: RawClient, size: int) -> None:
        """Send that much of a request, and wait until the node has it."""
        before = sum(one._end for one in listener.logging_in)
        peer.writer.write(announced + bytes(size - 4))
        await until(lambda: sum(one._end for one in listener.logging_in) == before + size)

    async def go() -> None:
        async with AsyncExitStack() as opened:

            async def stranger(host: str = "127.0.0.1") -> RawClient:
                return await opened.enter_async_context(
                    await RawClient.connect(lone.port, host=host)
                )

            small = await stranger()
            await held(small, 10_000)
            assert not logins.used_bytes, "what an idle connection has is nobody's"
            large = await stranger()
            await held(large, 200_000)
            assert logins.used_bytes == 245_760
            late = await stranger()
            late.writer.write(announced + bytes(40_000))
            assert await late.ends(), "its address has its quarter"
            await held(await stranger("127.0.0.2"), 40_000)
            async with await RawClient.connect(lone.port) as ada:
                assert not await ada.log_in("ada", "pencil"), "a login needs nothing of it"
                assert await ada.is_in()
        await until(lambda: not listener.quota.count)
        assert not logins.used_bytes

    lone.run(go())


def client_arguments(client: Any) -> tuple[str, ...]:
    if isinstance(client, PlainClient):
        _, user, password = client._message.decode().split("\0")
        return user, password
    return client.mechanism, client._bare[2:].partition(",")[0], client._password


def test_tokens_are_bare_after_the_first_version_of_the_handshake(secure) -> None:
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            response = await peer.ask(HANDSHAKE, 0, mechanism="SCRAM-SHA-256")
            assert list(response.mechanisms) == ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
            client = ScramClient("SCRAM-SHA-256", "ada", "pencil")
            token = client.step(None)
            while not client.done:
                peer.send_bare(token)
                token = client.step(await peer.frame())
            assert await peer.is_in()
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 0, mechanism="PLAIN")
            peer.send_bare(b"\0ada\0pencil")
            assert await peer.frame() == b""
            assert await peer.is_in()
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 0, mechanism="PLAIN")
            peer.send_bare(b"\0ada\0wrong")
            assert await peer.ends()

    lone.run(go())


def test_what_is_sent_behind_the_last_token_is_served_behind_it(secure) -> None:
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            peer.send(HANDSHAKE, 1, mechanism="PLAIN")
            peer.send(AUTHENTICATE, 2, auth_bytes=b"\0ada\0pencil")
            for _ in range(20):
                peer.send(METADATA, 9, topics=None)
            assert (await peer.receive(HANDSHAKE, 1)).error_code.name == "none"
            assert (await peer.receive(AUTHENTICATE, 2)).error_code.name == "none"
            for _ in range(20):
                assert (await peer.receive(METADATA, 9)).brokers

    lone.run(go())


@pytest.mark.parametrize(
    ("mechanism", "client"),
    [
        ("PLAIN", PlainClient("ada", "wrong")),
        ("PLAIN", PlainClient("nobody", "pencil")),
        ("PLAIN", PlainClient("sue", "pencil")),
        ("SCRAM-SHA-256", ScramClient("SCRAM-SHA-256", "ada", "wrong")),
        ("SCRAM-SHA-256", ScramClient("SCRAM-SHA-256", "nobody", "pencil")),
        ("SCRAM-SHA-256", ScramClient("SCRAM-SHA-256", "root", '"r=;')),
    ],
)
def test_one_text_for_whoever_is_refused(secure, mechanism, client, capfd) -> None:
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(VERSIONS, 3, **SOFTWARE)
            response = await peer.login(type(client)(*client_arguments(client)), mechanism)
            assert response.error_code.name == "sasl_authentication_failed"
            assert response.error_message == FAILED + mechanism
            assert response.auth_bytes == b""
            assert await peer.ends()

    lone.run(go())
    assert (lone.node.parts.counters.logins, lone.node.parts.counters.failed_logins) == (0, 1)
    told = capfd.readouterr().err
    assert 'event="login refused"' in told
    assert "pencil" not in told
    assert "wrong" not in told


def test_a_user_of_the_file_has_no_other_password(secure) -> None:
    """Not that of his SCRAM credential, which others log in by here."""
    lone = secure(
        kept_sasl_plain_users="scram",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="ink";',
    )

    async def go() -> None:
        for user, password, code in (
            ("ada", "ink", "none"),
            ("sue", "pencil", "none"),
            ("ada", "pencil", "sasl_authentication_failed"),
        ):
            async with await RawClient.connect(lone.port) as peer:
                response = await peer.login(PlainClient(user, password), "PLAIN")
                assert response.error_code.name == code, user

    lone.run(go())
    for user, password, status in (
        ("ada", "ink", 200),
        ("sue", "pencil", 200),
        ("ada", "pencil", 401),
    ):
        login = f"Authorization: {basic(user, password)}"
        answer = lone.http(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{login}\r\n\r\n")
        assert answer[0] == status, user


def test_a_mechanism_that_is_not_enabled_is_told_which_are(secure) -> None:
    lone = secure(sasl_enabled_mechanisms="SCRAM-SHA-512")

    async def go() -> None:
        for mechanism in ("PLAIN", "GSSAPI", "SCRAM-SHA-256", "x" * 1000, ""):
            async with await RawClient.connect(lone.port) as peer:
                response = await peer.ask(HANDSHAKE, 1, mechanism=mechanism)
                assert response.error_code.name == "unsupported_sasl_mechanism"
                assert list(response.mechanisms) == ["SCRAM-SHA-512"]
                assert await peer.ends()

    lone.run(go())


def test_an_unknown_version_of_api_versions_is_asked_again(secure) -> None:
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            for version, software in ((99, b""), (3, b"\0\4a b\2x\0")):
                peer.writer.write(
                    struct.pack(">ihhih", 10 + len(software), 18, version, 7, -1) + software
                )
                answer = await peer.frame()
                assert answer[4:6] in (b"\0\x23", b"\0\x2a")
            assert (await peer.ask(VERSIONS, 3, **SOFTWARE)).error_code.name == "none"
            assert (await peer.login(PlainClient("ada", "pencil"), "PLAIN")).auth_bytes == b""

        async with await RawClient.connect(lone.port) as peer:
            peer.writer.write(3 * frame(18, 99))
            for _ in range(2):
                assert (await peer.frame())[4:6] == b"\0\x23"
            assert await peer.ends(), "answers that nobody takes fill no memory"

    lone.run(go())


def frame(key: int, version: int, body: bytes = b"", size: int | None = None) -> bytes:
    head = struct.pack(">hhih", key, version, 7, -1)
    return struct.pack(">i", len(head) + len(body) if size is None else size) + head + body


HELLO = frame(HANDSHAKE, 1, b"\0\5PLAIN")

STRANGERS = {
    "metadata": frame(METADATA, 1, b"\0\0\0\0"),
    "produce": frame(PRODUCE, 3, b"\xff" * 60),
    "fetch": frame(1, 12, b"\0" * 60),
    "an unknown API": frame(999, 0),
    "authenticate first": frame(AUTHENTICATE, 1, b"\0\0\0\2ab"),
    "handshake twice": HELLO + HELLO,
    "versions twice": frame(VERSIONS, 0) + frame(VERSIONS, 0),
    "versions behind the handshake": HELLO + frame(VERSIONS, 0),
    "metadata behind the handshake": HELLO + frame(METADATA, 1, b"\0\0\0\0"),
    "handshake of another version": frame(HANDSHAKE, 2, b"\0\5PLAIN"),
    "authenticate of another version": HELLO + frame(AUTHENTICATE, 3, b"\0\3ab\0"),
    "half a mechanism": frame(HANDSHAKE, 1, b"\0\5PL"),
    "a null mechanism": frame(HANDSHAKE, 1, b"\xff\xff"),
    "a token longer than its request": HELLO + frame(AUTHENTICATE, 1, b"\0\0\xff\xffab"),
    "no request": b"\0\0\0\2ab",
    "an empty request": b"\0\0\0\0",
    "a negative size": b"\xff\xff\xff\xff",
    "one byte more than is taken": struct.pack(">i", 2049),
    "as large as a request may be elsewhere": struct.pack(">i", 104857600),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
}


def test_whoever_does_not_log_in_is_closed_unparsed(secure, monkeypatch, capfd) -> None:
    lone = secure(kept_silent_ms="600000")  # it is not for want of more
    made: list[Any] = []
    monkeypatch.setattr("kept.node.kafka.listener.Connection", lambda *_: made.append(1))

    async def go() -> None:
        for what, data in STRANGERS.items():
            async with await RawClient.connect(lone.port) as peer:
                peer.writer.write(data)
                try:
                    left = await asyncio.wait_for(peer.reader.read(), 60)
                except ConnectionResetError:  # with bytes unread
                    left = b""
                allowed = 0 if not data.startswith((HELLO, frame(VERSIONS, 0))) else 4096
                assert len(left) <= allowed, what
        await until(lambda: not listener_of(lone).quota.count)

    lone.run(go())
    assert not made, "nothing of a stranger reaches a connection"
    assert not listener_of(lone).logging_in
    said = capfd.readouterr().err
    assert said.count("level=warning") == 2, "one line of a kind in ten seconds"
    assert "not a request of a client that logs in" in said and "speaks TLS, which this" in said


def test_probes_of_health_need_no_login(secure) -> None:
    lone = secure()
    for path, said in (("/healthz", b"ok\n"), ("/readyz", b"ready\n")):
        status, _, body = lone.http(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (status, body) == (200, said), path


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/", "", 401),
        ("/metrics", "", 401),
        ("/nothing", "", 401),
        ("/api/v1/cluster", "", 401),
        ("/api/v1/topics", "Bearer x", 401),
        ("/api/v1/topics", "Basic", 401),
        ("/api/v1/topics", "Basic !", 401),
        ("/api/v1/topics", basic("ada", "wrong"), 401),
        ("/api/v1/topics", basic("nobody", "pencil"), 401),
        ("/api/v1/topics", basic("ada", "pencil"), 200),
        ("/api/v1/topics", basic("sue", "pencil"), 200),
        ("/nothing", basic("ada", "pencil"), 404),
        ("/metrics", basic("root", '"r=;'), 200),
    ],
)
def test_http_asks_who_it_is(secure, path, authorization, status) -> None:
    lone = secure()
    header = f"Authorization: {authorization}\r\n" if authorization else ""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
    answers = lone.exchange(
        f"{request}{header}\r\n{request}\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 3
    )
    assert [answer[0] for answer in answers] == [status, 401, 200], "each request says it anew"
    assert answers[1][1]["www-authenticate"] == 'Basic realm="kept", charset="UTF-8"'


def test_a_request_with_two_logins_has_none(secure) -> None:
    """Which of the two counts would be seen differently by a proxy."""
    lone = secure()
    right = basic("ada", "pencil")
    for other in (right, basic("ada", "wrong")):
        logins = f"Authorization: {right}\r\nAuthorization: {other}"
        answer = lone.http(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{logins}\r\n\r\n")
        assert answer[0] == 401


def test_a_credential_that_is_deleted_while_its_password_is_checked_lets_nobody_in(
    secure, monkeypatch
) -> None:
    """Checks take their turns: it may have been right when its own began."""
    lone = secure()
    parts = lone.node.parts
    matches, mechanisms = parts.logins.password_matches, ("SHA_256", "SHA_512")
    gone = [
        RemoveScramCredentialRecord("sue", ScramMechanism[f"SCRAM_{one}"]) for one in mechanisms
    ]
    found: list[bool] = []

    async def deleted_meanwhile(*login: Any, **way: Any) -> bool:
        found.append(await matches(*login, **way))
        await parts.metadata.propose(gone)
        return found[-1]

    monkeypatch.setattr(parts.logins, "password_matches", deleted_meanwhile)
    login = f"Authorization: {basic('sue', 'pencil')}"
    answer = lone.http(f"GET /api/v1/topics HTTP/1.1\r\nHost: localhost\r\n{login}\r\n\r\n")
    assert found == [True] and answer[0] == 401
    assert (parts.counters.logins, parts.counters.failed_logins) == (0, 1)


def test_who_gives_wrong_passwords_holds_nobody_up(secure) -> None:
    """So many large answers are made at a time; whoever is refused late is none of them."""
    lone = secure(connection_failed_authentication_delay_ms="5000")
    request = "GET /api/v1/topics HTTP/1.1\r\nHost: localhost\r\nAuthorization: {}\r\n\r\n"

    async def go() -> None:
        async with AsyncExitStack() as peers:
            wrong = [
                await peers.enter_async_context(await RawClient.connect(lone.port))
                for _ in range(MOST + 1)
            ]
            for peer in wrong:
                peer.writer.write(request.format(basic("ada", "wrong")).encode())
            counters = lone.node.parts.counters
            await until(lambda: counters.failed_logins > MOST)
            good = await peers.enter_async_context(await RawClient.connect(lone.port))
            good.writer.write(request.format(basic("ada", "pencil")).encode())
            answer = await asyncio.wait_for(good.reader.readuntil(b"\r\n"), 60)
            assert answer == b"HTTP/1.1 200 OK\r\n"
            assert not any(peer.reader._buffer for peer in wrong), "they are answered later"

    lone.run(go())


def test_the_nodes_own_requests_need_no_login(secure) -> None:
    """The console's records come over a connection of the node to itself."""
    lone = secure(connections_max_reauth_ms="1000", max_connections="1")
    lone.create("t")
    status, _, body = lone.http(
        "GET /api/v1/records?topic=t&partition=0 HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: {basic('ada', 'pencil')}\r\n\r\n"
    )
    assert (status, json.loads(body)["records"]) == (200, [])


def test_a_login_that_takes_too_long_is_closed_though_bytes_trickle(secure) -> None:
    lone = secure(kept_silent_ms="1500")

    async def go() -> None:
        async with (
            await RawClient.connect(lone.port) as peer,
            await RawClient.connect(lone.port) as silent,
        ):
            await peer.ask(VERSIONS, 3, **SOFTWARE)
            peer.writer.write(struct.pack(">i", 2048))
            trickle = asyncio.ensure_future(_trickle(peer))
            assert await peer.ends()
            assert await silent.ends()
            trickle.cancel()
        await until(lambda: not listener_of(lone).quota.count)

    lone.run(go())


async def _trickle(peer: RawClient) -> None:
    while True:
        peer.writer.write(b"x")
        await asyncio.sleep(0.01)


def test_who_is_in_may_be_silent(secure) -> None:
    lone = secure(kept_silent_ms="1500")

    async def go() -> None:
        async with (
            await RawClient.connect(lone.port) as peer,
            await RawClient.connect(lone.port) as silent,
        ):
            await peer.login(PlainClient("ada", "pencil"), "PLAIN")
            async with await RawClient.connect(lone.port) as other:
                assert await other.ends(), "it came later and is closed first"
            assert await silent.ends()
            assert await peer.is_in()

    lone.run(go())


def test_logins_count_as_connections(secure) -> None:
    lone = secure(max_connections="2")

    async def go() -> None:
        async with (
            await RawClient.connect(lone.port) as one,
            await RawClient.connect(lone.port) as two,
        ):
            await one.ask(VERSIONS, 3, **SOFTWARE)
            await two.login(PlainClient("ada", "pencil"), "PLAIN")
            async with await RawClient.connect(lone.port) as three:
                three.send(VERSIONS, 3, **SOFTWARE)
                assert await three.ends()
            assert listener_of(lone).quota.count == 2

    lone.run(go())


def test_a_bug_in_a_check_of_passwords_closes_the_connection(secure, monkeypatch, capfd) -> None:
    lone = secure()

    async def breaks(*_: Any) -> bool:
        raise LookupError("planted")

    monkeypatch.setattr(lone.node.parts.logins, "password_matches", breaks)

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism="PLAIN")
            peer.send(AUTHENTICATE, 2, auth_bytes=b"\0ada\0pencil")
            assert await peer.ends()
        await until(lambda: not listener_of(lone).quota.count)

    lone.run(go())
    told = capfd.readouterr().err
    assert 'event="login failed"' in told and "planted" in told and "Traceback" in told


def test_a_failure_is_answered_late_and_nothing_is_read_meanwhile(secure) -> None:
    lone = secure(connection_failed_authentication_delay_ms="5000")

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism="PLAIN")
            peer.send(AUTHENTICATE, 2, auth_bytes=b"\0ada\0wrong")
            await until(lambda: lone.node.parts.counters.failed_logins)
            await turns()  # it is not answered in the next one
            (login,) = listener_of(lone).logging_in
            assert not login.transport.is_reading()
            assert not peer.reader._buffer
            (response,) = login._timer._args
            login._timer.cancel()
            login._close_with(response)
            assert (await peer.receive(AUTHENTICATE, 2)).error_message == FAILED + "PLAIN"
            assert await peer.ends()

    lone.run(go())


def test_failures_from_one_network_of_ipv6_slow_each_other_down(secure) -> None:
    lone = secure(connection_failed_authentication_delay_ms="100")
    logins, name = lone.node.parts.logins, listener_of(lone).name
    delays_s = [
        logins.refused(name, host, "PLAIN", "ada", "wrong")
        for host in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "10.0.0.1", "10.0.0.2")
    ]
    assert delays_s == [0.1, 0.2, 0.1, 0.1, 0.1]


def test_passwords_of_stored_credentials_serve_plain_where_that_is_set(secure) -> None:
    lone = secure(kept_sasl_plain_users="scram")

    async def go() -> None:
        for user, password, code in (
            ("sue", "pencil", "none"),
            ("ada", "pencil", "none"),
            ("root", '"r=;', "none"),
            ("sue", "Pencil", "sasl_authentication_failed"),
            ("root", "pencil", "sasl_authentication_failed"),
            ("nobody", "pencil", "sasl_authentication_failed"),
        ):
            async with await RawClient.connect(lone.port) as peer:
                response = await peer.login(PlainClient(user, password), "PLAIN")
                assert response.error_code.name == code, user

    lone.run(go())


# Logging in again.


def expire(lone: Any) -> Any:
    (connection,) = listener_of(lone).connections
    connection.session.expires_at = 0.0
    return connection


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_session_ends_unless_its_client_logs_in_again(secure, mechanism, capfd) -> None:
    lone = secure(connections_max_reauth_ms="3600000")

    def client() -> Any:
        if mechanism == "PLAIN":
            return PlainClient("ada", "pencil")
        return ScramClient(mechanism, "ada", "pencil")

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            response = await peer.login(client(), mechanism, version=1)
            assert response.session_lifetime.total_seconds() == 3600
            assert await peer.is_in()
            connection = expire(lone)
            response = await peer.login(client(), mechanism)
            assert response.session_lifetime.total_seconds() == 3600
            assert connection.session.expires_at > lone.node.parts.runtime.loop.time() + 3000
            assert await peer.is_in()
            again = await peer.ask(HANDSHAKE, 1, mechanism=mechanism)
            assert again.error_code.name == "illegal_sasl_state", "twice in a second"
            assert await peer.is_in()
            expire(lone)
            peer.send(METADATA, 9, topics=None)
            assert await peer.ends()

    lone.run(go())
    assert 'event="session expired"' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mechanism", "client", "code"),
    [
        (
            "SCRAM-SHA-256",
            ScramClient("SCRAM-SHA-256", "sue", "pencil"),
            "sasl_authentication_failed",
        ),
        (
            "SCRAM-SHA-256",
            ScramClient("SCRAM-SHA-256", "ada", "wrong"),
            "sasl_authentication_failed",
        ),
        ("PLAIN", None, "sasl_authentication_failed"),
        ("SCRAM-SHA-512", None, "sasl_authentication_failed"),
        ("GSSAPI", None, "unsupported_sasl_mechanism"),
    ],
)
def test_who_logs_in_again_as_another_or_otherwise_is_closed(
    secure, mechanism, client, code
) -> None:
    lone = secure(connections_max_reauth_ms="3600000")

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.login(ScramClient("SCRAM-SHA-256", "ada", "pencil"), "SCRAM-SHA-256")
            if client is None:
                response = await peer.ask(HANDSHAKE, 1, mechanism=mechanism)
            else:
                response = await peer.login(
                    ScramClient(*client_arguments(client)),
                    mechanism,  # type: ignore[arg-type]
                )
            assert response.error_code.name == code
            peer.send(METADATA, 9, topics=None)
            assert await peer.ends()

    lone.run(go())


def test_a_fetch_that_waits_outlives_its_session(secure) -> None:
    """What was asked while it lasted is answered; the next request closes."""
    lone = secure(connections_max_reauth_ms="3600000")
    lone.create("t")

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.login(PlainClient("ada", "pencil"), "PLAIN")
            metadata = await peer.ask(METADATA, 12, topics=None)
            (topic_id,) = {t.topic_id for t in metadata.topics}
            peer.send(1, 13, **fetch_values("t", topic_id=topic_id, max_wait=300))
            (connection,) = listener_of(lone).connections
            await until(lambda: connection._replies)
            connection.session.expires_at = 0.0
            assert (await peer.receive(1, 13)).error_code.name == "none"
            peer.send(METADATA, 9, topics=None)
            assert await peer.ends()

    lone.run(go())


# Whose credentials are deleted.


@pytest.mark.parametrize(
    ("plain_users", "mechanism", "ended"),
    [
        ("jaas", "SCRAM-SHA-256", True),
        ("jaas", "SCRAM-SHA-512", False),
        ("jaas", "PLAIN", False),
        ("scram", "PLAIN", False),
    ],
)
def test_sessions_end_with_the_credential_they_began_by(
    secure, plain_users, mechanism, ended, capfd
) -> None:
    lone = secure(kept_sasl_plain_users=plain_users)
    user = "ada" if plain_users == "jaas" else "sue"

    def client() -> Any:
        if mechanism == "PLAIN":
            return PlainClient(user, "pencil")
        return ScramClient(mechanism, user, "pencil")

    async def go() -> None:
        metadata = lone.node.parts.metadata
        async with await RawClient.connect(lone.port) as peer:
            assert (await peer.login(client(), mechanism)).error_code.name == "none"
            altered = credential("other", "SCRAM-SHA-256")
            sha_256, sha_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
            await metadata.propose([ScramCredentialRecord(user, sha_256, altered)])
            assert await peer.is_in(), "an altered one ends none"
            await metadata.propose([RemoveScramCredentialRecord(user, sha_256)])
            if ended:
                assert await peer.ends()
                return
            assert await peer.is_in()
            await metadata.propose([RemoveScramCredentialRecord(user, sha_512)])
            if user == "ada" and mechanism == "PLAIN":
                assert await peer.is_in(), "he is a user of the file"
            else:
                assert await peer.ends()

    lone.run(go())


def test_a_login_under_way_ends_with_its_credential(secure) -> None:
    lone = secure()

    async def go() -> None:
        client = ScramClient("SCRAM-SHA-256", "ada", "pencil")
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism="SCRAM-SHA-256")
            first = await peer.ask(AUTHENTICATE, 2, auth_bytes=client.step(None))
            removed = RemoveScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256)
            await lone.node.parts.metadata.propose([removed])
            last = await peer.ask(AUTHENTICATE, 2, auth_bytes=client.step(first.auth_bytes))
            assert last.error_code.name == "none", "the exchange was right"
            assert await peer.ends()

    lone.run(go())


# A password outside of SASL.


@pytest.mark.parametrize(
    ("mechanisms", "user", "password", "known"),
    [
        ("PLAIN", "ada", "pencil", True),
        ("PLAIN", "sue", "pencil", False),
        ("SCRAM-SHA-256", "root", '"r=;', False),
        ("OAUTHBEARER", "ada", "pencil", False),
        ("OAUTHBEARER", "sue", "pencil", False),
        ("OAUTHBEARER,SCRAM-SHA-256", "sue", "pencil", True),
        ("OAUTHBEARER,SCRAM-SHA-256", "root", '"r=;', False),
        ("OAUTHBEARER,PLAIN", "root", '"r=;', True),
        ("SCRAM-SHA-256", "sue", "pencil", True),
        ("SCRAM-SHA-256", "sue", "wrong", False),
        ("SCRAM-SHA-256", "joe", "pencil", True),
        ("SCRAM-SHA-512", "joe", "pencil", False),
        ("SCRAM-SHA-256", "tim", "pencil", True),
        ("SCRAM-SHA-256", "tim", "another", False),
        ("SCRAM-SHA-512", "tim", "another", True),
        ("SCRAM-SHA-256", "sue", "", False),
        ("SCRAM-SHA-256", "sue\0", "pencil", False),
        ("SCRAM-SHA-256", "nobody", "pencil", False),
    ],
)
def test_a_password_over_http_is_that_of_any_mechanism_that_is_enabled(
    secure, tmp_path, *, mechanisms, user, password, known
) -> None:
    keys = Issuer().write(tmp_path / "keys.json")
    lone = secure(sasl_enabled_mechanisms=mechanisms, sasl_oauthbearer_jwks_endpoint_url=keys)
    more = [  # a credential of one mechanism alone, and two of different passwords
        ScramCredentialRecord(user, mechanism, credential(word, mechanism.text))
        for user, mechanism, word in (
            ("joe", ScramMechanism.SCRAM_SHA_256, "pencil"),
            ("tim", ScramMechanism.SCRAM_SHA_256, "pencil"),
            ("tim", ScramMechanism.SCRAM_SHA_512, "another"),
        )
    ]
    lone.run(lone.node.parts.metadata.propose(more))

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(VERSIONS, 3, **SOFTWARE)
            (login,) = listener_of(lone).logging_in
            session = await listener_of(lone).authenticate_password(login.transport, user, password)
            assert (session is not None) is known
            if session is not None:
                assert (session.user, session.host) == (user, "127.0.0.1")

    lone.run(go())
