"""The page of planted bugs is what the code says, and names what is there."""

from __future__ import annotations

from pathlib import Path

from tests.sim.planted import PLANTED
from tests.sim.planted_page import SIM, TRANSACTIONS, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_code_says() -> None:
    again = "write it again: python -m tests.sim.planted_page > docs/planted-bugs.md"
    assert (ROOT / "docs" / "planted-bugs.md").read_text() == "\n".join([*page(), ""]), again


def test_what_may_go_wrong_in_transactions_is_planted_where_the_page_says() -> None:
    missing = [
        (path, name)
        for _, places in TRANSACTIONS
        for path, name in places
        if not (name in PLANTED if path == SIM else name in (ROOT / path).read_text())
    ]
    assert len(TRANSACTIONS) == 38 and not missing, missing
