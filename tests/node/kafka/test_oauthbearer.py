"""OAUTHBEARER on a node: who gets in by a token, over Kafka's protocol, HTTP and gRPC, and when his
session ends. Anchors: SaslAuthenticatorTest (OAUTHBEARER) and OAuthBearerSaslServerTest of Kafka
4.3.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.oauthbearer import OAuthBearerClient
from kept.cluster.metadata.records import ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.proto import broker_pb2
from kept.node.security import logins, revocation
from kept.node.security.oauth import key_source
from tests.support.credentials import credential
from tests.support.grpc_calls import basic, call, calling
from tests.support.loops import until
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, METADATA, VERSIONS, RawClient
from tests.support.token_issuer import AUDIENCE, ISSUER, Issuer

# isort: split
import grpc
import grpc.aio

OAUTH = "OAUTHBEARER"
SOFTWARE = {"client_software_name": "x", "client_software_version": "1"}
ERROR = b'{"status":"invalid_token"}'
FAILED = (
    "Authentication failed during authentication due to invalid credentials with SASL mechanism "
    "OAUTHBEARER"
)
PLANTED = "planted-in-a-token"


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def secure(lone_node: Any, issuer: Issuer, tmp_path: Path) -> Any:
    def start(**settings: str) -> Any:
        return lone_node(
            **{
                "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
                "sasl_enabled_mechanisms": "OAUTHBEARER,SCRAM-SHA-256",
                "sasl_oauthbearer_jwks_endpoint_url": issuer.write(tmp_path / "keys.json"),
                "sasl_oauthbearer_expected_audience": AUDIENCE,
                "sasl_oauthbearer_expected_issuer": ISSUER,
                "connection_failed_authentication_delay_ms": "0",
                **settings,
            }
        )

    return start


def sessions(lone: Any) -> list[Any]:
    return [one.session for one in lone.node.parts.listeners[0].connections]


def counted(lone: Any) -> tuple[int, int]:
    counters = lone.node.parts.counters
    return counters.logins, counters.failed_logins


@pytest.mark.parametrize(
    ("version", "max_ms"), [(0, 0), (1, 0), (2, 0), (2, 60_000), (2, 3_600_000)]
)
def test_a_session_lasts_as_long_as_its_token_or_as_it_may(secure, issuer, version, max_ms):
    lone = secure(connections_max_reauth_ms=str(max_ms))

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(VERSIONS, 3, **SOFTWARE)
            client = OAuthBearerClient(issuer.token("ada", life_s=120))
            response = await peer.login(client, OAUTH, version=version)
            assert response.error_code.name == "none" and response.auth_bytes == b""
            (session,) = sessions(lone)
            assert (session.principal, session.mechanism) == ("User:ada", OAUTH)
            left_s = session.expires_at - lone.node.parts.runtime.loop.time()
            most_s = min(max_ms / 1000 or 120, 120)
            assert most_s - 10 < left_s <= most_s
            if version:
                told_s = response.session_lifetime.total_seconds()
                assert most_s - 10 < told_s <= most_s
            assert await peer.is_in()

    lone.run(go())
    assert counted(lone) == (1, 0)


def test_a_token_of_a_bare_login(secure, issuer):
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 0, mechanism=OAUTH)
            peer.send_bare(OAuthBearerClient(issuer.token()).step(None) or b"")
            assert await peer.frame() == b""
            assert await peer.is_in()
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 0, mechanism=OAUTH)
            peer.send_bare(OAuthBearerClient(issuer.token(aud="x")).step(None) or b"")
            assert await peer.frame() == ERROR
            peer.send_bare(b"\x01")
            assert await peer.ends()

    lone.run(go())


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"iss": "https://other.test"}, "the token's iss is not"),
        ({"aud": "other"}, "the token's aud is none of"),
        ({"life_s": -60}, "the token has expired"),
        ({"nbf": time.time() + 3600}, "the token is not valid yet"),
        ({"headers": {"kid": "k9"}}, "its key 'k9' is not in"),
    ],
)
def test_who_is_not_believed_acknowledges_that_and_is_closed(secure, issuer, claims, why, capfd):
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            client = OAuthBearerClient(issuer.token(secret=PLANTED, **claims))
            first = await peer.ask(AUTHENTICATE, 2, auth_bytes=client.step(None))
            assert (first.error_code.name, first.auth_bytes) == ("none", ERROR)
            assert first.session_lifetime.total_seconds() == 0
            assert counted(lone) == (0, 1), "also of who does not come back"
            last = await peer.ask(AUTHENTICATE, 2, auth_bytes=client.step(first.auth_bytes))
            assert last.error_code.name == "sasl_authentication_failed"
            assert (last.error_message, last.auth_bytes) == (FAILED, b"")
            assert await peer.ends()

    lone.run(go())
    assert counted(lone) == (0, 1)
    told = capfd.readouterr().err
    assert 'event="login refused"' in told and "mechanism=OAUTHBEARER" in told and why in told
    assert issuer.token()[:20] not in told and PLANTED not in told


def test_who_acknowledges_with_a_better_token_is_refused_all_the_same(secure, issuer):
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            for token, code in (("a.b.c", "none"), (issuer.token(), "sasl_authentication_failed")):
                message = OAuthBearerClient(token).step(None)
                response = await peer.ask(AUTHENTICATE, 2, auth_bytes=message)
                assert response.error_code.name == code
            assert await peer.ends()
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            bad = OAuthBearerClient("a.b.c").step(None)
            assert (await peer.ask(AUTHENTICATE, 2, auth_bytes=bad)).auth_bytes == ERROR
            peer.send(METADATA, 9, topics=None)
            assert await peer.ends(), "nothing else is served"

    lone.run(go())


@pytest.mark.parametrize("size", [17 * 1024, 500_000])
def test_a_huge_token_is_refused_before_it_is_read(secure, size, monkeypatch):
    lone = secure()
    monkeypatch.setattr(key_source, "read_header", None)

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            message = b"n,,\x01auth=Bearer " + b"A" * size + b"\x01\x01"
            response = await peer.ask(AUTHENTICATE, 2, auth_bytes=message)
            assert response.error_code.name == "sasl_authentication_failed"
            assert await peer.ends()

    lone.run(go())


def test_a_new_token_on_the_same_connection_renews_the_session(secure, issuer, capfd):
    lone = secure()

    async def go() -> None:
        loop = lone.node.parts.runtime.loop
        async with await RawClient.connect(lone.port) as peer:
            await peer.login(OAuthBearerClient(issuer.token(life_s=60)), OAUTH)
            (session,) = sessions(lone)
            response = await peer.login(OAuthBearerClient(issuer.token(life_s=600)), OAUTH)
            assert 590 < response.session_lifetime.total_seconds() <= 600
            assert 580 < session.expires_at - loop.time() <= 600
            assert await peer.is_in()
            session.expires_at = 0.0
            peer.send(METADATA, 9, topics=None)
            assert await peer.ends()

    lone.run(go())
    assert 'event="session expired"' in capfd.readouterr().err
    assert lone.node.parts.counters.expired_sessions == 1


@pytest.mark.parametrize("token", ["bob's", "expired"])
def test_a_renewal_that_is_not_right_is_refused_and_closes(secure, issuer, token):
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.login(OAuthBearerClient(issuer.token()), OAUTH)
            other = issuer.token("bob") if token == "bob's" else issuer.token(life_s=-60)
            response = await peer.login(OAuthBearerClient(other), OAUTH)
            assert response.error_code.name == "sasl_authentication_failed"
            peer.send(METADATA, 9, topics=None)
            assert await peer.ends()

    lone.run(go())
    assert counted(lone) == (1, 1)


def test_a_token_is_checked_once_at_a_time(secure, issuer):
    """Messages that come while a token is checked are answered as out of place."""
    lone = secure()

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.login(OAuthBearerClient(issuer.token()), OAUTH)
            message = OAuthBearerClient(issuer.token()).step(None)
            await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            peer.send(AUTHENTICATE, 2, auth_bytes=message)
            peer.send(AUTHENTICATE, 2, auth_bytes=message)
            assert (await peer.receive(AUTHENTICATE, 2)).error_code.name == "none"
            second = await peer.receive(AUTHENTICATE, 2)
            assert second.error_code.name == "illegal_sasl_state"
            assert await peer.is_in()

    lone.run(go())


def test_another_mechanism_of_the_listener_takes_no_token(secure, issuer):
    lone = secure(sasl_enabled_mechanisms="SCRAM-SHA-256")

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            response = await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            assert response.error_code.name == "unsupported_sasl_mechanism"
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism="SCRAM-SHA-256")
            message = OAuthBearerClient(issuer.token()).step(None)
            response = await peer.ask(AUTHENTICATE, 2, auth_bytes=message)
            assert response.error_code.name == "sasl_authentication_failed"

    lone.run(go())
    assert get(lone, f"Bearer {issuer.token()}")[0] == 401


# HTTP and gRPC.


def get(
    lone: Any, login: str = "", path: str = "/api/v1/cluster"
) -> tuple[int, dict[str, str], bytes]:
    header = f"Authorization: {login}\r\n" if login else ""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n"
    answer: tuple[int, dict[str, str], bytes] = lone.http(request)
    return answer


@pytest.mark.parametrize(
    ("mechanisms", "challenge", "said"),
    [
        ("OAUTHBEARER", 'Bearer realm="kept"', "with an access token (Authorization: Bearer)"),
        ("OAUTHBEARER,SCRAM-SHA-256", 'Bearer realm="kept"', "(HTTP Basic) or an access token"),
        ("SCRAM-SHA-256", 'Basic realm="kept", charset="UTF-8"', "a password (HTTP Basic)"),
    ],
)
def test_http_says_how_to_log_in(secure, mechanisms, challenge, said):
    status, headers, body = get(secure(sasl_enabled_mechanisms=mechanisms))
    assert status == 401 and headers["www-authenticate"] == challenge
    assert said in body.decode()


def test_a_listener_of_tokens_alone_takes_no_password(secure, capfd):
    """Users of PLAIN and SCRAM are there, and their settings: for another listener."""
    jaas = f'{PLAIN_MODULE} required user_root="word";'
    lone = secure(
        sasl_enabled_mechanisms=OAUTH, kept_sasl_plain_users="scram", plain_sasl_jaas_config=jaas
    )
    sue = ScramCredentialRecord("sue", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
    lone.run(lone.node.parts.metadata.propose([sue]))
    request = broker_pb2.CreateTopicRequest(topic="t")
    for login in (basic("sue", "pencil"), basic("root", "word")):
        assert get(lone, login)[0] == 401
        called = lone.run(call(lone.port, "CreateTopic", request, login))
        assert called is grpc.StatusCode.UNAUTHENTICATED
    assert counted(lone) == (0, 4)
    assert "the listener takes no login by Basic" in capfd.readouterr().err


BESIDE = {
    "listeners": "PLAINTEXT://127.0.0.1:0,OUT://127.0.0.1:0",
    "listener_security_protocol_map": "OUT:SASL_PLAINTEXT",
    "sasl_enabled_mechanisms": OAUTH,
    "authorizer_class_name": STANDARD_AUTHORIZER,
    "super_users": "User:root;User:sue",
}
"""A listener without SASL beside one of tokens alone; mechanisms are the same setting's."""
CREATE = broker_pb2.CreateTopicRequest(topic="t", partitions=1)


