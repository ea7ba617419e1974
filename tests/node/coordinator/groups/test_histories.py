"""Every history in ``histories/`` happens as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.coordinator.groups.histories import History
from tests.support.histories import check_history

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.txt"))


def test_there_are_histories() -> None:
    assert len(HISTORIES) >= 10


@pytest.mark.parametrize("path", HISTORIES, ids=lambda p: p.stem)
def test_history(path: Path) -> None:
    check_history(path, History().run)
