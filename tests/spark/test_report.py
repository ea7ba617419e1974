"""The page of an analysis, whatever the keys are."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from kept.pipeline.jobs.analysis import Analysis
from kept.pipeline.jobs.report import MOST_PARTITIONS, page

KEYS = [
    b"$\\frac{$",
    b"<script>alert(1)</script>",
    b'"><img src=x onerror=alert(2)>',
    b"\xff\0\n",
    "日本語.😀".encode(),
    b"a" * 10_000,
    b"user.long.common.prefix.0001",
    b"user.long.common.prefix.0002",
    b"",
    "\u202eevil".encode(),
]
MIB = 1 << 20
FIGURES = {
    "records": 10,
    "bytes": 64 * MIB,
    "kept_records": 4,
    "kept_bytes": 16 * MIB,
    "tombstones": 2,
    "winning_tombstones": 1,
    "keys": 3,
}


class _Elements(HTMLParser):
    """Which elements a page has, and the text of its tables by their captions."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.widths: list[float] = []
        self._caption = ""
        self._into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag == "rect":
            width = dict(attrs)["width"] or ""
            if width.endswith("%"):
                self.widths.append(float(width[:-1]))
        if tag == "tr":
            self.rows[self._caption].append([])
        if tag in ("caption", "td", "th"):
            self._into = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self._caption = "".join(self._into or [])
            self.rows[self._caption] = []
        elif tag in ("td", "th"):
            self.rows[self._caption][-1].append("".join(self._into or []))
        if tag in ("caption", "td", "th"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into.append(data)


def test_hostile_keys_are_shown_and_do_nothing() -> None:
    hottest = [{"partition": 0, "key": key, "records": 5, "bytes": 9} for key in KEYS]
    prefixes = [{"prefix": key.decode("utf-8", "backslashreplace"), **FIGURES} for key in KEYS]
    made = page(Analysis("<b>t</b>", 0, 10, FIGURES, "latest", [], prefixes, hottest))
    elements = _Elements(made)
    assert not {"script", "img", "b"} & set(elements.seen) and "\u202e" not in made
    assert not re.search(r"https?://", made), "the page fetches nothing"
    shown = [row[0] for row in elements.rows["Hottest keys"][1:]]
    assert len(set(shown)) == len(KEYS), "each key has a row of its own"
    assert shown[1] == "<script>alert(1)</script>" and shown[3] == "\\xff\\x00\\n"
    assert shown[4] == "日本語.😀" and shown[9] == "\\u202eevil"
    assert shown[5] == "a" * 200 + "… (10,000 bytes)"


def test_figures_are_in_units_that_people_read() -> None:
    totals = {**FIGURES, "bytes": 3 * MIB, "kept_bytes": MIB}
    partitions = [
        {"partition": 0, **FIGURES, "bytes": 2 * MIB, "kept_bytes": 2 * MIB},
        {"partition": 1, **FIGURES, "bytes": MIB, "kept_bytes": 0},
    ]
    ages = [{"age": 2, **FIGURES}, {"age": 6, **FIGURES}, {"age": 8, **FIGURES}]
    duplicates = [{"from_records": 4, "keys": 7, "records": 30}]
    found = Analysis("t", 0, 10, totals, "latest", partitions, duplicates=duplicates, ages=ages)
    made = page(found)
    elements = _Elements(made)
    assert "free <strong>2.0 MiB</strong> of 3.0 MiB (66.7 %)" in made
    assert elements.rows["Partitions"][1:] == [
        ["0", "", "2.0 MiB", "0 B", "0.0 %", "10", "6", "2", "3"],
        ["1", "", "1.0 MiB", "1.0 MiB", "100.0 %", "10", "6", "2", "3"],
    ]
    # The bars: what stays and what goes, of the whole; then of the largest partition.
    assert elements.widths[:6] == [33.33, 66.67, 100, 0, 0, 50]
    assert [row[0] for row in elements.rows["Age of records"][1:]] == [
        "≤ 1 day",
        "older",
        "no timestamp",
    ]
    assert elements.rows["How many records keys have"][1][0] == "4 to 7"


def test_of_many_partitions_those_are_shown_that_free_most() -> None:
    partitions = [
        {"partition": n, **FIGURES, "kept_bytes": FIGURES["bytes"] - n} for n in range(150)
    ]
    made = page(Analysis("t", 0, 10, FIGURES, "latest", partitions))
    shown = [int(row[0]) for row in _Elements(made).rows["Partitions"][1:]]
    assert shown == list(range(149, 149 - MOST_PARTITIONS, -1))
    assert "50 more free less" in made


def test_a_topic_without_records() -> None:
    zeroes = dict.fromkeys(FIGURES, 0)
    made = page(Analysis("t", 0, 0, zeroes, "latest", [{"partition": 0, **zeroes}]))
    assert "of 0 records" in made and made.count('<p class="quiet">none</p>') == 4


@pytest.mark.slow
@pytest.mark.chromium
def test_nothing_makes_the_page_wider_than_its_window() -> None:
    from tests.console import browser

    partitions = [{"partition": n, **FIGURES} for n in range(30)]
    prefixes = [{"prefix": "long." * 40, **FIGURES}]
    made = page(Analysis("t", 0, 10, FIGURES, "latest", partitions, prefixes))
    with browser.chromium() as chromium:
        for width in (1200, 390):
            shown, wrong = browser.opened(chromium, width=width)
            shown.set_content(made)
            assert shown.evaluate("document.documentElement.scrollWidth") == width
            assert wrong == []
