"""Control characters in what a login says, over SASL, HTTP and gRPC, and in a call's metadata: they
reach neither the log, nor the audit log, nor an answer of the JSON API, nor a terminal.

No such user can be created (``cluster/controller/scram_changes.py``); this one is in the metadata
as another version, or Apache Kafka, may have left it there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from typing import Any

import pytest

from kept.client.security.scram import ScramClient
from kept.cluster.metadata.records import ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.proto import broker_pb2
from kept.storage.printable import printable_line
from tests.fuzz import seeds
from tests.support.credentials import credential
from tests.support.grpc_calls import basic, call
from tests.support.hostile import HOSTILE, NOT_TEXT, check, in_terminal
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, RawClient
from tests.support.request_values import topic_values

# isort: split
import grpc
import grpc.aio

USER = HOSTILE.replace("\0", "")
"""NUL ends a name in SASL PLAIN."""
STRANGER = USER + "?"
CREATE_TOPICS, DESCRIBE_USERS = 19, 50


@pytest.fixture
def secure(lone_node: Any) -> Any:
    """A node that knows the user, who may do nothing; whoever does not log in may do everything."""
    lone = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN,SCRAM-SHA-256",
        kept_sasl_plain_users="scram",
        connection_failed_authentication_delay_ms="0",
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users="User:ANONYMOUS",
        kept_audit="all",
    )
    known = ScramCredentialRecord(USER, ScramMechanism.SCRAM_SHA_256, credential("pencil"))
    lone.run(lone.node.parts.metadata.propose([known]))
    return lone


async def by_sasl(lone: Any) -> None:
    """Logins that fail in every way, and one that does not, with a request that is denied."""
    for user, password in ((STRANGER, "x"), (USER, "x"), (USER, HOSTILE)):
        client = await RawClient.connect(lone.port)
        assert await client.log_in(user, password.replace("\0", "")) == 58
        client.close()
    for mechanism in (HOSTILE, "PLAIN" + HOSTILE):
        async with await RawClient.connect(lone.port) as peer:
            refused = await peer.ask(HANDSHAKE, 1, mechanism=mechanism)
            assert refused.error_code.name == "unsupported_sasl_mechanism"
    texts = (f"n,,n={USER},r={USER}", f"n,a={USER},n={USER},r=x", f"{USER},,n=x,r=x", f"n,,{USER}")
    for token in (*(text.encode() for text in texts), NOT_TEXT, b"n,," + NOT_TEXT):
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism="SCRAM-SHA-256")
            await peer.ask(AUTHENTICATE, 2, auth_bytes=token)
    for user, password, code in ((USER, "x", 58), (STRANGER, "pencil", 58), (USER, "pencil", 0)):
        async with await RawClient.connect(lone.port) as peer:
            said = await peer.login(ScramClient("SCRAM-SHA-256", user, password), "SCRAM-SHA-256")
            assert int(said.error_code) == code
    client = await RawClient.connect(lone.port, USER, "pencil")
    topics = [topic_values(HOSTILE)]
    denied = await client.ask(CREATE_TOPICS, 7, topics=topics, timeout=9000, validate_only=False)
    assert denied.topics[0].error_code.name == "topic_authorization_failed"
    client.close()


async def by_http(lone: Any) -> None:
    """Basic, right and wrong, and what is no login at all."""
    right = base64.b64encode(f"{USER}:pencil".encode()).decode()
    for login in (
        f"Basic {right}",
        f"Basic {base64.b64encode(STRANGER.encode()).decode()}",
        f"Basic {USER}".replace("\r\n", " "),
        f"Bearer {USER}".replace("\r\n", " "),
        f"{USER} {right}".replace("\r\n", " "),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        head = f"GET /api/v1/topics/t HTTP/1.1\r\nHost: localhost\r\nAuthorization: {login}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n")
        answer = (await asyncio.wait_for(reader.read(), 60)).decode()
        check("an answer to a login", answer.replace("\r\n", "\n"))
        writer.close()


async def by_grpc(lone: Any) -> None:
    """Logins in metadata, a topic's name, and headers that no library of clients sends."""
    produce = broker_pb2.ProduceRequest(topic=HOSTILE, payload=b"v")
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    for login in (basic(STRANGER, "x"), basic(USER, "x"), basic(USER, HOSTILE)):
        assert await call(lone.port, "Produce", produce, login) is unauthenticated
    denied = await call(lone.port, "Produce", produce, basic(USER, "pencil"))
    assert denied is grpc.StatusCode.PERMISSION_DENIED
    raw = USER.encode()
    for name, value in (
        (b":authority", raw),
        (b"user-agent", raw),
        (b"authorization", raw),
        (b"x-kept", raw),
        (b"x-kept-bin", base64.b64encode(raw)),
        (b"x-kept-bin", raw),
        (b"grpc-timeout", raw),
        (b"grpc-encoding", raw),
        (b"content-type", b"application/grpc+" + raw),
        (raw, raw),
        (b"x-kept", NOT_TEXT),
    ):
        head = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": b"/broker.Broker/Produce",
            b":authority": b"localhost",
            b"content-type": b"application/grpc",
            b"te": b"trailers",
        } | {name: value}
        literals = b"".join(
            b"\0" + bytes([len(part)]) + part + bytes([len(text)]) + text
            for part, text in head.items()
        )
        body = produce.SerializeToString()
        frames = (
            seeds.h2_frame(seeds.SETTINGS, 0, 0),
            seeds.h2_frame(seeds.HEADERS, seeds.END_HEADERS, 1, literals),
            seeds.h2_frame(
                seeds.DATA, seeds.END_STREAM, 1, b"\0" + len(body).to_bytes(4, "big") + body
            ),
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(seeds.PREFACE + b"".join(frames))
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.2):  # for whatever it may answer
                while await reader.read(65_536):
                    pass
        writer.close()


