"""A password that is not checked, since too many others wait, is answered as no wrong one: clients
of each protocol hear what lets them try again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kept.client.client import Client
from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.plain import PlainClient
from kept.client.security.security import Security
from kept.cluster.metadata.records import ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from kept.node.proto import broker_pb2
from kept.node.security import password_checks
from tests.support.credentials import credential
from tests.support.grpc_calls import basic, call
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, RawClient

# isort: split
import grpc

TOKEN = b"\0ada\0pencil"
LOGIN = basic("ada", "pencil")


class Site:
    """A node whose passwords are those of SCRAM's users, and whether any is checked."""

    def __init__(self, lone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lone = lone
        self.checks = lone.node.parts.logins.passwords
        self._monkeypatch = monkeypatch
        ada = ScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
        lone.run(lone.node.parts.metadata.propose([ada]))

    def crowd(self) -> None:
        """Both threads are busy, and nobody may wait; nothing is remembered."""
        self.checks._right.clear()
        self.checks._running = password_checks.THREADS
        self._monkeypatch.setattr(password_checks, "MAX_WAITING_PER_HOST", 0)

    def empty(self) -> None:
        """It is over."""
        self.checks._running = 0

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {LOGIN}\r\n\r\n"
        answer: tuple[int, dict[str, str], bytes] = self.lone.http(head)
        return answer


@pytest.fixture
def site(lone_node: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    def start(**settings: str) -> Site:
        lone = lone_node(
            listeners="SASL_PLAINTEXT://127.0.0.1:0",
            sasl_enabled_mechanisms="PLAIN",
            kept_sasl_plain_users="scram",
            connection_failed_authentication_delay_ms="0",
            **settings,
        )
        return Site(lone, monkeypatch)

    return start


@pytest.mark.parametrize("version", [0, 1])
def test_a_kafka_client_is_closed_without_an_answer(
    site: Any, version: int, capfd: pytest.CaptureFixture[str]
) -> None:
    crowded = site()
    crowded.crowd()

    async def attempt() -> bool:
        async with await RawClient.connect(crowded.lone.port) as peer:
            await peer.ask(HANDSHAKE, version, mechanism="PLAIN")
            if version:
                peer.send(AUTHENTICATE, 2, auth_bytes=TOKEN)
            else:
                peer.send_bare(TOKEN)
            return bool(await peer.ends())

    assert crowded.lone.run(attempt())
    told = capfd.readouterr().err
    assert 'event="login not checked"' in told and "Traceback" not in told
    counters = crowded.lone.node.parts.counters
    assert (counters.logins, counters.failed_logins) == (0, 0)
    crowded.empty()

    async def again() -> Any:
        async with await RawClient.connect(crowded.lone.port) as peer:
            return await peer.login(PlainClient("ada", "pencil"), "PLAIN")

    assert crowded.lone.run(again()).error_code.name == "none"


def test_a_client_that_logs_in_again_is_closed_without_an_answer(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    crowded = site(connections_max_reauth_ms="3600000")

    async def attempt() -> bool:
        async with await RawClient.connect(crowded.lone.port) as peer:
            await peer.login(PlainClient("ada", "pencil"), "PLAIN")
            crowded.crowd()
            await peer.ask(HANDSHAKE, 1, mechanism="PLAIN")
            peer.send(AUTHENTICATE, 2, auth_bytes=TOKEN)
            return bool(await peer.ends())

    assert crowded.lone.run(attempt())
    assert crowded.lone.node.parts.counters.failed_logins == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("times", [1, 3])
def test_a_client_of_ours_gets_in_once_the_crowd_is_over(
    site: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = site()
    crowded.crowd()
    turn, away = crowded.checks._turn, []

    async def counted(host: str) -> bool:
        in_turn: bool = await turn(host)
        if not in_turn:
            away.append(host)
            if len(away) == times:
                crowded.empty()
        return in_turn

    monkeypatch.setattr(crowded.checks, "_turn", counted)
    security = Security(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": f'{PLAIN_MODULE} required username="ada" password="pencil";',
        }
    )

    def ask() -> list[int]:
        with Client(f"127.0.0.1:{crowded.lone.port}", security=security) as client:
            return sorted(client.metadata().nodes)

    assert crowded.lone.run(asyncio.to_thread(ask)) == [0]
    assert len(away) == times
    assert crowded.lone.node.parts.counters.failed_logins == 0


def test_http_says_when_to_come_again(site: Any) -> None:
    crowded = site()
    crowded.crowd()
    status, headers, body = crowded.get("/api/v1/cluster")
    assert (status, headers["retry-after"]) == (503, "1")
    assert "wait to be checked" in json.loads(body)["error"]["message"]
    assert crowded.get("/healthz")[0] == 200, "a probe needs no login, and may have one"
    assert crowded.lone.node.parts.counters.failed_logins == 0
    crowded.empty()
    assert crowded.get("/api/v1/cluster")[0] == 200


def test_grpc_is_unavailable(site: Any) -> None:
    crowded = site()
    crowded.lone.create("t")
    crowded.crowd()
    produce = broker_pb2.ProduceRequest(topic="t", payload=b"v")
    ended = crowded.lone.run(call(crowded.lone.port, "Produce", produce, LOGIN))
    assert ended is grpc.StatusCode.UNAVAILABLE
    crowded.empty()
    assert crowded.lone.run(call(crowded.lone.port, "Produce", produce, LOGIN)).offset == 0


def test_logins_that_are_not_checked_are_counted_and_told_beside_refused_ones(
    site: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    crowded = site()
    logins = crowded.lone.node.parts.logins
    listener = "SASL_PLAINTEXT"

    async def fail() -> None:
        error = password_checks.TooManyLogins("too many")
        for _ in range(2):
            logins.refused(listener, "10.0.0.1", "PLAIN", "ada", "wrong")
            logins.not_checked(listener, "10.0.0.1", "PLAIN", error)

    crowded.lone.run(fail())
    told = capfd.readouterr().err
    for event in ("login refused", "login not checked"):
        lines = [line for line in told.splitlines() if f'event="{event}"' in line]
        assert len(lines) == 1 and "times=1" in lines[0], "once in a while, each"
    page = crowded.get("/metrics")[2].decode()
    assert "kept_logins_refused_total 2" in page and "kept_logins_not_checked_total 2" in page
