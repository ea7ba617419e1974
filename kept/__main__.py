"""``python -m kept`` is the console script ``kept``."""

from __future__ import annotations

import os
import sys

from kept.cli import main


def children_find_kept(package: str, path: list[str]) -> None:
    """Where this kept was found in the working directory (``python -m kept`` in a checkout), let
    processes that it starts find the same one: they do not look there by themselves (``-P``).
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(package)))
    if not sys.flags.safe_path and path and os.path.abspath(path[0]) == root:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = root if not before else f"{root}{os.pathsep}{before}"


if __name__ == "__main__":
    children_find_kept(__file__, sys.path)
    main()
