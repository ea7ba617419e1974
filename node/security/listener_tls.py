"""TLS of one listener: the context of new connections, and who a client's certificate says it is.

A listener's protocol is SSL (the certificate, if one is asked for, is who the client is), SASL_SSL
(the certificate is checked where it is asked for, but SASL says who the client is), or one without
TLS. The listener between nodes always wants a certificate.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kept.client.security.certificates import parse_certificate
from kept.client.security.distinguished_names import PrincipalMapper, distinguished_name
from kept.client.security.tls import server_context, tls_config
from kept.cluster.security.acls import ANONYMOUS
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl

    from kept.client.security.tls import TlsConfig
    from kept.node.config.listeners import Listener
    from kept.node.config.node_config import NodeConfig


class UnknownPeer(Exception):
    """A certificate that says of nobody who he is."""


class ListenerTls:
    """The context of a listener's new connections, replaced when its files change."""

    def __init__(
        self, config: NodeConfig, listener: Listener, *, between_nodes: bool = False
    ) -> None:
        """Raises ConfigurationError, which names the listener and the setting."""
        self.name = listener.name
        self._client_auth = client_auth(config, listener, between_nodes=between_nodes)
        config = config.of_listener(listener.name)
        self._properties = config.tls_properties()
        self._mapper = PrincipalMapper(config.ssl_principal_mapping_rules)
        try:
            self.config = self.read()
            self.context = self.context_of(self.config)
        except ConfigurationError as error:
            raise ConfigurationError(f"listener {listener.name}: {error}") from None

    def read(self) -> TlsConfig:
        """What settings and files say now. Raises ConfigurationError."""
        return tls_config(self._properties)

    def context_of(self, config: TlsConfig) -> ssl.SSLContext:
        """A context of what was read. Raises ConfigurationError."""
        return server_context(config, self._client_auth)

    def principal(self, ssl_object: Any) -> str:
        """Who speaks, by the certificate that was shown. Raises UnknownPeer."""
        der = ssl_object.getpeercert(binary_form=True)
        if der is None:
            return ANONYMOUS
        try:
            certificate = parse_certificate(der)
            name = self._mapper.name(distinguished_name(certificate.subject))
        except ValueError as error:
            raise UnknownPeer(str(error)) from None
        # A session of TLS 1.2 may have been resumed, with a certificate that was good then.
        if certificate.not_after < time.time():
            raise UnknownPeer("its certificate has expired")
        return f"User:{name}"


def client_auth(config: NodeConfig, listener: Listener, *, between_nodes: bool) -> str:
    """``none``, ``requested`` or ``required``: whether clients of a listener show a certificate.

    With SASL_SSL only the setting with the listener's prefix counts, as in Kafka
    (``ChannelBuilders``): certificates for all would be asked of those who log in with a password.
    """
    if between_nodes:
        return "required"
    own = config.of_listener(listener.name)
    if listener.protocol == "SASL_SSL" and not config.has_of_listener(
        listener.name, "ssl.client.auth"
    ):
        return "none"
    return own.ssl_client_auth
