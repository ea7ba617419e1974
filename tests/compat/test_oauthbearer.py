"""Clients that log in by access tokens (OAUTHBEARER), and go on while their tokens expire: several
lives of a token pass under each.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider as AioTokens
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from kafka.net.sasl.oauth import AbstractTokenProvider as PythonTokens

from kept.client.client import Client, OutRecord
from kept.client.security.jaas import OAUTH_MODULE
from kept.client.security.security import Security
from kept.storage.errors import KeptError
from tests.support.certificates import Authority
from tests.support.sasl_site import Secured, librdkafka_goes_on, secured
from tests.support.token_issuer import (
    AUDIENCE,
    CLIENT,
    ISSUER,
    SECRET,
    Endpoint,
    Issuer,
    fresh_token,
    served,
)
from tests.tools import go_tools, kafka_dist

pytestmark = [pytest.mark.slow]

LIFE_S = 4
"""Of tokens in a file and in Python."""
LONGER_LIFE_S = 10
"""Of those that an endpoint gives, and of librdkafka, which gets new ones a second late."""
RECORDS = 50
HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"


class Site(NamedTuple):
    node: Secured
    issuer: Issuer
    endpoint: Endpoint
    token_file: Path
    """Has a fresh token, all the time."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("oauth")
    issuer = Issuer()
    with (
        fresh_token(folder / "token", issuer, life_s=LIFE_S) as file,
        served(Endpoint(issuer, life_s=LONGER_LIFE_S)) as endpoint,
        secured(
            sasl_enabled_mechanisms="OAUTHBEARER",
            sasl_oauthbearer_jwks_endpoint_url=issuer.write(folder / "keys.json"),
            sasl_oauthbearer_expected_audience=AUDIENCE,
            sasl_oauthbearer_expected_issuer=ISSUER,
            sasl_oauthbearer_clock_skew_seconds=0,
        ) as node,
    ):
        yield Site(node, issuer, endpoint, file)


def refused(site: Site) -> dict[str, float]:
    """Logins that were refused and sessions that ended, so far."""
    import urllib.request

    with urllib.request.urlopen(f"http://{site.node.open}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = "kept_logins_refused_total", "kept_sessions_expired_total"
    return {one.split()[0]: float(one.split()[1]) for one in lines if one.startswith(names)}


def librdkafka(site: Site, how: str) -> dict[str, Any]:
    common = {
        "bootstrap.servers": site.node.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "log_level": 0,
    }
    if how == "oidc":
        return common | {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": CLIENT,
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.scope": "kafka",
            "sasl.oauthbearer.token.endpoint.url": site.endpoint.url,
        }

    def token(_: str) -> tuple[str, float]:
        return site.issuer.token(life_s=LONGER_LIFE_S), time.time() + LONGER_LIFE_S

    return common | {"oauth_cb": token}


@pytest.mark.parametrize("how", ["callback", "oidc"])
def test_librdkafka_goes_on_while_its_tokens_expire(site: Site, how: str) -> None:
    before = refused(site)
    librdkafka_goes_on(librdkafka(site, how), 2.5 * LONGER_LIFE_S)
    assert refused(site) == before, "no session ended, no login was refused"


def test_librdkafka_hears_that_it_is_refused(site: Site) -> None:
    def token(_: str) -> tuple[str, float]:
        return site.issuer.token(aud="other"), time.time() + 300

    admin = AdminClient(librdkafka(site, "callback") | {"oauth_cb": token})
    with pytest.raises(KafkaException):
        admin.list_topics(timeout=3)


class ForPython(PythonTokens):
    def __init__(self, site: Site) -> None:
        self.site = site

    def token(self) -> str:
        return self.site.issuer.token(life_s=LIFE_S)


def test_kafka_python(site: Site) -> None:
    topic = f"kp-{uuid.uuid4().hex[:8]}"
    given = {
        "bootstrap_servers": site.node.bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": ForPython(site),
    }
    producer = kafka.KafkaProducer(**given)
    end, sent = time.monotonic() + 2.5 * LIFE_S, 0
    while time.monotonic() < end:
        producer.send(topic, b"%d" % sent).get(30)
        sent += 1
        time.sleep(0.05)
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic, auto_offset_reset="earliest", consumer_timeout_ms=30_000, **given
    )
    assert [next(consumer).value for _ in range(sent)] == [b"%d" % n for n in range(sent)]
    consumer.close()


