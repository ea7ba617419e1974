"""TLS as ``ssl.*`` properties say it: a :class:`TlsConfig`, and OpenSSL's contexts made of it.

The names and their meaning are Apache Kafka's (``SslConfigs``, ``BrokerSecurityConfigs``), with
these differences: stores are PEM (``ssl.keystore.type`` is PEM unless set), only TLSv1.2 and
TLSv1.3 are spoken, and suites without forward secrecy or without authenticated encryption do not
exist. A TlsConfig holds what its files contained when it was made: of two that are equal, nothing
changed between them.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, structs

from kept.client.security.config_providers import resolve
from kept.client.security.pem import (
    KeyStore,
    Place,
    TrustStore,
    as_file,
    check_store_type,
    key_store,
    read_store,
    trust_store,
)
from kept.storage.errors import ConfigurationError

DEFAULTS: Final[Mapping[str, str | None]] = {
    "ssl.keystore.type": "PEM",
    "ssl.keystore.location": None,
    "ssl.keystore.password": None,
    "ssl.keystore.key": None,
    "ssl.keystore.certificate.chain": None,
    "ssl.key.password": None,
    "ssl.truststore.type": "PEM",
    "ssl.truststore.location": None,
    "ssl.truststore.password": None,
    "ssl.truststore.certificates": None,
    "ssl.protocol": "TLSv1.3",
    "ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
    "ssl.cipher.suites": "",
    "ssl.endpoint.identification.algorithm": "https",
    "ssl.client.auth": "none",
}
"""The properties that are read, with their defaults."""

VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
CLIENT_AUTH: Final = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
ALPN: Final = ("http/1.1", "h2")
"""What a server offers besides Kafka's protocol, whose clients name none. gRPC's name h2 alone;
browsers name both, and get HTTP/1.1."""

SUITES_1_3: Final = (
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_AES_128_GCM_SHA256",
)
SUITES_1_2: Final = {
    f"TLS_{exchange}_WITH_{cipher}": f"{exchange.replace('_', '-')}-{name}"
    for exchange in ("ECDHE_ECDSA", "ECDHE_RSA", "DHE_RSA")
    for cipher, name in (
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}
"""IANA's names of the suites of TLS 1.2 that are spoken, and OpenSSL's."""

_DEFAULT_1_2: Final = ":".join(name for name in SUITES_1_2.values() if name.startswith("ECDHE"))
_ELSEWHERE: Final = {
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.location": "ssl.keystore.location",
    "ssl.key.location": "ssl.keystore.location",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
"""librdkafka's names, and Java's for the same."""


class TlsConfig(Struct, frozen=True):
    """How one side speaks TLS. ``trust`` None: the system's certificates, for a client."""

    keys: KeyStore | None
    trust: TrustStore | None
    oldest: ssl.TLSVersion
    newest: ssl.TLSVersion
    ciphers: str
    """OpenSSL's list for TLS 1.2; those of TLS 1.3 cannot be chosen."""
    check_hostname: bool
    client_auth: str
    """``none``, ``requested`` or ``required``."""


def tls_config(properties: Mapping[str, str | None]) -> TlsConfig:
    """What the ``ssl.*`` properties mean; other names are passed over. Reads the files that they
    name, and the values that they refer to (:mod:`kept.client.security.config_providers`).

    Raises ConfigurationError, which names the property and the file.
    """
    given = {n: v for n, v in properties.items() if n.startswith("ssl.") and v is not None}
    for name in given:
        if name not in DEFAULTS:
            other = _ELSEWHERE.get(name)
            hint = f"; as in Java, this is {other}" if other else ""
            raise ConfigurationError(f"{name}: there is no such setting of TLS{hint}")
    values = {**DEFAULTS, **{name: resolve(name, text) for name, text in given.items()}}
    oldest, newest = _versions(values)
    algorithm = values["ssl.endpoint.identification.algorithm"] or ""
    if algorithm.lower() not in ("", "https"):
        raise ConfigurationError(
            f"ssl.endpoint.identification.algorithm={algorithm}: https, or empty to accept a "
            "certificate for any host"
        )
    client_auth = values["ssl.client.auth"] or "none"
    if client_auth not in CLIENT_AUTH:
        raise ConfigurationError(
            f"ssl.client.auth={client_auth}: one of {', '.join(CLIENT_AUTH)} is wanted"
        )
    return TlsConfig(
        _keys(values),
        _trust(values),
        oldest,
        newest,
        _ciphers(values["ssl.cipher.suites"] or "", newest),
        bool(algorithm),
        client_auth,
    )


