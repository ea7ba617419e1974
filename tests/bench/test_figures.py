"""What the benchmark makes of what it measures: CPU of processes, silences, goals, the page."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import baseline
import controller
import failover
import frames
import machine
import meters
import pytest
import report
import run
import transactions
from harness import Bench
from targets import GOALS

from kept.storage.types import Codec

BURN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"


def row(name, broker, value, unit="CPU-s/GB", group="cluster"):
    return {"group": group, "name": name, "broker": broker, "unit": unit, "value": value}


def test_cpu_counts_children_that_run_and_children_that_ended():
    code = (
        "import subprocess, sys, time\n"
        f"burn = {BURN!r}\n"
        "subprocess.run([sys.executable, '-c', burn])\n"
        "late = subprocess.Popen([sys.executable, '-c', burn + 'print(1, flush=True)\\n"
        "time.sleep(60)'], stdout=subprocess.PIPE)\n"
        "late.stdout.readline()\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
        "late.kill()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"there\n"
        assert len(meters.children(process.pid)) == 1
        assert meters.cpu_seconds(process.pid) >= 0.39
        resident = meters.resident_bytes(process.pid)
        assert 0 < meters.proportional_bytes(process.pid) <= resident
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


class Told(failover.Flow):
    """What a producer was told, without one."""

    def __init__(self, acknowledged):
        self.acknowledged = acknowledged


def test_the_gap_is_the_longest_silence_until_something_new_is_acknowledged():
    steady = [(n / 10, n / 10 + 0.01) for n in range(10)]  # the last is told at 0.91
    flow = Told([*steady, (0.95, 2.0), (0.97, 3.5), (1.2, 3.6), (1.3, 9.0)])
    assert flow.gap(1.0) == pytest.approx(3.5 - 2.0)
    assert Told([*steady, (0.99, 4.91), (1.1, 4.92)]).gap(1.0) == pytest.approx(4.0)
    assert Told([(0.5, 0.9), (1.1, 1.15)]).gap(1.0) == pytest.approx(0.25)


def test_goals_are_compared_with_ours_and_with_kafkas_figure():
    rows = [
        row("acks=all 16 KiB, 1 conn.", "kept", 4.0),
        row("acks=all 16 KiB, 1 conn.", "kafka", 35.0),
        row("acks=all 16 KiB, 4 conn.", "kept", 6.0),
        row("acks=all 16 KiB, 4 conn.", "kafka", 42.0),  # twice what it was where the goal is from
        row("acks=all 16 KiB, 4 conn.", "floor", 0.5),
        row("acks=all 64 KiB, 1 conn.", "kept", 3.0),
        row("acks=all 64 KiB, 1 conn.", "kafka", 16.0),
        row("acks=all 1 MB, 1 conn.", "kept", 6.0),
        row("something", "kept", 1e9),
    ]
    found = {line.name: line for line in report.lines(rows)}
    assert [(line.goal, line.verdict) for line in found.values()] == [
        (3.5, "missed"),
        (3.5, "missed"),
        (16.0, "met"),
        (None, ""),
        (None, ""),
    ]
    text = report.table(rows)
    assert ["missed" in line for line in text.splitlines()] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert "0.500" in text
    assert "8.75" in text  # 35 / 4


def test_a_figure_is_the_median_of_its_measurements():
    rows = [row("a", "kept", value) for value in (9.0, 1.0, 2.0)]
    rows += [row("a", "kafka", value) for value in (4.0, 8.0, 100.0)]
    (line,) = report.lines(rows)
    assert (line.ours, line.theirs, line.times, line.ratio) == (2.0, 8.0, 3, 4.0)


def test_the_page_names_machine_noise_and_missed_goals():
    result = {
        "machine": {
            "cpus": 2,
            "processor": "P",
            "memory_gb": 8.0,
            "virtual": True,
            "kernel": "6.1",
            "python": "3.11",
            "java": "openjdk 17",
            "date": "2026-01-01",
        },
        "noise": [
            {"section": "cluster", "load_average": 1.0, "cpu_ms": 2.0, "stretch": 1.5},
            {"section": "failover", "load_average": 1.0, "cpu_ms": 3.0, "stretch": 1.0},
        ],
        "scale": 1.0,
        "failed": [],
        "rows": [row("acks=all 16 KiB, 1 conn.", "kept", 4.0)],
    }
    page = report.page(json.loads(json.dumps(result)))
    assert "Linux 6.1" in page
    assert "cluster 1.00/1.5, failover 1.50/1.0" in page.replace("\n", " ")
    assert "| acks=all 16 KiB, 1 conn. | 4.000 |  |  | CPU-s/GB | 3.500 | **missed** |  |" in page
    missing = page.split("## Not measured\n")[1].splitlines()
    assert "- ready (s): no figure" in missing
    assert not any("acks=all 16 KiB, 1 conn." in line for line in missing)
    assert page.split("## Goals missed\n")[1].startswith(
        "- acks=all 16 KiB, 1 conn.: 4.000 CPU-s/GB, goal 3.500\n"
    )


def test_a_run_of_some_sections_is_put_into_the_page():
    start, missed = (
        "\n\n## Start\n\n| x |",
        "\n\n## Goals missed\n- a: 3\n- ready: 9 s\n\n## Then\nz\n",
    )
    old = f"# M\n\nabout\n\n## The run\none{start}{missed}"
    machine_ = {"date": "2026-11-25", "virtual": True, "cpus": 2, "processor": "P", "memory_gb": 8}
    result = {
        "machine": {**machine_, "kernel": "6", "python": "3.11", "java": "17"},
        "noise": [{"section": "start", "cpu_ms": 3, "stretch": 1.0}],
        "scale": 1,
        "rows": [row("ready", "kept", 0.7, "s", "start"), row("new", "kept", 1, "s", "another")],
    }
    page = report.put_into(old, result)
    assert page.startswith("# M\n\nabout\n\n## The run\none\n\n## Start\n2026-11-25, a virtual")
    assert "| x |" not in page and "- ready: 9 s" not in page
    assert page.index("| ready | 0.700 |") < page.index("## Another\nIn the same run.")
    end = "\n\n## Goals missed\n- a: 3\n- ready: 0.700 s, goal 0.500\n\n## Then\nz\n"
    assert page.endswith(end)
    assert report.put_into(page, result) == page


def test_the_floor_takes_what_the_load_sends_and_leaves_nothing(tmp_path):
    bench = Bench(tmp_path, 1.0)
    data = frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000))
    baseline.produce(bench, "this", frames.produce("some", data), 50)
    told = {(str(r["name"]), str(r["unit"])): r["broker"] for r in bench.rows}
    assert set(told) == {
        ("this", "CPU-s/GB"),
        ("this, in the kernel", "CPU-s/GB"),
        ("this", "us/request"),
        ("this, write(2) alone", "CPU-s/GB"),
    }
    assert set(told.values()) == {"floor"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floor", "frame", "load"]


def test_the_floor_of_transactions_stands_beside_their_goals(tmp_path):
    bench = Bench(tmp_path, 0.01)
    transactions.floor(bench, "transactions, one node", "transaction")
    floors = {(line.name, line.unit): line.floor for line in report.lines(bench.rows)}
    goals = {(name, unit) for name, unit in GOALS if name.startswith("transaction, ")}
    assert {goal for goal in goals if goal[1] == "ms"} <= floors.keys()
    assert all(floors.values())


def test_the_controllers_figures_have_a_goal_at_the_largest_size():
    names = {(str(r["name"]), str(r["unit"])) for r in controller.rows((10, 100))}
    assert ("fence, 100 partitions", "CPU-ms") in names
    assert ("memory, 100 partitions", "bytes/partition") in names
    assert ("memory, 10 partitions", "bytes/partition") not in names
    assert (f"fence, {controller.SIZES[-1]} partitions", "CPU-ms") in GOALS


def test_every_section_can_be_asked_for_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "nothing"])
    with pytest.raises(SystemExit):
        run.main()
    said = capsys.readouterr().err
    assert all(name in said for name in ("start", "cluster", "failover", "partitions", "stalls"))


def test_a_section_that_does_not_end_is_told_and_ends():
    with pytest.raises(TimeoutError, match="longer than 1 s"), run.limited(1):
        signal.pause()
    with run.limited(1):
        pass
    assert signal.alarm(0) == 0


def test_noise_is_told_with_its_section():
    noise = machine.noise("here")
    assert noise["section"] == "here"
    assert float(str(noise["cpu_ms"])) > 0
    assert time.strftime("%Y") in str(machine.describe()["date"])
