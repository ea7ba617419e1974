"""Real processes, killed with -9 at every step of append, roll, checkpoint, swap and close."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kept.storage import layout
from kept.storage.disk import ENV_FAIL_POINT, Disk
from kept.storage.inspect.check import check_directory
from kept.storage.log.log import Log
from kept.storage.records import records
from tests.support.slow import rest_slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("log_writer.py")
BATCHES = 120


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("log_writer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(path: Path, batches: int, fail_point: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), ENV_FAIL_POINT: fail_point}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path), str(batches)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def values(log: Log) -> list[tuple[int, bytes]]:
    found, offset = [], log.log_start_offset
    while data := log.read_batches(offset, 1 << 20, log.log_end_offset):
        for record in records(data):
            found.append((record.offset, record.value[:8]))
            offset = record.offset + 1
    return found


def judge(writer: ModuleType, path: Path, lines: list[str]) -> int:
    """Everything the process said is true of what it left; the log end."""
    said = [line.split() for line in lines]
    written = max((int(s[1]) for s in said if s[0] in ("written", "opened")), default=0)
    words = {s[0] for s in said}
    serious = [f for f in check_directory(str(path)) if f.damaged] if path.exists() else []
    assert not serious
    plan = None
    if "swapping" in words:
        plan = plan_of(writer, path)
    directory, log = writer.open_log(
        str(path), Disk({}), unfinished_swap=plan, compacted_to=written
    )
    try:
        log.check_invariants()
        assert log.log_end_offset >= written
        assert log.log_end_offset <= written + 2, "more than the batch in flight"
        found = values(log)
        everything = [(n, b"%08d" % (n // 2)) for n in range(log.log_end_offset)]
        if "swapping" in words:
            end = log.segments[1].base_offset if len(log.segments) > 1 else 0
            cleaned = set(everything) - set(found)
            assert all(offset % 4 >= 2 for offset, _ in cleaned)
            assert found == [e for e in everything if e not in cleaned]
            below = [o for o, _ in found if o < end]
            assert not cleaned or all(o % 4 < 2 for o in below), "all of a group or none"
            assert cleaned or "swapped" not in words
        else:
            assert found == everything
        names = [layout.parse_segment_file(p.name) for p in (path / "t-0").iterdir()]
        assert not [n for n in names if n is not None and n.state]
        return log.log_end_offset
    finally:
        directory.close(clean=False)


def plan_of(writer: ModuleType, path: Path):
    """The plan as a manifest on disk would give it."""
    known = path / "bases"
    if not known.exists():
        return None
    bases = [int(text) for text in known.read_text().split()]
    group = writer.SwapGroup
    return writer.SwapPlan(
        (group((bases[0],), (bases[0], bases[1])), group((bases[2],), (bases[2],)))
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory, writer) -> str:
    """Base offsets of the segments that the script makes, for the plan."""
    path = tmp_path_factory.mktemp("dry")
    directory, log = writer.open_log(str(path), Disk({}))
    for n in range(BATCHES):
        log.append(writer.check(memoryview(writer.batch(n)), writer.RULES, writer.NOW), 0, 0)
        log.write()
    directory.close(clean=False)
    return " ".join(str(s.base_offset) for s in log.segments)


POINTS = [
    "append.write:60",
    "append.written:77",
    "index.saved:1",
    "roll.closed:2",
    "roll.created:3",
    "flush.synced:4",
    "atomic.written:1",
    "checkpoint.written:4",
    "swap.cleaned",
    "swap.renamed:1",
    "swap.renamed:2",
    "swap.prepared",
    "swap.deleted:1",
    "swap.deleted:2",
    "swap.group:1",
    "swap.group:2",
    "swap.done",
    "atomic.written:12",
]
OTHER_TIMES = [
    "append.write:1",
    "append.written:1",
    "roll.created:1",
    "flush.synced:1",
    "atomic.written:2",
    "atomic.written:5",
    "checkpoint.written:1",
]
"""The same steps at other times, mostly in a log that has next to nothing yet."""


@pytest.mark.parametrize("point", rest_slow([*POINTS, *OTHER_TIMES], len(POINTS)))
def test_killed_at_a_fail_point(writer, tmp_path, bases, point) -> None:
    path = tmp_path / "data"
    process = start(path, BATCHES, point)
    out, _ = process.communicate(timeout=200)
    lines = out.splitlines()
    assert process.returncode == -signal.SIGKILL, f"{point} was not reached: {lines[-3:]}"
    assert "closed" not in lines
    if (path / "t-0").exists():
        (path / "bases").write_text(bases)
    end = judge(writer, path, lines)
    again = start(path, 80)
    out, _ = again.communicate(timeout=200)
    assert again.returncode == 0 and f"opened {end}" in out and out.endswith("closed\n")


@pytest.mark.parametrize("after", [1, 30, 55, 111])
def test_killed_from_outside(writer, tmp_path, after) -> None:
    path = tmp_path / "data"
    process = start(path, 100_000)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if len(lines) > after:
            break
    process.kill()
    lines += process.stdout.read().splitlines(keepends=True)
    process.wait()
    process.stdout.close()
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    judge(writer, path, lines)
