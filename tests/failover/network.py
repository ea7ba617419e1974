"""Three nodes, each in a network namespace of its own, and cuts between them, also one-way.

A holder process keeps each namespace; one more holds the bridge that joins them to each other and,
by one pair of devices, to the test. Namespaces have no names and devices vanish with them: once the
holders are dead, however the test ended (``kept.testing.reaper``), nothing is left on the machine.

A cut is a wrong permanent entry in the sender's neighbour table: its frames to that address reach
nobody, and nobody is told, as with a cable that is pulled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from kept.node.config.local_cluster import NODE_PORT_OFFSET, cluster_settings
from kept.testing import Cluster

PORT: Final = 9092
TEST: Final = 254
"""The last number of the test's own address; node i has i + 1."""
NOBODY: Final = "02:00:00:00:00:01"
TOOLS: Final = ("ip", "unshare", "nsenter")


def missing() -> str | None:
    """Why there can be no namespaces here; None when there can."""
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found"
    try:
        run("unshare", "--net", "ip", "link", "add", "kept0", "type", "bridge")
        run(
            "unshare",
            "--net",
            "ip",
            "link",
            "add",
            "kept0",
            "type",
            "veth",
            "peer",
            "name",
            "kept1",
        )
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None


def run(*command: str) -> str:
    """What a command prints. Raises RuntimeError with it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr).strip()}")
    return done.stdout


SHORT: Final[Mapping[str, int]] = {
    "broker_session_timeout_ms": 4000,
    "broker_heartbeat_interval_ms": 500,
    "kept_stall_ms": 2000,
    "replica_lag_time_max_ms": 4000,
    "replica_fetch_wait_max_ms": 500,
}
"""Settings of nodes that notice soon that another one is cut off."""


class ApartCluster(Cluster):
    """A cluster each of whose nodes has a network of its own."""

    def __init__(self, nodes: int = 3, **settings: Any) -> None:
        super().__init__(nodes, **settings)
        self._net = f"10.213.{os.getpid() % 250}"
        self._device = f"kept{os.getpid()}"
        self._holders: list[subprocess.Popen[str]] = []
        self.hub = 0
        for node in self._nodes:
            node.host = self.address(node.number)
            node.settings["listeners"] = f"PLAINTEXT://{node.host}:{PORT}"

    def address(self, node: int) -> str:
        """The address of a node."""
        return f"{self._net}.{node + 1}"

    def __enter__(self) -> Self:
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all nodes and their networks."""
        super().close()
        # A namespace ends some time after its last process; the next device has the same name.
        with contextlib.suppress(RuntimeError):
            run("ip", "link", "del", self._device)
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders.clear()

    # Cuts.

    def cut(self, one: Iterable[int], other: Iterable[int], *, both_ways: bool = True) -> None:
        """No frame goes from any of one side to any of the other, nor back."""
        others = list(other)
        for sender in one:
            for receiver in others:
                self._neighbour(sender, "replace", self.address(receiver))
                if both_ways:
                    self._neighbour(receiver, "replace", self.address(sender))

    def heal(self) -> None:
        """Every frame arrives again."""
        for node in range(len(self)):
            self._within(node, "ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")

    # Inside.

    def _neighbour(self, node: int, action: str, address: str) -> None:
        self._within(
            node,
            "ip",
            "neigh",
            action,
            address,
            "lladdr",
            NOBODY,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    def _within(self, number: int, *command: str) -> str:
        return run("nsenter", f"--net=/proc/{self._holders[number].pid}/ns/net", *command)

    def _hold(self) -> int:
        """A new namespace, which lives as long as a process of this number in our directory."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.directory,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        return holder.pid

    def _connect(self) -> None:
        pids = [self._hold() for _ in self._nodes]
        hub = self._hold()
        self.hub = len(self._nodes)
        self._within(self.hub, "ip", "link", "add", "hub", "type", "bridge")
        self._within(self.hub, "ip", "link", "set", "hub", "up")
        for number, pid in enumerate(pids):
            self._join(f"node{number}", pid, "eth0")
            self._within(number, "ip", "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._within(number, "ip", "link", "set", "eth0", "up")
        run(
            "ip",
            "link",
            "add",
            self._device,
            "type",
            "veth",
            "peer",
            "name",
            "test",
            "netns",
            str(hub),
        )
        self._within(self.hub, "ip", "link", "set", "test", "master", "hub", "up")
        run("ip", "addr", "add", f"{self._net}.{TEST}/24", "dev", self._device)
        run("ip", "link", "set", self._device, "up")

    def _join(self, port: str, pid: int, name: str) -> None:
        """A pair of devices: one at the hub, the other in the namespace of a process."""
        self._within(
            self.hub,
            "ip",
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            name,
            "netns",
            str(pid),
        )
        self._within(self.hub, "ip", "link", "set", port, "master", "hub", "up")

    def _choose_ports(self) -> None:
        for node in self._nodes:
            node.port, node.node_port = PORT, PORT + NODE_PORT_OFFSET
        voters = ",".join(f"{n.number}@{n.host}:{n.node_port}" for n in self._nodes)
        self._shared = cluster_settings([node.node_port for node in self._nodes])
        self._shared["controller.quorum.voters"] = voters

    def _command(self, node: Any) -> list[str]:
        within = f"--net=/proc/{self._holders[node.number].pid}/ns/net"
        return ["nsenter", within, "--", sys.executable, *super()._command(node)[1:]]
