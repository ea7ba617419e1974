"""The figures as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

from rig import Row


def table(rows: list[Row]) -> str:
    """One line a figure, the brokers side by side."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        key = (str(row["name"]), str(row["unit"]))
        found.setdefault(key, {})[str(row["broker"])] = float(str(row["value"]))
    lines = [f"{'':44} {'kept':>10} {'kafka':>10}  unit        kafka/kept"]
    for (name, unit), values in found.items():
        ours, theirs = values.get("kept"), values.get("kafka")
        cells = " ".join("         -" if v is None else f"{v:10.3f}" for v in (ours, theirs))
        ratio = f"{theirs / ours:10.2f}" if ours and theirs else ""
        lines.append(f"{name:44} {cells}  {unit:11} {ratio}")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Bars of every row in CPU-s/GB and of the latencies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for axis, unit in zip(axes, ("CPU-s/GB", "ms"), strict=True):
        names = list(dict.fromkeys(str(r["name"]) for r in rows if r["unit"] == unit))
        for shift, broker in enumerate(("kept", "kafka")):
            values = {
                str(r["name"]): float(str(r["value"]))
                for r in rows
                if r["unit"] == unit and r["broker"] == broker
            }
            positions = [i + (shift - 0.5) * 0.38 for i, n in enumerate(names) if n in values]
            axis.barh(positions, [values[n] for n in names if n in values], 0.36, label=broker)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlabel(f"{unit} (less is better)")
        axis.legend()
    figure.savefig(path, dpi=110)