def _list(text: str | None) -> list[str]:
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def _versions(values: Mapping[str, str | None]) -> tuple[ssl.TLSVersion, ssl.TLSVersion]:
    """The oldest and the newest version spoken."""
    most = values["ssl.protocol"] or ""
    enabled = _list(values["ssl.enabled.protocols"])
    for name, versions in (("ssl.protocol", [most]), ("ssl.enabled.protocols", enabled)):
        for version in versions:
            if version not in VERSIONS:
                raise ConfigurationError(
                    f"{name}: {version or 'nothing'} is not spoken; {' and '.join(VERSIONS)} are"
                )
    spoken = [VERSIONS[version] for version in enabled if VERSIONS[version] <= VERSIONS[most]]
    if not spoken:
        raise ConfigurationError(
            f"ssl.enabled.protocols={','.join(enabled)} and ssl.protocol={most} leave no version: "
            "the latter is the newest that is spoken"
        )
    return min(spoken), max(spoken)


def _ciphers(text: str, newest: ssl.TLSVersion) -> str:
    suites = _list(text)
    if not suites:
        return _DEFAULT_1_2
    for suite in suites:
        if suite not in SUITES_1_2 and suite not in SUITES_1_3:
            raise ConfigurationError(
                f"ssl.cipher.suites: {suite} is not spoken; these are: "
                f"{', '.join((*SUITES_1_3, *SUITES_1_2))}"
            )
    missing = [suite for suite in SUITES_1_3 if suite not in suites]
    if newest is ssl.TLSVersion.TLSv1_3 and missing:
        raise ConfigurationError(
            f"ssl.cipher.suites: TLSv1.3 is enabled, whose suites cannot be chosen among; add "
            f"{', '.join(missing)}, or set ssl.enabled.protocols=TLSv1.2"
        )
    return ":".join(SUITES_1_2[suite] for suite in suites if suite in SUITES_1_2) or _DEFAULT_1_2


def _keys(values: Mapping[str, str | None]) -> KeyStore | None:
    path, key = values["ssl.keystore.location"], values["ssl.keystore.key"]
    chain = values["ssl.keystore.certificate.chain"]
    if not (path or key or chain):
        return None
    _no_store_password(values, "keystore")
    kind, password = values["ssl.keystore.type"] or "", values["ssl.key.password"] or ""
    if path:
        texts = "ssl.keystore.key", "ssl.keystore.certificate.chain"
        _not_both(values, "ssl.keystore.location", *texts)
        place = Place("ssl.keystore.location", path)
        text = read_store(place, kind, "keystore")
        return key_store(text, text, password, place, place)
    if not (key and chain):
        raise ConfigurationError(
            "ssl.keystore.key and ssl.keystore.certificate.chain are wanted together, or "
            "ssl.keystore.location, a file with both"
        )
    key_place, place = Place("ssl.keystore.key"), Place("ssl.keystore.certificate.chain")
    check_store_type(place, kind, "keystore")
    return key_store(key, chain, password, key_place, place)


def _trust(values: Mapping[str, str | None]) -> TrustStore | None:
    path, text = values["ssl.truststore.location"], values["ssl.truststore.certificates"]
    if not (path or text):
        return None
    _no_store_password(values, "truststore")
    kind = values["ssl.truststore.type"] or ""
    if path:
        _not_both(values, "ssl.truststore.location", "ssl.truststore.certificates")
        place = Place("ssl.truststore.location", path)
        return trust_store(read_store(place, kind, "truststore"), place)
    place = Place("ssl.truststore.certificates")
    check_store_type(place, kind, "truststore")
    return trust_store(text or "", place)


