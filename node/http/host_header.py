"""What the header Host of a request says: whether it names this node, and at which port."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig


def host_is_known(config: NodeConfig, host: str) -> bool:
    """Whether a Host header names this node: localhost, an address, this machine, or one of its
    listeners'.

    Addresses are safe from DNS rebinding, which needs a name that the attacker owns.
    """
    try:
        address = urlsplit(f"//{host}")
        _ = address.port
    except ValueError:  # a bracket without its other half, or a port that is none
        return False
    if address.netloc != host or "@" in host:
        return False
    name = (address.hostname or "").lower().removesuffix(".")
    try:
        ip_address(name)
    except ValueError:
        hosts = {"localhost", socket.gethostname(), *config.http_hosts}
        hosts.update(listener.host for listener in config.listeners)
        hosts.update(listener.host for listener in config.advertised_listeners)
        for between in (config.node_listener, config.advertised_node_listener):
            hosts.update(() if between is None else (between.host,))
        return bool(name) and name in {accepted.lower() for accepted in hosts}
    return True


def with_port(host: str, *, https: bool) -> str:
    """HOST:PORT of a Host header, which leaves out the port that is usual: 80, or 443 of HTTPS."""
    _, colon, port = host.rpartition(":")
    if colon and port.isdecimal():
        return host
    return f"{host.removesuffix(':')}:{443 if https else 80}"
