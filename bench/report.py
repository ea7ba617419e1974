"""The figures of a run as a table, as a plot, and as ``docs/benchmarks.md``.

``python bench/report.py [RESULT.json]`` writes the page anew from a run's result;
``python bench/report.py --into RESULT.json`` puts the sections of that run into the page.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import failover
import loop_stalls
import replicated
import size
import tls
import transactions
from baseline import FLOOR
from harness import Row
from targets import GOALS, goal_of, scaled_goal_of

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "bench.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
PANELS = ("CPU-s/GB", "ms", "s")
MISSED = "## Goals missed"

INTRODUCTION = """# Measurements

`make bench` runs kept and Apache Kafka 4.3 side by side on one machine, prints one table and writes
JSON and a plot to `bench/results/`; `python bench/run.py --only NAME...` runs some sections alone,
`python bench/report.py` writes this page from the last result, `--into` only its sections. CPU is
the broker processes' own, user and system; the load comes from a small C program (`bench/load.c`).
Kafka has the settings it comes with and the JVM flags of its own start script. Read ratios within
the run, not single figures: CPU seconds grow up to twofold when others use the machine, latencies
by far more.

Two columns tell the machine's share from ours. *Floor* is a C program in the broker's place
(`bench/floor.c`): it receives the same frames, writes them to files on the same filesystem and
answers, looking at nothing; "write(2) alone" is the writing without the network. *Scaled* is the
goal times what Kafka needs here by what it needed where the goal was set: a machine on which
everything takes longer moves it as much. Before each figure of writing so much memory as it takes
is used and freed: on a virtual machine the first touch of memory is the host's, at the cost of
whoever comes first, and a host that is given free memory back has it touched for the first time
every few seconds (the two figures of "Machine" tell what that costs).
"""


ELSEWHERE = """## Not in this run
`bench/loop_stalls.py --clean`: p99 at 500 requests a second during a pass against without, the
median of three: 1.34, 1.31 and 0.72 in three runs on a quiet machine (goal 1.5). The one try in the
table above says more of its disk: 1.9 to 13 in six runs, Kafka 0.4 to 14.

`bench/cleaner.py`, 1 GB in the page cache: the cleaner alone 0.95-1.35 CPU-s/GB, all dirty or half
clean, 2.2-2.5 from a cold page cache; 17.8 bytes of offset map a key (goal 20). Strategies:
latest-n 2.5 CPU-s/GB, highest-version 2.0-2.4, by-key-prefix 2.0, a class of one's own in Python
20-30.

What memory costs that the host has to give: 1 MB with acks=all took 8-13 CPU-s/GB where files of
3 GB had been removed some seconds before, 2.2-2.7 where the memory was in use a moment ago.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of both brokers, and the floor under it."""

    group: str
    name: str
    unit: str
    ours: float | None
    theirs: float | None
    goal: float | None
    floor: float | None = None
    scaled: float | None = None
    """The goal as far as this machine differs from the one it was set on, by Kafka's figures."""

    @property
    def missed(self) -> bool:
        """Whether there is a goal that is not reached."""
        return self.goal is not None and self.ours is not None and self.ours > self.goal

    @property
    def verdict(self) -> str:
        """How it stands to its goal; nothing where there is none."""
        if self.goal is None or self.ours is None:
            return ""
        if not self.missed:
            return "reached"
        within = self.scaled is not None and self.ours <= self.scaled
        return "MISSED, scaled reached" if within else "MISSED"


def lines(rows: list[Row], scale: float = 1.0) -> list[Line]:
    """The rows of both brokers brought together, in the order of the run.

    With less than the whole load (``scale``) Kafka is not warm: its figures scale no goal then.
    """
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        key = (str(row["group"]), str(row["name"]), str(row["unit"]))
        found.setdefault(key, {})[str(row["broker"])] = row
    made = []
    for (group, name, unit), by_broker in found.items():
        ours, theirs, floor = (_value(by_broker.get(who)) for who in ("kept", "kafka", FLOOR))
        one = next(iter(by_broker.values()))
        goal, scaled = goal_of(one, theirs), scaled_goal_of(one, theirs) if scale == 1 else None
        made.append(Line(group, name, unit, ours, theirs, goal, floor, scaled))
    return made


