"""A short attack on a node, always the same; and that an attack finds what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kept.client.security.scram import ScramServer
from kept.cluster.controller.broker_lifecycle import SendHeartbeat
from kept.node.runtime.clock import elapsed_ms
from kept.node.runtime.connection_quota import ConnectionQuota
from tests.fuzz import oracle, seeds
from tests.fuzz.campaign import Failure, attack
from tests.fuzz.mutation import MAX_BYTES, mutated
from tests.fuzz.oracle import Broken, Escaped, Steady
from tests.fuzz.site import PLAINTEXT, Site
from tests.fuzz.targets import TARGETS

NOT_HERE = (b"no group fuzz", b"no transactional id fuzz", b"is not compacted", b"has 0..0 on")
"""What a handler says of what the topic, which is empty and not compacted, does not have."""
ROOT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("FUZZ_MINUTES", "5"))
SEED = os.environ.get("FUZZ_SEED")
"""Another one each time where none is given."""


def test_a_short_attack_breaks_nothing() -> None:
    report = attack(1, TARGETS, range(8))
    assert report.attempts == dict.fromkeys(TARGETS, 8)
    assert 0 < report.slowest_s < oracle.SERVED_S


def test_what_is_damaged_is_right(tmp_path) -> None:
    """Undamaged, each request of HTTP gets through to what serves its route."""
    site = Site(tmp_path)
    try:
        refused = {}
        for data in seeds.api_requests():
            head, _, body = site.run(answer(site.ports[PLAINTEXT], data)).partition(b"\r\n\r\n")
            status = int(head.split()[1])
            if status not in (200, 403) and not any(why in body for why in NOT_HERE):
                refused[data.split(b"\r\n")[0]] = (status, body)
            site.run(site.create_topics())
        assert not refused
    finally:
        site.close()


async def answer(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(20):
        answered = await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                answered += await reader.read(1 << 16)
    writer.close()
    return answered


def test_damage_follows_from_the_seed() -> None:
    data = bytes(range(256))
    several = [mutated(data, Random(7), (b"other",)) for _ in range(2)]
    assert several[0] == several[1] != data
    assert all(len(mutated(data * 1000, Random(n))) <= MAX_BYTES for n in range(50))


@pytest.mark.parametrize("noticed", [True, False])
def test_who_is_steady_may_be_refused_after_a_stall_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """A node that stood still asks the controller first; whoever is steady is served then."""
    site = Site(tmp_path)
    lifecycle = site.parts.cluster_link._lifecycle
    assert lifecycle is not None
    refused, answered = [], asyncio.Event()
    produce, heartbeat = Steady._produce, lifecycle._heartbeat

    async def counted(steady: Steady) -> None:
        try:
            await produce(steady)
        except oracle.NotServed as error:
            refused.append(error)
            answered.set()
            raise

    async def held(effect: SendHeartbeat) -> None:
        await answered.wait()
        await heartbeat(effect)

    async def scene(escaped: Escaped) -> None:
        steady = Steady(site, escaped)
        await steady.open()
        monkeypatch.setattr(lifecycle, "_heartbeat", held)
        lifecycle.core._running_until_ms = elapsed_ms()
        lifecycle.check_stalled()
        escaped.stalls *= noticed
        try:
            await steady.use()
            await steady.use()
        finally:
            steady.close()

    monkeypatch.setattr(Steady, "_produce", counted)
    try:
        with Escaped(site.loop) as escaped:
            if noticed:
                site.run(scene(escaped))
            else:
                with pytest.raises(Broken, match="is not served until the controller answers"):
                    site.run(scene(escaped))
        assert refused
    finally:
        site.close()


def test_who_is_steady_is_not_refused_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)

    async def scene(escaped: Escaped) -> None:
        steady = Steady(site, escaped)
        await steady.open()
        escaped.stalls += 1
        site.parts.replicas.suspend()
        try:
            await steady.use()
        finally:
            steady.close()

    try:
        with Escaped(site.loop) as escaped:
            monkeypatch.setattr(oracle, "SERVED_S", 0.5)
            with pytest.raises(Broken, match="a steady connection is not served"):
                site.run(scene(escaped))
    finally:
        site.close()


def raises(*_: object) -> None:
    raise LookupError("planted")


def does_nothing(*_: object) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "broken", "planted", "told"),
    [
        ("scram", (ScramServer, "step"), raises, "an exception got out"),
        ("frames", (ConnectionQuota, "leave"), does_nothing, "held although nobody is there"),
    ],
)
def test_an_attack_finds_what_is_planted(
    monkeypatch: pytest.MonkeyPatch, target: str, broken: tuple[Any, str], planted: Any, told: str
) -> None:
    monkeypatch.setattr(oracle, "SETTLED_S", 1)
    monkeypatch.setattr(*broken, planted)
    with pytest.raises(Failure, match=told) as caught:
        attack(1, [target], range(30))
    again = str(caught.value).splitlines()[-1]
    assert again.startswith(f"python -m tests.fuzz --seed 1 --target {target} --attempt ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_attack_of_minutes_breaks_nothing() -> None:
    """In a process of its own, whose memory nobody else uses."""
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", str(MINUTES)]
    command += ["--seed", SEED] if SEED else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
