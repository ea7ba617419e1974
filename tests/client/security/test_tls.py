"""TLS from properties: what two sides with such contexts agree on, and what is refused."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from kept.client.security.tls import (
    SUITES_1_3,
    TlsConfig,
    client_context,
    server_context,
    tls_config,
)
from kept.storage.errors import ConfigurationError
from tests.support.certificates import DAY, Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stores(authority: Authority) -> dict[str, str]:
    directory = authority.directory
    other = Authority(directory, "other")
    paths = {
        "server": authority.issue("server", "node-0", "127.0.0.1"),
        "ada": authority.issue("ada"),
        "locked": authority.issue("locked", "node-0", password="opens"),
        "expired": authority.issue("expired", not_before=-2 * DAY, not_after=-DAY),
        "stranger": other.issue("stranger", "node-0"),
        "ca": authority.ca,
        "other_ca": other.ca,
        "missing": str(directory / "missing.pem"),
    }
    server, ada = Path(paths["server"]).read_text(), Path(paths["ada"]).read_text()
    end = "-----END PRIVATE KEY-----\n"
    written = {
        "no_key": server.split(end)[1],
        "no_certificate": server.split(end)[0] + end,
        "two_keys": server + ada,
        "mismatch": server.split(end)[0] + end + ada.split(end)[1],
        "damaged": server.replace("CERTIFICATE-----\nMI", "CERTIFICATE-----\nM!"),
        "cut": server.replace("CERTIFICATE-----\nMI", "CERTIFICATE-----\nAI"),
        "text": "ssl.keystore.location=/etc/server.pem\n",
        "empty": "",
    }
    for name, text in written.items():
        path = directory / f"{name}.pem"
        path.write_text(text)
        paths[name] = str(path)
    for name, data in (("jks", b"\xfe\xed\xfe\xed\0\0\0\2"), ("p12", b"\x30\x82\x0a\x00")):
        path = directory / f"store.{name}"
        path.write_bytes(data)
        paths[name] = str(path)
    return paths


def config(stores: dict[str, str], keys: str = "", trust: str = "", **more: str) -> TlsConfig:
    properties = {name.replace("_", "."): value for name, value in more.items()}
    if keys:
        properties["ssl.keystore.location"] = stores[keys]
    if trust:
        properties["ssl.truststore.location"] = stores[trust]
    return tls_config(properties)


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "node-0"
) -> ssl.SSLObject:
    """The server's side after a handshake; raises SSLError of whichever side refuses."""
    return shake_hands(server, client, host)[0]


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "node-0"
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """The server's side and the client's."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    connecting = client.wrap_bio(to_client, to_server, server_hostname=host)
    open_ = [connecting, accepting]
    for _ in range(10):
        for side in list(open_):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            open_.remove(side)
        if not open_:
            break
    assert not open_
    return accepting, connecting


def test_both_sides_agree_on_the_newest_version_and_authenticated_encryption(
    stores: dict[str, str],
) -> None:
    server = server_context(config(stores, "server", "ca"), "required")
    side = handshake(server, client_context(config(stores, "ada", "ca")))
    assert side.version() == "TLSv1.3"
    older = client_context(config(stores, "ada", "ca", ssl_protocol="TLSv1.2"))
    side = handshake(server, older, "127.0.0.1")
    assert side.version() == "TLSv1.2"
    name, _, _ = side.cipher() or ("", "", 0)
    assert name.startswith("ECDHE-") and ("GCM" in name or "CHACHA20" in name)
    assert side.getpeercert(binary_form=True)


def test_a_version_that_is_not_enabled_is_not_spoken(stores: dict[str, str]) -> None:
    """By neither side, though OpenSSL could."""
    newest, older = {"ssl_enabled_protocols": "TLSv1.3"}, {"ssl_protocol": "TLSv1.2"}
    for of_server, of_client in ((newest, older), (older, newest)):
        server = server_context(config(stores, "server", **of_server))
        with pytest.raises(ssl.SSLError, match="PROTOCOL"):
            handshake(server, client_context(config(stores, "", "ca", **of_client)))


def test_nothing_is_spoken_without_forward_secrecy_unless_it_is_named(
    stores: dict[str, str],
) -> None:
    suites = [suite["name"] for suite in server_context(config(stores, "server")).get_ciphers()]
    assert suites and all(name.startswith(("TLS_", "ECDHE-")) for name in suites)


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
@pytest.mark.parametrize("auth", ["none", "requested", "required"])
def test_who_shows_a_certificate_gets_no_ticket(
    stores: dict[str, str], auth: str, version: str
) -> None:
    """A session that is resumed by one would skip the check of a certificate that has expired."""
    server = server_context(config(stores, "server", "ca"), auth)
    client = client_context(config(stores, "ada", "ca", ssl_enabled_protocols=version))
    accepting, connecting = shake_hands(server, client)
    accepting.write(b"x")  # TLS 1.3: tickets come before the first record
    assert connecting.read(1) == b"x"
    assert connecting.session is not None
    assert connecting.session.has_ticket is (auth == "none")


def test_a_key_may_be_encrypted_and_stores_may_be_text(stores: dict[str, str]) -> None:
    locked = config(stores, "locked", ssl_key_password="opens")
    handshake(server_context(locked), client_context(config(stores, "", "ca")))
    text = Path(stores["server"]).read_text()
    one_line = " ".join(text.split("\n"))  # as a value in a file of properties
    given = {"ssl_keystore_key": one_line, "ssl_keystore_certificate_chain": one_line}
    trust = Path(stores["ca"]).read_text()
    handshake(
        server_context(config(stores, **given)),
        client_context(config(stores, ssl_truststore_certificates=trust)),
    )
    assert "BEGIN" not in repr(config(stores, **given)) and "opens" not in repr(locked)


@pytest.mark.parametrize(
    ("client", "auth", "wrong"),
    [
        ({"trust": "other_ca"}, "none", "self-signed certificate in certificate chain|unable to"),
        ({"trust": "ca", "host": "node-1"}, "none", "Hostname mismatch"),
        ({"trust": "ca"}, "required", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ({"trust": "ca", "keys": "expired"}, "requested", "certificate has expired"),
        ({"trust": "ca", "keys": "stranger"}, "requested", "unable to get local issuer"),
    ],
)
def test_who_is_not_believed(
    stores: dict[str, str], client: dict[str, str], auth: str, wrong: str
) -> None:
    client = dict(client)
    host = client.pop("host", "node-0")
    server = server_context(config(stores, "server", "ca"), auth)
    with pytest.raises(ssl.SSLError, match=wrong):
        handshake(server, client_context(config(stores, **client)), host)


def test_a_common_name_is_no_name_of_a_host(authority: Authority, stores: dict[str, str]) -> None:
    """Who may have a certificate for a name of his own choice is not the host of that name."""
    keys = tls_config({"ssl.keystore.location": authority.issue("node-7")})
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        handshake(server_context(keys), client_context(config(stores, "", "ca")), "node-7")


@pytest.mark.parametrize(
    ("named", "reached", "believed"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("localhost", "127.0.0.1", False),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("*.example.org", "a.example.org", True),
        ("*.example.org", "a.b.example.org", False),
        ("*.example.org", "example.org", False),
    ],
)
def test_a_host_is_named_as_it_is_reached(
    authority: Authority, stores: dict[str, str], named: str, reached: str, believed: bool
) -> None:
    """An address is an address in the certificate; nobody is asked which names it has."""
    keys = tls_config({"ssl.keystore.location": authority.issue("host", named)})
    sides = server_context(keys), client_context(config(stores, "", "ca")), reached
    if believed:
        handshake(*sides)
        return
    with pytest.raises(ssl.SSLError, match=r"(Hostname|IP address) mismatch"):
        handshake(*sides)


def test_whom_a_client_says_it_is_concerns_nobody_who_does_not_ask(
    authority: Authority, stores: dict[str, str]
) -> None:
    """Nor is a client's host looked for in its certificate."""
    server = config(stores, "server", "ca")
    stranger = client_context(config(stores, "stranger", "ca"))
    assert handshake(server_context(server, "none"), stranger).getpeercert() is None
    elsewhere = tls_config(
        {
            "ssl.keystore.location": authority.issue("ada-elsewhere", "elsewhere.example.org"),
            "ssl.truststore.location": stores["ca"],
        }
    )
    side = handshake(server_context(server, "required"), client_context(elsewhere))
    assert side.getpeercert(binary_form=True)


