"""How a table is laid out in a terminal that it is too wide for. Text in, lines out. Widths are
those on the terminal, in columns: most characters take one, those of East Asia and emoji two,
combining ones none.

Nothing is cut: cells wrap, where they can at spaces and at ``-``, ``_``, ``.``, ``/``, ``:`` and
``,``; numbers, times and short cells stay whole. Columns that have nothing in any row make room
first. Then these are tried: the sentence that ends a row on lines of its own; one blank between
columns; a few words that end a row on a line of their own; and last, in a narrow terminal, each row
as lines of ``NAME  value``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

NOTHING: Final = "-"
WHOLE: Final = 10
"""Cells of a table that are so wide are not wrapped."""
PIECE: Final = 16
"""Longer pieces without a place to break are cut, in columns of at least this."""
SENTENCE: Final = 20
"""A cell with blanks gets at least so much."""
INDENT: Final = "    "
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
_PIECE: Final = re.compile(r"[^\s,:;/._-]*[\s,:;/._-]?")


def fitted(lines: Sequence[Sequence[str]], numeric: Sequence[bool], width: int) -> list[str]:
    """Lines that are at most ``width`` wide, or as little more as there may be in a very narrow
    terminal. The first of ``lines`` has the names of the columns; those that are ``numeric`` stand
    to the right.
    """
    columns = list(range(len(numeric)))
    filled = [c for c in columns if any(line[c] != NOTHING for line in lines[1:])] or columns
    tries = [(filled, False, 2)]
    last = filled[-1]
    if len(filled) > 1 and any(_is_sentence(line[last]) for line in lines[1:]):
        tries += [(filled[:-1], True, 2), (filled[:-1], True, 1)]
    tries.append((filled, False, 1))
    if len(filled) > 1 and any(" " in line[last] for line in lines[1:]):
        tries += [(filled[:-1], True, 2), (filled[:-1], True, 1)]
    for shown, is_last_below, gap in tries:
        widths = _widths(lines, shown, numeric, width - gap * (len(shown) - 1))
        if widths is None:
            continue
        out: list[str] = []
        for number, line in enumerate(lines):
            cells = [line[c] for c in shown]
            right = [numeric[c] for c in shown]
            out += _row(cells, widths, right, " " * gap, is_head=number == 0)
            if is_last_below and number and line[last] != NOTHING:
                text = f"{lines[0][last].lower()}: {line[last]}"
                out += [INDENT + part for part in wrapped(text, max(width - len(INDENT), PIECE))]
        return out
    return _records(lines, filled, width)


def width_of(text: str) -> int:
    """How wide a text is on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int, is_right: bool) -> str:
    """A text with blanks around it: before it where it stands to the right."""
    blanks = " " * (width - width_of(text))
    return blanks + text if is_right else text + blanks


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines that are at most ``width`` wide."""
    lines, line = [], ""
    for piece in _PIECE.findall(text):
        if line.strip() and width_of(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
        while width_of(line.rstrip()) > width:
            end = width
            while end > 1 and width_of(line[:end]) > width:
                end -= 1
            lines.append(line[:end])
            line = line[end:]
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def _is_sentence(cell: str) -> bool:
    return " " in cell and width_of(cell) > SENTENCE


def _least(cell: str) -> int:
    """How narrow a cell may become."""
    if width_of(cell) <= WHOLE or _MOMENT.fullmatch(cell):
        return width_of(cell)
    longest = max(width_of(piece.rstrip()) for piece in _PIECE.findall(cell))
    return min(width_of(cell), max(min(longest, PIECE), SENTENCE if _is_sentence(cell) else WHOLE))


def _widths(
    lines: Sequence[Sequence[str]], shown: Sequence[int], numeric: Sequence[bool], room: int
) -> list[int] | None:
    """The width of each column that is shown, together no more than ``room``; None: impossible.
    Names of columns wrap before cells do.
    """
    head, *rows = lines
    widths, least = [], []
    for c in shown:
        cells = [row[c] for row in rows]
        words = max(width_of(piece.rstrip()) for piece in _PIECE.findall(head[c]))
        widths.append(max([words, *map(width_of, cells)]))
        least.append(max([words, *(width_of(x) if numeric[c] else _least(x) for x in cells)]))
    while (over := sum(widths) - room) > 0:
        wide = [i for i in range(len(shown)) if widths[i] > least[i]]
        if not wide:
            return None
        widest = max(wide, key=lambda i: widths[i])
        others = [widths[i] for i in wide if widths[i] < widths[widest]]
        floor = max(least[widest], max(others, default=0))
        widths[widest] -= min(over, max(1, widths[widest] - floor))
    for i, c in enumerate(shown):
        widths[i] += max(0, min(width_of(head[c]) - widths[i], room - sum(widths)))
    return widths


def _row(
    cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], gap: str, *, is_head: bool
) -> Iterator[str]:
    parts = [wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, parts))
    if is_head:
        parts = [[""] * (height - len(part)) + part for part in parts]
    for at in range(height):
        line = [part[at] if at < len(part) else "" for part in parts]
        yield gap.join(
            padded(text, width, is_right)
            for text, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()


def _records(lines: Sequence[Sequence[str]], shown: Sequence[int], width: int) -> list[str]:
    """Each row as lines of a name and a value; a blank line between rows."""
    head, *rows = lines
    label = max(width_of(head[c]) for c in shown)
    out: list[str] = []
    for row in rows:
        out += [""] if out else []
        for c in shown:
            first, *more = wrapped(row[c], max(width - label - 2, WHOLE))
            out.append(f"{padded(head[c], label, False)}  {first}")
            out += [" " * (label + 2) + part for part in more]
    return out
