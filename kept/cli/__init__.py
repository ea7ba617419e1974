"""The command ``kept``. A command's module is imported when it is used (:mod:`kept.cli.root`)."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit status: 0 done, 1 it failed, 2 wrong usage."""
    import sys

    from kept.cli.shell import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
