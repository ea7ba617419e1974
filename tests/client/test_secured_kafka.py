"""Our client and Apache Kafka's listeners: encrypted, with a login, and such as do not fit."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kept.cli.run import run
from kept.client.client import TIMEOUT_MS, Client, OutRecord
from kept.client.core.broker_errors import AuthenticationFailed, ConnectionFailed
from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.client.security.security import Security
from kept.node.config.local_certificates import LocalCertificates
from tests.support.secured import MECHANISMS, PROTOCOLS, SecuredKafka, client_properties

pytestmark = [pytest.mark.java, pytest.mark.slow]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    lifetime = {"connections.max.reauth.ms": 3_000}
    with SecuredKafka(tmp_path_factory.mktemp("kafka"), **lifetime) as kafka:
        yield kafka


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [
        (protocol, mechanism)
        for protocol in PROTOCOLS
        for mechanism in (MECHANISMS if protocol.startswith("SASL") else ("",))
    ],
)
def test_records_go_there_and_back(kafka, protocol, mechanism):
    security = Security(client_properties(kafka.certificates, protocol, mechanism))
    topic = f"t-{protocol}-{mechanism}"
    with Client(kafka.bootstrap[protocol], security=security) as client:
        client.create_topic(topic, partitions=2)
        for _ in range(3):  # responses of megabytes: TLS gives them in records of 16 KiB
            client.produce(topic, [OutRecord(b"%d" % i, bytes(400_000)) for i in range(4)])
        assert [len(record.value) for record in client.read(topic)] == [400_000] * 12


def test_a_session_is_renewed_while_requests_go_on(kafka, monkeypatch):
    """Kafka closes a connection whose session has ended, and counts who came again."""
    security = Security(client_properties(kafka.certificates, "SASL_SSL", "SCRAM-SHA-512"))
    exchanges = []
    known = Security.exchange
    monkeypatch.setattr(Security, "exchange", lambda s: exchanges.append(s) or known(s))
    with Client(kafka.bootstrap["SASL_SSL"], security=security) as client:
        client.metadata([])
        (connection,) = client.core._connections.values()
        while len(exchanges) < 3:
            client.metadata([])
        assert list(client.core._connections.values()) == [connection]


WANTS_LOGIN = "want a login"
MISFITS = [
    ("SSL", {"security.protocol": "PLAINTEXT"}, ConnectionFailed, "of this security.protocol"),
    ("SASL_PLAINTEXT", {"security.protocol": "PLAINTEXT"}, ConnectionFailed, WANTS_LOGIN),
    ("PLAINTEXT", ("SSL", ""), ConnectionFailed, "ended the TLS handshake; is its listener SSL"),
    ("PLAINTEXT", ("SASL_PLAINTEXT", "PLAIN"), AuthenticationFailed, "may be PLAINTEXT there"),
    ("SSL", ("SASL_SSL", "PLAIN"), AuthenticationFailed, "wants a? ?.*certificate of this side"),
    ("SASL_PLAINTEXT", ("SASL_SSL", "PLAIN"), ConnectionFailed, "ended the TLS handshake"),
    ("SASL_SSL", ("SASL_PLAINTEXT", "PLAIN"), ConnectionFailed, "of this security.protocol"),
]


@pytest.mark.parametrize(("listener", "given", "kind", "said"), MISFITS)
def test_a_listener_of_another_protocol_is_told_by_what_it_does(kafka, listener, given, kind, said):
    properties = (
        client_properties(kafka.certificates, *given) if isinstance(given, tuple) else given
    )
    timeout_ms = 3_000 if said == WANTS_LOGIN else TIMEOUT_MS  # that is tried again
    with pytest.raises(kind, match=said):
        ask(kafka.bootstrap[listener], properties, timeout_ms)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_is_told_by_the_name_of_the_user(kafka, mechanism):
    module = PLAIN_MODULE if mechanism == "PLAIN" else SCRAM_MODULE
    properties = client_properties(kafka.certificates, "SASL_SSL", mechanism)
    properties["sasl.jaas.config"] = f'{module} required username="ada" password="wrong";'
    with pytest.raises(AuthenticationFailed, match=f"ada was not believed by SASL {mechanism}"):
        ask(kafka.bootstrap["SASL_SSL"], properties)


def test_certificates_that_are_not_trusted_are_told_by_whose_they_are(kafka, tmp_path):
    strangers = LocalCertificates(str(tmp_path))
    strangers.path("ada")
    properties = client_properties(kafka.certificates, "SSL")
    for changed, said in (
        ({"ssl.truststore.location": strangers.ca_path}, "certificate is not trusted: unable"),
        ({"ssl.keystore.location": strangers.path("ada")}, "alert certificate unknown: the other"),
        ({"ssl.keystore.location": None}, "wants the certificate of this side .* is none"),
    ):
        wrong = {n: v for n, v in (properties | changed).items() if v is not None}
        with pytest.raises(AuthenticationFailed, match=said):
            ask(kafka.bootstrap["SSL"], wrong)


def test_the_host_name_must_be_one_of_the_certificates(kafka, monkeypatch):
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **given: known("localhost", *rest, **given)
    )
    port = kafka.bootstrap["SASL_SSL"].rpartition(":")[2]
    properties = client_properties(kafka.certificates, "SASL_SSL", "PLAIN")
    with pytest.raises(AuthenticationFailed, match=r"not trusted: Hostname mismatch.*by a name"):
        ask(f"elsewhere:{port}", properties)
    ask(f"elsewhere:{port}", properties | {"ssl.endpoint.identification.algorithm": ""})


def ask(bootstrap: str, properties: dict[str, str], timeout_ms: int = TIMEOUT_MS) -> None:
    with Client(bootstrap, timeout_ms=timeout_ms, security=Security(properties)) as client:
        client.metadata([])


def test_commands_connect_as_a_file_says(kafka, tmp_path, monkeypatch, capfdbinary):
    file = tmp_path / "client.properties"
    properties = client_properties(kafka.certificates, "SASL_SSL", "SCRAM-SHA-256")
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    file.chmod(0o640)
    there = ("--bootstrap", kafka.bootstrap["SASL_SSL"])
    assert run(["topic", "create", "by-command", *there, "--command-config", str(file)]) == 0
    warned = capfdbinary.readouterr().err
    assert b"client.properties holds secrets and its group may read it: chmod 600 it" in warned
    file.chmod(0o600)
    monkeypatch.setenv("KEPT_COMMAND_CONFIG", str(file))
    assert run(["topic", "describe", "by-command", *there]) == 0
    out, err = capfdbinary.readouterr()
    assert b"Topic: by-command" in out and not err
    file.write_text(file.read_text().replace("secret-of-ada", "secret-of-bob"))
    assert run(["topic", "list", *there]) == 1
    err = capfdbinary.readouterr().err
    assert b"ada was not believed by SASL SCRAM-SHA-256" in err and b"secret-of" not in err
