"""Notifications for the service manager that runs the node: systemd's ``sd_notify`` protocol.

Each notification is a datagram of ``NAME=value`` lines to the AF_UNIX socket that the environment
names (sd_notify(3)). Without ``NOTIFY_SOCKET`` nothing is sent. A service manager that does not
take a datagram never ends the node: that is logged, and the next one is sent all the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, MutableMapping
from typing import Final

from kept.node.runtime.logging import log

SEND_TIMEOUT_S: Final = 1.0
"""How long a full queue of the service manager may hold up the node."""
STATUS_PERIOD_S: Final = 5.0
"""How often the status is looked at; a change is sent."""


class ServiceManager:
    """The service manager of this process.

    ``address`` is a path, or ``@name`` for an abstract socket; empty: there is no service manager.
    ``watchdog_s`` is how long it waits for a sign of life before it kills the process, None: it
    does not.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = address
        self.watchdog_s = watchdog_s
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> ServiceManager:
        """The one that the environment names. Its variables are taken out, so that child processes
        do not speak for this one. An address of another kind is logged and not used.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        period_us = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", str(pid))
        if address and not address.startswith(("/", "@")):
            log.warning("service manager is not notified", NOTIFY_SOCKET=address)
            address = ""
        watches = address and watched == str(pid) and period_us.isdecimal() and int(period_us) > 0
        return cls(address, int(period_us) / 1e6 if watches else None)

    def ready(self, status: str) -> None:
        """Clients may come."""
        self._status = status
        self._notify("READY=1", _status_line(status))

    def stopping(self, status: str) -> None:
        """The node has begun to stop."""
        self._status = status
        self._notify("STOPPING=1", _status_line(status))

    def status(self, status: str) -> None:
        """What ``systemctl status`` is to show; sent when it has changed."""
        if status != self._status:
            self._status = status
            self._notify(_status_line(status))

    async def report(self, status: Callable[[], str]) -> None:
        """Until it is cancelled: send the status when it changes, and signs of life from this loop
        three times in each ``watchdog_s``.
        """
        if not self._address:
            return
        period_s = STATUS_PERIOD_S
        if self.watchdog_s is not None:
            period_s = min(period_s, self.watchdog_s / 3)
        while True:
            if self.watchdog_s is not None:
                self._notify("WATCHDOG=1")
            self.status(status())
            await asyncio.sleep(period_s)

    def _notify(self, *lines: str) -> None:
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("service manager is not notified", what=lines[0], why=str(error))


def _status_line(status: str) -> str:
    return f"STATUS={' '.join(status.split())}"
