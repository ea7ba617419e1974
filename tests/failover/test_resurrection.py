"""The deleted key that comes back, told on real nodes by ``bench/resurrection.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "resurrection.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def told(broker: str) -> tuple[int, list[str]]:
    """Exit status and lines of the story on one system."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--broker", broker],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_on_kept_it_stays_deleted():
    status, lines = told("kept")
    assert status == 0, "\n".join(lines)
    assert lines[0].endswith("compacted: None")
    assert lines[1].endswith("leads: None: it stays deleted")


@pytest.mark.java
def test_on_kafka_it_comes_back():
    """Or the story would show nothing."""
    status, lines = told("kafka")
    assert status == 0, "\n".join(lines)
    assert lines[0].endswith("compacted: None")
    assert lines[1].endswith("leads: b'alive': IT CAME BACK")
