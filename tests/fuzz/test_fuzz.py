"""A short attack on a node, always the same; and that an attack finds what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kept.client.security.scram import ScramServer
from kept.node.runtime.connection_quota import ConnectionQuota
from tests.fuzz import oracle
from tests.fuzz.campaign import Failure, attack
from tests.fuzz.mutation import MAX_BYTES, mutated
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("FUZZ_MINUTES", "5"))


def test_a_short_attack_breaks_nothing() -> None:
    report = attack(1, TARGETS, range(8))
    assert report.attempts == dict.fromkeys(TARGETS, 8)
    assert 0 < report.slowest_s < oracle.SERVED_S


def test_damage_follows_from_the_seed() -> None:
    data = bytes(range(256))
    several = [mutated(data, Random(7), (b"other",)) for _ in range(2)]
    assert several[0] == several[1] != data
    assert all(len(mutated(data * 1000, Random(n))) <= MAX_BYTES for n in range(50))


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
