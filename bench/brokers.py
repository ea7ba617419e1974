"""The two brokers that are measured side by side, each as one process with its own CPU clock."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import meters

from kept.testing.ports import free_port

HERE = Path(__file__).resolve().parent
READY_DEADLINE_S = 120.0
CLUSTER_ID = "AAAAAAAAQACAAAAAAAAAAA"
JVM_FLAGS = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-XX:MaxInlineLevel=15",
    "-Djava.awt.headless=true",
)
sys.path.append(str(HERE.parent))


@dataclass
class Broker:
    """A running broker: where it listens, which process it is, how long it took to be ready."""

    name: str
    host: str
    port: int
    pid: int
    ready_seconds: float
    log_dir: Path
    tls_port: int = 0
    """Of a second listener, whose protocol is SSL; 0: there is none."""
    ca: str = ""
    """The file with the certificate of who signed this broker's."""

    @property
    def bootstrap(self) -> str:
        return f"{self.host}:{self.port}"

    def cpu_seconds(self) -> float:
        """CPU of the process, of the children that it has waited for, and of those it has now."""
        return meters.cpu_seconds(self.pid)

    def kernel_seconds(self) -> float:
        """The part of the process's own CPU that was spent in the kernel."""
        return meters.kernel_seconds(self.pid)

    def resident_bytes(self) -> int:
        return meters.resident_bytes(self.pid)


def kafka_server(properties: Path) -> list[str]:
    """The command of an Apache Kafka node, with the flags of its own start script."""
    from tests.tools import kafka_dist

    return kafka_dist.command(
        "kafka.Kafka", str(properties), heap="-Xmx1G", flags=("-Xms1G", *JVM_FLAGS)
    )


def kafka_format(properties: Path) -> list[str]:
    """The command that formats the directory of an Apache Kafka node."""
    from tests.tools import kafka_dist

    tool = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(properties)]
    return kafka_dist.command(*tool)


def wait_ready(port: int, process: subprocess.Popen[bytes], limit_s: float) -> None:
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
def kept(*, keys: str = "", **settings: str) -> Iterator[Broker]:
    """One kept node on an empty directory; with the file ``keys`` it has a listener SSL, too."""
    with tempfile.TemporaryDirectory(prefix="bench-kept-") as folder:
        port, tls_port = free_port(), free_port() if keys else 0
        command = [sys.executable, "-m", "kept", "serve", "--data-dir", folder]
        if keys:
            settings["listeners"] = f"PLAINTEXT://localhost:{port},SSL://localhost:{tls_port}"
            settings["ssl_keystore_location"] = keys
        else:
            command += ["--port", str(port)]
        for name, value in settings.items():
            command += ["--set", f"{name.replace('_', '.')}={value}"]
        yield from _run("kept", command, port, Path(folder) / "log", tls_port)


@contextlib.contextmanager
def kafka(*, keys: str = "", **settings: str) -> Iterator[Broker]:
    """One Apache Kafka node (broker and controller) on an empty directory, formatted beforehand;
    with the file ``keys`` it has a listener SSL, too.
    """
    with tempfile.TemporaryDirectory(prefix="bench-kafka-") as folder:
        port, tls_port = free_port(above=[500]), free_port() if keys else 0
        clients = f"PLAINTEXT://127.0.0.1:{port}"
        if keys:
            clients += f",SSL://localhost:{tls_port}"
            settings |= {"ssl_keystore_type": "PEM", "ssl_keystore_location": keys}
            settings["listener_security_protocol_map"] = (
                "PLAINTEXT:PLAINTEXT,SSL:SSL,CONTROLLER:PLAINTEXT"
            )
        properties = {
            "process.roles": "broker,controller",
            "node.id": "0",
            "controller.quorum.voters": f"0@127.0.0.1:{port + 500}",
            "listeners": f"{clients},CONTROLLER://127.0.0.1:{port + 500}",
            "advertised.listeners": clients,
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": f"{folder}/data",
            "offsets.topic.replication.factor": "1",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        path = Path(folder) / "server.properties"
        path.write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        subprocess.run(kafka_format(path), check=True, stdout=subprocess.DEVNULL)
        yield from _run("kafka", kafka_server(path), port, Path(folder) / "data", tls_port)


def _run(
    name: str, command: list[str], port: int, log_dir: Path, tls_port: int = 0
) -> Iterator[Broker]:
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_ready(port, process, READY_DEADLINE_S)
        ready_s = time.monotonic() - started
        yield Broker(name, "127.0.0.1", port, process.pid, ready_s, log_dir, tls_port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
