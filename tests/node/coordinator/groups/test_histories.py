"""Every history in ``histories/`` happens as it is told."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HISTORIES = sorted((HERE / "histories").glob("*.txt"))


def load(name: str):
    """A module beside this one: tests are imported by path, not as a package."""
    full = f"groups_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


histories = load("histories")


def test_there_are_histories() -> None:
    assert len(HISTORIES) >= 10


@pytest.mark.parametrize("path", HISTORIES, ids=lambda p: p.stem)
def test_history(path: Path) -> None:
    history = histories.History()
    text = path.read_text()
    if os.environ.get("KEPT_REWRITE_HISTORIES"):
        path.write_text(histories.rewritten(text, history.run))
        return
    for command, expected in histories.commands(text):
        assert history.run(command) == expected, command
