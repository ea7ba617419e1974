"""The two brokers that are measured side by side, each as one process with its own CPU clock."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TICKS = os.sysconf("SC_CLK_TCK")
sys.path.insert(0, str(HERE.parent / "tests" / "tools"))


@dataclass
class Broker:
    """A running broker: where it listens, which process it is, how long it took to be ready."""

    name: str
    host: str
    port: int
    pid: int
    ready_seconds: float
    log_dir: Path

    @property
    def bootstrap(self) -> str:
        return f"{self.host}:{self.port}"

    def cpu_seconds(self) -> float:
        """CPU of the process and of the children that it has waited for, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(int(fields[i]) for i in (11, 12, 13, 14)) / TICKS

    def cpu_seconds_with_workers(self) -> float:
        """The same with the children that are running now."""
        total = self.cpu_seconds()
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
                total += sum(int(fields[i]) for i in (11, 12)) / TICKS
        return total

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0


def free_port() -> int:
    """A port below 32768 that nothing listens on now."""
    for port in range(21000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def _wait_ready(port: int, process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Until an ApiVersions request is answered."""
    request = bytes.fromhex("0000000a 0012 0000 00000001 ffff".replace(" ", ""))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the broker ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as s:
            s.settimeout(5)
            s.sendall(request)
            if len(s.recv(4)) == 4:
                return
        time.sleep(0.005)
    raise RuntimeError(f"no answer on port {port} within {limit_s} s")


@contextlib.contextmanager
def kept(**settings: str) -> Iterator[Broker]:
    """One kept node on an empty directory."""
    with tempfile.TemporaryDirectory(prefix="bench-kept-") as folder:
        port = free_port()
        command = [sys.executable, "-m", "kept", "serve", "--port", str(port), "--data-dir", folder]
        for name, value in settings.items():
            command += ["--set", f"{name.replace('_', '.')}={value}"]
        yield from _run("kept", command, port, Path(folder) / "log")


@contextlib.contextmanager
def kafka(**settings: str) -> Iterator[Broker]:
    """One Apache Kafka node (broker and controller) on an empty directory, formatted beforehand."""
    import kafka_dist

    with tempfile.TemporaryDirectory(prefix="bench-kafka-") as folder:
        port = free_port()
        properties = {
            "process.roles": "broker,controller",
            "node.id": "0",
            "controller.quorum.voters": f"0@127.0.0.1:{port + 500}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{port + 500}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": f"{folder}/data",
            "offsets.topic.replication.factor": "1",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        path = Path(folder) / "server.properties"
        path.write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        tool = [
            "kafka.tools.StorageTool",
            "format",
            "-t",
            "AAAAAAAAQACAAAAAAAAAAA",
            "-c",
            str(path),
        ]
        subprocess.run(kafka_dist.command(*tool), check=True, stdout=subprocess.DEVNULL)
        command = kafka_dist.command("kafka.Kafka", str(path))
        yield from _run("kafka", command, port, Path(folder) / "data")


def _run(name: str, command: list[str], port: int, log_dir: Path) -> Iterator[Broker]:
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_ready(port, process, 60)
        yield Broker(name, "127.0.0.1", port, process.pid, time.monotonic() - started, log_dir)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
