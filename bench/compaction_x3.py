"""What compacting a log costs on all of three replicas, and what the check of each pass costs.

Apache Kafka cleans on every replica, kept on the leader: the others apply its manifest. The first
figure is made of those of the same run: the pass inside a broker (section ``cleaner``), and what
applying costs of a pass (``manifest_apply.py``), if both were measured.
"""

from __future__ import annotations

from harness import Bench

PASS = "cleaner, half clean"
APPLY = "applying a generation, CPU of its pass"
NAME = "compacting on three replicas, half clean"
GB = 0.5


def following(bench: Bench) -> None:
    """The figures of ``manifest_apply.py``: applying what another replica has computed."""
    found = bench.run_script("manifest_apply.py", GB)
    for name, unit, figure in (
        (APPLY, "ratio", "apply_per_clean"),
        ("the same, segments end elsewhere", "ratio", "apply_other_boundaries_per_clean"),
        ("manifest, share of the log", "%", "manifest_percent"),
    ):
        bench.add("following", name, "kept", unit, found[figure])


def thrice(bench: Bench) -> None:
    """Rows of both brokers, as far as the figures are there; and the check's share."""
    found = {
        (row["group"], row["name"], row["broker"]): float(str(row["value"]))
        for row in bench.rows
        if row["unit"] in ("CPU-s/GB", "ratio")
    }
    ours, theirs = (found.get(("cleaner", PASS, who)) for who in ("kept", "kafka"))
    share = found.get(("following", APPLY, "kept"))
    if ours is not None and share is not None:
        bench.add("following", NAME, "kept", "CPU-s/GB", ours * (1 + 2 * share))
    if theirs is not None:
        bench.add("following", NAME, "kafka", "CPU-s/GB", 3 * theirs)
    figures = bench.run_script("self_check_cost.py", GB)["latest"]
    name = "check of sampled keys, CPU of the pass"
    bench.add("following", name, "kept", "%", figures["draw_and_prove_percent"])
