"""The page of an analysis, whatever the keys are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kept.pipeline.jobs.analysis import Analysis
from kept.pipeline.jobs.report import page

pytestmark = [pytest.mark.slow, pytest.mark.spark]

KEYS = [
    b"$\\frac{$", b"<script>alert(1)</script>", b'"><img src=x onerror=alert(2)>', b"\xff\0\n",
    "日本語.😀".encode(), b"a" * 10_000, b"user.long.common.prefix.0001",
    b"user.long.common.prefix.0002", b"", "\u202eevil".encode(),
]  # fmt: skip
FIGURES = {
    "records": 10, "bytes": 1000, "kept_records": 5, "kept_bytes": 300, "tombstones": 1,
    "winning_tombstones": 1, "keys": 3,
}  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_hostile_keys_are_shown_and_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    bars: list[int] = []
    draw = Axes.bar

    def count(axes: Any, where: Any, *rest: Any, **more: Any) -> Any:
        bars.append(len(set(where)))
        return draw(axes, where, *rest, **more)

    monkeypatch.setattr(Axes, "bar", count)
    hottest = [{"partition": 0, "key": key, "records": 5, "bytes": 9} for key in KEYS]
    prefixes = [{"prefix": key.decode("utf-8", "backslashreplace"), **FIGURES} for key in KEYS]
    found = Analysis("<b>t</b>", 0, 10, FIGURES, [], prefixes, hottest)
    made = page(found)
    assert bars == [len(KEYS)] * 3, "every key has a bar of its own"
    assert len(re.findall("<img", made)) == 2 and "<script" not in made and "<b>" not in made
    assert (
        "…" in made
        and "(10,000 bytes)" in made
        and "a" * 1000 not in re.sub('base64,.*?"', "", made)
    )
    assert "\\xff\\x00\\n" in made and "\u202e" not in made and "日本語.😀" in made


def test_a_topic_without_records() -> None:
    zeroes = dict.fromkeys(FIGURES, 0)
    made = page(Analysis("t", 0, 0, zeroes, [{"partition": 0, **zeroes}]))
    assert "0 records of 0 keys" in made and made.count("<p>none</p>") == 4