def test_a_host_need_not_be_named_where_that_is_said(stores: dict[str, str]) -> None:
    lax = config(stores, "", "ca", ssl_endpoint_identification_algorithm="")
    handshake(server_context(config(stores, "server")), client_context(lax), "node-1")


def test_what_is_trusted_need_not_have_signed_itself(stores: dict[str, str]) -> None:
    """As in Java: a certificate in the trust store is trusted itself, whoever signed it."""
    pinned = config(stores, "", "server")
    handshake(server_context(config(stores, "server")), client_context(pinned))


@pytest.mark.parametrize(
    ("properties", "wrong"),
    [
        ({"keys": "missing"}, r"ssl.keystore.location=.*missing.pem: No such file"),
        ({"keys": "empty"}, r"ssl.keystore.location=.*empty.pem: not PEM"),
        ({"keys": "text"}, "not PEM: there is no -----BEGIN"),
        ({"keys": "no_key"}, r"no_key.pem: no private keys in it; one is wanted"),
        ({"keys": "no_certificate"}, r"no_certificate.pem: no certificate in it"),
        ({"keys": "two_keys"}, "2 private keys in it"),
        ({"keys": "mismatch"}, "mismatch.pem: the private key does not belong to the first"),
        ({"keys": "damaged"}, "certificate 1 cannot be read: its Base64 is damaged"),
        ({"keys": "cut"}, "certificate 1 cannot be read: DER has tag"),
        ({"keys": "locked"}, "private key is encrypted, and ssl.key.password is not set"),
        ({"keys": "locked", "ssl_key_password": "no"}, "ssl.key.password does not open"),
        ({"keys": "jks"}, r"Java key store \(JKS\); convert it with: keytool .*openssl pkcs12"),
        ({"keys": "p12"}, r"PKCS12, not PEM; convert it with: openssl pkcs12 -in .*store.p12"),
        ({"keys": "server", "ssl_keystore_type": "JKS"}, "ssl.keystore.type=JKS: only PEM is"),
        ({"keys": "server", "ssl_keystore_password": "x"}, "ssl.keystore.password: PEM has no"),
        ({"keys": "server", "ssl_keystore_key": "x"}, "location and ssl.keystore.key are both"),
        ({"ssl_keystore_key": "x"}, "ssl.keystore.certificate.chain are wanted together"),
        ({"keys": "server", "trust": "text"}, "ssl.truststore.location=.*text.pem: not PEM"),
        ({"keys": "server", "trust": "jks"}, "keytool -list -rfc -keystore"),
        ({}, "ssl.keystore.location is not set: a listener"),
        ({"keys": "server", "ssl_client_auth": "required"}, "needs ssl.truststore.location"),
        ({"keys": "server", "ssl_client_auth": "yes"}, "one of none, requested, required"),
        ({"keys": "server", "ssl_protocol": "TLSv1.1"}, "ssl.protocol: TLSv1.1 is not spoken"),
        ({"ssl_enabled_protocols": "TLSv1.2,SSLv3"}, "ssl.enabled.protocols: SSLv3 is not"),
        ({"ssl_enabled_protocols": "TLSv1.3", "ssl_protocol": "TLSv1.2"}, "leave no version"),
        ({"ssl_cipher_suites": "TLS_RSA_WITH_NULL_SHA256"}, "NULL_SHA256 is not spoken"),
        ({"ssl_cipher_suites": SUITES_1_3[0]}, "suites cannot be chosen among; add TLS_CHACHA20"),
        ({"ssl_endpoint_identification_algorithm": "ldaps"}, "algorithm=ldaps: https, or empty"),
        ({"ssl_ca_location": "x"}, "ssl.ca.location: .* this is ssl.truststore.location"),
    ],
)
def test_refusals_name_the_setting_and_the_file(
    stores: dict[str, str], properties: dict[str, str], wrong: str
) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        server_context(config(stores, **properties))


