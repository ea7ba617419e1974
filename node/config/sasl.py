"""What the settings say about logging in on a SASL listener."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from kept.client.security.jaas import PLAIN_MODULE, parse_jaas
from kept.client.security.oauthbearer import MECHANISM as OAUTHBEARER
from kept.client.security.plain import MAX_FIELD_BYTES
from kept.client.security.plain import MECHANISM as PLAIN
from kept.client.security.scram import HASHES as SCRAM
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from kept.node.config.listeners import ListenerConfig
    from kept.node.config.node_config import NodeConfig

MECHANISMS: Final = (PLAIN, *SCRAM, OAUTHBEARER)
"""What kept serves, in the order in which clients are told."""
SASL_PROTOCOLS: Final = frozenset({"SASL_PLAINTEXT", "SASL_SSL"})

JWKS_URL: Final = "sasl.oauthbearer.jwks.endpoint.url"
TRUSTSTORE: Final = "kept.sasl.oauthbearer.truststore.location"

_USER: Final = "user_"
_NO_GSSAPI: Final = (
    "GSSAPI (Kerberos), Kafka's default, is not served: it needs a KDC, a keytab and a C library "
    "on every node"
)


class TokenSettings(Struct, frozen=True):
    """Which access tokens are believed on one listener, and where the keys of their issuer are.

    ``truststore_path``: who may have signed the certificate of that place, None: whom the system
    trusts. Without ``audiences`` or an ``issuer`` those of a token are not looked at.
    """

    jwks_url: str
    truststore_path: str | None
    refresh_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    audiences: tuple[str, ...]
    issuer: str | None
    skew_s: int
    subject_claim: str
    scope_claim: str

    @property
    def jwks_path(self) -> str | None:
        """The file with the keys; None where they are fetched."""
        url = urlsplit(self.jwks_url)
        return unquote(url.path) if url.scheme == "file" else None


class SaslSettings(Struct, frozen=True):
    """How clients log in on one listener. Its repr hides the passwords.

    ``mechanisms`` are none where the listener's protocol is not SASL, whatever
    ``sasl.enabled.mechanisms`` has for others. ``plain_users`` are those of PLAIN's JAAS entry with
    their passwords; ``stored_passwords``: PLAIN also takes the passwords of users with SCRAM
    credentials. Both are empty where other mechanisms alone are enabled: settings of all listeners
    may have them for another one. Without SASL they are who logs in by HTTP Basic.
    ``max_reauth_ms`` 0: a login lasts as long as its connection, or as its token. ``tokens`` is
    None where OAUTHBEARER is not enabled.
    """

    mechanisms: tuple[str, ...]
    plain_users: Mapping[str, str]
    stored_passwords: bool
    max_receive_bytes: int
    max_reauth_ms: int
    failed_delay_ms: int
    tokens: TokenSettings | None = None

    @property
    def stored_over_http(self) -> tuple[str, ...]:
        """Mechanisms of SCRAM by whose credentials HTTP Basic knows a password: all of them where
        PLAIN does, else those that are enabled.
        """
        return tuple(name for name in SCRAM if self.stored_passwords or name in self.mechanisms)

    @property
    def http_schemes(self) -> tuple[str, ...]:
        """By what HTTP and gRPC can log somebody in: Basic, Bearer, both or nothing."""
        schemes = []
        if self.plain_users or self.stored_over_http:
            schemes.append("Basic")
        if self.tokens is not None:
            schemes.append("Bearer")
        return tuple(schemes)

    def __repr__(self) -> str:
        return f"SaslSettings({','.join(self.mechanisms)})"


@lru_cache(maxsize=64)
def sasl_settings(config: NodeConfig, listener: str) -> SaslSettings:
    """Those of the listener of this name. Raises ConfigurationError."""
    by_sasl = any(
        bound.name == listener and bound.protocol in SASL_PROTOCOLS for bound in config.listeners
    )
    config = config.of_listener(listener)
    mechanisms = config.sasl_enabled_mechanisms if by_sasl else ()
    for name in mechanisms:
        if name not in MECHANISMS:
            why = _NO_GSSAPI if name == "GSSAPI" else f"{name} is not served"
            raise ConfigurationError(
                f"sasl.enabled.mechanisms: {why}; there are {', '.join(MECHANISMS)}"
            )
    plain_users = _plain_users(config.plain_sasl_jaas_config)
    takes_plain = PLAIN in mechanisms or not by_sasl
    return SaslSettings(
        mechanisms,
        plain_users if takes_plain else {},
        takes_plain and config.sasl_plain_users == "scram",
        config.sasl_server_max_receive_size,
        config.connections_max_reauth_ms,
        config.connection_failed_authentication_delay_ms,
        _token_settings(config) if OAUTHBEARER in mechanisms else None,
    )


def check_logins(config: NodeConfig, listener: ListenerConfig) -> None:
    """Whether the settings of logins on a listener can be read, and on one of SASL whether anybody
    can log in. Raises ConfigurationError.
    """
    name, settings = listener.name, sasl_settings(config, listener.name)
    if listener.protocol not in SASL_PROTOCOLS:
        return
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
    if settings.tokens is not None:
        _check_tokens(name, settings.tokens)


def _check_tokens(name: str, tokens: TokenSettings) -> None:
    """Whether the keys of tokens can be looked for. Raises ConfigurationError."""
    if not tokens.jwks_url:
        raise ConfigurationError(
            f"listener {name} enables OAUTHBEARER, but nothing says by which keys tokens are "
            f"believed: set {JWKS_URL} to the issuer's JSON Web Key Set, an https:// address or a "
            "file:/// URL"
        )
    if find_spec("jwt") is None or find_spec("cryptography") is None:
        raise ConfigurationError(
            f"listener {name} enables OAUTHBEARER, which needs PyJWT and cryptography: "
            "pip install 'kept-log[oauth]'"
        )
    _check_jwks_url(tokens)
    if tokens.retry_backoff_ms > tokens.retry_backoff_max_ms:
        raise ConfigurationError(
            f"sasl.oauthbearer.jwks.endpoint.retry.backoff.ms ({tokens.retry_backoff_ms}) is above "
            f"sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms ({tokens.retry_backoff_max_ms})"
        )


def _check_jwks_url(tokens: TokenSettings) -> None:
    try:
        url = urlsplit(tokens.jwks_url)
        port, host = url.port, url.hostname
    except ValueError as error:
        raise ConfigurationError(f"{JWKS_URL}: no URL: {error}") from None
    if url.username is not None or url.password is not None:
        raise ConfigurationError(f"{JWKS_URL}: keys are public: no user and no password belong in")
    if url.scheme == "file" and host in (None, "localhost") and url.path.startswith("/"):
        if tokens.truststore_path is not None:
            raise ConfigurationError(
                f"{TRUSTSTORE} says whose certificates to trust, and {JWKS_URL} names a file: "
                "leave one out"
            )
        return
    is_plain = tokens.jwks_url.isascii() and tokens.jwks_url.isprintable()
    if url.scheme != "https" or not host or port == 0 or not is_plain or " " in tokens.jwks_url:
        raise ConfigurationError(
            f"{JWKS_URL}={tokens.jwks_url}: https://HOST/PATH or file:///PATH is wanted: whoever "
            "could change the keys on their way could make tokens"
        )


def sasl_warnings(config: NodeConfig) -> list[str]:
    """What is allowed and unwise about logins on the listeners of a node."""
    warnings = []
    for listener in config.listeners:
        if listener.protocol not in SASL_PROTOCOLS:
            continue
        settings = sasl_settings(config, listener.name)
        in_the_clear = listener.protocol == "SASL_PLAINTEXT" and not listener.is_loopback
        for mechanism, what in ((PLAIN, "passwords"), (OAUTHBEARER, "access tokens")):
            if in_the_clear and mechanism in settings.mechanisms:
                warnings.append(
                    f"listener {listener.name} takes {what} by {mechanism} over SASL_PLAINTEXT: "
                    "whoever is on the wire reads them; give it SASL_SSL, or SCRAM alone"
                )
        tokens = settings.tokens
        if tokens is not None and not (tokens.audiences and tokens.issuer):
            missing = "issuer" if tokens.audiences else "audience"
            warnings.append(
                f"listener {listener.name} believes tokens for whatever {missing}: set "
                f"sasl.oauthbearer.expected.{missing}, or one that the same keys sign for another "
                "service logs in here"
            )
    return warnings


def _token_settings(config: NodeConfig) -> TokenSettings:
    return TokenSettings(
        config.sasl_oauthbearer_jwks_endpoint_url or "",
        config.sasl_oauthbearer_truststore_location,
        config.sasl_oauthbearer_jwks_endpoint_refresh_ms,
        config.sasl_oauthbearer_jwks_endpoint_retry_backoff_ms,
        config.sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms,
        config.sasl_oauthbearer_expected_audience,
        config.sasl_oauthbearer_expected_issuer,
        config.sasl_oauthbearer_clock_skew_seconds,
        config.sasl_oauthbearer_sub_claim_name,
        config.sasl_oauthbearer_scope_claim_name,
    )


def _plain_users(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        entry = parse_jaas(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"plain.{error}") from None
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