def refused_call(lone: Any, login: str = "") -> tuple[Any, str]:
    """Status and text of a call that must fail."""

    async def go() -> tuple[Any, str]:
        async with calling(lone.port, "CreateTopic", CREATE, login) as under_way:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await under_way
            return ended.value.code(), str(ended.value.details())

    refused: tuple[Any, str] = lone.run(go())
    return refused


def test_a_listener_without_sasl_takes_passwords_whatever_mechanisms_others_have(secure, issuer):
    jaas = f'{PLAIN_MODULE} required user_root="word";'
    lone = secure(**BESIDE, plain_sasl_jaas_config=jaas)
    status, headers, body = get(lone)
    assert status == 401 and headers["www-authenticate"].startswith("Basic ")
    assert "access token" not in body.decode()
    assert get(lone, basic("root", "word"))[0] == 200
    assert get(lone, basic("root", "wrong"))[0] == 401
    assert get(lone, f"Bearer {issuer.token('root')}")[0] == 401, "there are no keys for it here"
    said = "log in: metadata authorization (Basic)"
    status, text = refused_call(lone)
    assert status is grpc.StatusCode.UNAUTHENTICATED and said in text
    assert lone.run(call(lone.port, "CreateTopic", CREATE, basic("root", "word"))).topic == "t"


