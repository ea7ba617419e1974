"""Reading and writing over TLS and SASL by the connector's options, and no secret is seen."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest

from kept.client.client import Client
from kept.client.security.security import Security
from tests.support.secured import SecuredKafka, client_properties

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(300)]

SECRET = "secret-of"
PROTOCOL = "SASL_SSL"


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture(scope="module", params=["options", "file"])
def given(request, kafka, tmp_path_factory) -> dict[str, str]:
    """How to connect: by options of the JVM connector's names, or by a file on each machine."""
    properties = client_properties(kafka.certificates, PROTOCOL, "SCRAM-SHA-512")
    where = {"kafka.bootstrap.servers": kafka.bootstrap[PROTOCOL]}
    if request.param == "options":
        return where | {f"kafka.{name}": value for name, value in properties.items()}
    file = tmp_path_factory.mktemp("config") / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    file.chmod(0o600)
    return where | {"kept.command.config": str(file)}


def test_rows_go_there_and_back_and_no_plan_shows_a_secret(spark, kafka, given, request, capfd):
    topic = f"t-{request.node.callspec.params['given']}"
    properties = client_properties(kafka.certificates, PROTOCOL, "PLAIN")
    with Client(kafka.bootstrap[PROTOCOL], security=Security(properties)) as client:
        client.create_topic(topic, partitions=2)
    rows = spark.range(100).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    rows.write.format("kept").mode("append").options(**given, topic=topic).save()
    frame = spark.read.format("kept").options(**given, subscribe=topic).load()
    assert sorted(int(row.value) for row in frame.collect()) == list(range(100))
    frame.explain(True)
    plan = frame._jdf.queryExecution().toString()
    assert SECRET not in capfd.readouterr().out + plan + frame._jdf.toString()


def test_a_stream_reads_secured(spark, given, kafka, tmp_path):
    topic = "t-stream"
    properties = client_properties(kafka.certificates, PROTOCOL, "PLAIN")
    with Client(kafka.bootstrap[PROTOCOL], security=Security(properties)) as client:
        if topic not in client.metadata().topics:
            client.create_topic(topic, partitions=1)
    rows = spark.range(10).selectExpr("CAST(id AS STRING) AS value")
    rows.write.format("kept").mode("append").options(**given, topic=topic).save()
    stream = spark.readStream.format("kept").options(
        **given, subscribe=topic, startingOffsets="earliest"
    )
    query = (
        stream.load().writeStream.format("parquet").trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "state")).start(str(tmp_path / "rows"))
    )  # fmt: skip
    query.awaitTermination()
    assert spark.read.parquet(str(tmp_path / "rows")).count() >= 10
    for path in (tmp_path / "state").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_a_wrong_password_ends_the_job_and_is_not_shown(spark, kafka):
    properties = client_properties(kafka.certificates, PROTOCOL, "SCRAM-SHA-256")
    jaas = properties["sasl.jaas.config"].replace("secret-of-ada", "secret-of-nobody")
    properties["sasl.jaas.config"] = jaas
    wrong = {f"kafka.{name}": value for name, value in properties.items()}
    wrong["kafka.bootstrap.servers"] = kafka.bootstrap[PROTOCOL]
    with pytest.raises(Exception, match="ada was not believed by SASL") as caught:
        spark.read.format("kept").options(**wrong, subscribe="t").load().collect()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
