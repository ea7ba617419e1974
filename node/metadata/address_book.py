"""Where this node and the others are reached, by listener.

Three sources say it: what the settings advertise, what brokers registered, and where the voters of
the metadata log are. A listener on port 0 has its port once it is bound
(:meth:`AddressBook.set_port`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.cluster.metadata.records import Endpoint

if TYPE_CHECKING:
    import ssl

    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.security.listener_tls import ListenerTls

Address = tuple[str, int]


class AddressBook:
    """Knows where this node and the others listen. Addresses are (host, port)."""

    def __init__(
        self, config: LiveConfig, metadata: MetadataLog, tls: ListenerTls | None = None
    ) -> None:
        self._config = config
        self._tls = tls
        self._metadata = metadata
        self._ports: dict[str, int] = {}

    def set_port(self, listener_name: str, port: int) -> None:
        """A listener of this node has its port."""
        self._ports[listener_name] = port

    def own_address(self, listener_name: str) -> Address:
        """Where clients of a listener reach this node: by the first one for a name it does not
        have, and a controller alone by the listener between nodes.
        """
        config = self._config.current
        for listener, advertised in zip(
            config.listeners, config.advertised_listeners, strict=False
        ):
            if listener.name == listener_name:
                return advertised.host, advertised.port or self._ports[listener.name]
        if config.listeners:
            return self.own_address(config.listeners[0].name)
        between = self.own_node_address()
        assert between is not None, "a controller alone listens to other nodes"
        return between

    def node_tls(self) -> ssl.SSLContext | None:
        """How other nodes' listeners for nodes are spoken to; None: without TLS."""
        return None if self._tls is None else self._tls.client_context

    def own_node_address(self) -> Address | None:
        """Where other nodes reach this one; None for a lone node."""
        config = self._config.current
        advertised, listener = config.advertised_node_listener, config.node_listener
        if advertised is None or listener is None:
            return None
        return advertised.host, advertised.port or self._ports[listener.name]

    def registration(self) -> tuple[Endpoint, ...]:
        """What this broker registers."""
        config = self._config.current
        endpoints = [
            Endpoint(listener.name, listener.protocol, *self.own_address(listener.name))
            for listener in config.listeners
        ]
        advertised, address = config.advertised_node_listener, self.own_node_address()
        if advertised is not None and address is not None:
            endpoints.append(Endpoint(advertised.name, advertised.protocol, *address))
        return tuple(endpoints)

    def node_addresses(self, node_id: int) -> tuple[Address, ...]:
        """Where another node's listener for nodes may be, the likeliest first: as it registered, as
        a voter, as the settings say. Metadata may be old: whole clusters move between two starts.
        """
        config = self._config.current
        if config.node_listener is None:
            return ()
        broker = self._metadata.image.brokers.get(node_id)
        registered = None if broker is None else broker.endpoint(config.node_listener.name)
        addresses = [] if registered is None else [(registered.host, registered.port)]
        for voters in (self._metadata.raft_node.voters, config.controller_quorum_voters):
            addresses += [(v.host, v.port) for v in voters if v.node_id == node_id and v.host]
        return tuple(addresses)

    def node_address(self, node_id: int) -> Address | None:
        """The likeliest of :meth:`node_addresses`; None: none is known."""
        return next(iter(self.node_addresses(node_id)), None)

    def broker(self, broker_id: int, listener_name: str) -> Address | None:
        """Where clients of a listener reach a broker: this one, or another as it registered; None:
        it did not, or has no such listener.
        """
        if broker_id == self._config.current.node_id:
            return self.own_address(listener_name)
        broker = self._metadata.image.brokers.get(broker_id)
        endpoint = None if broker is None else broker.endpoint(listener_name)
        return None if endpoint is None else (endpoint.host, endpoint.port)
