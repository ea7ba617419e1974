"""``kept serve --check``: what would keep a node from starting, found out without starting it.

A listener's host must be this machine's, and what is advertised must be a name that resolves here.
A port in use is no fault while the node itself is running. Where clients come from a name may mean
something else, and behind a mapping the advertised address is another machine's; so much cannot be
checked from here. Directories must be this node's, or nobody's yet. The logs in them are not read:
``kept log check`` does that.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import TYPE_CHECKING

from kept.client.security.distinguished_names import PrincipalMapper
from kept.client.security.tls import check_own_certificate, server_context, tls_config
from kept.cluster.metadata.wal import WAL_NAME
from kept.node.config.bootstrap_scram import founding_records
from kept.node.config.security_checks import security_warnings
from kept.node.metadata import directory_ids
from kept.node.security.oauth.token_checks import token_settings
from kept.storage import layout
from kept.storage.directory import refuse_kafka, refuse_ownerless
from kept.storage.disk import Disk
from kept.storage.errors import ConfigurationError, DirectoryInUse

if TYPE_CHECKING:
    from kept.node.config.listeners import ListenerConfig
    from kept.node.config.node_config import NodeConfig


def check(config: NodeConfig, *, adopting: bool = False) -> list[str]:
    """All checks; what is allowed and probably not wanted, a sentence each. ``adopting``: whose the
    directories are is checked by who takes them over from Apache Kafka.

    Raises ConfigurationError, DirectoryRefused, DirectoryInUse and DamagedData, as a start would.
    """
    disk = Disk()
    busy = check_addresses(config)
    check_directories(config)
    if not adopting:
        check_owners(config, disk)
    check_first_users(config)
    over = check_tls(config)
    check_tokens(config)
    if busy and not _is_running(config, disk):
        raise ConfigurationError(
            f"listeners: the port of {busy[0]} is in use, and not by this node: stop what has it, "
            "or choose another"
        )
    return [
        *(f"listeners: the port of {a} is in use, it seems by this node" for a in busy),
        *over,
        *audit_warnings(config),
        *security_warnings(config),
    ]


def _is_running(config: NodeConfig, disk: Disk) -> bool:
    """Whether a process has the metadata directory in use."""
    path = f"{config.metadata_log_dir}/{layout.LOCK}"
    if not disk.exists(path):
        return False
    try:
        disk.lock(path).release()
    except DirectoryInUse:
        return True
    return False


def check_addresses(config: NodeConfig) -> list[str]:
    """Raises ConfigurationError for the first address that cannot be served or reached. Returns
    those whose port is in use.
    """
    bound = list(config.listeners)
    advertised = list(config.advertised_listeners)
    if config.node_listener is not None and config.advertised_node_listener is not None:
        bound.append(config.node_listener)
        advertised.append(config.advertised_node_listener)
    busy = [str(listener) for listener in bound if not _check_bound(listener)]
    for listener in advertised:
        _resolve("advertised.listeners" if listener not in bound else "listeners", listener)
    return busy


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


def check_owners(config: NodeConfig, disk: Disk) -> None:
    """Raises DirectoryRefused for a directory of Apache Kafka, of another node or cluster, or with
    logs and no owner, and where one that this node has used is missing.
    """
    metadata = config.metadata_log_dir
    log_dirs = config.log_dirs if config.is_broker else ()
    for path in (*log_dirs, metadata):
        refuse_kafka(disk, path)
    alone = len(config.controller_quorum_voters) <= 1
    directory_ids.refuse_foreign(disk, metadata, log_dirs, node_id=config.node_id, alone=alone)
    directory_ids.refuse_missing(disk, metadata, log_dirs)
    for path in log_dirs:
        refuse_ownerless(disk, path)


def check_tls(config: NodeConfig) -> list[str]:
    """Whether each listener with TLS has a key, certificates and rules that can be used, and nodes
    that have these settings believe each other. Raises ConfigurationError, which names the
    listener, the setting and the file. Returns which certificates are not valid now: with such a
    node starts, so that one that is replaced later is used then.
    """
    warnings: list[str] = []
    now_s = time.time()
    node = () if config.node_listener is None else (config.node_listener,)
    for listener in (*config.listeners, *node):
        if listener.is_tls:
            own = config.of_listener(listener.name)
            try:
                tls = tls_config(own.tls_properties())
                server_context(tls, config.tls_client_auth(listener))
                assert tls.keys is not None, "server_context refuses it"
                leaf = tls.keys.leaf
                if not leaf.not_before <= now_s < leaf.not_after:
                    what = "has expired" if now_s >= leaf.not_after else "is not valid yet"
                    warnings.append(
                        f"listener {listener.name}: {tls.keys.place}: the certificate {what}: "
                        "clients will not connect"
                    )
                if listener in node:
                    check_own_certificate(tls)
                PrincipalMapper(own.ssl_principal_mapping_rules)
            except ConfigurationError as error:
                raise ConfigurationError(f"listener {listener.name}: {error}") from None
    return warnings


def audit_warnings(config: NodeConfig) -> list[str]:
    """Whether lines of the audit log would be lost, since its file cannot be made."""
    path = config.audit_path
    if path is None:
        return []
    place = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        why = "this is a directory"
    elif not os.path.isdir(place):
        why = f"{place} is no directory"
    elif not os.access(path if os.path.exists(path) else place, os.W_OK):
        why = "this user may not write there"
    else:
        return []
    return [f"kept.audit.path={path}: {why}: lines of the audit log will be lost"]


def check_tokens(config: NodeConfig) -> None:
    """Whether the keys of access tokens, where they are in a file, and whom to trust about others
    can be read. Raises ConfigurationError, which names the listener, the setting and the file.
    """
    for name, settings in token_settings(config).items():
        from kept.node.security.oauth.key_source import check_keys

        try:
            check_keys(settings)
        except ConfigurationError as error:
            raise ConfigurationError(f"listener {name}: {error}") from None


def check_first_users(config: NodeConfig) -> None:
    """Raises ConfigurationError for a password of ``kept.bootstrap.scram`` that cannot be read,
    where this node may form a cluster.
    """
    if not os.path.exists(f"{config.metadata_log_dir}/{WAL_NAME}"):
        founding_records(config.bootstrap_scram)


def _resolve(setting: str, listener: ListenerConfig) -> str:
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


def _check_bound(listener: ListenerConfig) -> bool:
    """Whether its port is free on each of its addresses."""
    free = True
    for number, host in enumerate(listener.bind_hosts):
        address = _resolve("listeners", listener._replace(host=host))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, listener.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                free = False
            elif not number or family != socket.AF_INET6:
                raise ConfigurationError(_refused(listener, error)) from error
    return free


def _refused(listener: ListenerConfig, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"listeners: {listener}: {listener.host} is no address of this machine; listen on "
            f"localhost, on an address of its own or on all ({listener.name}://:{listener.port}), "
            "and say in advertised.listeners what others are told"
        )
    if error.errno == errno.EACCES:
        return f"listeners: {listener}: this user may not bind that port; take one above 1023"
    return f"listeners: {listener}: {error.strerror or os.strerror(error.errno or 0)}"