class ForAio(AioTokens):
    def __init__(self, site: Site) -> None:
        self.site = site

    async def token(self) -> str:
        return self.site.issuer.token(life_s=LIFE_S)


def test_aiokafka(site: Site) -> None:
    topic = f"aio-{uuid.uuid4().hex[:8]}"

    async def go() -> list[bytes]:
        given: Any = {
            "bootstrap_servers": site.node.bootstrap,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauth_token_provider": ForAio(site),
        }
        producer = AIOKafkaProducer(**given)
        await producer.start()
        for number in range(5):
            await producer.send_and_wait(topic, b"%d" % number)
            await asyncio.sleep(LIFE_S / 2)
        await producer.stop()
        consumer = AIOKafkaConsumer(topic, auto_offset_reset="earliest", **given)
        await consumer.start()
        records = [await asyncio.wait_for(consumer.getone(), 30) for _ in range(5)]
        await consumer.stop()
        return [bytes(record.value) for record in records]

    assert asyncio.run(go()) == [b"%d" % number for number in range(5)]


@pytest.mark.go
@pytest.mark.timeout(900)
def test_franz_go(site: Site) -> None:
    topic, before = f"franz-{uuid.uuid4().hex[:8]}", refused(site)
    environ = {"SECURITY_MECHANISM": "OAUTHBEARER", "SECURITY_TOKEN_FILE": str(site.token_file)}
    done = subprocess.run(
        [str(go_tools.kafka_clients()), "franz", site.node.bootstrap, topic],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["sent"], result["seen"]) == (600, 600)
    assert refused(site) == before


# Ours.


def own(site: Site, *, by_file: bool) -> dict[str, str]:
    url = "sasl.oauthbearer.token.endpoint.url"
    common = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
    if by_file:
        return common | {url: site.token_file.as_uri()}
    return common | {
        url: site.endpoint.url,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.client.credentials.client.id": CLIENT,
        "sasl.oauthbearer.client.credentials.client.secret": SECRET,
    }


@pytest.mark.parametrize("by_file", [True, False])
def test_our_client_goes_on_while_its_tokens_expire(site: Site, by_file: bool) -> None:
    topic, before = f"own-{uuid.uuid4().hex[:8]}", refused(site)
    with Client(site.node.bootstrap, security=Security(own(site, by_file=by_file))) as client:
        client.create_topic(topic)
        end, sent = time.monotonic() + 2.5 * (LIFE_S if by_file else LONGER_LIFE_S), 0
        while time.monotonic() < end:
            client.produce(topic, [OutRecord(b"k", b"%d" % sent)])
            sent += 1
            time.sleep(0.05)
        assert [one.value for one in client.read(topic)] == [b"%d" % n for n in range(sent)]
    assert refused(site) == before


