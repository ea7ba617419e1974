"""The page of an analysis: one HTML file with tables and plots in it, asking for nothing else."""

from __future__ import annotations

import base64
import datetime
import html
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kept.pipeline.jobs.analysis import AGES, Analysis

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } h2 { margin-top: 2rem }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left; font-family: ui-monospace, monospace }
td:first-child { overflow-wrap: anywhere }
img { max-width: 100% }
"""
MOST_SHOWN: Final = 200
"""Characters of a key in a table."""
MOST_BESIDE: Final = 24
"""Characters below a bar."""


def page(found: Analysis) -> str:
    """The page as text."""
    total = found.totals
    saved = total["bytes"] - total["kept_bytes"]
    share = 100 * saved / total["bytes"] if total["bytes"] else 0.0
    taken = datetime.datetime.fromtimestamp(found.taken_ms / 1000, datetime.UTC)
    lead = (
        f"{total['records']:,} records of {total['keys']:,} keys at {found.offsets:,} offsets, "
        f"{total['bytes']:,} bytes of keys, values and headers. Compaction would remove "
        f"{total['records'] - total['kept_records']:,} records and {saved:,} bytes "
        f"({share:.1f} %). {total['tombstones']:,} records are tombstones, "
        f"{total['winning_tombstones']:,} of them the newest of their key. The largest partition "
        f"has {found.skew:.2f} times the mean."
    )
    parts = [
        f"<p>{html.escape(lead)}</p>",
        _section("Partitions", _saved(found.partitions, "partition"), found.partitions),
        _section("Key prefixes", _saved(found.prefixes, "prefix"), found.prefixes),
        _section("Records per key", _bars(
            found.duplicates, lambda r: f"{r['from_records']}+", "keys", "keys"), found.duplicates),
        _section("Hottest keys", _bars(
            found.hottest, lambda r: r["key"], "records", "records"), found.hottest),
        _section("Age of records", _bars(
            found.ages, lambda r: AGES[r["age"]], "records", "records"),
            [{**row, "age": AGES[row["age"]]} for row in found.ages]),
    ]  # fmt: skip
    title = f"Topic {html.escape(found.topic)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{taken:%Y-%m-%d %H:%M:%S} UTC</p>"
        + "".join(parts)
        + "</html>\n"
    )


def _text(value: Any, most: int = MOST_SHOWN) -> str:
    """What people can read: keys as far as ``most``, what cannot be printed as escapes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    given = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    decoded = given[: 4 * most].decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in decoded[: most + 1])
    return shown if len(decoded) <= most else f"{shown[:most]}… ({len(given):,} bytes)"


def _section(title: str, image: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return f"<h2>{title}</h2><p>none</p>"
    head = "".join(f"<th>{html.escape(n.replace('_', ' '))}</th>" for n in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(v))}</td>" for v in row.values()) + "</tr>"
        for row in rows
    )
    return f"<h2>{title}</h2>{image}<table><tr>{head}</tr>{body}</table>"


def _saved(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Bytes that stay and bytes that go, a bar for each row."""
    if not rows:
        return ""
    labels = [row[name] for row in rows]
    kept = [row["kept_bytes"] for row in rows]
    gone = [row["bytes"] - row["kept_bytes"] for row in rows]

    def draw(axes: Any) -> None:
        axes.bar(range(len(rows)), kept, label="stays", color="#4878a8")
        axes.bar(range(len(rows)), gone, bottom=kept, label="goes", color="#d9a05b")
        axes.set_ylabel("bytes")
        axes.legend()

    return _image(draw, f"bytes by {name}", labels)


def _bars(rows: Sequence[Mapping[str, Any]], label: Any, name: str, unit: str) -> str:
    if not rows:
        return ""

    def draw(axes: Any) -> None:
        axes.bar(range(len(rows)), [row[name] for row in rows], color="#4878a8")
        axes.set_ylabel(unit)

    return _image(draw, f"{unit} by class", [label(row) for row in rows])


def _image(draw: Any, alt: str, labels: Sequence[Any]) -> str:
    """A plot with a label below each bar, as an image inside the page; no display is needed.

    The labels are what producers wrote: no two bars are one for having the same, a dollar sign
    begins no formula, and a character that the font lacks is nobody's concern.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    shown = [_text(label, MOST_BESIDE).partition("… (")[0] or "(none)" for label in labels]
    axes.set_xticks(range(len(shown)), shown, rotation=45, ha="right", parse_math=False)
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(out, format="png", dpi=96)
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