def lines_of(written: str) -> list[str]:
    """The lines of log and audit log; nothing in them moves a cursor, or begins another one."""
    check("the log", written)
    lines = written.splitlines()
    for line in lines:
        assert line.startswith(("20", "{")), line[:200]
    return lines


def test_what_a_login_says_is_spelled_out(secure: Any, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    for ways in (by_sasl, by_http, by_grpc):
        secure.run(asyncio.wait_for(ways(secure), 60))
    lines = lines_of(capfd.readouterr().err)
    audited = [json.loads(line) for line in lines if line.startswith("{")]
    principal = f"User:{USER}"
    assert {entry["event"] for entry in audited if entry.get("principal") == principal} == {
        "login",
        "access",
    }
    denied = [entry.get("resource") for entry in audited if entry.get("principal") == principal]
    assert HOSTILE in denied, "a name comes back whole from JSON"
    assert any(printable_line("\x1b[2J") in line for line in lines), "it is told, spelled out"
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_commands_spell_such_users_out(secure: Any) -> None:
    """Users and their rules, by name and in lists."""
    port = secure.node.parts.listeners[1].port
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KEPT_")}
    environ |= {"KEPT_BOOTSTRAP": f"127.0.0.1:{port}", "TERM": "dumb", "COLUMNS": "200"}
    for arguments in (
        ("user", "list"),
        ("user", "list", "--json"),
        ("user", "delete", STRANGER),
        ("user", "add", USER),
        ("acl", "add", f"User:{USER}", "read", "topic:t"),
        ("acl", "list"),
        ("acl", "list", "--principal", f"User:{STRANGER}"),
        ("acl", "check", f"User:{USER}", "read", "topic:t"),
        ("quota", "describe", "--user", USER),
        ("quota", "set", "--user", USER, "--producer-byte-rate", "1"),
        ("quota", "list"),
    ):
        command = [sys.executable, "-P", "-m", "kept", *arguments]
        shown = secure.run(asyncio.to_thread(in_terminal, command, environ))
        assert shown.strip() and "Traceback" not in shown, (arguments, shown)
        check(" ".join(arguments), shown)
        if arguments == ("user", "list"):
            assert printable_line(USER) in shown, "spelled out"
