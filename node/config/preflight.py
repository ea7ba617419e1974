"""What ``kept serve --check`` finds out about addresses and directories, without starting anything.

A listener's host must be this machine's, and what is advertised must be a name that resolves here.
A port in use is no fault: the node itself may be running. Where clients come from a name may mean
something else, and behind a mapping the advertised address is another machine's; so much cannot be
checked from here.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from kept.client.security.distinguished_names import PrincipalMapper
from kept.client.security.tls import server_context, tls_config
from kept.cluster.metadata.wal import WAL_NAME
from kept.node.config.bootstrap_scram import founding_records
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from kept.node.config.listeners import Listener
    from kept.node.config.node_config import NodeConfig


def check_addresses(config: NodeConfig) -> None:
    """Raises ConfigurationError for the first address that cannot be served or reached."""
    bound = list(config.listeners)
    advertised = list(config.advertised_listeners)
    if config.node_listener is not None and config.advertised_node_listener is not None:
        bound.append(config.node_listener)
        advertised.append(config.advertised_node_listener)
    for listener in bound:
        _check_bound(listener)
    for listener in advertised:
        _resolve("advertised.listeners" if listener not in bound else "listeners", listener)


def check_directories(config: NodeConfig) -> None:
    """Raises ConfigurationError for the first directory that cannot be made or written."""
    for setting, path in (
        *(("log.dirs", path) for path in config.log_dirs),
        ("metadata.log.dir", config.metadata_log_dir),
    ):
        place = os.path.abspath(path)
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise ConfigurationError(f"{setting}: {path}: {place} is not a directory")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{setting}: {path}: this user may not write in {place}")


def check_tls(config: NodeConfig) -> None:
    """Whether each listener with TLS has a key, certificates and rules that can be used. Raises
    ConfigurationError, which names the listener, the setting and the file.
    """
    node = () if config.node_listener is None else (config.node_listener,)
    for listener in (*config.listeners, *node):
        if listener.is_tls:
            own = config.of_listener(listener.name)
            try:
                server_context(tls_config(own.tls_properties()), config.tls_client_auth(listener))
                PrincipalMapper(own.ssl_principal_mapping_rules)
            except ConfigurationError as error:
                raise ConfigurationError(f"listener {listener.name}: {error}") from None


def check_first_users(config: NodeConfig) -> None:
    """Raises ConfigurationError for a password of ``kept.bootstrap.scram`` that cannot be read,
    where this node may form a cluster.
    """
    if not os.path.exists(f"{config.metadata_log_dir}/{WAL_NAME}"):
        founding_records(config.bootstrap_scram)


def _resolve(setting: str, listener: Listener) -> str:
    """The first address of a listener's host."""
    try:
        addresses = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{setting}: {listener}: {listener.host} is not a known host ({why}); give a name that "
            "resolves, or an address"
        ) from error
    return str(addresses[0][4][0])


def _check_bound(listener: Listener) -> None:
    for number, host in enumerate(listener.bind_hosts):
        address = _resolve("listeners", listener._replace(host=host))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, listener.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE or (number and family == socket.AF_INET6):
                continue
            raise ConfigurationError(_refused(listener, error)) from error


def _refused(listener: Listener, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"listeners: {listener}: {listener.host} is no address of this machine; listen on "
            f"localhost, on an address of its own or on all ({listener.name}://:{listener.port}), "
            "and say in advertised.listeners what others are told"
        )
    if error.errno == errno.EACCES:
        return f"listeners: {listener}: this user may not bind that port; take one above 1023"
    return f"listeners: {listener}: {error.strerror or os.strerror(error.errno or 0)}"
