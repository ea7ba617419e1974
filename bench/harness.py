"""One run of the benchmark: the C programs, how much to move, and the figures so far."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kept.storage.errors import KeptError

HERE = Path(__file__).resolve().parent
GB = 1e9

Row = dict[str, object]


class Bench:
    """The C programs, how much to move (``scale``), and the rows so far."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self.scale = scale
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.load, self.floor = (self._built(name) for name in ("load", "floor"))

    def _built(self, name: str) -> Path:
        """Compile one of the programs beside this file."""
        program = self.folder / name
        subprocess.run(["gcc", "-O2", "-o", program, HERE / f"{name}.c"], check=True)
        return program

    def run_load(self, mode: str, port: int, frame: bytes, *args: object) -> dict[str, float]:
        """Run ``load.c`` with a frame against a port here and return what it measured."""
        path = self.folder / "frame"
        path.write_bytes(frame)
        command = [self.load, mode, "127.0.0.1", port, path, *args]
        done = subprocess.run(
            [str(c) for c in command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"load {mode} on port {port}: {done.stderr.strip()}")
        return dict(json.loads(done.stdout))

    def run_script(self, name: str, gigabytes: float) -> dict[str, Any]:
        """Run one of the programs beside this file in a process of its own; its figures."""
        target = self.folder / "figures.json"
        run = [sys.executable, HERE / name, "--gb", gigabytes * self.scale]
        run += ["--dir", self.folder, "--json", target]
        subprocess.run([str(word) for word in run], check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(target.read_text()))

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A measurement that may fail without an end to the run: it is told at the end."""
        try:
            yield
        # Whatever it is: an hour of figures does not end with one that is missing.
        except Exception as error:  # noqa: BLE001
            ours = isinstance(error, KeptError | RuntimeError)
            said = str(error).strip().splitlines()[:1]
            if not (ours and said):
                said.insert(0, type(error).__name__)
            self.failed.append(f"{what}: {': '.join(said)}")
            print(f"  failed: {self.failed[-1]}", file=sys.stderr, flush=True)
            if not ours:
                traceback.print_exc()

    def add(self, group: str, name: str, broker: str, unit: str, value: float) -> None:
        """Note one figure."""
        row = {"group": group, "name": name, "broker": broker, "unit": unit, "value": value}
        self.rows.append(row)
        print(f"  {broker:6} {name:46} {value:10.3f} {unit}", flush=True)
