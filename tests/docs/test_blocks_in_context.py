"""Blocks of pages that need something around them: a program of the reader's, directories of
Apache Kafka, a second cluster.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from kept.client.client import OutRecord
from kept.node.config.local_cluster import NODE_PORT_OFFSET
from kept.testing.ports import free_port
from tests.docs.blocks import LOCAL_PORTS, ROOT, Command, given_to, run, typed
from tests.node.kafka_import import fixtures

pytestmark = pytest.mark.slow
HERE = "tests/docs/test_blocks_in_context.py"
READERS_PROGRAM = """
import contextlib

from kept.client.client import Client, OutRecord


class my_program:
    @staticmethod
    def run(bootstrap, topic):
        with Client(bootstrap) as client:
            if topic not in client.metadata().topics:
                client.create_topic(topic)
            client.produce(topic, [OutRecord(b"order", b"one")])
            assert [record.value for record in client.read(topic)] == [b"one"]

    @staticmethod
    @contextlib.contextmanager
    def running(bootstrap, topic):
        with Client(bootstrap, timeout_ms=60_000) as client:
            client.produce(topic, [OutRecord(b"order", b"before")])
            yield
            client.produce(topic, [OutRecord(b"order", b"after")])
            assert [record.value for record in client.read(topic)] == [b"before", b"after"]


run_my_code = my_program.run
"""
"""What the pages call ``my_program`` and ``run_my_code``."""


@pytest.mark.parametrize("page", ["README.md", "docs/testing.md"])
def test_fixtures_in_a_test_of_the_reader(page, tmp_path):
    blocks = [text for language, text, _ in given_to(HERE, ROOT / page) if language == "python"]
    (tmp_path / "test_page.py").write_text("\n\n".join((READERS_PROGRAM, *blocks)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(blocks)} passed" in done.stdout


def adopting() -> list[str]:
    """The commands of docs/adopting.md: look, start one node, start one of three."""
    found = given_to(HERE, ROOT / "docs" / "adopting.md")
    return [
        one.text.replace("\\\n", "")
        for _, text, line in found
        for one in typed(text, "docs/adopting.md", line)
    ]


def in_background(command: str, number: int) -> list[Command]:
    """A node that is started and waited for."""
    said = f"said-{number}"
    waits = (
        f"timeout 100 sh -c 'until grep -q \"ready on\" {said}; do sleep 0.1; done' || cat {said}"
    )
    return [
        Command(text, (), "docs/adopting.md", 0) for text in (f"{command} >{said} 2>&1 &", waits)
    ]


STOP = Command("kill $(jobs -p); wait", (), "docs/adopting.md", 0)


def test_one_node_is_taken_over(tmp_path):
    look, start, _ = adopting()
    fixtures.copy("one", tmp_path / "data")
    here = {"/var/lib/kafka": str(tmp_path), "--adopt ": "--adopt --ignore-security "}
    for old, new in here.items():
        assert old in look and old in start
        look, start = look.replace(old, new), start.replace(old, new)
    before = fixtures.hashes(tmp_path / "data")
    commands = [
        Command(look, (), "docs/adopting.md", 0),
        *in_background(start, 0),
        Command("kept topic list", ("NAME …", "…", "t0 …", "…"), "docs/adopting.md", 0),
        STOP,
    ]
    run(commands, tmp_path, free_port(LOCAL_PORTS), 150)
    assert fixtures.hashes(tmp_path / "data") == before


def test_three_nodes_are_taken_over(tmp_path):
    *_, start = adopting()
    ports = [free_port((NODE_PORT_OFFSET,)) for _ in range(3)]
    nodes = ",".join(f"{n}@localhost:{port + NODE_PORT_OFFSET}" for n, port in enumerate(ports))
    commands = []
    for n, port in enumerate(ports):
        fixtures.copy(f"n{n}", tmp_path / str(n) / "data")
        own = f"PLAINTEXT://localhost:{port},NODE://localhost:{port + NODE_PORT_OFFSET}"
        command = start
        for old, new in {
            "--node-id 1": f"--node-id {n}",
            "/var/lib/kafka": str(tmp_path / str(n)),
            "0@a:10092,1@b:10092,2@c:10092": nodes,
            "PLAINTEXT://:9092,NODE://:10092": own,
            "PLAINTEXT://b:9092,NODE://b:10092": own,
        }.items():
            assert old in command
            command = command.replace(old, new)
        commands.append(Command(f"{command} >said-{n} 2>&1 &", (), "docs/adopting.md", 0))
    check = f"kept cluster status --check --bootstrap localhost:{ports[0]}"
    waits = (
        f"timeout 100 sh -c 'until {check} >checked 2>&1; do sleep 0.2; done' || cat checked said-*"
    )
    status = (Command(waits, (), "docs/adopting.md", 0), Command(check, (), "docs/adopting.md", 0))
    run([*commands, *status, STOP], tmp_path, ports[0], 150)


def test_a_cluster_begins_with_its_first_user(tmp_path):
    page, port = "docs/security.md", free_port((NODE_PORT_OFFSET,))
    ((_, text, line),) = given_to(HERE, ROOT / page)
    (start,) = [command.text.replace("\\\n", "") for command in typed(text, page, line)]
    (tmp_path / "admin").write_text("pencil\n")
    here = {"DIR": "data", "localhost:9092": f"localhost:{port}", "/run/secrets/admin": "admin"}
    for old, new in here.items():
        assert old in start
        start = start.replace(old, new)
    (tmp_path / "admin.properties").write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-512\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="admin" password="pencil";\n'
    )
    listed = Command(
        "kept user list --command-config admin.properties", ("…", "admin …", "…"), page, line
    )
    run([*in_background(start, 0), listed, STOP], tmp_path, port, 100)


def test_records_move_from_another_cluster(kept_cluster, tmp_path):
    """The other one is kept, too: both sides of the pipe speak Kafka's protocol only."""
    other, own = kept_cluster(), kept_cluster()
    with other.client() as client:
        client.create_topic("users", partitions=12)
        client.produce("users", [OutRecord(b"ada", b"countess"), OutRecord(b"bob", None)])
    page = "docs/operations.md"
    commands = [
        command._replace(text=command.text.replace("kafka:9092", other.bootstrap))
        for _, text, line in given_to(HERE, ROOT / page)
        for command in typed(text, page, line)
    ]
    assert other.bootstrap in commands[-1].text
    run(commands, tmp_path, own.port(), 60)
    with own.client() as client:
        moved = {(record.key, record.value) for record in client.read("users")}
    assert moved == {(b"ada", b"countess"), (b"bob", None)}
