"""What the code consists of, as docs/adr/0013-how-large-the-code-is.md counts it.

python -m tests.tools.code_lines    # a row for the product, its folders, the rooms of node/, tests

Lines are of Python files that git tracks, without what protoc makes. A docstring is any string that
stands as a statement; code is what is no docstring, comment, import or blank line.
"""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("storage", "compaction", "replication", "cluster", "client", "node", "pipeline", "kept")


class Count(NamedTuple):
    """Lines by what they are, and files."""

    all: int = 0
    docstrings: int = 0
    blank: int = 0
    imports: int = 0
    comments: int = 0
    code: int = 0
    files: int = 0


def count(text: str) -> Count:
    """The lines of one module."""
    docstrings: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            is_string = isinstance(node.value.value, str)
            docstrings.update(range(node.lineno, node.end_lineno + 1) if is_string else ())
    lines = text.splitlines()
    rest = [n for n in range(1, len(lines) + 1) if n not in docstrings]
    blank = sum(not lines[n - 1].strip() for n in rest)
    comments = sum(lines[n - 1].lstrip().startswith("#") for n in rest)
    code = len(rest) - blank - comments - len(imports)
    return Count(len(lines), len(docstrings), blank, len(imports), comments, code, 1)


def total(paths: Iterable[Path]) -> Count:
    """The lines of several."""
    counts = [count((ROOT / path).read_text()) for path in paths]
    return Count(*map(sum, zip(*counts, strict=True)))


def tracked() -> Iterator[Path]:
    """The Python files that git tracks, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if not name.endswith("_pb2.py"):
            yield Path(name)


def rows() -> dict[str, Count]:
    """By name of a part, its lines."""
    parts: dict[str, list[Path]] = defaultdict(list)
    for path in tracked():
        top = path.parts[0]
        if top in PRODUCT:
            parts["product"].append(path)
            parts[f"{top}/"].append(path)
            if top == "node" and len(path.parts) > 2:
                parts["/".join(path.parts[:2])].append(path)
        elif top == "tests":
            parts["tests"].append(path)
    return {name: total(parts[name]) for name in sorted(parts)}


if __name__ == "__main__":
    print(f"{'':20}", *(f"{name:>10}" for name in Count._fields))
    for name, lines in rows().items():
        print(f"{name:20}", *(f"{value:>10,}" for value in lines))
