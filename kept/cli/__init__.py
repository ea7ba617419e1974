"""The command ``kept``. A command's module is imported when it is used (:mod:`kept.cli.root`)."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit status: 0 done, 1 it failed, 2 wrong usage."""
    import sys

    # kio imports hypothesis wherever it is installed: 0.2 s, 15 MB and a directory .hypothesis in
    # the working directory, for nothing. This process has no use for it.
    sys.modules.setdefault("hypothesis", None)  # type: ignore[arg-type]
    from kept.cli.run import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