def _no_store_password(values: Mapping[str, str | None], kind: str) -> None:
    if values[f"ssl.{kind}.password"]:
        raise ConfigurationError(
            f"ssl.{kind}.password: PEM has no password of the store; "
            + ("a key's is ssl.key.password" if kind == "keystore" else "leave it out")
        )


def _not_both(values: Mapping[str, str | None], one: str, *others: str) -> None:
    both = [name for name in others if values[name]]
    if both:
        raise ConfigurationError(f"{one} and {both[0]} are both set: give the file or the text")


def server_context(config: TlsConfig, client_auth: str | None = None) -> ssl.SSLContext:
    """The accepting side's context; ``client_auth``: other than the config's own.

    Raises ConfigurationError: no key store, a key that does not fit its certificate, or a wish for
    clients' certificates without a trust store.
    """
    client_auth = client_auth or config.client_auth
    if config.keys is None:
        raise ConfigurationError(
            "ssl.keystore.location is not set: a listener of SSL or SASL_SSL needs a key and its "
            "certificate (or ssl.keystore.key and ssl.keystore.certificate.chain)"
        )
    if client_auth != "none" and config.trust is None:
        raise ConfigurationError(
            f"ssl.client.auth={client_auth} needs ssl.truststore.location (or "
            "ssl.truststore.certificates): whose certificates are to be believed?"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    context.verify_mode = CLIENT_AUTH[client_auth]
    if client_auth != "none":
        # A session that is resumed would skip the check of a certificate that has expired since.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols(ALPN)
    _set_up(context, config)
    return context


def client_context(config: TlsConfig) -> ssl.SSLContext:
    """The connecting side's context. Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = config.check_hostname
    context.hostname_checks_common_name = False
    if config.trust is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    _set_up(context, config)
    return context


def check_own_certificate(config: TlsConfig) -> None:
    """Whether two that both have this config, as nodes of a cluster do, believe each other: they
    shake hands here, each with its certificate; names of hosts are not looked at.

    Raises ConfigurationError, which names both stores.
    """
    assert config.keys is not None and config.trust is not None, "server_context refuses it"
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting, connecting = (
        server_context(config, "required"),
        client_context(structs.replace(config, check_hostname=False)),
    )
    sides = {
        "server": connecting.wrap_bio(down, up),
        "client": accepting.wrap_bio(up, down, server_side=True),
    }
    while sides:
        for shown_by, side in tuple(sides.items()):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                config.keys.place.refuse(
                    f"the certificate that a {shown_by} shows is not believed by who has "
                    f"{config.trust.place} ({error.verify_message}), and nodes show it to each "
                    "other: the authority that signed it belongs there, and it needs the usages "
                    "serverAuth and clientAuth, or none"
                )
            except ssl.SSLError as error:
                config.keys.place.refuse(f"no handshake is possible with it: {_reason(error)}")
            del sides[shown_by]


def _set_up(context: ssl.SSLContext, config: TlsConfig) -> None:
    context.minimum_version = config.oldest
    context.maximum_version = config.newest
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # As in Java, whatever stands in a trust store is trusted, also where another signed it.
    context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)
    context.set_ciphers(config.ciphers)
    if config.keys is not None:
        _load_keys(context, config.keys)
    if config.trust is not None:
        try:
            context.load_verify_locations(cadata=config.trust.certificates)
        except ssl.SSLError as error:
            config.trust.place.refuse(f"a certificate cannot be used: {_reason(error)}")


def _load_keys(context: ssl.SSLContext, keys: KeyStore) -> None:
    with as_file(keys.chain + keys.key, keys.place) as path:
        try:
            context.load_cert_chain(path, password=lambda: keys.key_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                keys.place.refuse("the private key does not belong to the first certificate")
            if "ENCRYPTED" in keys.key:
                keys.place.refuse("ssl.key.password does not open the private key")
            keys.place.refuse(f"the key or a certificate cannot be used: {_reason(error)}")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
