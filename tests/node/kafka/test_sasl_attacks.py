"""What strangers try on a SASL listener, by the thousand."""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.client.protocol import messages as protocol
from kept.client.security.scram import ScramClient, password_matches
from kept.cluster.metadata.records import ScramCredentialRecord
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.node.security import password_checks
from kept.node.security.password_checks import MAX_WAITING_PER_HOST
from tests.support.credentials import credential
from tests.support.loops import until
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, RawClient

pytestmark = pytest.mark.slow

SETTINGS = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl_enabled_mechanisms": "PLAIN,SCRAM-SHA-256",
    "kept_sasl_plain_users": "scram",
    "max_connections_per_ip": "1000",
}


@pytest.fixture
def secure(lone_node: Any, request: pytest.FixtureRequest) -> Any:
    delay_ms = "100" if "flood" in request.node.name else "0"
    lone = lone_node(**SETTINGS, connection_failed_authentication_delay_ms=delay_ms)
    ada = ScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
    lone.run(lone.node.parts.metadata.propose([ada]))
    return lone


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4096


async def log_in(lone: Any, password: str, host: str) -> str:
    """By PLAIN; the name of the answer's code."""
    async with await RawClient.connect(lone.port, host=host) as client:
        return ErrorCode(await client.log_in("ada", password)).name


def test_ten_thousand_strangers_leave_nothing(secure: Any) -> None:
    requests = (
        protocol.encode_request(3, 9, 7, "x", {"topics": None}),
        protocol.encode_request(HANDSHAKE, 1, 7, "x", {"mechanism": "PLAIN"}) * 2,
        protocol.encode_request(AUTHENTICATE, 2, 7, "x", {"auth_bytes": b"x" * 5000}),
        struct.pack(">i", 524_289),
    )
    listener = secure.node.parts.listeners[0]

    async def wave(count: int) -> None:
        for number in range(count):
            async with await RawClient.connect(secure.port) as client:
                client.writer.write(requests[number % len(requests)])
                await client.ends()
        await until(lambda: not listener.quota.count)

    secure.run(wave(1_000))
    before = resident_bytes()
    secure.run(wave(9_000))
    assert resident_bytes() - before < 4_000_000
    assert not listener.logging_in
    assert not listener.connections
    assert len(listener.silent) == 0


def test_a_flood_of_wrong_passwords_keeps_no_other_address_out(secure: Any) -> None:
    checks = secure.node.parts.logins.passwords

    async def go() -> None:
        waited, spent_s = 0, 0.0
        stop = asyncio.Event()
        answers = set()

        async def guess(number: int) -> None:
            while not stop.is_set():
                with suppress(asyncio.IncompleteReadError):  # too many wait: it was not checked
                    answers.add(await log_in(secure, f"guess {number}", "127.0.0.2"))

        guesses = [asyncio.ensure_future(guess(number)) for number in range(300)]
        await until(lambda: checks.waiting == MAX_WAITING_PER_HOST)
        for _ in range(20):
            checks._right.clear()
            began = time.process_time()
            code = await log_in(secure, "pencil", "127.0.0.3")
            spent_s = max(spent_s, time.process_time() - began)
            assert code == "none"
            waited = max(waited, checks.waiting)
        stop.set()
        await asyncio.gather(*guesses)
        assert answers == {"sasl_authentication_failed"}
        assert 0 < waited <= MAX_WAITING_PER_HOST + 1
        print(f"{1e3 * spent_s:.0f} ms of this process at most, the flood's clients included")
        assert spent_s < 0.2

    secure.run(go())


@pytest.mark.parametrize(
    ("mechanism", "count"),
    [("PLAIN", 1000), ("SCRAM-SHA-256", 200)],  # of SCRAM it is the client that works long
)
def test_an_unknown_user_is_answered_as_a_wrong_password_is(
    secure: Any, mechanism: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same answers, the same work, and times of which none tells who exists."""
    work: list[tuple[Any, ...]] = []

    def checked(mechanism: str, password: str, stored: ScramCredential) -> bool:
        work.append((mechanism, stored.iterations, len(stored.salt), len(password)))
        return password_matches(mechanism, password, stored)

    monkeypatch.setattr(password_checks, "password_matches", checked)

    async def attempt(user: str) -> tuple[list[tuple[Any, ...]], float]:
        """What the answers show but for nonces and salts, and the time that the whole took."""
        shown = []
        token: bytes | None = f"\0{user}\0wrong".encode()
        scram = ScramClient("SCRAM-SHA-256", user, "wrong")
        if mechanism != "PLAIN":
            token = scram.step(None)
        async with await RawClient.connect(secure.port) as client:
            began = time.perf_counter()
            await client.ask(HANDSHAKE, 1, mechanism=mechanism)
            while True:
                response = await client.ask(AUTHENTICATE, 2, auth_bytes=token)
                iterations = response.auth_bytes.rpartition(b",i=")[2]
                known = response.error_code, response.error_message, response.session_lifetime
                shown.append((*known, len(response.auth_bytes), iterations))
                if response.error_code.name != "none":
                    break
                token = scram.step(response.auth_bytes)
            took = time.perf_counter() - began
        return shown, took

    async def go() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"ada": [], "eve": []}
        shapes = set()
        for _ in range(count):
            for user, taken in times.items():
                shown, took = await attempt(user)
                shapes.add(tuple(shown))
                taken.append(took)
        assert len(shapes) == 1, shapes
        return times

    known, unknown = (quantiles(taken) for taken in secure.run(go()).values())
    assert len(set(work)) == (mechanism == "PLAIN"), set(work)
    assert len(work) == (2 * count if mechanism == "PLAIN" else 0)
    print(f"{mechanism}, s by quartiles: {known}, {unknown}")
    assert known[0] < unknown[2] and unknown[0] < known[2], "each lies within the other"
