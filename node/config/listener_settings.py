"""Settings of one listener: ``listener.name.<name in lower case>.<setting>`` (KIP-103, KIP-226).

Of two that say the same the one with the prefix counts, on that listener. Only settings that a
listener can have of its own may stand behind the prefix; any other is refused by its whole name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kept.node.config.config_def import nearest
from kept.storage.errors import ConfigurationError

PREFIX: Final = "listener.name."

OF_A_LISTENER: Final = (
    "connections.max.reauth.ms",
    "kept.sasl.oauthbearer.truststore.location",
    "kept.sasl.plain.users",
    "max.connection.creation.rate",
    "max.connections",
    "oauthbearer.sasl.jaas.config",
    "oauthbearer.sasl.server.callback.handler.class",
    "plain.sasl.jaas.config",
    "sasl.enabled.mechanisms",
    "sasl.oauthbearer.clock.skew.seconds",
    "sasl.oauthbearer.expected.audience",
    "sasl.oauthbearer.expected.issuer",
    "sasl.oauthbearer.jwks.endpoint.refresh.ms",
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
    "sasl.oauthbearer.jwks.endpoint.url",
    "sasl.oauthbearer.scope.claim.name",
    "sasl.oauthbearer.sub.claim.name",
    "sasl.server.max.receive.size",
    "scram-sha-256.sasl.jaas.config",
    "scram-sha-512.sasl.jaas.config",
    "ssl.allow.dn.changes",
    "ssl.allow.san.changes",
    "ssl.cipher.suites",
    "ssl.client.auth",
    "ssl.enabled.protocols",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.password",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.keystore.type",
    "ssl.principal.mapping.rules",
    "ssl.protocol",
    "ssl.truststore.certificates",
    "ssl.truststore.location",
    "ssl.truststore.password",
    "ssl.truststore.type",
)
"""Settings that a listener can have of its own."""

_NAME: Final = re.compile(r"listener\.name\.(?P<listener>[a-z0-9_]+)\.(?P<setting>.+)")


def split(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The settings of the node, and those of each listener by its name in lower case.

    Raises ConfigurationError for a name with the prefix that no listener can have.
    """
    node: dict[str, str] = {}
    listeners: dict[str, dict[str, str]] = {}
    for name, text in given.items():
        if not name.startswith(PREFIX):
            node[name] = text
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigurationError(
                f"{name}: listener.name.<listener in lower case>.<setting> is wanted"
            )
        if match["setting"] not in OF_A_LISTENER:
            near = nearest(match["setting"], OF_A_LISTENER)
            hint = f"did you mean {PREFIX}{match['listener']}.{near}?" if near else ""
            raise ConfigurationError(
                f"{name}: {match['setting']} is no setting of a single listener; "
                + (hint or f"these are: {', '.join(OF_A_LISTENER)}")
            )
        listeners.setdefault(match["listener"], {})[match["setting"]] = text
    return node, listeners


def check_listeners(settings: Iterable[str], bound: Iterable[str]) -> None:
    """Whether the listeners with ``settings`` exist. Raises ConfigurationError."""
    bound = sorted(bound)
    for listener in settings:
        if listener.upper() not in bound:
            raise ConfigurationError(
                f"{PREFIX}{listener}.…: there is no listener {listener.upper()}; listeners has "
                f"{', '.join(bound)}"
            )


def from_variable(variable: str) -> str | None:
    """The setting that ``KEPT_LISTENER_NAME_<LISTENER>_<SETTING>`` means; None: it means none."""
    text = variable.removeprefix("KEPT_LISTENER_NAME_")
    if text == variable:
        return None
    for setting in sorted(OF_A_LISTENER, key=len, reverse=True):
        listener = text.removesuffix("_" + setting.upper().replace(".", "_").replace("-", "_"))
        if listener not in ("", text):
            return f"{PREFIX}{listener.lower()}.{setting}"
    return None
