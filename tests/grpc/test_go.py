"""The real grpcurl, and a client in Go made from the proto."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections import Counter

import pytest

from kept.client.partitioner import partition_for_key
from tests.docs.blocks import ROOT, given_to, typed
from tests.docs.blocks import run as run_blocks
from tests.tools import go_tools

pytestmark = [pytest.mark.slow, pytest.mark.go, pytest.mark.timeout(1200)]
RUN_SECONDS = 60


def run(*command):
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=RUN_SECONDS
    )


@pytest.fixture(scope="module")
def grpcurl():
    return go_tools.tool(go_tools.GRPCURL)


def said(done):
    """What grpcurl printed: one JSON value after the other."""
    assert done.returncode == 0, done.stderr
    decoder, rest, values = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        value, end = decoder.raw_decode(rest)
        values.append(value)
        rest = rest[end:].strip()
    return values


def test_the_three_commands_as_they_stand(kept_cluster, grpcurl, tmp_path):
    """Those of docs/grpc.md."""
    cluster, page = kept_cluster(), "docs/grpc.md"
    where = f"localhost:{cluster.port()}"
    commands = [
        command
        for _, text, line in given_to("tests/grpc/test_go.py", ROOT / page)
        for command in typed(text, page, line)
    ]
    create, produce, consume = (shlex.split(command.text) for command in commands)
    assert [words[-1].rpartition("/")[2] for words in (create, produce, consume)] == [
        "CreateTopic",
        "Produce",
        "Consume",
    ]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "grpcurl").symlink_to(grpcurl)
    run_blocks(commands[:2], tmp_path, cluster.port(), RUN_SECONDS, programs)
    flags = (grpcurl, "-plaintext", "-d")
    (record,) = said(run(*flags, consume[3], where, "broker.Broker/Consume"))
    assert (record["offset"], record["payload"]) == ("0", "SGVsbG8gV29ybGQ=")
    with cluster.client() as client:
        assert len(client.topic("test-topic").partitions) == 3
        assert [r.value for r in client.read("test-topic")] == [b"Hello World"]
    again = run(*flags, create[3], where, "broker.Broker/CreateTopic")
    assert again.returncode != 0 and "AlreadyExists" in again.stderr


def test_grpcurl_explores(kept_broker, grpcurl):
    where = f"localhost:{kept_broker.port()}"
    listed = run(grpcurl, "-plaintext", where, "list").stdout.split()
    assert {"broker.Broker", "grpc.health.v1.Health"} <= set(listed)
    for service in listed:
        described = run(grpcurl, "-plaintext", where, "describe", service)
        assert described.returncode == 0, described.stderr
    (health,) = said(run(grpcurl, "-plaintext", where, "grpc.health.v1.Health/Check"))
    assert health == {"status": "SERVING"}


def test_a_client_in_go(kept_broker):
    topic = kept_broker.topic()
    done = run(go_tools.client(), f"localhost:{kept_broker.port()}", topic)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = Counter(line["kind"] for line in lines)
    assert kinds["created"] == kinds["refused"] == kinds["ended"] == 1
    produced = {line["key"]: line for line in lines if line["kind"] == "produced"}
    records = {line["key"]: line for line in lines if line["kind"] == "record"}
    assert len(produced) == len(records) == 20
    for n in range(20):
        key = f"key-{n}"
        partition = partition_for_key(key.encode(), 3)
        where = (produced[key]["partition"], produced[key]["offset"])
        assert where == (records[key]["partition"], records[key]["offset"])
        assert where[0] == partition
        assert records[key]["tombstone"] == (n % 5 == 0)
        assert records[key]["payload"] == ("" if n % 5 == 0 else f"value-{n}")
        assert records[key]["headers"] == (0 if n % 5 == 0 else 1)
    followed = [line["offset"] for line in lines if line["kind"] == "followed"]
    assert followed == [r["offset"] for r in records.values() if r["partition"] == 0]
    (refused,) = [line for line in lines if line["kind"] == "refused"]
    assert refused["code"] == "NotFound" and "CreateTopic makes one" in refused["message"]
    assert [line["deadline"] for line in lines if line["kind"] == "ended"] == [True]
    with kept_broker.client() as client:
        assert sum(1 for _ in client.read(topic)) == 20
