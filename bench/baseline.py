"""What the machine itself takes for the work of a broker, measured in the same run (``floor.c``).

The floor is a C program in a broker's place: it receives the same frames from the same load, writes
them to files on the same filesystem and answers, looking at nothing. Beside it plain ``write(2)``
of frames of that size. What a broker needs more is its own; what the floor needs is the machine's.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import GB, Bench

from kept.testing.ports import free_port

FLOOR = "floor"
"""Whose figures these are, where others say kept or kafka."""
PIECE_BYTES = 1_048_000
TOUCHED_BYTES = 8e9


def touch(bench: Bench) -> None:
    """What it costs that the page cache takes memory for the first time, and memory just used.

    On a virtual machine the first touch is paid by the host, in the time of whoever comes first,
    and again and again where free memory is given back to the host (free page reporting).
    """
    for what in ("the first time", "again"):
        spent = _written(bench, PIECE_BYTES, int(TOUCHED_BYTES * bench.scale / PIECE_BYTES))
        bench.add("machine", f"write(2) of 1 MB, {what}", FLOOR, "CPU-s/GB", spent)


def use_memory(bench: Bench, size_bytes: float) -> None:
    """Have so much free memory be such as was used a moment ago, for what is measured next."""
    _written(bench, PIECE_BYTES, max(1, int(size_bytes / PIECE_BYTES)))


def produce(bench: Bench, name: str, frame: bytes, count: int) -> None:
    """The floor of a produce figure, and of its writing alone."""
    use_memory(bench, count * len(frame))
    spent = sunk(
        bench,
        bench.floor,
        len(frame),
        lambda port: bench.run_load("send", port, frame, 1, 8, count),
    )
    total = spent["user"] + spent["system"]
    bench.add("produce", name, FLOOR, "CPU-s/GB", total / (spent["bytes"] / GB))
    bench.add(
        "produce",
        f"{name}, in the kernel",
        FLOOR,
        "CPU-s/GB",
        spent["system"] / (spent["bytes"] / GB),
    )
    bench.add("produce", name, FLOOR, "us/request", total / count * 1e6)
    alone = _written(bench, len(frame), count)
    bench.add("produce", f"{name}, write(2) alone", FLOOR, "CPU-s/GB", alone)


def sunk(
    bench: Bench,
    program: Path,
    length: int,
    load: Callable[[int], object],
    keys: tuple[str, ...] = (),
) -> dict[str, float]:
    """What the floor spent on frames of so many bytes that ``load`` sends to its port."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        port = free_port()
        command = [str(program), "sink", str(port), folder, str(length), *keys]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sink:
            try:
                assert sink.stdout is not None
                sink.stdout.readline()
                load(port)
                return dict(json.loads(sink.stdout.read()))
            finally:
                sink.kill()


def _written(bench: Bench, size: int, count: int) -> float:
    """CPU seconds per GB of so many writes of that size into new files."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        command = [str(bench.floor), "write", folder, str(size), str(count)]
        spent = json.loads(subprocess.check_output(command))
    return float((spent["user"] + spent["system"]) / (spent["bytes"] / GB))
