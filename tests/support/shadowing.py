"""Modules in a directory that shadow ours and Python's own."""

from __future__ import annotations

from pathlib import Path

TRACE = "trace"
IMPORTED_EARLY = ("platform", "json", "asyncio/__init__", "kept/__init__", "sitecustomize")
"""Names that every child imports; each would leave a trace."""


def plant(directory: Path) -> Path:
    """Modules that shadow ours and Python's own; what they leave when one of them runs."""
    trace = directory / TRACE
    for name in IMPORTED_EARLY:
        file = directory / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(f"open({str(trace)!r}, 'a').write({name!r})\nraise SystemExit(77)\n")
    return trace
