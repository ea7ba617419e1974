"""Damaged files and messages of our own: an error of ours, or a value; see ``decoders.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DECODERS = 32
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_damage_is_told_or_does_nothing(seed: int) -> None:
    command = [sys.executable, "-m", "tests.node.decoders", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    *faults, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    assert not faults
    assert json.loads(last) == {"decoders": DECODERS}
