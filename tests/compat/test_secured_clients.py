"""Every client over every security protocol and mechanism, and over the death of a leader."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kept.client.security.jaas import OAUTH_MODULE
from kept.node.config.local_security import ADMIN
from kept.testing import Cluster
from tests.compat.adapters import (
    Aiokafka,
    KafkaPython,
    Librdkafka,
    for_librdkafka,
    token_file,
    user_and_password,
)
from tests.compat.scenario import over_a_kill, story_over_a_kill, undisturbed
from tests.support.token_issuer import AUDIENCE, ISSUER, Issuer, fresh_token
from tests.tools import go_tools, kafka_dist

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
WAYS = [
    "SSL",
    "mutual SSL",
    *(f"{p} {m}" for p in ("SASL_PLAINTEXT", "SASL_SSL") for m in MECHANISMS),
]
BY_TOKEN = "SASL_SSL OAUTHBEARER"
"""Tokens live for :data:`LIFE_S`, so that several expire under a client."""
LIFE_S = 5
HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
PYTHON = [Librdkafka, KafkaPython, Aiokafka]
GO = ["franz", "sarama", "segmentio"]
slow = [pytest.mark.slow, pytest.mark.timeout(600)]

# kafka-python leaves a TLS socket to the garbage collector where the broker has gone
# before the handshake.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)


class Clusters:
    """Those that were started, by their protocol and number of nodes, and the access tokens that
    those with SASL take.
    """

    def __init__(self, keys: str, tokens: Path) -> None:
        self.started: dict[tuple[str, int], Cluster] = {}
        self.keys = keys
        self.tokens = tokens


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    folder, issuer = tmp_path_factory.mktemp("tokens"), Issuer()
    with fresh_token(folder / "token", issuer, ADMIN, LIFE_S) as tokens:
        made = Clusters(issuer.write(folder / "keys.json"), tokens)
        yield made
        for cluster in made.started.values():
            cluster.close()


def cluster_for(clusters: Clusters, way: str, nodes: int = 1) -> tuple[Cluster, Mapping[str, str]]:
    """A cluster, and the properties of a client of it, who may do everything."""
    protocol, _, mechanism = way.rpartition(" ") if way.startswith("SASL") else ("", "", "")
    cluster = clusters.started.get((protocol or way, nodes))
    if cluster is None:
        settings = {}
        if protocol:
            settings = {
                "sasl_enabled_mechanisms": ",".join((*MECHANISMS, "OAUTHBEARER")),
                "sasl_oauthbearer_jwks_endpoint_url": clusters.keys,
                "sasl_oauthbearer_expected_audience": AUDIENCE,
                "sasl_oauthbearer_expected_issuer": ISSUER,
            }
        elif way == "SSL":
            settings = {"ssl_client_auth": "none", "super_users": "User:ANONYMOUS;User:kept-node"}
        cluster = Cluster(nodes, security=protocol or "SSL", **settings)
        clusters.started[protocol or way, nodes] = cluster.__enter__()
    if way == BY_TOKEN:
        properties = cluster.client_properties()
        del properties["sasl.jaas.config"]
        return cluster, properties | {
            "sasl.mechanism": mechanism,
            "sasl.oauthbearer.token.endpoint.url": clusters.tokens.as_uri(),
        }
    if protocol:
        return cluster, cluster.client_properties(mechanism=mechanism)
    properties = cluster.client_properties()
    if way == "SSL":
        del properties["ssl.keystore.location"], properties["ssl.keystore.type"]
    return cluster, properties


def told(cls: Any, story: Any, cluster: Cluster, security: Mapping[str, str]) -> None:
    client = cls(security)
    try:
        story(cluster, client)
    finally:
        if isinstance(client, Aiokafka):
            client.end()


def environ(security: Mapping[str, str]) -> dict[str, str]:
    """For the clients in Go and JavaScript."""
    values = {
        "SECURITY_CA": security.get("ssl.truststore.location", ""),
        "SECURITY_CERTIFICATE": security.get("ssl.keystore.location", ""),
    }
    tokens = token_file(security)
    if tokens is not None:
        values |= {
            "SECURITY_MECHANISM": security["sasl.mechanism"],
            "SECURITY_TOKEN_FILE": str(tokens),
        }
    elif "sasl.mechanism" in security:
        user, password = user_and_password(security)
        values |= {
            "SECURITY_MECHANISM": security["sasl.mechanism"],
            "SECURITY_USER": user,
            "SECURITY_PASSWORD": password,
        }
    return values


def test_a_client_is_who_it_says_and_may_do_what_acls_allow(kept_secure_broker):
    """The one combination that is always tried: librdkafka, SASL_SSL, SCRAM-SHA-512."""
    cluster = kept_secure_broker
    topic = cluster.create_topic(partitions=3)
    where = {"bootstrap.servers": cluster.bootstrap, "log_level": 0}
    failed: list[Any] = []
    producer = Producer({**where, **for_librdkafka(cluster.client_properties("admin"))})
    producer.produce(topic, b"v", on_delivery=lambda error, _: error and failed.append(error))
    assert producer.flush(30) == 0 and not failed
    producer = Producer({**where, **for_librdkafka(cluster.client_properties("ada"))})
    producer.produce(topic, b"v", on_delivery=lambda error, _: failed.append(error))
    assert producer.flush(30) == 0
    assert [error.code() for error in failed] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    wrong = for_librdkafka(cluster.client_properties("ada")) | {"sasl.password": "wrong"}
    admin = AdminClient({**where, **wrong})
    with pytest.raises(KafkaException):
        admin.list_topics(timeout=2)


@pytest.mark.parametrize("way", [pytest.param(way, marks=slow) for way in WAYS])
@pytest.mark.parametrize("library", PYTHON)
def test_clients_in_python(clusters, library, way):
    told(library, undisturbed, *cluster_for(clusters, way))


@pytest.mark.parametrize("way", [*WAYS, BY_TOKEN])
@pytest.mark.parametrize("library", [pytest.param(c, marks=slow) for c in PYTHON])
def test_clients_in_python_over_the_death_of_a_leader(clusters, library, way):
    told(library, over_a_kill, *cluster_for(clusters, way, 3))


@pytest.mark.parametrize("way", [pytest.param(way, marks=[*slow, pytest.mark.go]) for way in WAYS])
@pytest.mark.parametrize("library", GO)
def test_clients_in_go_over_kill_9(clusters, library, way):
    program = go_tools.kafka_clients()
    program_over_a_kill(clusters, way, 1, [str(program), library])


@pytest.mark.parametrize("way", [*WAYS, BY_TOKEN])
@pytest.mark.parametrize("library", [pytest.param(c, marks=[*slow, pytest.mark.go]) for c in GO])
def test_clients_in_go_over_the_death_of_a_leader(clusters, library, way):
    program = go_tools.kafka_clients()
    program_over_a_kill(clusters, way, 3, [str(program), library])


@pytest.mark.node_js
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "nodes"), [*((way, nodes) for nodes in (1, 3) for way in WAYS), (BY_TOKEN, 3)]
)
def test_a_client_in_javascript_over_kill_9(clusters, workspace, way, nodes):
    program_over_a_kill(clusters, way, nodes, ["node", "over_a_kill.js"], workspace)


def program_over_a_kill(
    clusters: Clusters, way: str, nodes: int, command: list[str], folder: Path | None = None
) -> None:
    cluster, security = cluster_for(clusters, way, nodes)
    topic = cluster.topic("story")
    result = story_over_a_kill(
        cluster, topic, [*command, cluster.bootstrap, topic], folder, environ(security)
    )
    assert (result["sent"], result["seen"]) == (600, 600)
    assert 600 <= result["held"] <= 610  # kafka-go is not idempotent


def for_java(security: Mapping[str, str], folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The file of properties that a client in Java is given, and the flags of its machine."""
    flags = kafka_dist.QUICK_START
    if security.get("sasl.mechanism") == "OAUTHBEARER":
        url = security["sasl.oauthbearer.token.endpoint.url"]
        flags = (*flags, f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}")
        security = {
            **security,
            "sasl.jaas.config": f"{OAUTH_MODULE} required;",
            "sasl.login.callback.handler.class": HANDLER,
        }
    config = folder / "command.properties"
    config.write_text("".join(f"{name}={value}\n" for name, value in security.items()))
    return config, flags


