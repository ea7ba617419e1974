"""deploy/compose.secure.yaml over deploy/compose.yaml: logins, ACLs, certificates, a node lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kept.client.bootstrap import read_security
from kept.client.security.jaas import SCRAM_MODULE
from kept.client.security.security import Security
from kept.testing.ports import free_port
from tests.deploy.containers import BASE, Compose, docker, stand_in, until
from tests.deploy.files import ROOT
from tests.docs.blocks import Command, given_to, typed
from tests.tools import judges

pytestmark = [
    pytest.mark.slow,
    pytest.mark.docker,
    pytest.mark.openssl,
    pytest.mark.timeout(900),
]

WAIT_S = 60
ADA = "adas-password"
PROMETHEUS = "kept-prometheus:under-test"
PAGE = "docs/operations.md"
FILES = (
    "compose.yaml",
    "compose.monitoring.yaml",
    "compose.secure.yaml",
    "compose.secure-monitoring.yaml",
)


class SecureCompose(Compose):
    """The same nodes with the second file, started as the page says, with ``directory`` for its
    ``secret``; the user ada's password is typed.
    """

    def __init__(self, directory: Path) -> None:
        self.secret = directory / "secret"
        self.prometheus_port = free_port()
        self.of_nodes, self.of_monitoring = (
            [self._here(command) for command in typed(text, PAGE, line)]
            for _, text, line in given_to("tests/deploy/test_compose_secure.py", ROOT / PAGE)
        )
        super().__init__(
            files=FILES,
            ADMIN_PASSWORD_FILE=str(self.secret / "admin"),
            PROMETHEUS_PASSWORD_FILE=str(self.secret / "prometheus"),
            PROMETHEUS_PORT=str(self.prometheus_port),
            PROMETHEUS_IMAGE=PROMETHEUS,
            GRAFANA_IMAGE=stand_in(),
            GRAFANA_PORT=str(free_port()),
        )

    def _here(self, command: Command) -> Command:
        text = re.sub(r"(\$PWD/)?\bsecret\b(?=[/;])", str(self.secret), command.text)
        asks = "kept user add ada"
        return command._replace(text=text.replace(asks, f"echo {ADA} | {asks}"))

    def begin(self) -> None:
        *start, users = self.of_nodes
        waits = Command("kept cluster status", (), PAGE, users.line)
        self.run_commands([*start, waits, users])
        self.environ["KEPT_COMMAND_CONFIG"] = str(self.secret / "admin.properties")
        self.await_ready()

    @property
    def admins_password(self) -> str:
        return (self.secret / "admin").read_text().strip()

    def security(self) -> Security:
        return read_security(self.properties("admin", self.admins_password))

    @property
    def ca(self) -> str:
        """The authority's certificate, as a node has it."""
        return str(self.secret / "ca.pem")

    def properties(self, user: str, password: str) -> str:
        """The path of a file for ``--command-config``."""
        path = self.secret / f"{user}-{quote(password, safe='')}.properties"
        path.touch(0o600)
        path.write_text(
            "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\n"
            f'sasl.jaas.config={SCRAM_MODULE} required username="{user}" password="{password}";\n'
            f"ssl.truststore.type=PEM\nssl.truststore.location={self.ca}\n"
        )
        return str(path)

    def librdkafka(self, user: str, password: str) -> dict[str, str]:
        """The same for confluent-kafka."""
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": self.ca,
        }

    def certificate(self, node: int) -> str:
        """What a node shows to clients."""
        return ssl.get_server_certificate(("localhost", self.port(node)), ca_certs=self.ca)


@pytest.fixture(scope="module")
def compose(tmp_path_factory):
    with SecureCompose(tmp_path_factory.mktemp("secret")) as started:
        yield started


def run_kept(compose, *arguments, user="admin", password="", stdin=""):
    """The command line of this checkout, on this machine: status and both streams."""
    config = ("--command-config", compose.properties(user, password or compose.admins_password))
    environ = {**os.environ, "KEPT_BOOTSTRAP": compose.bootstrap}
    done = subprocess.run(
        [sys.executable, "-m", "kept", *arguments, *config],
        input=stdin,
        text=True,
        check=False,
        capture_output=True,
        timeout=WAIT_S,
        env=environ,
    )
    return done.returncode, done.stdout + done.stderr


def as_admin(compose, *arguments, stdin=""):
    status, said = run_kept(compose, *arguments, stdin=stdin)
    assert status == 0, said
    return said


@pytest.fixture(scope="module")
def topic(compose):
    """One that ada may write, as on the page, and read, with the group readers."""
    as_admin(compose, "topic", "create", "orders", "--partitions", "3")
    as_admin(compose, "topic", "create", "secret")
    as_admin(
        compose, "acl", "add", "User:ada", "--consumer", "--topic", "orders", "--group", "readers"
    )
    return "orders"


def healthy(compose, nodes):
    for node in nodes:
        until(lambda n=node: compose.state(n, "{{.State.Health.Status}}") == "healthy", "healthy")


def write(compose, topic, values):
    """Write as ada; what was not acknowledged."""
    failed = []
    producer = Producer({**compose.librdkafka("ada", ADA), "enable.idempotence": True})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: error and failed.append(error))
    producer.flush(WAIT_S)
    return failed


