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
from kept.client.security.tls import (
    check_own_certificate,
    client_context,
    server_context,
    tls_config,
)
from kept.cluster.security.acls import ANONYMOUS
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl

    from kept.client.security.certificates import Certificate
    from kept.client.security.tls import TlsConfig
    from kept.node.config.listeners import ListenerConfig
    from kept.node.config.node_config import NodeConfig


class UnknownPeer(Exception):
    """A certificate that says of nobody who he is."""


class ListenerTls:
    """The context of a listener's new connections, replaced when its files change."""

    def __init__(
        self, config: NodeConfig, listener: ListenerConfig, *, between_nodes: bool = False
    ) -> None:
        """Raises ConfigurationError, which names the listener and the setting."""
        self.name = listener.name
        self._between_nodes = between_nodes
        self.config: TlsConfig
        self.context: ssl.SSLContext
        self.client_context: ssl.SSLContext | None = None
        """Of this node's connections to the same listener of others; None: nodes do not use it."""
        self._client_auth = config.tls_client_auth(listener)
        config = config.of_listener(listener.name)
        self._properties = config.tls_properties()
        self._allow_dn = config.ssl_allow_dn_changes
        self._allow_san = config.ssl_allow_san_changes
        self._mapper = PrincipalMapper(config.ssl_principal_mapping_rules)
        try:
            self.use(self.read())
        except ConfigurationError as error:
            raise ConfigurationError(f"listener {listener.name}: {error}") from None

    def read(self) -> TlsConfig:
        """What settings and files say now. Raises ConfigurationError."""
        return tls_config(self._properties)

    def use(self, config: TlsConfig) -> None:
        """New connections have this from now on. Raises ConfigurationError, and changes nothing."""
        context = server_context(config, self._client_auth)
        if self._between_nodes:
            check_own_certificate(config)
            self.client_context = client_context(config)
        self.context, self.config = context, config

    @property
    def not_after(self) -> float:
        """When the certificate in force expires, in seconds since 1970."""
        return self._leaf(self.config).not_after

    @property
    def subject(self) -> str:
        """The distinguished name of the certificate in force."""
        return distinguished_name(self._leaf(self.config).subject)

    @staticmethod
    def _leaf(config: TlsConfig) -> Certificate:
        assert config.keys is not None, "server_context refuses a config without"
        return config.keys.leaf

    def check_change(self, config: TlsConfig, now_s: float) -> None:
        """Whether what is in force may be replaced by ``config``. Raises ConfigurationError."""
        if config.keys is None:
            return  # refused when it is used
        old, new, place = self._leaf(self.config), config.keys.leaf, config.keys.place
        if not self._allow_dn and old.subject != new.subject:
            place.refuse(
                f"the certificate is for {distinguished_name(new.subject)}, the one in force for "
                f"{self.subject}; ssl.allow.dn.changes would allow that"
            )
        missing = set(old.names) - set(new.names)
        if not self._allow_san and missing:
            place.refuse(
                f"the certificate does not name {', '.join(sorted(missing))} any more; "
                "ssl.allow.san.changes would allow that"
            )
        if not new.not_before <= now_s < new.not_after:
            place.refuse("the certificate is not valid now")

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
