"""Addresses of a node: ``listeners``, ``advertised.listeners`` and what belongs to them.

Kafka's syntax (``NAME://host:port``, comma-separated) and Kafka's checks, with one difference: one
listener carries all traffic between nodes, named by ``inter.broker.listener.name`` and
``controller.listener.names`` alike; it speaks PLAINTEXT or SSL. A node of several has one
also where ``listeners`` does not name it: ``NODE``, on the first client port + 1000.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from kept.storage.errors import ConfigurationError

NODE_LISTENER: Final = "NODE"
"""Name of the listener between nodes where no setting names it."""

NODE_PORT_OFFSET: Final = 1000
"""From the first client port to the node port, where no setting says."""

_ADDRESS: Final = re.compile(
    r"(?P<name>\w+)://(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^\[\]:/]*)):(?P<port>[0-9]{1,5})"
)
_VOTER: Final = re.compile(
    r"(?P<id>[0-9]{1,10})@(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^\[\]:/@]+)):(?P<port>[0-9]{1,5})"
)
SERVED: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
"""Security protocols that listeners may have."""
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})


class ListenerConfig(NamedTuple):
    """One address. ``host`` "" means every interface; port 0 means one that the system chooses."""

    name: str
    protocol: str
    host: str
    port: int

    @property
    def bind_hosts(self) -> tuple[str, ...]:
        """Addresses to bind; a caller skips ``::1`` and ``::`` where there is no IPv6."""
        if self.host == "localhost":
            return ("127.0.0.1", "::1")
        if self.host == "":
            return ("0.0.0.0", "::")
        return (self.host,)

    @property
    def is_tls(self) -> bool:
        """Whether everything there is in TLS."""
        return self.protocol in {"SSL", "SASL_SSL"}

    @property
    def is_loopback(self) -> bool:
        """Only programs of this machine, or container, reach it."""
        return all(host == "::1" or host.startswith("127.") for host in self.bind_hosts)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self.port}"


class ConfiguredVoter(NamedTuple):
    """One entry of ``controller.quorum.voters``: a node and its node listener."""

    node_id: int
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.node_id}@{host}:{self.port}"


class Listeners(Struct, frozen=True):
    """Where a node listens for clients and what it tells them; ``node`` is for other nodes, and
    ``advertised_node`` what those get. A lone node has neither.
    """

    client: tuple[ListenerConfig, ...]
    advertised: tuple[ListenerConfig, ...]
    node: ListenerConfig | None
    advertised_node: ListenerConfig | None


class ListenerRole(Struct, frozen=True):
    """What the addresses depend on: ``voter`` is this node's entry in the list of voters, if it has
    one; ``alone`` a cluster of one that names nobody else; ``broker`` False: a controller only.
    """

    alone: bool
    broker: bool
    voter: ConfiguredVoter | None


def parse_voters(entries: Sequence[str]) -> tuple[ConfiguredVoter, ...]:
    """``id@host:port`` entries. Raises ConfigurationError."""
    voters = []
    for entry in entries:
        match = _VOTER.fullmatch(entry)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ConfigurationError(
                f"controller.quorum.voters: {entry} is not id@host:port, as in 0@node-0:10092"
            )
        voters.append(
            ConfiguredVoter(int(match["id"]), match["v6"] or match["host"], int(match["port"]))
        )
    by_identity: dict[object, ConfiguredVoter] = {}
    for voter in voters:
        other = by_identity.setdefault(voter.node_id, voter)
        if other is not voter:
            raise ConfigurationError(
                f"controller.quorum.voters: node id {voter.node_id} is given twice, {other} and "
                f"{voter}: each voter has an id of its own"
            )
        other = by_identity.setdefault((voter.host, voter.port), voter)
        if other is not voter:
            raise ConfigurationError(
                f"controller.quorum.voters: {other} and {voter} have the same address; each node "
                "has a node listener of its own"
            )
    return tuple(voters)


def parse_protocol_map(entries: Sequence[str]) -> dict[str, str]:
    """``NAME:PROTOCOL`` entries. Raises ConfigurationError."""
    protocols = {}
    for entry in entries:
        name, colon, protocol = entry.partition(":")
        if not colon or not name or not protocol:
            raise ConfigurationError(
                f"listener.security.protocol.map: {entry} is not NAME:PROTOCOL"
            )
        if name.upper() in protocols:
            raise ConfigurationError(f"listener.security.protocol.map: {name} is given twice")
        protocols[name.upper()] = protocol.upper()
    return protocols


def _parse(setting: str, entries: Sequence[str], protocols: dict[str, str]) -> list[ListenerConfig]:
    listeners: list[ListenerConfig] = []
    for entry in entries:
        match = _ADDRESS.fullmatch(entry)
        if match is None or int(match["port"]) > 65535:
            raise ConfigurationError(
                f"{setting}: {entry} is not NAME://host:port, as in PLAINTEXT://localhost:9092"
            )
        name = match["name"].upper()
        protocol = protocols.get(name)
        if protocol is None:
            raise ConfigurationError(
                f"{setting}: no security protocol for listener {name}; add {name}:PLAINTEXT to "
                "listener.security.protocol.map"
            )
        if protocol not in SERVED:
            raise ConfigurationError(
                f"{setting}: listener {name} is to speak {protocol}, but kept serves "
                f"{', '.join(SERVED)} only"
            )
        if any(other.name == name for other in listeners):
            raise ConfigurationError(f"{setting}: listener {name} is given twice")
        listeners.append(
            ListenerConfig(name, protocol, match["v6"] or match["host"] or "", int(match["port"]))
        )
    return listeners


def _node_name(inter_broker: str | None, controllers: Sequence[str] | None) -> str | None:
    """The name of the listener between nodes, None where no setting says."""
    if controllers is not None and len(controllers) != 1:
        raise ConfigurationError("controller.listener.names: one name is wanted")
    controller = controllers[0].upper() if controllers else None
    inter_broker = inter_broker.upper() if inter_broker else None
    if controller and inter_broker and controller != inter_broker:
        raise ConfigurationError(
            f"inter.broker.listener.name={inter_broker} and controller.listener.names={controller} "
            "contradict each other: one listener carries all traffic between nodes"
        )
    return controller or inter_broker


def resolve(
    listeners: Sequence[str],
    advertised: Sequence[str] | None,
    protocol_map: Sequence[str],
    inter_broker: str | None,
    controllers: Sequence[str] | None,
    *,
    role: ListenerRole,
) -> Listeners:
    """The addresses that the settings mean. Raises ConfigurationError."""
    protocols = {"PLAINTEXT": "PLAINTEXT", "SSL": "SSL", "SASL_PLAINTEXT": "SASL_PLAINTEXT"}
    protocols |= {"SASL_SSL": "SASL_SSL", NODE_LISTENER: "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    protocols |= parse_protocol_map(protocol_map)
    bound = _parse("listeners", listeners, protocols)
    named = _node_name(inter_broker, controllers)
    node = next((lst for lst in bound if lst.name == (named or NODE_LISTENER)), None)
    if named is not None and node is None:
        raise ConfigurationError(
            f"listener {named} is to carry the traffic between nodes, but listeners has none of "
            "that name"
        )
    if node is not None and node.protocol.startswith("SASL_"):
        raise ConfigurationError(
            f"listeners: {node.name} carries the traffic between nodes and is to speak "
            f"{node.protocol}, but users are in the metadata that it brings: nodes know each other "
            "by certificates (SSL), or by the network that only they are in (PLAINTEXT)"
        )
    client = tuple(listener for listener in bound if listener is not node)
    if not client and role.broker:
        raise ConfigurationError("listeners: none is left for clients")
    if node is None and not role.alone:
        node = _default_node(client[0], protocols[NODE_LISTENER])
        bound.append(node)
    _no_port_twice(bound)
    by_name = _advertised_by_name(advertised, protocols, bound, role)
    return Listeners(
        client,
        _advertised(by_name, client),
        node,
        None if node is None else _advertised_node(node, by_name, client, role.voter),
    )


def _default_node(client: ListenerConfig, protocol: str) -> ListenerConfig:
    port = client.port + NODE_PORT_OFFSET
    if client.port == 0 or port > 65535:
        raise ConfigurationError(
            f"listeners: {client} leaves no node port (it is the client port + {NODE_PORT_OFFSET} "
            f"unless set): add {NODE_LISTENER}://{client.host}:port"
        )
    return client._replace(name=NODE_LISTENER, port=port, protocol=protocol)


def _advertised_node(
    node: ListenerConfig,
    by_name: dict[str, ListenerConfig],
    client: Sequence[ListenerConfig],
    voter: ConfiguredVoter | None,
) -> ListenerConfig:
    """Where other nodes reach this one: as said, else as its own voter's entry has it, else where
    it listens, else on the host that clients get.
    """
    listener = by_name.get(node.name)
    if listener is None:
        if voter is not None:
            listener = node._replace(host=voter.host)
        elif node.host not in _WILDCARDS:
            listener = node
        else:
            hosts = [by_name[listener.name].host for listener in client if listener.name in by_name]
            if not hosts:
                raise ConfigurationError(
                    f"listener {node} is bound to every interface: advertised.listeners must say "
                    f"where other nodes reach it, as in {node.name}://host:{node.port}"
                )
            listener = node._replace(host=hosts[0])
    if voter is not None and listener.port != voter.port:
        raise ConfigurationError(
            f"controller.quorum.voters says {voter}, but the node listener of node "
            f"{voter.node_id} is {listener}: give both the same port (NODE in listeners, or in "
            "advertised.listeners where ports are mapped)"
        )
    return listener


def _no_port_twice(bound: Sequence[ListenerConfig]) -> None:
    seen: dict[tuple[str, int], ListenerConfig] = {}
    for listener in bound:
        other = seen.setdefault((listener.host, listener.port), listener)
        if other is not listener and listener.port:
            raise ConfigurationError(f"listeners: {other} and {listener} are the same address")


def _advertised_by_name(
    entries: Sequence[str] | None,
    protocols: dict[str, str],
    bound: Sequence[ListenerConfig],
    role: ListenerRole,
) -> dict[str, ListenerConfig]:
    """``advertised.listeners`` by name."""
    by_name = {a.name: a for a in _parse("advertised.listeners", entries or (), protocols)}
    names = [listener.name for listener in bound]
    for listener in by_name.values():
        if listener.name not in names:
            alone = role.alone and listener.name == NODE_LISTENER
            hint = "; a cluster of one has no node listener unless it is there" if alone else ""
            raise ConfigurationError(
                f"advertised.listeners: there is no listener {listener.name}; listeners has "
                f"{', '.join(names)}{hint}"
            )
        if listener.host in _WILDCARDS:
            raise ConfigurationError(
                f"advertised.listeners: nobody can connect to {listener.host or 'no host'}; "
                "give a name or address that the others reach"
            )
    return by_name


def _advertised(
    by_name: dict[str, ListenerConfig], client: Sequence[ListenerConfig]
) -> tuple[ListenerConfig, ...]:
    for listener in client:
        if listener.name not in by_name and listener.host in _WILDCARDS:
            raise ConfigurationError(
                f"listener {listener} is bound to every interface: advertised.listeners must say "
                f"where clients reach it, as in {listener.name}://host:{listener.port}"
            )
    return tuple(by_name.get(listener.name, listener) for listener in client)