def read(compose, topic, count):
    """Values of a topic as ada reads them with her group, from the beginning."""
    consumer = Consumer(
        {
            **compose.librdkafka("ada", ADA),
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    values, end = [], time.monotonic() + WAIT_S
    try:
        consumer.subscribe([topic])
        while len(values) < count and time.monotonic() < end:
            message = consumer.poll(1)
            if message is not None and not message.error():
                values.append(message.value())
    finally:
        consumer.close()
    return values


def test_the_admin_of_the_secret_logs_in(compose):
    status = as_admin(compose, "cluster", "status", "--check")
    assert all(f"localhost:{compose.port(node)}" in status for node in range(3)), status
    password = compose.admins_password
    known = AdminClient(compose.librdkafka("admin", password)).list_topics(timeout=WAIT_S)
    assert sorted(known.brokers) == [0, 1, 2]
    assert password not in "".join(compose.log(node) for node in range(3))


@pytest.fixture(scope="module")
def prometheus(compose, tmp_path_factory):
    """Debian's Prometheus in the place of the published image, started as the page says, but for
    its user.
    """
    context = tmp_path_factory.mktemp("prometheus")
    shutil.copy2(judges.prometheus(), context / "prometheus")
    (context / "Dockerfile").write_text(
        f"FROM {BASE}\nCOPY prometheus /bin/prometheus\n"
        "RUN install -d -o 65534 /prometheus\nUSER 65534\n"
        'CMD ["/bin/prometheus", "--config.file=/etc/prometheus/prometheus.yml", '
        '"--storage.tsdb.path=/prometheus"]\n'
    )
    docker("build", "-q", "-t", PROMETHEUS, str(context))
    compose.run_commands(compose.of_monitoring[:-1])
    return f"http://localhost:{compose.prometheus_port}/api/v1"


@pytest.mark.promtool
def test_prometheus_logs_in_and_scrapes_every_node(compose, prometheus):
    def targets():
        try:
            with urllib.request.urlopen(f"{prometheus}/targets", timeout=10) as answer:
                return json.load(answer)["data"]["activeTargets"]
        except OSError:  # it starts
            return []

    def errors():
        return {target["lastError"] for target in targets() if target["lastError"]}

    until(lambda: any("401" in error for error in errors()), "a stranger is refused")
    compose.run_commands(compose.of_monitoring[-1:])
    until(lambda: [target["health"] for target in targets()] == ["up"] * 3, "all are scraped")
    with urllib.request.urlopen(f"{prometheus}/query?query=sum(kept_ready)", timeout=10) as answer:
        (sample,) = json.load(answer)["data"]["result"]
    assert sample["value"][1] == "3"


def test_strangers_are_refused(compose, topic):
    status, said = run_kept(compose, "topic", "list", password="wrong")
    assert status and "admin" in said and "orders" not in said
    plain = AdminClient({"bootstrap.servers": compose.bootstrap})
    with pytest.raises(KafkaException):
        plain.list_topics(timeout=5)
    unlogged = {**compose.librdkafka("", ""), "security.protocol": "SSL"}
    with pytest.raises(KafkaException):
        AdminClient(unlogged).list_topics(timeout=5)


def test_a_user_does_what_acls_allow(compose, topic):
    values = [f"{n}".encode() for n in range(30)]
    assert write(compose, topic, values) == []
    assert set(values) <= set(read(compose, topic, len(values)))
    denied = write(compose, "secret", [b"x"])
    assert [error.code() for error in denied] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    status, said = run_kept(
        compose, "consume", "secret", "--from-beginning", "--max", "1", user="ada", password=ADA
    )
    assert status and "AUTHORIZATION_FAILED" in said
    assert "secret" not in run_kept(compose, "topic", "list", user="ada", password=ADA)[1]


def test_nodes_are_healthy_and_have_only_their_own_key(compose):
    healthy(compose, range(3))
    keys = set()
    for node in range(3):
        shown = docker("exec", compose.name(node), "cat", "/etc/kept/tls/node.pem")
        keys.add(shown[: shown.index("BEGIN CERTIFICATE")])
        there = docker("exec", compose.name(node), "ls", "-l", "/etc/kept/tls")
        assert "-r--------" in there or "-rw-------" in there
        touched = docker("exec", compose.name(node), "touch", "/etc/kept/tls/x", check=False)
        assert "Read-only file system" in touched
    assert len(keys) == 3


OPEN = """
import socket, ssl, sys
context = ssl.create_default_context(cafile="/etc/kept/tls/ca.pem")
if sys.argv[1:]:
    context.load_cert_chain(*sys.argv[1:])
plain = socket.create_connection(("kept-1", 10092))
with context.wrap_socket(plain, server_hostname="kept-1") as it:
    it.settimeout(3)
    try:
        print("closed" if it.recv(1) == b"" else "answered")
    except TimeoutError:
        print("open")
    except ssl.SSLError:
        print("closed")
"""


def test_between_nodes_a_certificate_is_asked_for(compose):
    def said(*store):
        return docker("exec", compose.name(0), "python", "-c", OPEN, *store).strip()

    assert said("/etc/kept/tls/node.pem") == "open"
    assert said() == "closed"


def test_a_node_is_lost_and_comes_back(compose, topic):
    compose.kill(2)
    values = [f"without {n}".encode() for n in range(30)]
    assert write(compose, topic, values) == []
    assert set(values) <= set(read(compose, topic, 60))
    healthy(compose, (0, 1))
    compose.start(2)
    healthy(compose, (2,))
    as_admin(compose, "cluster", "status", "--check")


def test_new_certificates_are_taken_without_a_restart(compose, topic):
    before = [compose.certificate(node) for node in range(3)]
    starts = [compose.state(node, "{{.State.StartedAt}}") for node in range(3)]
    compose.compose("run", "--rm", "certificates")
    for node in range(3):
        until(lambda n=node: compose.certificate(n) != before[n], "the new one is shown")
    assert [compose.state(node, "{{.State.StartedAt}}") for node in range(3)] == starts
    assert write(compose, topic, [b"after"]) == []
    compose.await_ready()