@pytest.mark.java
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [*WAYS, BY_TOKEN])
def test_a_client_in_java_over_the_death_of_a_leader(clusters, way, tmp_path):
    _, security = cluster_for(clusters, way, 3)
    config, flags = for_java(security, tmp_path)
    program = str(Path(__file__).parent / "java" / "OverAKill.java")
    command = kafka_dist.command(program, str(config), level="OFF", flags=flags)
    program_over_a_kill(clusters, way, 3, command)


@pytest.mark.java
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [*WAYS, BY_TOKEN])
def test_kafkas_tools_with_a_command_config(clusters, way, tmp_path):
    cluster, security = cluster_for(clusters, way)
    config, flags = for_java(security, tmp_path)
    topic = cluster.topic("tools")

    def tool(name: str, *args: str, **given: Any) -> str:
        command = kafka_dist.command(
            f"org.apache.kafka.tools.{name}",
            "--bootstrap-server",
            cluster.bootstrap,
            "--command-config",
            str(config),
            *args,
            flags=flags,
        )
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=200, **given
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tool("TopicCommand", "--create", "--topic", topic, "--partitions", "2")
    tool("ConsoleProducer", "--topic", topic, input="a\nb\nc\n")
    read = tool(
        "consumer.ConsoleConsumer",
        "--topic",
        topic,
        "--group",
        topic,
        "--from-beginning",
        "--max-messages",
        "3",
        "--timeout-ms",
        "60000",
    )
    values = [line for line in read.splitlines() if len(line) == 1]  # between warnings
    assert sorted(values) == ["a", "b", "c"], read
    group = tool("consumer.group.ConsumerGroupCommand", "--describe", "--group", topic)
    assert topic in group
