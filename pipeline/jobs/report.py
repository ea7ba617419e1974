"""The page of an analysis: one HTML file that fetches nothing, for a browser, a mail or a printer.

Every figure stands in a table, and each row has a bar beside its numbers: there are no axes to read
and nothing is told by a picture alone. Names and keys are what producers wrote: they are escaped,
and what cannot be printed is spelled out.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kept.pipeline.jobs.analysis import AGES, Analysis

MOST_SHOWN: Final = 200
"""Characters of a key in a table."""
MOST_PARTITIONS: Final = 100
"""Partitions in the table: those that compaction would free most of."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STYLE: Final = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f8fa; --text: #1b1f24;
  --quiet: #57606a; --line: #d0d7de; --stays: #1a7f37; --goes: #b06a00; --goes-light: #e0b06a;
  --plain: #2f6fe4 }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --card: #171c23; --text: #e6edf3;
  --quiet: #9aa7b4; --line: #30363d; --stays: #3fb950; --goes: #d29922; --goes-light: #6d5214;
  --plain: #79b8ff } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem }
p { margin: .4rem 0 } .quiet { color: var(--quiet); font-size: .9rem }
.lead { font-size: 1.25rem; margin: 1.2rem 0 .6rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem;
  margin: 1rem 0 }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .75rem }
dt { color: var(--quiet); font-size: .85rem }
dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; margin: .6rem 0 }
caption { position: absolute; left: -200vw }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top }
th { color: var(--quiet); font-size: .85rem; font-weight: 600; white-space: nowrap }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
td.name { font-family: ui-monospace, monospace; font-size: .9rem; overflow-wrap: anywhere;
  min-width: 9rem }
td.bar { width: 32%; min-width: 9rem; padding-top: .6rem }
svg { display: block; width: 100%; height: .8rem; border-radius: 2px }
svg.big { height: 2rem } .stays { fill: var(--stays) } .plain { fill: var(--plain) }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.5rem; color: var(--quiet); font-size: .9rem;
  padding: 0; margin: .3rem 0; list-style: none }
.legend svg { display: inline-block; width: .9rem; height: .9rem; margin-right: .4rem;
  vertical-align: -.12rem }