@pytest.mark.parametrize("mechanisms", [OAUTH, "OAUTHBEARER,SCRAM-SHA-256"])
def test_where_nobody_can_log_in_nobody_is_asked_to(secure, issuer, mechanisms):
    """Mechanisms of SASL are for listeners of SASL: users of SCRAM have no password here."""
    lone = secure(**(BESIDE | {"sasl_enabled_mechanisms": mechanisms}))
    sue = ScramCredentialRecord("sue", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
    lone.run(lone.node.parts.metadata.propose([sue]))
    tried = ("", basic("sue", "pencil"), f"Bearer {issuer.token('root')}")
    for login in tried:
        status, headers, body = get(lone, login)
        assert status == 403 and "www-authenticate" not in headers, login
        assert "this listener takes no login by HTTP or gRPC" in body.decode()
    status, text = refused_call(lone)
    assert status is grpc.StatusCode.UNAUTHENTICATED and "takes no login" in text
    for login in tried[1:]:
        assert refused_call(lone, login)[0] is grpc.StatusCode.UNAUTHENTICATED


def test_who_may_not_without_a_login_is_told_how_to_log_in_there(secure, issuer):
    """A token may name the user of those who did not log in."""
    lone = secure(
        sasl_enabled_mechanisms=OAUTH,
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users="User:admin",
    )
    status, _, body = get(lone, f"Bearer {issuer.token('ANONYMOUS')}")
    said = "User:ANONYMOUS may not describe cluster; log in with an access token (Authorization:"
    assert status == 401 and said in body.decode() and "password" not in body.decode()


def test_http_takes_a_token(secure, issuer, capfd):
    lone = secure()
    assert get(lone, f"Bearer {issuer.token()}")[0] == 200
    assert get(lone, f"bearer  {issuer.token()}")[0] == 200
    for wrong in ("x", "", issuer.token(life_s=-60), issuer.token(aud="x"), "a b", "A" * 20_000):
        assert get(lone, f"Bearer {wrong}")[0] == 401
    assert counted(lone) == (2, 6)
    assert "mechanism=Bearer" in capfd.readouterr().err


@pytest.mark.parametrize("by_password", [False, True])
def test_a_stream_of_http_ends_with_its_login(secure, issuer, monkeypatch, by_password):
    """Also where there is no authorizer, so that nothing else is asked."""
    monkeypatch.setattr(logins, "MIN_TOKEN_SESSION_MS", 1500)
    monkeypatch.setattr(revocation, "CHECK_S", 0.05)
    lone = secure(connections_max_reauth_ms="1500" if by_password else "0")
    login = f"Bearer {issuer.token(life_s=0.1)}"
    if by_password:
        sue = ScramCredentialRecord("sue", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
        lone.run(lone.node.parts.metadata.propose([sue]))
        login = basic("sue", "pencil")
    request = f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: {login}\r\n\r\n"

    async def watched() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(request.encode())
        try:
            return await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 30)
        finally:
            writer.close()

    answer = lone.run(watched())
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: {" in answer


def test_grpc_takes_a_token_and_ends_a_stream_with_it(secure, issuer):
    lone = secure()
    token = f"Bearer {issuer.token()}"

    async def produced_and_read() -> Any:
        create = broker_pb2.CreateTopicRequest(topic="t")
        created = await call(lone.port, "CreateTopic", create, token)
        assert created.topic == "t"
        produce = broker_pb2.ProduceRequest(topic="t", payload=b"v")
        refused = grpc.StatusCode.UNAUTHENTICATED
        assert await call(lone.port, "Produce", produce, "Bearer x") is refused
        assert (await call(lone.port, "Produce", produce, token)).offset == 0
        consume = broker_pb2.ConsumeRequest(topic="t", partition=0, follow=True)
        short = f"Bearer {issuer.token(life_s=0.5)}"  # two seconds at least
        async with calling(lone.port, "Consume", consume, short) as stream:
            assert (await anext(aiter(stream))).payload == b"v"
            try:
                await anext(aiter(stream))
            except grpc.aio.AioRpcError as error:
                return error.code()

    assert lone.run(produced_and_read()) is grpc.StatusCode.PERMISSION_DENIED


def test_a_bug_in_a_check_of_tokens_closes_the_connection(secure, issuer, monkeypatch, capfd):
    lone = secure()

    async def breaks(*_: Any) -> Any:
        raise LookupError("planted")

    monkeypatch.setattr(lone.node.parts.logins.tokens, "verify", breaks)

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism=OAUTH)
            message = OAuthBearerClient(issuer.token()).step(None)
            peer.send(AUTHENTICATE, 2, auth_bytes=message)
            assert await peer.ends()

    lone.run(go())
    assert "planted" in capfd.readouterr().err


def test_keys_are_in_the_metrics(secure, issuer):
    lone = secure()

    async def fetched() -> None:
        await until(lambda: dict(lone.node.parts.logins.tokens.ages()))

    lone.run(fetched())
    text = get(lone, f"Bearer {issuer.token()}", "/metrics")[2].decode()
    assert 'kept_jwks_refresh_failed{listener="SASL_PLAINTEXT"} 0' in text
    assert 'kept_jwks_age_seconds{listener="SASL_PLAINTEXT"}' in text
