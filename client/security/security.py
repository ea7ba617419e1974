"""How a client is secured, as one value: made of the properties that Java's clients have.

::

    security = Security({
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": 'org.apache.kafka.common.security.scram.ScramLoginModule required '
                            'username="ada" password="…";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/etc/kept/ca.pem",
    })

Neither its repr nor an error shows anything but the protocol and the mechanism. Two are equal if
their properties are; their hash is that of a digest, so that one may be part of a key.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import hmac
import ssl
from collections.abc import Mapping
from typing import Final, Protocol

from kept.client.security import oauthbearer, plain
from kept.client.security.access_tokens import (
    TOKEN_URL,
    AccessTokens,
    access_tokens,
    is_this_machine,
)
from kept.client.security.config_providers import resolve
from kept.client.security.jaas import MODULES, parse_jaas
from kept.client.security.scram import HASHES, ScramClient
from kept.client.security.tls import TlsConfig, client_context, tls_config
from kept.storage.errors import ConfigurationError

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = (plain.MECHANISM, *HASHES, oauthbearer.MECHANISM)
_CLIENT_ID: Final = "sasl.oauthbearer.client.credentials.client.id"
_CLIENT_SECRET: Final = "sasl.oauthbearer.client.credentials.client.secret"
_SCOPE: Final = "sasl.oauthbearer.scope"
_URLENCODE: Final = "sasl.oauthbearer.header.urlencode"
_OF_TOKENS: Final = (TOKEN_URL, _CLIENT_ID, _CLIENT_SECRET, _SCOPE, _URLENCODE)
_OF_LIBRDKAFKA: Final = {
    "sasl.oauthbearer.client.id": _CLIENT_ID,
    "sasl.oauthbearer.client.secret": _CLIENT_SECRET,
}
"""librdkafka's names, which are taken as well, and Java's for the same."""
_OWN: Final = ("security.protocol", "sasl.mechanism", "sasl.jaas.config", *_OF_TOKENS)
_JAVAS_CLASSES: Final = {
    "sasl.login.callback.handler.class": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
        "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
    ),
    "sasl.oauthbearer.jwt.retriever.class": (
        "org.apache.kafka.common.security.oauthbearer.DefaultJwtRetriever",
        "org.apache.kafka.common.security.oauthbearer.ClientCredentialsJwtRetriever",
        "org.apache.kafka.common.security.oauthbearer.FileJwtRetriever",
    ),
}
"""Classes of Java that do what is done here for OAUTHBEARER, so that Kafka's tools take the same
file."""
_KEYS: Final = ("ssl.keystore.location", "ssl.keystore.key")
_SECRETS: Final = (_CLIENT_SECRET, "sasl.oauthbearer.client.secret")
_SECURING: Final = ("security.", "sasl.", "ssl.")
"""Properties that begin so are ours, or an error; others are of no concern to us."""
WITHOUT_EFFECT: Final = frozenset(
    (
        "security.providers",
        "sasl.login.connect.timeout.ms",
        "sasl.login.read.timeout.ms",
        "sasl.login.refresh.buffer.seconds",
        "sasl.login.refresh.min.period.seconds",
        "sasl.login.refresh.window.factor",
        "sasl.login.refresh.window.jitter",
        "sasl.login.retry.backoff.max.ms",
        "sasl.login.retry.backoff.ms",
        "sasl.oauthbearer.clock.skew.seconds",
        "ssl.provider",
        "ssl.secure.random.implementation",
    )
)
"""Properties of Java's clients that are accepted: they tune what is not used, or Java itself."""


class SaslClient(Protocol):
    """One SASL exchange, seen from the client."""

    @property
    def done(self) -> bool:
        """Whether the server has proved all that it has to prove."""

    def step(self, challenge: bytes | None) -> bytes | None:
        """The answer to what the server said (None at first); None when there is none. Raises
        KeptError for a server that is not believed.
        """


