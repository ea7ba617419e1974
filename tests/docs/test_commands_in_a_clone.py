"""Commands of pages for whoever changes kept, in a clone: run for less long than the pages say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Command, given_to, run, typed

HERE = "tests/docs/test_commands_in_a_clone.py"
SHORTER = {
    "CONTRIBUTING.md": {"--seed ": "--traces TRACES --seed "},
    "docs/failover.md": {
        "pytest tests/failover ": "pytest --collect-only -q tests/failover ",
        "MINUTES=10": "MINUTES=0.05",
    },
    "docs/simulation.md": {
        "SEEDS=10000": "SEEDS=1",
        "MINUTES=60": "MINUTES=1e-9",
        "--seed ": "--traces TRACES --seed ",
    },
    "docs/compaction-protocol.md": {
        "make model ": "make model SECONDS=1 STATES=2000 ",
        "--states 500000": "--states 2000 --seconds 1",
    },
}
"""Page -> what stands in it, and what is run instead. ``make test-slow`` runs all failovers; in so
few minutes ``make sim`` begins no history: it has a seed of each stage by ``SEEDS``.
"""
BREAKS = "--planted hw-from-leader"
"""A history with this bug ends with 1, as it should, and says where its trace is."""


def shorter(page: str, traces: Path) -> list[Command]:
    """The commands of the page that are run here."""
    made = [
        command
        for _, text, line in given_to(HERE, ROOT / page)
        for command in typed(text, page, line)
    ]
    for old, new in SHORTER[page].items():
        assert any(old in command.text for command in made), f"{page} does not say {old!r} any more"
        new = new.replace("TRACES", str(traces))
        made = [command._replace(text=command.text.replace(old, new)) for command in made]
    return made


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """The environment of this test. ``make`` takes it for ready, and installs nothing into it."""
    made = tmp_path / "venv"
    made.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".ready":
            (made / entry.name).symlink_to(entry)
    (made / ".ready").touch()
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SHORTER)
def test_a_page(page: str, tmp_path: Path, venv: Path) -> None:
    run_here = []
    for command in shorter(page, tmp_path):
        text = command.text.replace(".venv/", f"{venv}/")
        expected = command.expected
        if "--seed" in text and BREAKS in text:
            text, expected = f"{text} || true", ("…", "trace: … fingerprint …", "…")
        run_here.append(command._replace(text=text, expected=expected))
    run(run_here, ROOT, 1, 800, environ={"VENV": str(venv)})
