"""Every history in ``histories/`` happens as it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.node.coordinator.transactions.histories import History
from tests.support.histories import commands, rewritten

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.txt"))


def test_there_are_histories() -> None:
    assert len(HISTORIES) >= 10


@pytest.mark.parametrize("path", HISTORIES, ids=lambda p: p.stem)
def test_history(path: Path) -> None:
    history = History()
    text = path.read_text()
    if os.environ.get("KEPT_REWRITE_HISTORIES"):
        path.write_text(rewritten(text, history.run))
        return
    for command, expected in commands(text):
        assert history.run(command) == expected, command