class Security:
    """Protocol, mechanism, and what proves who one is."""

    __slots__ = (
        "_context",
        "_digest",
        "_password",
        "_password_stands_here",
        "_properties",
        "_tokens",
        "mechanism",
        "protocol",
        "tls",
        "user",
    )

    def __init__(self, properties: Mapping[str, str] | None = None) -> None:
        """Raises ConfigurationError with the name of the property and what would be right."""
        given = {n: v for n, v in (properties or {}).items() if n.startswith(_SECURING)}
        self.protocol = given.get("security.protocol", "PLAINTEXT").strip().upper()
        if self.protocol not in PROTOCOLS:
            raise ConfigurationError(
                f"security.protocol is {self.protocol}, which is none of {', '.join(PROTOCOLS)}"
            )
        if given and "security.protocol" not in given:
            raise ConfigurationError(
                f"{min(given)} is given, and security.protocol is not: SSL or SASL_SSL?"
            )
        self.mechanism = self.user = self._password = ""
        self._password_stands_here = False
        self._context: ssl.SSLContext | None = None
        self._tokens: AccessTokens | None = None
        if self.protocol.startswith("SASL"):
            self._choose_mechanism(given)
        _refuse_unknown(given, self.mechanism)
        self.tls: TlsConfig | None = None
        if self.protocol.endswith("SSL"):
            self.tls = tls_config({n: v for n, v in given.items() if n not in WITHOUT_EFFECT})
        if self.mechanism == oauthbearer.MECHANISM:
            self._tokens = self._token_source(given)
        self._properties = given
        material = "\0".join(f"{name}\0{given[name]}" for name in sorted(given))
        self._digest = hashlib.sha256(material.encode("utf-8", "surrogatepass")).digest()

    def _choose_mechanism(self, given: Mapping[str, str]) -> None:
        mechanism = given.get("sasl.mechanism", "GSSAPI").strip()
        known = ", ".join(MECHANISMS)
        if mechanism not in MECHANISMS:
            default = "" if "sasl.mechanism" in given else ", Kafka's default,"
            raise ConfigurationError(
                f"sasl.mechanism is {mechanism}{default} which is none of {known}"
            )
        self.mechanism = mechanism
        if mechanism != oauthbearer.MECHANISM:
            self._take_password(given)

    def _take_password(self, given: Mapping[str, str]) -> None:
        mechanism = self.mechanism
        module = next(name for name, kinds in MODULES.items() if mechanism in kinds)
        text = given.get("sasl.jaas.config")
        if text is None:
            raise ConfigurationError(
                f"sasl.jaas.config is missing, which {mechanism} needs: "
                f'{module} required username="…" password="…";'
            )
        login = resolve("sasl.jaas.config", text)
        self._password_stands_here = login == text
        entry = parse_jaas(login)
        if entry.login_module != module:
            raise ConfigurationError(
                f"sasl.jaas.config names {entry.login_module}: for {mechanism} it is {module}"
            )
        for name in ("username", "password"):
            if not entry.options.get(name):
                raise ConfigurationError(f'sasl.jaas.config lacks {name}="…"')
        if unknown := sorted(entry.options.keys() - {"username", "password"}):
            raise ConfigurationError(
                f"sasl.jaas.config has the option {unknown[0]}: a client gives username and "
                "password"
            )
        self.user, self._password = entry.options["username"], entry.options["password"]

    def _token_source(self, given: Mapping[str, str]) -> AccessTokens:
        """Where OAUTHBEARER's tokens come from. Raises ConfigurationError."""
        options = self._options_of_tokens(given)
        url = given.get(TOKEN_URL, "").strip()
        if not url:
            raise ConfigurationError(
                f"{TOKEN_URL} is missing, which OAUTHBEARER needs: https://… of an OAuth server, "
                "or file:///… of a file with the token"
            )
        names = [name for name in (*_OF_TOKENS, *_OF_LIBRDKAFKA) if name in given]
        values = {name: resolve(name, given[name]) for name in names}
        for other, name in _OF_LIBRDKAFKA.items():
            if other in values:
                values.setdefault(name, values[other])
        client_id = values.get(_CLIENT_ID, options.get("clientId", ""))
        secret = values.get(_CLIENT_SECRET, options.get("clientSecret", ""))
        trust = None if self.tls is None else self.tls.trust
        return access_tokens(
            url,
            (client_id, secret) if client_id and secret else None,
            values.get(_SCOPE, options.get("scope", "")),
            urlencoded=values.get(_URLENCODE, "false").strip().lower() == "true",
            authorities=trust.certificates if trust is not None else "",
        )

    def _options_of_tokens(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """Those of ``sasl.jaas.config``, which Java wants to be there."""
        text = given.get("sasl.jaas.config")
        if text is None:
            return {}
        login = resolve("sasl.jaas.config", text)
        entry = parse_jaas(login)
        (module,) = (name for name, kinds in MODULES.items() if self.mechanism in kinds)
        if entry.login_module != module:
            raise ConfigurationError(
                f"sasl.jaas.config names {entry.login_module}: for {self.mechanism} it is {module}"
            )
        if unknown := sorted(entry.options.keys() - {"clientId", "clientSecret", "scope"}):
            raise ConfigurationError(
                f"sasl.jaas.config has the option {unknown[0]}: clientId, clientSecret and scope "
                "are read; tokens without a signature are not made"
            )
        self._password_stands_here = login == text and "clientSecret" in entry.options
        return entry.options

    @property
    def principal(self) -> str:
        """What authorization calls this client; ``""`` where only the server knows, as for
        certificates and access tokens.
        """
        if self.user:
            return f"User:{self.user}"
        known = self.protocol.endswith("SSL") or bool(self.mechanism)
        return "" if known else "User:ANONYMOUS"

    @property
    def who(self) -> str:
        """Who logs in, for messages."""
        return self.user or "the access token"

    @property
    def has_secrets(self) -> bool:
        """Whether a password or a private key stands in its properties. What they refer to
        (:mod:`kept.client.security.config_providers`) does not.
        """
        stands_here = any("${" not in self._properties.get(name, "${") for name in _SECRETS)
        has_key = not self._properties.keys().isdisjoint(_KEYS)
        return self._password_stands_here or stands_here or has_key

    @property
    def properties(self) -> Mapping[str, str]:
        """The properties that it was made of, secrets and all."""
        return self._properties

    def http_login(self, host: str) -> tuple[str, str] | None:
        """User and password for HTTP at ``host``; None where none are given, or where nothing would
        hide a password that SASL itself does not send.
        """
        hidden = self.tls is not None or is_this_machine(host)
        if self.user and (hidden or self.mechanism == plain.MECHANISM):
            return self.user, self._password
        return None

    def http_authorization(self, host: str) -> str | None:
        """The header ``Authorization`` for HTTP at ``host``; None as :meth:`http_login`. May block.
        Raises NoAccessToken.
        """
        if self._tokens is not None:
            self._tokens.refresh()
            return f"Bearer {self._tokens.current()}"
        login = self.http_login(host)
        if login is None:
            return None
        return f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"

    def refresh(self) -> None:
        """Get what an exchange needs and what may have ended: an access token. May block, and fails
        in the exchange only.
        """
        if self._tokens is not None:
            self._tokens.refresh()

    def context(self) -> ssl.SSLContext | None:
        """What a connection's TLS is made with, None without TLS. Raises ConfigurationError for
        files that cannot be used.
        """
        if self.tls is not None and self._context is None:
            self._context = client_context(self.tls)
        return self._context

    def exchange(self) -> SaslClient | None:
        """A new SASL exchange, None without SASL; with an access token, the one that
        :meth:`refresh` got last. Raises KeptError.
        """
        if not self.mechanism:
            return None
        if self._tokens is not None:
            return oauthbearer.OAuthBearerClient(self._tokens.current())
        if self.mechanism == plain.MECHANISM:
            return plain.PlainClient(self.user, self._password)
        return ScramClient(self.mechanism, self.user, self._password)

    def __repr__(self) -> str:
        return f"<Security {self.protocol}{f' {self.mechanism}' * bool(self.mechanism)}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Security) and hmac.compare_digest(self._digest, other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> tuple[type[Security], tuple[Mapping[str, str]]]:
        return Security, (self._properties,)


def _refuse_unknown(given: Mapping[str, str], mechanism: str) -> None:
    by_token = mechanism == oauthbearer.MECHANISM
    for name in sorted(given):
        if name.startswith("sasl.oauthbearer.") and name not in WITHOUT_EFFECT and not by_token:
            raise ConfigurationError(f"{name} is for OAUTHBEARER, and sasl.mechanism is not that")
        if by_token and (name in _OF_LIBRDKAFKA or given[name] in _JAVAS_CLASSES.get(name, ())):
            continue
        if name == "sasl.oauthbearer.method" and given[name].strip().lower() == "oidc":
            continue
        if name in _OWN or name in WITHOUT_EFFECT or name.startswith("ssl."):
            continue
        if ".callback.handler.class" in name or name.endswith((".class", ".classes")):
            raise ConfigurationError(f"{name} names a class of Java, which is not run here")
        if name in ("sasl.oauthbearer.config", "sasl.oauthbearer.method"):
            raise ConfigurationError(
                f"{name}: tokens without a signature are not made: set {TOKEN_URL}"
            )
        if name.startswith(("sasl.kerberos.", "sasl.login.")):
            raise ConfigurationError(
                f"{name} is for a mechanism that is not here: there are {', '.join(MECHANISMS)}"
            )
        near = difflib.get_close_matches(name, _OWN, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{name} is no property of a client{hint}")


PLAINTEXT: Final = Security()
"""Neither encrypted nor authenticated."""