def test_one_suite_of_tls_1_2(stores: dict[str, str]) -> None:
    suite = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"
    only = config(stores, "server", ssl_cipher_suites=suite, ssl_enabled_protocols="TLSv1.2")
    side = handshake(server_context(only), client_context(config(stores, "", "ca")))
    assert side.version() == "TLSv1.2"
    assert (side.cipher() or ("",))[0] == "ECDHE-ECDSA-AES128-GCM-SHA256"


def test_the_key_is_on_no_disk(stores: dict[str, str], tmp_path: Path) -> None:
    """The file may be gone: what was read is what is used."""
    path = tmp_path / "once.pem"
    path.write_bytes(Path(stores["server"]).read_bytes())
    read = tls_config({"ssl.keystore.location": str(path)})
    path.unlink()
    handshake(server_context(read), client_context(config(stores, "", "ca")))


def test_equal_configs_have_read_the_same(stores: dict[str, str]) -> None:
    assert config(stores, "server", "ca") == config(stores, "server", "ca")
    assert config(stores, "server", "ca") != config(stores, "server", "other_ca")


@pytest.mark.openssl
def test_the_command_that_is_named_converts(stores: dict[str, str], tmp_path: Path) -> None:
    p12 = tmp_path / "store.p12"
    export = ["openssl", "pkcs12", "-export", "-in", stores["server"], "-out", str(p12)]
    subprocess.run([*export, "-passout", "pass:secret"], check=True, capture_output=True)
    with pytest.raises(ConfigurationError) as refused:
        tls_config({"ssl.keystore.location": str(p12)})
    command = str(refused.value).split("convert it with: ")[1].split()
    more = ["-passin", "pass:secret", "-passout", "pass:again"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    read = {"ssl.keystore.location": str(tmp_path / "store.pem"), "ssl.key.password": "again"}
    handshake(server_context(tls_config(read)), client_context(config(stores, "", "ca")))
