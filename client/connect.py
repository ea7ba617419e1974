"""A blocking connection to a host that may have addresses which are of no use on this machine."""

from __future__ import annotations

import socket

from kept.client.address_errors import UNUSABLE_ADDRESS


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to the first address that takes it. Raises the OSError of the last one that this
    machine has use of, if there is one, where :func:`socket.create_connection` raises that of the
    last.
    """
    try:
        return socket.create_connection((host, port), timeout_s, all_errors=True)
    except ExceptionGroup as errors:
        failed = errors.exceptions
        told = [e for e in failed if getattr(e, "errno", None) not in UNUSABLE_ADDRESS]
        raise (told or failed)[-1] from None
