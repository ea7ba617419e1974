"""Reading and writing over TLS and SASL by the connector's options, and no secret is seen."""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kept.client.bootstrap import Bootstrap, read_security
from kept.client.client import Client
from kept.client.security.jaas import parse_jaas
from kept.client.security.security import Security
from kept.node.config.local_security import ADMIN
from kept.pipeline import jobs
from kept.testing import Cluster
from tests.support.secured import SecuredKafka, client_properties
from tests.support.secured import password as password_of
from tests.support.token_issuer import AUDIENCE, ISSUER, Issuer, fresh_token
from tests.tools.needs import need

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(300)]

PROTOCOL = "SASL_SSL"


class Secured(NamedTuple):
    """A cluster, how one of its users connects by a mechanism, and his name and password."""

    bootstrap: str
    properties: Callable[[str], dict[str, str]]
    user: str
    secret: str


@pytest.fixture(scope="module", params=["kept", "kafka"])
def secured(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    if request.param == "kept":
        with Cluster(security=PROTOCOL) as kept:
            jaas = kept.client_properties()["sasl.jaas.config"]
            password = parse_jaas(jaas).options["password"]
            yield Secured(
                kept.bootstrap,
                lambda name: kept.client_properties("admin", name),
                "admin",
                password,
            )
        return
    need("java")
    with SecuredKafka(tmp_path_factory.mktemp("kafka")) as kafka:
        yield Secured(
            kafka.bootstrap[PROTOCOL],
            lambda name: client_properties(kafka.certificates, PROTOCOL, name),
            "ada",
            password_of("ada"),
        )


@pytest.fixture(scope="module", params=["options", "file"])
def given(request, secured, tmp_path_factory) -> dict[str, str]:
    """How to connect: by options of the JVM connector's names, or by a file on each machine."""
    properties = secured.properties("SCRAM-SHA-512")
    where = {"kafka.bootstrap.servers": secured.bootstrap}
    if request.param == "options":
        return where | {f"kafka.{name}": value for name, value in properties.items()}
    file = tmp_path_factory.mktemp("config") / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    file.chmod(0o600)
    return where | {"kept.command.config": str(file)}


@pytest.fixture
def topic(secured) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with Client(secured.bootstrap, security=Security(secured.properties("PLAIN"))) as client:
        client.create_topic(name, partitions=2)
        yield name


def test_rows_go_there_and_back_and_no_plan_shows_a_secret(spark, secured, given, topic, capfd):
    rows = spark.range(100).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    rows.write.format("kept").mode("append").options(**given, topic=topic).save()
    frame = spark.read.format("kept").options(**given, subscribe=topic).load()
    assert sorted(int(row.value) for row in frame.collect()) == list(range(100))
    frame.explain(True)
    plan = frame._jdf.queryExecution().toString()
    assert secured.secret not in capfd.readouterr().out + plan + frame._jdf.toString()


def test_a_stream_reads_secured(spark, secured, given, topic, tmp_path):
    rows = spark.range(10).selectExpr("CAST(id AS STRING) AS value")
    rows.write.format("kept").mode("append").options(**given, topic=topic).save()
    stream = spark.readStream.format("kept").options(
        **given, subscribe=topic, startingOffsets="earliest"
    )
    query = (
        stream.load()
        .writeStream.format("parquet")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "state"))
        .start(str(tmp_path / "rows"))
    )
    query.awaitTermination()
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 10
    for path in (tmp_path / "state").rglob("*"):
        assert path.is_dir() or secured.secret.encode() not in path.read_bytes(), path


def test_a_wrong_password_ends_the_job_and_is_not_shown(spark, secured):
    properties = secured.properties("SCRAM-SHA-256")
    jaas = properties["sasl.jaas.config"].replace(secured.secret, f"not-{secured.secret}")
    properties["sasl.jaas.config"] = jaas
    wrong = {f"kafka.{name}": value for name, value in properties.items()}
    wrong["kafka.bootstrap.servers"] = secured.bootstrap
    with pytest.raises(Exception, match=f"{secured.user} was not believed by SASL") as caught:
        spark.read.format("kept").options(**wrong, subscribe="t").load().collect()
    assert secured.secret not in "".join(traceback.format_exception(caught.value))


def test_jobs_read_by_a_file_that_every_machine_has(spark, secured, given, topic):
    path = given.get("kept.command.config")
    if path is None:  # a job is told by a file alone
        return
    where = Bootstrap(secured.bootstrap, read_security(path), path)
    rows = spark.range(10).selectExpr(
        "CAST(id % 3 AS STRING) AS key", "CAST(id AS STRING) AS value"
    )
    rows.write.format("kept").mode("append").options(**given, topic=topic).save()
    assert jobs.table(spark, where, topic).count() == 3


# By access tokens.

LIFE_S = 4
"""Of a token: several expire under a stream."""


@pytest.fixture(scope="module")
def by_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """How to connect with a cluster that takes access tokens: by one in a file."""
    folder, issuer = tmp_path_factory.mktemp("tokens"), Issuer()
    with (
        fresh_token(folder / "token", issuer, ADMIN, LIFE_S) as token,
        Cluster(
            security=PROTOCOL,
            sasl_enabled_mechanisms="SCRAM-SHA-512,OAUTHBEARER",
            sasl_oauthbearer_jwks_endpoint_url=issuer.write(folder / "keys.json"),
            sasl_oauthbearer_expected_audience=AUDIENCE,
            sasl_oauthbearer_expected_issuer=ISSUER,
        ) as cluster,
    ):
        properties = cluster.client_properties()
        del properties["sasl.jaas.config"]
        properties |= {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": token.as_uri(),
        }
        yield {f"kafka.{name}": value for name, value in properties.items()} | {
            "kafka.bootstrap.servers": cluster.bootstrap
        }


@pytest.mark.timeout(600)
def test_a_stream_goes_on_while_its_tokens_expire(spark, by_token, tmp_path):
    topic = f"t-{uuid.uuid4().hex[:8]}"
    rows = spark.range(10).selectExpr("CAST(id AS STRING) AS value")

    def write() -> None:
        rows.write.format("kept").mode("append").options(**by_token, topic=topic).save()

    given = {name.removeprefix("kafka."): value for name, value in by_token.items()}
    with Client(given.pop("bootstrap.servers"), security=Security(given)) as client:
        client.create_topic(topic, partitions=2)
    stream = spark.readStream.format("kept").options(
        **by_token, subscribe=topic, startingOffsets="earliest"
    )
    query = (
        stream.load()
        .writeStream.format("parquet")
        .trigger(processingTime="2 seconds")
        .option("checkpointLocation", str(tmp_path / "state"))
        .start(str(tmp_path / "rows"))
    )
    end, written = time.monotonic() + 3 * LIFE_S, 0
    while time.monotonic() < end:
        write()
        written += 10
    query.processAllAvailable()
    query.stop()
    assert query.exception() is None
    assert spark.read.parquet(str(tmp_path / "rows")).count() == written