def test_our_commands(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "client.properties"

    def kept(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "kept",
                *args,
                "--bootstrap",
                site.node.bootstrap,
                "--command-config",
                str(file),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    for by_file in (True, False):
        given = own(site, by_file=by_file)
        file.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
        file.chmod(0o600)
        for command in (("topic", "list"), ("cluster", "status")):  # Kafka's protocol, and HTTP
            done = kept(*command)
            assert done.returncode == 0, done.stderr
    file.write_text(file.read_text().replace(SECRET, "wrong"))
    done = kept("topic", "list")
    assert done.returncode == 1 and "status 401 ('invalid_client')" in done.stderr
    assert "wrong" not in done.stderr


def test_our_client_hears_that_it_is_refused(site: Site, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(site.issuer.token(iss="https://other.test"))
    given = own(site, by_file=True) | {"sasl.oauthbearer.token.endpoint.url": token.as_uri()}
    said = "the access token was not believed by SASL OAUTHBEARER"
    with (
        Client(site.node.bootstrap, security=Security(given)) as client,
        pytest.raises(KeptError, match=said),
    ):
        client.metadata()


def test_a_node_fetches_keys_by_https_and_goes_on_without_them(tmp_path: Path) -> None:
    authority, issuer, token = Authority(tmp_path), Issuer(), tmp_path / "token"
    given = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": token.as_uri(),
    }

    def logs_in(node: Secured, key_id: str) -> None:
        token.write_text(issuer.token(key_id=key_id))
        with Client(node.bootstrap, security=Security(given)) as client:
            assert client.metadata().topics == {}

    with served(Endpoint(issuer), authority.issue("issuer", "localhost")) as endpoint:
        settings = {
            "sasl_enabled_mechanisms": "OAUTHBEARER",
            "sasl_oauthbearer_jwks_endpoint_url": endpoint.url,
            "kept_sasl_oauthbearer_truststore_location": authority.ca,
            "sasl_oauthbearer_jwks_endpoint_refresh_ms": 1000,
        }
        with secured(**settings) as node:
            logs_in(node, "k1")
            issuer.add_key("k2")
            logs_in(node, "k2")
            endpoint.respond = lambda *_: (500, {}, b"")  # type: ignore[method-assign]
            node.cluster.wait_until(
                lambda: "keys of tokens not fetched" in node.cluster.log(), "it fails"
            )
            logs_in(node, "k1")
            logs_in(node, "k2")


# Apache Kafka's tools.


def tool(site: Site, class_name: str, file: Path, *args: object) -> list[str]:
    allowed = f"{site.endpoint.url},{site.token_file.as_uri()}"
    flag = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={allowed}"
    return kafka_dist.command(
        f"org.apache.kafka.tools.{class_name}",
        "--bootstrap-server",
        site.node.bootstrap,
        "--command-config",
        str(file),
        *map(str, args),
        flags=(*kafka_dist.QUICK_START, flag),
    )


@pytest.fixture(params=[True, False], ids=["file", "endpoint"])
def java_config(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> Path:
    given = own(site, by_file=request.param) | {
        "sasl.login.callback.handler.class": HANDLER,
        "sasl.jaas.config": f"{OAUTH_MODULE} required;",
    }
    Security(given)  # the same file is ours
    file = tmp_path / "java.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    return file


@pytest.mark.java
@pytest.mark.timeout(600)
def test_kafkas_tools(site: Site, java_config: Path) -> None:
    topic, before = f"java-{uuid.uuid4().hex[:8]}", refused(site)
    done = subprocess.run(
        tool(site, "TopicCommand", java_config, "--create", "--topic", topic),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with subprocess.Popen(
        tool(site, "ConsoleProducer", java_config, "--topic", topic),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as producer:
        assert producer.stdin is not None and producer.stdout is not None
        for number in range(RECORDS):
            producer.stdin.write(f"{number}\n")
            producer.stdin.flush()
            time.sleep(2.5 * LONGER_LIFE_S / RECORDS)
        producer.stdin.close()
        said = producer.stdout.read()
        assert producer.wait(60) == 0 and "xception" not in said, said
    read = subprocess.run(
        tool(
            site,
            "consumer.ConsoleConsumer",
            java_config,
            "--topic",
            topic,
            "--from-beginning",
            "--max-messages",
            RECORDS,
            "--timeout-ms",
            60_000,
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    values = [line for line in read.stdout.splitlines() if line.isdecimal()]  # between warnings
    assert values == [str(number) for number in range(RECORDS)], read.stdout + read.stderr
    assert refused(site) == before


@pytest.mark.java
def test_kafkas_tools_hear_that_they_are_refused(site: Site, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(site.issuer.token(aud="other"))
    wrong = site._replace(token_file=token)
    given = own(wrong, by_file=True) | {
        "sasl.login.callback.handler.class": HANDLER,
        "sasl.jaas.config": f"{OAUTH_MODULE} required;",
    }
    file = tmp_path / "java.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    done = subprocess.run(
        tool(wrong, "TopicCommand", file, "--list"),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode != 0
    assert "invalid credentials with SASL mechanism OAUTHBEARER" in done.stdout + done.stderr
