"""What the service manager hears of a node: datagrams on a real AF_UNIX socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest

from kept.node.runtime.service_manager import ServiceManager
from kept.testing import Cluster

PID = 7
WAIT_S = 60


class Receiver:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address[0] == "@" else address)
        self.socket.settimeout(WAIT_S)

    def environment(self, **more: str) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, **more}

    def received(self) -> list[str]:
        """The lines of the next datagram."""
        return self.socket.recv(4096).decode().split("\n")

    def await_line(self, start: str) -> str:
        """The next line that begins so; those before it are passed over."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for line in self.received():
                if line.startswith(start):
                    return line
        raise AssertionError(f"no {start}")


@pytest.fixture(params=["path", "abstract"])
def receiver(request, tmp_path):
    name = f"kept-test-{os.getpid()}"
    receiver = Receiver(f"@{name}" if request.param == "abstract" else f"{tmp_path}/{name}")
    yield receiver
    receiver.socket.close()


def test_each_notification_is_one_datagram(receiver):
    manager = ServiceManager(receiver.address)
    manager.status("starting")
    manager.status("starting")
    manager.ready("ready on\nlocalhost:9092")
    manager.status("ready on\nlocalhost:9092")
    manager.status("not ready: fenced")
    manager.stopping("stopping")
    assert receiver.received() == ["STATUS=starting"]
    assert receiver.received() == ["READY=1", "STATUS=ready on localhost:9092"]
    assert receiver.received() == ["STATUS=not ready: fenced"]
    assert receiver.received() == ["STOPPING=1", "STATUS=stopping"]


def test_signs_of_life_come_in_time(receiver):
    async def run():
        manager = ServiceManager(receiver.address, watchdog_s=0.03)
        reporting = asyncio.create_task(manager.report(lambda: "fine"))
        received = [await asyncio.to_thread(receiver.received) for _ in range(4)]
        reporting.cancel()
        return received

    assert asyncio.run(run()) == [["WATCHDOG=1"], ["STATUS=fine"], ["WATCHDOG=1"], ["WATCHDOG=1"]]


def test_the_environment_is_taken_for_this_process_alone(receiver):
    ours = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(PID), "PATH": "/bin"}
    environment = receiver.environment(**ours)
    manager = ServiceManager.from_environment(environment, PID)
    assert environment == {"PATH": "/bin"}
    assert manager.watchdog_s == 30
    manager.status("here")
    assert receiver.received() == ["STATUS=here"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"},
        {"WATCHDOG_USEC": "often"},
        {"WATCHDOG_USEC": "0"},
    ],
)
def test_without_a_watchdog_of_ours_there_are_no_signs_of_life(more):
    environment = {"NOTIFY_SOCKET": "/run/systemd/notify", **more}
    assert ServiceManager.from_environment(environment, PID).watchdog_s is None


def test_without_a_service_manager_nothing_happens():
    manager = ServiceManager.from_environment({}, PID)
    manager.ready("ready")
    manager.stopping("stopping")
    asyncio.run(manager.report(lambda: "never"))


@pytest.mark.parametrize("address", ["vsock:2:1234", "notify"])
def test_an_address_of_another_kind_is_logged(address, capsys):
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": address}, PID)
    assert address in capsys.readouterr().err
    manager.ready("ready")
    assert capsys.readouterr().err == ""


def test_a_service_manager_that_is_gone_ends_nothing(tmp_path, capsys):
    ServiceManager(f"{tmp_path}/gone").ready("ready")
    logged = capsys.readouterr().err
    assert "service manager is not notified" in logged and "READY=1" in logged


def test_a_process_says_when_it_is_ready_and_when_it_stops(receiver):
    environment = receiver.environment(WATCHDOG_USEC="600000")
    with Cluster(1, environ=environment) as cluster:
        assert receiver.received() == ["STATUS=starting"]
        ready, status = receiver.received()
        assert ready == "READY=1"
        assert status.startswith("STATUS=kept ") and f":{cluster.port()}, data in" in status
        assert receiver.await_line("WATCHDOG=1")
        os.kill(cluster.pid(), signal.SIGTERM)
        assert receiver.await_line("STOPPING=1")
