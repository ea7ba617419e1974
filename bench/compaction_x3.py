"""What compacting a log costs on all of three replicas, and what the check of each pass costs.

Apache Kafka cleans on every replica, kept on the leader: the others apply its manifest. The first
figure is made of those of the same run: the pass inside a broker (section ``cleaner``), and what
applying costs of a pass (``manifest_apply.py``), if both were measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import Bench, Row

HERE = Path(__file__).resolve().parent
PASS = "cleaner, half clean"
APPLY = "applying a generation, CPU of its pass"
NAME = "compacting on three replicas, half clean"


def thrice(bench: Bench) -> None:
    """Rows of both brokers, as far as the figures are there; and the check's share."""
    ours, theirs = (_value(bench.rows, "cleaner", PASS, who) for who in ("kept", "kafka"))
    share = _value(bench.rows, "following", APPLY, "kept")
    if ours is not None and share is not None:
        bench.add("following", NAME, "kept", "CPU-s/GB", ours * (1 + 2 * share))
    if theirs is not None:
        bench.add("following", NAME, "kafka", "CPU-s/GB", 3 * theirs)
    checked(bench)


def _value(rows: list[Row], group: str, name: str, broker: str) -> float | None:
    for row in rows:
        found = (row["group"], row["name"], row["broker"])
        if found == (group, name, broker) and row["unit"] in ("CPU-s/GB", "ratio"):
            return float(str(row["value"]))
    return None


def checked(bench: Bench) -> None:
    """The figures of ``self_check_cost.py``."""
    target = bench.folder / "checked.json"
    run = [sys.executable, HERE / "self_check_cost.py", "--gb", 0.5 * bench.scale]
    run += ["--dir", bench.folder, "--json", target]
    subprocess.run([str(word) for word in run], check=True, stdout=subprocess.DEVNULL)
    figures = json.loads(target.read_text())["latest"]
    name = "check of sampled keys, CPU of the pass"
    bench.add("following", name, "kept", "%", figures["draw_and_prove_percent"])
