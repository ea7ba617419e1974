"""The playground's programs, one after the other, as its README has them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from kept.testing.ports import free_port
from tests.docs.blocks import ROOT, given_to, typed

HERE = "tests/examples/test_playground.py"
PLAYGROUND = ROOT / "examples" / "playground"


def commands() -> list[list[str]]:
    """The words of each command of the README: serve, create, produce, watch, log, view."""
    return [
        shlex.split(command.text)
        for _, text, line in given_to(HERE, PLAYGROUND / "README.md")
        for command in typed(text, "README.md", line)
    ]


@pytest.fixture
def play(kept_cluster):
    cluster = kept_cluster(log_cleaner_backoff_ms=100)

    def run(program: str, *arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", program, *arguments],
            cwd=PLAYGROUND,
            env={**os.environ, "KEPT_BOOTSTRAP": cluster.bootstrap},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    run.cluster = cluster  # type: ignore[attr-defined]
    return run


def test_the_playground(play):
    _, *programs = commands()
    assert {python for python, *_ in programs} == {"python"}
    create, produce, watch, log, view = (words for _, *words in programs)
    assert "cleanup.policy=compact" in play(*create)
    assert "exists" in play("create_topic.py", "-t", "my_topic", status=1)
    said = play(*produce, "--wait_time", "0", "--seed", "1")
    assert said == "produced 449 values and 51 tombstones\n"

    segments = play(*watch, "--once")
    assert re.search(r"00000000000000000000\.log .*(clean|dirty)", segments)
    assert "active" in segments
    assert "cleaner: " in segments

    def cleaned() -> bool:
        return " clean " in play(*watch, "--once")

    play.cluster.wait_until(cleaned, "a segment is clean")
    lines = play(*log, "--until-end").splitlines()
    assert 3 <= len(lines) < 500
    table = play(*view, "--until-end")
    assert [line.split()[0] for line in table.splitlines()[1:-1]] == ["key1", "key2", "key3"]
    assert re.search(r"^3 keys from \d+ records", table, re.MULTILINE)


def test_the_node_of_the_playground_would_start(tmp_path):
    (kept, *words), *_ = commands()
    assert kept == "kept"
    check = ("--check", "--port", str(free_port()), "--data-dir", str(tmp_path / "data"))
    subprocess.run([sys.executable, "-m", "kept", *words, *check], check=True, timeout=60)


def test_partitions_that_other_nodes_lead_are_watched(kept_cluster):
    cluster = kept_cluster(nodes=2)
    topic = cluster.create_topic(partitions=2)
    command = [sys.executable, "-W", "error", "watch.py", "-t", topic, "--once"]

    def watch(*arguments: str) -> str:
        return subprocess.run(
            [*command, *arguments], cwd=PLAYGROUND, capture_output=True, text=True, check=True
        ).stdout

    for node in range(2):
        said = watch("-b", f"localhost:{cluster.port(node)}")
        assert all(f"{topic}:{p}: offsets 0 to 0" in said for p in range(2)), said
    cluster.kill(1)
    said = watch("-b", f"localhost:{cluster.port(0)}")
    assert (said.count("offsets 0 to 0"), said.count("not served now: ")) == (1, 1), said


def test_what_is_wrong_is_said(play, tmp_path):
    wrong = tmp_path / "wrong.props"
    wrong.write_text("cleanup.policy=compost\n")
    assert "cleanup.policy" in play("create_topic.py", "-t", "t", "-c", str(wrong), status=1)
    wrong.write_text("nonsense\n")
    assert "not KEY=VALUE" in play("create_topic.py", "-t", "t", "-c", str(wrong), status=1)
    assert "no topic nope" in play("watch.py", "-t", "nope", "--once", status=1)
