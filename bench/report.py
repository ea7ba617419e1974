"""The figures of a run as a table, as a plot, and as ``docs/benchmarks.md``.

``python bench/report.py [RESULT.json]`` writes the page anew from a run's result;
``python bench/report.py --into RESULT.json`` puts the sections of that run into the page.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
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
from targets import GOALS, goal_of

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "bench.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
PLOT = PAGE.parent / "images" / "measurements.png"
MISSED = "## Goals missed"

INTRODUCTION = """# Measurements

kept beside Apache Kafka 4.3, in one run on one machine. What favours kept here:

- Two processor cores, which the broker shares with the load. Kafka spreads over many cores, and its
  compiler and its garbage collector want cores of their own; a node of kept uses one for the
  network and the log and would not use more. On a machine with many cores Kafka moves more data.
- One topic, few partitions and connections, and the loopback interface: the work of a laptop or
  of CI, not of a large cluster.
- Kafka has the settings it comes with and the JVM flags of its own start script. It is warmed up
  before each figure, and was not tuned.

Read the ratios, not single figures: processor seconds grow up to twofold when others use the
machine, latencies by far more. *Kafka / kept* above 1: kept needs less. A goal (`bench/targets.py`)
is *met* or *missed*, on whatever machine the run was.

![Kafka's figure by ours](images/measurements.png)

`make bench` makes the run, `python bench/run.py --only NAME…` some sections of it. Processor time
is the broker's own, user and system; the load comes from a small C program (`bench/load.c`).
*Floor* is a C program in the broker's place (`bench/floor.c`): it receives the same frames, writes
them to files on the same filesystem, and answers; "write(2) alone" is the writing
without the network. Before each figure of writing so much memory as it takes is used and freed: the
first touch of memory is the host's on a virtual machine, at the cost of whoever comes first.
"""


ELSEWHERE = """## Not in this run
`bench/loop_stalls.py --clean`: p99 at 500 requests a second during a pass against without, the
median of three: 1.34, 1.31 and 0.72 in three runs on a quiet machine (goal 1.5). The one try in the
table above says more of its disk: 1.9 to 13 in six runs, Kafka 0.4 to 14.

`bench/cleaner.py`, 1 GB in the page cache: the cleaner alone 0.95-1.35 CPU-s/GB, all dirty or half
clean, 2.2-2.5 from a cold page cache; 17.8 bytes of offset map a key (goal 20). Strategies:
latest-n 2.5 CPU-s/GB, highest-version 2.0-2.4, by-key-prefix 2.0, a class of one's own in Python
20-30.

`bench/known_ids.py`: transactional ids, each made by an InitProducerId, one node: 986,000 in a node
of 249 MB, some 190 bytes each. A million read back after a start: 188 MB above a node of 63 MB, at
the peak as 20 s later; 15 CPU-s, and 5 ms at most held its loop at a stretch (others used the
machine: 49 s). Before ids that rest were packed: 398 MB for a million, 708 MB after a start. 10,000
transactions open at once (`--open 10000`): 15 MB, 1.5 kB each. All were listed in 0.11 s and
described in 0.25 s, on a machine that others used; nothing of them was stable until they ended, and
all were committed in 4.9 s.

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
    times: int = 1
    """Of so many measurements our figure is the median."""

    @property
    def ratio(self) -> float | None:
        """Kafka's figure by ours."""
        return self.theirs / self.ours if self.ours and self.theirs else None

    @property
    def missed(self) -> bool:
        """Whether there is a goal that is not reached."""
        return self.goal is not None and self.ours is not None and self.ours > self.goal

    @property
    def verdict(self) -> str:
        """How it stands to its goal; nothing where there is none."""
        if self.goal is None or self.ours is None:
            return ""
        return "missed" if self.missed else "met"


def lines(rows: list[Row]) -> list[Line]:
    """The rows of both brokers brought together, in the order of the run: the median of each."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        key = (str(row["group"]), str(row["name"]), str(row["unit"]))
        values = found.setdefault(key, {}).setdefault(str(row["broker"]), [])
        values.append(float(str(row["value"])))
    made = []
    for (group, name, unit), by_broker in found.items():
        ours, theirs, floor = (_median(by_broker.get(who)) for who in ("kept", "kafka", FLOOR))
        goal = goal_of(name, unit, theirs)
        times = len(by_broker.get("kept", ()))
        made.append(Line(group, name, unit, ours, theirs, goal, floor, times))
    return made


def _median(values: list[float] | None) -> float | None:
    return statistics.median(values) if values else None


def _cells(line: Line) -> list[str]:
    """What a table shows of a line: kept, floor, kafka, goal, kafka by kept."""
    values = (line.ours, line.floor, line.theirs, line.goal)
    shown = [_number(value) for value in values]
    return [*shown, "" if line.ratio is None else f"{line.ratio:.2f}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def table(rows: list[Row]) -> str:
    """One line a figure, the brokers side by side, goals that are missed marked."""
    out = [
        f"{'':52} {'kept':>8} {'floor':>8} {'kafka':>8}  {'unit':11} {'goal':>8} {'kafka/kept':>10}"
    ]
    for line in lines(rows):
        ours, floor, theirs, goal, ratio = _cells(line)
        verdict = f"  {line.verdict}" if line.goal is not None else ""
        out.append(
            f"{line.name:52} {ours:>8} {floor:>8} {theirs:>8}  {line.unit:11} {goal:>8}"
            f" {ratio:>10}{verdict}"
        )
    return "\n".join(out)


def plot(found: list[Line], path: Path) -> None:
    """How many times ours Kafka's figure is, of what there is a goal for, as bars by section."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in found if line.goal is not None and line.ratio is not None]
    groups = list(dict.fromkeys(line.group for line in shown))
    height = 0.6 + 0.22 * max(len(shown), 1)
    figure, axis = pyplot.subplots(figsize=(9, height), layout="constrained")
    for place, line in enumerate(shown):
        assert line.ratio is not None
        color = f"C{groups.index(line.group) % 10}"
        axis.barh(place, line.ratio - 1, 0.7, left=1, color=color)
        beside = max(line.ratio, 1.0)
        axis.text(beside * 1.03, place, f"{line.ratio:.1f}", va="center", fontsize=7)
    names = [f"{line.name} ({line.unit})" for line in shown]
    axis.set_yticks(range(len(shown)), names, fontsize=7)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.set_xticks(
        [0.1, 0.5, 1, 2, 5, 10, 50, 100], ["0.1", "0.5", "1", "2", "5", "10", "50", "100"]
    )
    axis.minorticks_off()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("Kafka's figure by kept's: right of 1 kept needs less, left of it Kafka does")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def page(result: dict[str, Any]) -> str:
    """``docs/benchmarks.md`` of one run."""
    found = lines(result["rows"])
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
    found = lines(result["rows"])
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
    noise_text = (
        "Noise, by section: processor time of a fixed piece of work against the least in this run, "
        "and its wall time against its processor time (1 and 1 on a machine of one's own): "
        f"{said}."
    )
    return f"{text}\n{textwrap.fill(noise_text, 100)}"


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

**Stalls.** {_said(loop_stalls)} A stall counts as far as the loop used the processor in it.

**Spark.** In Kafka's column stands Spark's Kafka connector, on the same node and topics. Time is
that of a warm query by its rows, CPU that of Spark's processes (JVM and Python workers), medians of
five. *Longer*: four times the rows. *Once started*: what the rows of the longer topic cost beyond
those of the other. *Made beforehand* and *thrown away*: a source and a sink in Python that do
nothing themselves; what they take is Spark's part, and no source in Python takes less."""


def _said(module: ModuleType) -> str:
    """What a module's docstring says after its first line."""
    text = (module.__doc__ or "").partition("\n\n")[2].partition("\n\n    ")[0]
    return text.strip().replace("``", "`")


def _markdown(found: list[Line]) -> str:
    times = min((line.times for line in found if line.ours is not None), default=0)
    out = [f"Medians of {times} measurements of each side.", ""] if times > 1 else []
    out += ["| | kept | floor | Kafka | unit | goal | | Kafka / kept |"]
    out += ["|---|--:|--:|--:|---|--:|---|--:|"]
    for line in found:
        ours, floor, theirs, goal, ratio = _cells(line)
        verdict = f"**{line.verdict}**" if line.missed else line.verdict
        cells = (line.name, ours, floor, theirs, line.unit, goal, verdict, ratio)
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _missed(found: list[Line]) -> str:
    return "\n".join([MISSED, *(_said_missed(found) or ["None in this run."])])


def _said_missed(found: list[Line]) -> list[str]:
    said = []
    for line in (x for x in found if x.missed):
        more = "" if line.floor is None else f", floor {_number(line.floor)}"
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
    if not into:
        plot(lines(result["rows"]), PLOT)
    print(f"{PAGE} from {path}")


if __name__ == "__main__":
    main()