def _value(row: Row | None) -> float | None:
    return None if row is None else float(str(row["value"]))


def _cells(line: Line) -> list[str]:
    """What a table shows of a line: kept, floor, kafka, goal, scaled goal, kafka by kept."""
    ratio = line.theirs / line.ours if line.ours and line.theirs else None
    values = (line.ours, line.floor, line.theirs, line.goal, line.scaled)
    shown = [_number(value) for value in values]
    return [*shown, "" if ratio is None else f"{ratio:.2f}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def table(rows: list[Row], scale: float = 1.0) -> str:
    """One line a figure, the brokers side by side, goals that are missed marked."""
    out = [
        f"{'':52} {'kept':>8} {'floor':>8} {'kafka':>8}  {'unit':11} {'goal':>8} {'scaled':>8}"
        f" {'kafka/kept':>10}"
    ]
    for line in lines(rows, scale):
        ours, floor, theirs, goal, scaled, ratio = _cells(line)
        verdict = f"  {line.verdict}" if line.missed else ""
        out.append(
            f"{line.name:52} {ours:>8} {floor:>8} {theirs:>8}  {line.unit:11} {goal:>8}"
            f" {scaled:>8} {ratio:>10}{verdict}"
        )
    return "\n".join(out)


def plot(rows: list[Row], path: Path) -> None:
    """Bars of the figures in CPU-s/GB, milliseconds and seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(19, 9), layout="constrained")
    for axis, unit in zip(axes, PANELS, strict=True):
        shown = [line for line in lines(rows) if line.unit == unit and not _is_part(line)]
        for shift, broker in enumerate(("kept", "kafka")):
            values = [line.theirs if shift else line.ours for line in shown]
            places = [i + (shift - 0.5) * 0.38 for i, v in enumerate(values) if v is not None]
            axis.barh(places, [v for v in values if v is not None], 0.36, label=broker)
        for i, line in enumerate(shown):
            if line.goal is not None:
                axis.plot([line.goal] * 2, [i - 0.45, i + 0.45], color="black", linewidth=1)
        axis.set_yticks(range(len(shown)), [line.name for line in shown])
        axis.invert_yaxis()
        if any(line.ours or line.theirs for line in shown):
            axis.set_xscale("log")
        axis.set_xlabel(f"{unit} (less is better; the line is the goal)")
        axis.legend()
    figure.savefig(path, dpi=100)


def _is_part(line: Line) -> bool:
    """A share of another figure."""
    return line.name.endswith(
        (", leader", ", two followers", ", in the kernel", ", write(2) alone")
    )


def page(result: dict[str, Any]) -> str:
    """``docs/benchmarks.md`` of one run."""
    found = lines(result["rows"], result["scale"])
    parts = [INTRODUCTION, _machine(result), _method()]
    for group in dict.fromkeys(line.group for line in found):
        parts += [f"## {group.capitalize()}", _markdown([x for x in found if x.group == group])]
    parts += [_missed(found), _failed(result["failed"], found), ELSEWHERE]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def put_into(old: str, result: dict[str, Any]) -> str:
    """A page with the sections of a run of some: in the place of the page's own, or before the
    goals that were missed, of which those of these sections are listed anew.
    """
    head, *sections = re.split(r"^(?=## )", old, flags=re.MULTILINE)
    texts = {text.partition("\n")[0]: text.strip() for text in sections}
    found = lines(result["rows"], result["scale"])
    new = {f"## {line.group.capitalize()}": line.group for line in found}
    before = [heading for heading in texts if heading not in new]
    at = before.index(MISSED)
    said = _run(result)
    for heading, group in new.items():
        table = _markdown([x for x in found if x.group == group])
        texts[heading] = f"{heading}\n{said}\n\n{table}"
        said = "In the same run."
    measured = tuple(f"- {line.name}: " for line in found)
    others = [x for x in texts[MISSED].splitlines() if not x.startswith((MISSED, *measured))]
    texts[MISSED] = "\n".join([MISSED, *others, *_said_missed(found)])
    order = [*before[:at], *new, *before[at:]]
    return "\n\n".join([head.strip(), *(texts[heading] for heading in order)]) + "\n"


def _machine(result: dict[str, Any]) -> str:
    return f"## The run\n{_run(result)}"


def _run(result: dict[str, Any]) -> str:
    """When and where it was, and how quiet the machine."""
    machine, noise = result["machine"], result["noise"]
    kind = "virtual machine" if machine["virtual"] else "machine"
    least = min(float(n["cpu_ms"]) for n in noise)
    said = ", ".join(
        f"{n['section']} {float(n['cpu_ms']) / least:.2f}/{n['stretch']}" for n in noise
    )
    text = f"""{machine["date"]}, a {kind} with {machine["cpus"]} processors
({machine["processor"]}), {machine["memory_gb"]} GB, Linux {machine["kernel"]},
Python {machine["python"]}, {machine["java"]}.
"""
    if result["scale"] != 1:
        text += (
            f"With `--quick` ({result['scale']} of the load: Kafka's compiler hardly warms up).\n"
        )
    return f"""{text}
Noise, by section: processor time of a fixed piece of work against the least in this run, and its
wall time against its processor time (1 and 1 on a machine of one's own): {said}."""


def _method() -> str:
    kept = "/".join(str(fault.times["kept"]) for fault in failover.FAULTS)
    kafka = "/".join(str(fault.times["kafka"]) for fault in failover.FAULTS)
    return f"""## How
**One node.** One connection, eight requests in flight, acks=1. Latency from when a request was due.

**Three nodes.** {_said(replicated)}

**Failover.** {_said(failover)}
Measured so often: kept {kept}, Kafka {kafka}, in the order below; the 95th percentile of 20 is the
second largest.

**Transactions.** {_said(transactions)}

**TLS.** {_said(tls)}

**Partitions.** {_said(size)}

**Stalls.** {_said(loop_stalls)} A stall counts as far as the loop used the processor in it."""


def _said(module: ModuleType) -> str:
    """What a module's docstring says after its first line."""
    text = (module.__doc__ or "").partition("\n\n")[2].partition("\n\n    ")[0]
    return text.strip().replace("``", "`")


def _markdown(found: list[Line]) -> str:
    out = [
        "| | kept | floor | Kafka | unit | goal | scaled | | Kafka / kept |",
        "|---|--:|--:|--:|---|--:|--:|---|--:|",
    ]
    for line in found:
        ours, floor, theirs, goal, scaled, ratio = _cells(line)
        verdict = line.verdict.replace("MISSED", "**missed**")
        cells = (line.name, ours, floor, theirs, line.unit, goal, scaled, verdict, ratio)
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _missed(found: list[Line]) -> str:
    return "\n".join([MISSED, *(_said_missed(found) or ["None in this run."])])


def _said_missed(found: list[Line]) -> list[str]:
    said = []
    for line in (x for x in found if x.missed):
        more = "" if line.floor is None else f", floor {_number(line.floor)}"
        more += "" if line.scaled is None else f", scaled goal {_number(line.scaled)}"
        said.append(
            f"- {line.name}: {_number(line.ours)} {line.unit}, goal {_number(line.goal)}{more}"
        )
    return said


def _failed(failed: list[str], found: list[Line]) -> str:
    """What could not be measured in the run, and goals of which it says nothing."""
    said = {(line.name, line.unit) for line in found if line.ours is not None}
    absent = [f"{name} ({unit}): no figure" for name, unit in GOALS if (name, unit) not in said]
    told = [f"- {what}" for what in [*failed, *absent]]
    return "\n".join(["## Not measured", *told]) if told else ""


def main() -> None:
    """Write the page."""
    into = "--into" in sys.argv
    paths = [Path(x) for x in sys.argv[1:] if x != "--into"]
    path = paths[0] if paths else RESULT
    result = json.loads(path.read_text())
    PAGE.write_text(put_into(PAGE.read_text(), result) if into else page(result))
    print(f"{PAGE} from {path}")


if __name__ == "__main__":
    main()
