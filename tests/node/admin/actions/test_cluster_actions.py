"""What operators change by the console: done as the Kafka request does it, with its rights."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys

import pytest

from kept.cli.position_syntax import Position, PositionKind, PositionType
from kept.client.client import Client, OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.admin.actions.command_lines import CommandLines, moment
from kept.node.admin.records.partition_records import NewRecord
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.http import json_results
from kept.node.http.messages import HttpRequest
from kept.node.runtime.time_slices import Pace
from kept.node.security.session import Session

LINES = CommandLines("localhost:9092")
HEAD = "HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def lone(lone_node):
    return lone_node(kept_console_actions="true", offsets_topic_num_partitions="1")


def done(lone, path, **body):
    status, result = lone.post(f"/api/v1/{path}", **body)
    assert status == 200 and result["error"] is None, result
    return result


def refused(lone, path, **body):
    """Why Kafka's request was refused."""
    status, result = lone.post(f"/api/v1/{path}", **body)
    assert status == 200 and result["done"] is False, result
    return result["error"]


def wrong(lone, path, **body):
    """Why it is no request that could be made."""
    status, result = lone.post(f"/api/v1/{path}", **body)
    assert 400 <= status < 500, result
    return result["error"]["message"]


def run(lone, line, status=0):
    """Run a command line by a shell, against this node."""
    kept = f"{shlex.quote(sys.executable)} -m kept"
    script = f'kept() {{ {kept} "$@"; }}; {line}'
    environment = {"KEPT_BOOTSTRAP": "127.0.0.1:1", "PATH": "/usr/bin:/bin"}

    def call():
        return subprocess.run(
            ["/bin/bash", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    result = lone.run(asyncio.to_thread(call))
    assert result.returncode == status, result.stderr
    return result.stdout


def with_client(lone, use):
    def call():
        with Client(f"127.0.0.1:{lone.port}") as client:
            return use(client)

    return lone.run(asyncio.to_thread(call))


def test_topics_are_created_altered_and_deleted(lone):
    config = {"cleanup.policy": "compact", "segment.bytes": "2048"}
    result = done(lone, "topics/create", topic="t", partitions=3, config=config)
    assert result["done"]
    command = "kept topic create t --partitions 3 --config cleanup.policy=compact"
    assert result["command"] == f"{command} --config segment.bytes=2048 --bootstrap localhost:80"
    topic = lone.get("/api/v1/topics/t")
    assert topic["partition_count"] == 3 and topic["config"] == config
    why = refused(lone, "topics/create", topic="t")
    assert why == "CreateTopics of t: TOPIC_ALREADY_EXISTS (Topic 't' already exists.)"
    dry = done(lone, "topics/create", topic="dry", validate_only=True)
    assert not dry["done"] and "dry" not in lone.node.parts.metadata.image.topics

    changes = {"segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.1"}
    result = done(lone, "topics/alter", topic="t", set=changes, delete=["cleanup.policy"])
    assert "--delete-config cleanup.policy" in result["command"]
    assert lone.get("/api/v1/topics/t")["config"] == changes
    done(lone, "topics/alter", topic="t", partitions=5)
    assert lone.get("/api/v1/topics/t")["partition_count"] == 5
    why = refused(lone, "topics/alter", topic="t", partitions=2)
    assert "INVALID_PARTITIONS" in why
    why = refused(lone, "topics/alter", topic="t", partitions=2, set={"segment.bytes": "5000"})
    assert why.startswith("the settings are changed, the partitions are not: ")
    assert "INVALID_CONFIG" in refused(lone, "topics/alter", topic="t", set={"none": "1"})

    assert (
        done(lone, "topics/delete", topic="t")["command"]
        == "kept topic delete t --bootstrap localhost:80"
    )
    assert "t" not in lone.node.parts.metadata.image.topics
    assert "UNKNOWN_TOPIC_OR_PARTITION" in refused(lone, "topics/delete", topic="t")


def test_what_cannot_be_asked_for_is_refused_by_name(lone):
    lone.create("t")
    for path, body, message in (
        ("topics/create", {}, "topic is missing"),
        ("topics/create", {"topic": 5}, "topic is missing"),
        ("topics/create", {"topic": "x", "partitions": 0}, "partitions must be 1 to"),
        ("topics/create", {"topic": "x", "partitions": 2**40}, "partitions must be 1 to"),
        ("topics/create", {"topic": "x", "replication_factor": 40_000}, "must be 1 to 32767"),
        ("topics/create", {"topic": "x", "config": ["a"]}, "config must be an object"),
        ("topics/create", {"topic": "x", "config": {"a": 1}}, "the value of a must be a text"),
        ("topics/create", {"topic": "x", "more": 1}, "unknown parameter more"),
        ("topics/alter", {"topic": "t"}, "nothing is to be changed"),
        ("topics/alter", {"topic": "t", "delete": "x"}, "delete must be a list of texts"),
        ("topics/alter", {"topic": "t", "delete": [["x"]]}, "delete must be a list of texts"),
        ("produce", {"topic": "t"}, "a tombstone needs a key"),
        ("produce", {"topic": "t", "value": 5}, "value must be a text"),
        ("produce", {"topic": "t", "value": "a", "value_base64": "YQ=="}, "both given"),
        ("produce", {"topic": "t", "value_base64": "?"}, "value_base64 is not base64"),
        ("produce", {"topic": "t", "value_base64": 7}, "value_base64 is not base64"),
        ("produce", {"topic": "t", "value": "a", "headers": [{"value": "x"}]}, "with name"),
        ("produce", {"topic": "t", "value": "a", "headers": [{"name": "x"}] * 51}, "more than 50"),
        ("produce", {"topic": "t", "value": "a", "timestamp": -1}, "timestamp must be a number"),
        ("produce", {"topic": "t", "value": "a", "partition": "x"}, "partition must be a number"),
        ("groups/reset-offsets", {"group": "g", "topic": "t"}, "one of to, offset"),
        ("groups/reset-offsets", {"group": "g", "topic": "t", "to": "sideways"}, "earliest or"),
        (
            "groups/reset-offsets",
            {"group": "g", "topic": "t", "to": "latest", "offset": 3},
            "one of to, offset",
        ),
        ("groups/reset-offsets", {"topic": "t", "to": "latest"}, "group is missing"),
        ("brokers/config", {"broker": 0}, "nothing is to be changed"),
        ("brokers/config", {"broker": 7, "set": {"a": "b"}}, "there is no broker 7; brokers: 0"),
    ):
        assert message in wrong(lone, path, **body), (path, body)
    assert lone.node.parts.counters.records_in == 0
    for name in ("7", "x", "-1", "1e3", "٣"):
        status, _, body = lone.http(
            f"GET /api/v1/brokers/{name}/config {HEAD}".encode().decode("latin-1")
        )
        assert status in (400, 404) and "broker" in body.decode()


def test_records_are_appended(lone):
    lone.create("t", 3)
    result = done(
        lone,
        "produce",
        topic="t",
        key="k",
        value="v",
        timestamp=5,
        headers=[{"name": "h", "value": "x"}, {"name": "n", "value_base64": "/w=="}, {"name": "e"}],
    )
    assert (result["offset"], result["timestamp"]) == (0, 5)
    (found,) = lone.get(f"/api/v1/records?topic=t&partition={result['partition']}")["records"]
    assert (found["key_base64"], found["value_base64"], found["timestamp"]) == ("aw==", "dg==", 5)
    values = [header["value_base64"] for header in found["headers"]]
    assert values == ["eA==", "/w==", None]
    again = done(lone, "produce", topic="t", key_base64="aw==")
    assert (again["partition"], again["offset"]) == (result["partition"], 1)
    assert done(lone, "produce", topic="t", value="", partition=2)["partition"] == 2
    why = refused(lone, "produce", topic="t", value="x", partition=3)
    assert why == "t has no partition 3; it has 0 to 2"
    assert "there is no topic none" in refused(lone, "produce", topic="none", value="x")
    assert "none" not in lone.node.parts.metadata.image.topics
    lone.create("small", max_message_bytes="100")
    why = refused(lone, "produce", topic="small", value="x" * 200)
    assert "MESSAGE_TOO_LARGE" in why or "RECORD_TOO_LARGE" in why


def committed(lone, group):
    rows = lone.get(f"/api/v1/groups/{group}")["partitions"]
    return {row["partition"]: row["committed_offset"] for row in rows}


def test_the_answer_about_many_reset_offsets_is_made_in_slices(lone, monkeypatch):
    steps = 0

    class Counted(Pace):
        async def checkpoint(self):
            nonlocal steps
            steps += 1
            await super().checkpoint()

    monkeypatch.setattr(json_results, "Pace", Counted)
    lone.create("t", 100)
    wanted = {"group": "g", "topic": "t", "to": "latest", "dry_run": True}
    assert len(done(lone, "groups/reset-offsets", **wanted)["partitions"]) == 100
    assert steps > 100


def test_offsets_are_reset_after_a_dry_run(lone):
    lone.create("t", 2)
    records = [OutRecord(b"k", b"%d" % n, timestamp=1000 * n, partition=1) for n in range(10)]
    with_client(lone, lambda client: client.produce("t", records))
    wanted = {"group": "g", "topic": "t"}
    dry = done(lone, "groups/reset-offsets", **wanted, to="latest", dry_run=True)
    assert not dry["done"] and dry["dry_run"]
    expected = [(0, None, 0), (1, None, 10)]
    assert [
        (one["partition"], one["before"], one["after"]) for one in dry["partitions"]
    ] == expected
    assert (
        dry["command"]
        == "kept group reset-offsets g --topic t --to latest --dry-run --bootstrap localhost:80"
    )
    assert lone.http(f"GET /api/v1/groups/g {HEAD}")[0] == 404
    result = done(lone, "groups/reset-offsets", **wanted, to="latest")
    assert result["done"] and result["partitions"] == dry["partitions"]
    assert committed(lone, "g") == {0: 0, 1: 10}
    result = done(lone, "groups/reset-offsets", **wanted, timestamp=4500, partition=1)
    assert [(one["before"], one["after"]) for one in result["partitions"]] == [(10, 5)]
    result = done(lone, "groups/reset-offsets", **wanted, timestamp=2**63 - 1, partition=1)
    assert [(one["before"], one["after"]) for one in result["partitions"]] == [(5, 10)]
    assert f"--to @{2**63 - 1} " in result["command"]
    done(lone, "groups/reset-offsets", **wanted, offset=99)
    assert committed(lone, "g") == {0: 0, 1: 10}
    done(lone, "groups/reset-offsets", **wanted, to="earliest")
    assert committed(lone, "g") == {0: 0, 1: 0}
    assert "no partition 7" in refused(
        lone, "groups/reset-offsets", **wanted, partition=7, to="latest"
    )


def test_offsets_of_a_group_with_members_stay(lone):
    lone.create("t")

    def join(client):
        client.produce("t", [OutRecord(b"k", b"v")])
        member = GroupConsumer(client, "g", ["t"], reset=EARLIEST)
        while not member.poll():
            pass
        member.commit()

    with_client(lone, join)
    why = refused(lone, "groups/reset-offsets", group="g", topic="t", to="earliest")
    assert why == "group g is Stable: stop its members"
    assert committed(lone, "g") == {0: 1}


def test_settings_of_brokers(lone):
    config = lone.get("/api/v1/brokers/0/config")
    by_name = {one["name"]: one for one in config["settings"]}
    assert config["broker"] == 0 and by_name["log.dirs"]["read_only"]
    threads = by_name["log.cleaner.threads"]
    assert threads["source"] == "default" and threads["documentation"] and not threads["read_only"]
    result = done(lone, "brokers/config", broker=0, set={"log.cleaner.threads": "2"})
    line = "kept broker config set 0 --config log.cleaner.threads=2"
    assert result["command"] == f"{line} --bootstrap localhost:80"
    assert lone.node.parts.live_config.current.log_cleaner_threads == 2
    why = refused(lone, "brokers/config", broker=0, set={"log.dirs": "/x"})
    assert "Cannot update these configs dynamically" in why or "INVALID" in why
    result = done(
        lone, "brokers/config", set={"message.max.bytes": "5000"}, delete=["log.retention.ms"]
    )
    assert result["command"] == (
        "kept broker config set default --config message.max.bytes=5000 --bootstrap localhost:80"
        " && kept broker config delete default --name log.retention.ms --bootstrap localhost:80"
    )
    done(lone, "brokers/config", broker=0, delete=["log.cleaner.threads"])
    assert lone.node.parts.live_config.current.log_cleaner_threads == 1


def test_without_the_setting_nobody_may(lone_node):
    lone = lone_node()
    for path in ("topics/create", "topics/delete", "topics/alter", "produce", "brokers/config"):
        status, answer = lone.post(f"/api/v1/{path}", topic="t", value="v")
        assert status == 403 and "kept.console.actions=true" in answer["error"]["message"]
    assert not lone.node.parts.metadata.image.topics
    assert lone.get("/api/v1/brokers/0/config")["settings"], "to look is allowed"


# Command lines.


@pytest.mark.slow
def test_the_command_lines_do_the_same(lone):
    """Each is run by a shell."""
    lines = CommandLines(f"127.0.0.1:{lone.port}")
    config = {"cleanup.policy": "compact", "segment.bytes": "2048"}
    line = lines.create_topic("-t", 2, 1, config)
    run(lone, line)
    topic = lone.get("/api/v1/topics/-t")
    assert (topic["partition_count"], topic["config"]) == (2, config)
    run(lone, lines.alter_topic("-t", 3, {"segment.bytes": "4096"}, ["cleanup.policy"]))
    topic = lone.get("/api/v1/topics/-t")
    assert (topic["partition_count"], topic["config"]) == (3, {"segment.bytes": "4096"})
    headers = (("h'$(id)", b"\xff"), ("n", None))
    record = NewRecord(7, b"it's", 'line\n$HOME "x" \u202e'.encode(), headers)
    run(lone, lines.produce("-t", 1, record, timestamp=True))
    (found,) = lone.get("/api/v1/records?topic=-t&partition=1")["records"]
    assert found["timestamp"] == 7 and found["value_bytes"] == len(record.value)
    assert [one["name"] for one in found["headers"]] == ["h'$(id)", "n"]
    group = "-g; rm -rf $HOME '"
    run(lone, lines.reset_offsets(group, "-t", 1, "latest", dry_run=True))
    run(lone, lines.reset_offsets(group, "-t", 1, moment(7), dry_run=False))
    run(lone, lines.alter_broker(None, {"message.max.bytes": "5000"}, ["log.retention.ms"]))
    assert lone.node.parts.live_config.current.topic_defaults()
    run(lone, lines.delete_topic("-t"))
    assert "-t" not in lone.node.parts.metadata.image.topics


@pytest.mark.parametrize("at_ms", [0, 253_402_300_799_999, 253_402_300_800_000, 2**63 - 1])
def test_a_moment_is_what_the_command_line_reads(at_ms):
    assert PositionType().convert(moment(at_ms), None, None) == Position(PositionKind.TIME, at_ms)


def test_a_command_line_names_the_cluster():
    """Also the one that commands take by themselves: a context may name another one."""
    usual = "kept topic delete t --bootstrap localhost:9092"
    assert CommandLines("localhost:9092").delete_topic("t") == usual
    line = "kept topic delete --bootstrap node-1:9192 -- -t"
    assert CommandLines("node-1:9192").delete_topic("-t") == line
    line = 'printf \'%s\\n\' \'{"key": null, "value": "v"}\' | kept produce --json t'
    record = NewRecord(0, None, b"v", ())
    assert CommandLines("h:1").produce("t", None, record, timestamp=False) == (
        f"{line} --bootstrap h:1"
    )


@pytest.mark.parametrize("text", ["a b", "'; id; '", "$(id)", "`id`", "a\nb", "-x", "é\u202e", ""])
def test_whatever_a_name_is_it_stays_one_word(text):
    for line in (
        LINES.create_topic(text, 1, None, {text: text}),
        LINES.reset_offsets(text, text, 0, "latest", True),
        LINES.alter_topic(text, None, {}, [text]),
    ):
        words = shlex.split(line)
        assert any(text in word for word in words)
        assert [w for w in words if w == text or w.endswith(f"={text}") or w == f"{text}={text}"]
    record = NewRecord(0, text.encode(), text.encode(), ((text, text.encode()),))
    words = shlex.split(LINES.produce("t", None, record, timestamp=False))
    line = json.loads(words[2])
    assert (line["key"], line["value"], line["headers"][0]["key"]) == (text, text, text)


# Rights and the audit log.


def acl(kind, name, operation):
    allow, literal = AclPermission.ALLOW, PatternType.LITERAL
    return AclBinding(kind, name, literal, "User:ada", "*", AclOperation[operation], allow)


def test_an_action_needs_no_connection_of_its_user(lone_node):
    lone = lone_node(kept_console_actions="true", max_connections_per_ip="1", max_connections="1")
    done(lone, "topics/create", topic="t")


def test_an_action_needs_the_right_of_the_kafka_request_and_is_audited(lone_node, tmp_path):
    path = tmp_path / "audit.log"
    lone = lone_node(
        kept_console_actions="true",
        offsets_topic_num_partitions="1",
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users="User:admin",
        kept_audit_path=str(path),
    )
    lone.run(lone.node.warmed_up())
    lone.run(lone.node.parts.http._import())
    routes, parts = lone.node.parts.http._started().routes, lone.node.parts
    topic, group, cluster = AclResourceType.TOPIC, AclResourceType.GROUP, AclResourceType.CLUSTER

    def ask(path, **body):
        session = Session("User:ada", "10.0.0.1", "PLAINTEXT", authorizer=parts.authorizer)
        request = HttpRequest("POST", f"/api/v1/{path}", {}, body, session=session)
        response = lone.run(routes.respond(request))
        return response.status, response.value

    reset = {"group": "g", "topic": "t", "to": "latest"}
    steps = [
        ("topics/create", {"topic": "t"}, [(topic, "t", "CREATE")]),
        ("topics/alter", {"topic": "t", "partitions": 2}, [(topic, "t", "ALTER")]),
        (
            "topics/alter",
            {"topic": "t", "set": {"segment.bytes": "9999"}},
            [(topic, "t", "ALTER_CONFIGS")],
        ),
        ("produce", {"topic": "t", "value": "v"}, [(topic, "t", "WRITE")]),
        ("groups/reset-offsets", reset, [(group, "g", "READ"), (topic, "t", "READ")]),
        (
            "brokers/config",
            {"set": {"message.max.bytes": "5000"}},
            [(cluster, "kafka-cluster", "ALTER_CONFIGS")],
        ),
        ("topics/delete", {"topic": "t"}, [(topic, "t", "DELETE")]),
    ]
    for path_, body, rights in steps:
        for right in rights:
            status, answer = ask(path_, **body)
            assert status == 403 and "User:ada may not" in answer["error"]["message"], path_
            grant(lone, acl(*right))
        status, answer = ask(path_, **body)
        assert status == 200 and answer.done, (path_, answer)
    lone.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changes = [
        (line["principal"], line["host"], line["api"], line["names"])
        for line in lines
        if line["event"] == "change" and line["principal"] == "User:ada"
    ]
    ada = ("User:ada", "10.0.0.1")
    assert changes == [
        (*ada, "create_topics", ["t"]),
        (*ada, "create_partitions", ["t"]),
        (*ada, "incremental_alter_configs", ["2:t:segment.bytes"]),
        (*ada, "POST /api/v1/produce", ["t"]),
        (*ada, "POST /api/v1/groups/reset-offsets", ["g t"]),
        (*ada, "incremental_alter_configs", ["4::message.max.bytes"]),
        (*ada, "delete_topics", ["t"]),
    ]
    assert "5000" not in path.read_text()


def grant(lone, binding):
    values = {
        "resource_type": binding.resource_type,
        "resource_name": binding.name,
        "resource_pattern_type": binding.pattern,
        "principal": binding.principal,
        "host": binding.host,
        "operation": binding.operation,
        "permission_type": binding.permission,
    }
    answer = lone.ask(30, 3, creations=[values])
    assert int(answer.results[0].error_code) == 0, answer