.hatch { stroke: var(--goes); stroke-width: 4 } .ground { fill: var(--goes-light) }
@media print { .scroll { overflow: visible } tr { break-inside: avoid } }
"""
_HATCH: Final = (
    '<svg style="position:absolute;width:0;height:0" aria-hidden="true"><defs>'
    '<pattern id="goes" width="8" height="8" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="ground" width="8" height="8"/>'
    '<line class="hatch" x1="2" y1="0" x2="2" y2="8"/></pattern></defs></svg>'
)
"""What would go is hatched: no colour alone tells it."""


def page(found: Analysis) -> str:
    """The page as text."""
    total = found.totals
    freed = total["bytes"] - total["kept_bytes"]
    removed = total["records"] - total["kept_records"]
    taken = datetime.datetime.fromtimestamp(found.taken_ms / 1000, datetime.UTC)
    count = len(found.partitions)
    measured = f"{taken:%Y-%m-%d %H:%M} UTC · {count:,} partition{'' if count == 1 else 's'}"
    if found.strategy:
        measured += f" · strategy {_text(found.strategy)}"
    lead = (
        f"Compaction would free <strong>{_size(freed)}</strong> of {_size(total['bytes'])} "
        f"({_percent(freed, total['bytes'])}) and remove <strong>{removed:,}</strong> of "
        f"{total['records']:,} records."
    )
    tiles = [
        ("Records", f"{total['records']:,}"),
        ("Keys", f"{total['keys']:,}"),
        ("Size", _size(total["bytes"])),
        ("Size that stays", _size(total["kept_bytes"])),
        ("Tombstones", f"{total['tombstones']:,}"),
        ("Largest partition", f"{found.skew:.2f} × mean"),
    ]
    title = f"Topic {_text(found.topic)}: what compaction would free"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{_HATCH}<main>"
        f"<h1>{html.escape(title)}</h1>"
        f'<p class="quiet">{html.escape(measured)}</p><p class="lead">{lead}</p>'
        + _stays_and_goes(total, total["bytes"], "big")
        + '<ul class="legend"><li><svg viewBox="0 0 9 9" aria-hidden="true"><rect class="stays" '
        'width="9" height="9"/></svg>stays</li><li><svg viewBox="0 0 9 9" aria-hidden="true">'
        '<rect fill="url(#goes)" width="9" height="9"/></svg>goes</li></ul><dl>'
        + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
        + "</dl>"
        + _partitions(found.partitions)
        + _prefixes(found.prefixes)
        + _duplicates(found.duplicates)
        + _hottest(found.hottest)
        + _ages(found.ages)
        + "<h2>How this was measured</h2>"
        '<p class="quiet">Spark read every record up to the end of the log, and judged each by the '
        "strategy as if the active segment were closed. Sizes are those of keys, values and "
        f"headers before compression; the topic has {found.offsets:,} offsets. Of the tombstones "
        f"{total['winning_tombstones']:,} are the newest record of their key: they count as "
        "records that stay, although the cleaner removes them after delete.retention.ms.</p>"
        "</main></body></html>\n"
    )


def _partitions(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = sorted(rows, key=lambda row: row["kept_bytes"] - row["bytes"])[:MOST_PARTITIONS]
    left_out = len(rows) - len(shown)
    note = f"The {len(shown)} that free most; {left_out:,} more free less." if left_out else ""
    if not left_out:
        shown = list(rows)
    return _figures(
        "Partitions", "Partition", [(str(row["partition"]), row) for row in shown], note
    )


def _prefixes(rows: Sequence[Mapping[str, Any]]) -> str:
    named = [(_text(row["prefix"]) or "(no prefix)", row) for row in rows]
    note = "What keys begin with; the prefixes that compaction would free most of."
    return _figures("Key prefixes", "Prefix", named, note if rows else "")


def _figures(
    title: str, name: str, rows: Sequence[tuple[str, Mapping[str, Any]]], note: str
) -> str:
    """What stays and goes, a row for each."""
    most = max((row["bytes"] for _, row in rows), default=0)
    heads = [name, "", "Size", "Goes", "", "Records", "Go", "Tombstones", "Keys"]
    cells = [
        [
            _name(label),
            _bar_cell(_stays_and_goes(row, most)),
            _number(_size(row["bytes"])),
            _number(_size(row["bytes"] - row["kept_bytes"])),
            _number(_percent(row["bytes"] - row["kept_bytes"], row["bytes"])),
            _number(f"{row['records']:,}"),
            _number(f"{row['records'] - row['kept_records']:,}"),
            _number(f"{row['tombstones']:,}"),
            _number(f"{row['keys']:,}"),
        ]
        for label, row in rows
    ]
    return _section(title, heads, cells, note)


def _duplicates(rows: Sequence[Mapping[str, Any]]) -> str:
    most = max((row["keys"] for row in rows), default=0)
    cells = []
    for row in rows:
        first, last = row["from_records"], 2 * row["from_records"] - 1
        label = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        bar = _bar_cell(_bar(row["keys"], most))
        cells.append(
            [_name(label), bar, _number(f"{row['keys']:,}"), _number(f"{row['records']:,}")]
        )
    heads = ["Records of a key", "", "Keys", "Records"]
    return _section("How many records keys have", heads, cells)


def _hottest(rows: Sequence[Mapping[str, Any]]) -> str:
    most = max((row["records"] for row in rows), default=0)
    cells = [
        [
            _name(_text(row["key"]) or "(empty key)"),
            _bar_cell(_bar(row["records"], most)),
            _number(f"{row['records']:,}"),
            _number(_size(row["bytes"])),
            _number(str(row["partition"])),
        ]
        for row in rows
    ]
    return _section("Hottest keys", ["Key", "", "Records", "Size", "Partition"], cells)


def _ages(rows: Sequence[Mapping[str, Any]]) -> str:
    most = max((row["bytes"] for row in rows), default=0)
    cells = [
        [
            _name(
                AGES[row["age"]] if row["age"] >= AGES.index("older") else f"≤ {AGES[row['age']]}"
            ),
            _bar_cell(_stays_and_goes(row, most)),
            _number(_size(row["bytes"])),
            _number(_size(row["bytes"] - row["kept_bytes"])),
            _number(f"{row['records']:,}"),
            _number(f"{row['records'] - row['kept_records']:,}"),
        ]
        for row in rows
    ]
    heads = ["Age", "", "Size", "Goes", "Records", "Go"]
    return _section("Age of records", heads, cells)


def _section(
    title: str, heads: Sequence[str], cells: Sequence[Sequence[str]], note: str = ""
) -> str:
    """A table below its title. The heads of columns of numbers stand at the right."""
    if not cells:
        return f'<h2>{title}</h2><p class="quiet">none</p>'
    head = "".join(_head(text, number=i > 1) for i, text in enumerate(heads))
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    note = f'<p class="quiet">{note}</p>' if note else ""
    return (
        f'<h2>{title}</h2>{note}<div class="scroll"><table><caption>{title}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(text: str, *, number: bool) -> str:
    if not text:
        return "<td></td>"
    kind = ' class="number"' if number else ""
    return f'<th scope="col"{kind}>{text}</th>'


def _name(text: str) -> str:
    return f'<td class="name">{html.escape(text)}</td>'


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'


def _bar_cell(bar: str) -> str:
    return f'<td class="bar">{bar}</td>'


def _stays_and_goes(row: Mapping[str, Any], most: int, kind: str = "") -> str:
    """Bytes that stay and bytes that go, against ``most``; the numbers stand beside it."""
    stays, whole = _share(row["kept_bytes"], most), _share(row["bytes"], most)
    return (
        f'<svg class="{kind}" aria-hidden="true"><rect class="stays" width="{stays}%" '
        f'height="100%"/><rect fill="url(#goes)" x="{stays}%" width="{round(whole - stays, 2)}%" '
        'height="100%"/></svg>'
    )


def _bar(value: int, most: int) -> str:
    return (
        f'<svg aria-hidden="true"><rect class="plain" width="{_share(value, most)}%" '
        'height="100%"/></svg>'
    )


def _share(value: int, most: int) -> float:
    """In percent; something that is there has a bar that can be seen."""
    return max(round(100 * value / most, 2), 0.3 if value else 0) if most else 0


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _size(count: float) -> str:
    """Bytes in the unit that fits."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:,.0f} {_UNITS[unit]}" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def _text(value: bytes | str, most: int = MOST_SHOWN) -> str:
    """What people can read: keys as far as ``most``, what cannot be printed as escapes."""
    given = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    decoded = given[: 4 * most].decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in decoded[: most + 1])
    return shown if len(decoded) <= most else f"{shown[:most]}… ({len(given):,} bytes)"
