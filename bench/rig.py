"""One run of the benchmark: the load program, how much to move, and the figures so far."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
GB = 1e9

Row = dict[str, object]


class Bench:
    """The load program, how much to move (``scale``), and the rows so far."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self.scale = scale
        self.rows: list[Row] = []
        self.load = folder / "load"
        subprocess.run(["gcc", "-O2", "-o", self.load, HERE / "load.c"], check=True)

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

    def add(self, group: str, name: str, broker: str, unit: str, value: float) -> None:
        """Note one figure."""
        row = {"group": group, "name": name, "broker": broker, "unit": unit, "value": value}
        self.rows.append(row)
        print(f"  {broker:6} {name:46} {value:10.3f} {unit}", flush=True)
