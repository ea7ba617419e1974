"""Record the answers of Apache Kafka into the scripts of this folder.

::

    .venv/bin/python -m tests.golden.transactions.record            # all scripts
    .venv/bin/python -m tests.golden.transactions.record end_txn    # those

Kafka runs once at each level of ``transaction.version``; what kept answers on purpose stays.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.transactions import held
from tests.golden.transactions.script import LEVELS, files, parse, play, render


def record(names: list[str]) -> None:
    """Write the answers of both levels."""
    chosen = [path for path in files() if not names or path.stem in names]
    scripts = {path: parse(path.read_text()) for path in chosen}
    for steps in scripts.values():
        for step in steps:
            step.kafka = {}
    for level in LEVELS:
        with tempfile.TemporaryDirectory() as folder, held.kafka(Path(folder), level) as verbs:
            for path, steps in scripts.items():
                for step, answer in play(steps, verbs, level):
                    step.kafka[level] = answer
                print(f"{path.stem} at level {level}: {len(steps)} lines", flush=True)
    for path, steps in scripts.items():
        path.write_text(render(steps))


if __name__ == "__main__":
    record(sys.argv[1:])
