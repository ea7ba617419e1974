"""The deleted key that comes back, told on real nodes by ``bench/resurrection.py``."""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs.blocks import ROOT, Command, given_to, run, typed

HERE = "tests/failover/test_resurrection.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def told() -> Command:
    """The command of README.md, and what it prints. Which node was away is chance."""
    ((_, text, line),) = given_to(HERE, ROOT / "README.md")
    (command,) = typed(text, "README.md", line)
    return command._replace(
        text=command.text.replace(".venv/bin/python", sys.executable),
        expected=tuple(re.sub(r"node \d", "node …", said) for said in command.expected),
    )


def test_on_kept_it_stays_deleted():
    """Without Java."""
    command = told()
    alone = command._replace(
        text=command.text.replace("resurrection.py", "resurrection.py --broker kept"),
        expected=tuple(said for said in command.expected if said.startswith("kept: ")),
    )
    assert len(alone.expected) == 2 and "--broker" in alone.text
    run([alone], ROOT, 1, 300)


@pytest.mark.java
def test_on_kafka_it_comes_back():
    """Or the story would show nothing."""
    command = told()
    assert len(command.expected) == 4
    run([command], ROOT, 1, 550)
