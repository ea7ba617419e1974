"""What the settings say about logging in on a SASL listener."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.client.security.jaas import PLAIN_MODULE, parse_jaas
from kept.client.security.plain import MAX_FIELD_BYTES
from kept.client.security.plain import MECHANISM as PLAIN
from kept.client.security.scram import HASHES as SCRAM
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig

MECHANISMS: Final = (PLAIN, *SCRAM)
"""What kept serves, in the order in which clients are told."""
SASL_PROTOCOLS: Final = frozenset({"SASL_PLAINTEXT", "SASL_SSL"})

_USER: Final = "user_"
_NO_GSSAPI: Final = (
    "GSSAPI (Kerberos), Kafka's default, is not served: it needs a KDC, a keytab and a C library "
    "on every node"
)


class SaslSettings(Struct, frozen=True):
    """How clients log in on one listener. Its repr hides the passwords.

    ``plain_users`` are those of PLAIN's JAAS entry with their passwords; ``stored_passwords``:
    PLAIN also takes the passwords of users with SCRAM credentials. ``max_reauth_ms`` 0: a login
    lasts as long as its connection.
    """

    mechanisms: tuple[str, ...]
    plain_users: Mapping[str, str]
    stored_passwords: bool
    max_receive_bytes: int
    max_reauth_ms: int
    failed_delay_ms: int

    def __repr__(self) -> str:
        return f"SaslSettings({','.join(self.mechanisms)})"


@lru_cache(maxsize=64)
def sasl_settings(config: NodeConfig) -> SaslSettings:
    """Those of a listener, from its ``config`` (:meth:`NodeConfig.of_listener`). Raises
    ConfigurationError.
    """
    mechanisms = config.sasl_enabled_mechanisms
    for name in mechanisms:
        if name not in MECHANISMS:
            why = _NO_GSSAPI if name == "GSSAPI" else f"{name} is not served"
            raise ConfigurationError(
                f"sasl.enabled.mechanisms: {why}; there are {', '.join(MECHANISMS)}"
            )
    return SaslSettings(
        mechanisms,
        _plain_users(config.plain_sasl_jaas_config),
        config.sasl_plain_users == "scram",
        config.sasl_server_max_receive_size,
        config.connections_max_reauth_ms,
        config.connection_failed_authentication_delay_ms,
    )


def check_sasl_listener(name: str, config: NodeConfig) -> None:
    """Whether anybody can log in on a SASL listener called ``name``. Raises ConfigurationError."""
    settings = sasl_settings(config)
    if not settings.mechanisms:
        raise ConfigurationError(
            f"listener {name} is a SASL listener without mechanisms: set sasl.enabled.mechanisms "
            f"to some of {', '.join(MECHANISMS)} ({_NO_GSSAPI})"
        )
    if PLAIN in settings.mechanisms and not (settings.plain_users or settings.stored_passwords):
        raise ConfigurationError(
            f"listener {name} enables PLAIN, but names no users: set kept.sasl.plain.users=scram "
            f"(the passwords of users with SCRAM credentials), or listener.name.{name.lower()}."
            f'plain.sasl.jaas.config={PLAIN_MODULE} required user_NAME="PASSWORD";'
        )


def sasl_warnings(config: NodeConfig) -> list[str]:
    """What is allowed and unwise about logins on the listeners of a node."""
    return [
        f"listener {listener.name} takes passwords by PLAIN over SASL_PLAINTEXT: whoever is on the "
        "wire reads them; give it SASL_SSL, or SCRAM alone"
        for listener in config.listeners
        if listener.protocol == "SASL_PLAINTEXT"
        and not listener.is_loopback
        and PLAIN in config.of_listener(listener.name).sasl_enabled_mechanisms
    ]


def _plain_users(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    entry = parse_jaas(text)
    if entry.login_module != PLAIN_MODULE:
        raise ConfigurationError(
            f"plain.sasl.jaas.config: {entry.login_module} is not PLAIN's login module, which is "
            f"{PLAIN_MODULE}"
        )
    users = {}
    for option, password in entry.options.items():
        if option.startswith(_USER):
            user = option.removeprefix(_USER)
            sizes = len(user.encode()), len(password.encode())
            if min(sizes) < 1 or max(sizes) > MAX_FIELD_BYTES or "\0" in user + password:
                raise ConfigurationError(
                    f"plain.sasl.jaas.config: user and password of {option!r} must have 1 to "
                    f"{MAX_FIELD_BYTES} bytes and no NUL"
                )
            users[user] = password
    return users
