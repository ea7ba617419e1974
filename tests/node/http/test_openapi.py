"""``docs/openapi.yaml`` is what a node does: its routes, their parameters, the fields of answers.

A field that the node answers and the document lacks is an error here, and so is one that the
document demands and the node lacks.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import reduce
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml
from jsonschema import Draft202012Validator, FormatChecker
from openapi_spec_validator import validate

from kept.client.client import Client, OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from kept.client.produce import init_producer_id
from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.tls import client_context, tls_config
from kept.compaction.cleaner.removal_log import Fate, Reason
from kept.node.admin.cluster_client import ClusterClient
from kept.node.admin.compaction import compaction_status
from kept.node.compaction.cleaner import Running
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.http import route_table, routes
from kept.node.replicas import lost_records_report
from kept.replication.progress import ReplicaProgress
from kept.replication.replica_effects import LostRecord, RecordsLost
from kept.storage.errors import NetworkException
from kept.storage.layout import lost_file
from kept.storage.types import TopicPartition
from tests.support.certificates import Authority
from tests.support.grpc_calls import basic
from tests.support.token_issuer import Issuer

DOCUMENT = yaml.load(
    (Path(__file__).resolve().parents[3] / "docs" / "openapi.yaml").read_text(), yaml.CSafeLoader
)
OPERATIONS = {
    (method.upper(), path): operation
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
}
NO_NODE = {
    path
    for path, methods in route_table.ROUTES.items()
    if not all(route.travels for route in methods.values())
}
"""What the node that gets the request serves itself: streams and actions."""
NEEDS_MORE_NODES = {
    ("POST", "/api/v1/partitions/elect"),
    ("POST", "/api/v1/voters/add"),
    ("POST", "/api/v1/voters/remove"),
}
"""What a lone node can only refuse."""
EXAMPLES = {
    "topic": "t",
    "partition": 0,
    "offset": 0,
    "start": 0,
    "end": 0,
    "node_id": 7,
    "group": "g",
}
"""A value for each parameter that some operation needs."""


def resolved(part):
    """Without references; what stands beside one overrides what it names."""
    if isinstance(part, list):
        return [resolved(one) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        steps = part["$ref"].removeprefix("#/").split("/")
        beside = {name: value for name, value in part.items() if name != "$ref"}
        return resolved({**reduce(dict.__getitem__, steps, DOCUMENT), **beside})
    return {name: resolved(value) for name, value in part.items()}


def closed(schema, combined=False):
    """A resolved schema that refuses fields it does not name; ``combined``: it is a part of
    another one, which does.
    """
    found = dict(schema)
    for name in {"allOf", "anyOf", "oneOf"} & schema.keys():
        found[name] = [closed(one, True) for one in schema[name]]
    for name in {"items", "additionalProperties"} & schema.keys():
        found[name] = closed(schema[name]) if isinstance(schema[name], dict) else schema[name]
    if "properties" in schema:
        found["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
    if not combined and {"properties", "allOf", "anyOf", "oneOf"} & schema.keys():
        found["unevaluatedProperties"] = False
    return found


def validator(schema):
    return Draft202012Validator(closed(resolved(schema)), format_checker=FormatChecker())


def schema_named(name):
    return DOCUMENT["components"]["schemas"][name]


def parameters(operation, place):
    """Names of the operation's parameters there, with whether each is needed."""
    listed = resolved(operation.get("parameters", []))
    return {one["name"]: one.get("required", False) for one in listed if one["in"] == place}


def given(operation):
    """What is given for it beside ``node``: in the query, or in the body of a POST."""
    if "requestBody" not in operation:
        return {n: need for n, need in parameters(operation, "query").items() if n != "node"}
    schema = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
    assert schema["additionalProperties"] is False
    return {name: name in schema["required"] for name in schema["properties"]}


class Reader:
    """Asks a node, and holds every answer against the document."""

    def __init__(self, lone):
        self.lone = lone
        self.answered = set()
        """(method, path) of what was answered with 200."""

    def ask(self, method, path, wanted=200, where="", name="", **values):
        """The JSON of an operation's answer; ``where`` is the query of a POST."""
        url, body, head = re.sub("{.*}", name, path), "", ""
        if method == "GET":
            where = urlencode(values)
        else:
            body = json.dumps(values)
            head = f"X-Kept: 1\r\nContent-Length: {len(body)}\r\n"
        start = f"{method} {url}{'?' * bool(where)}{where} HTTP/1.1\r\nHost: localhost\r\n"
        status, headers, data = self.lone.http(f"{start}{head}\r\n{body}")
        assert status == wanted, data
        self._check(OPERATIONS[method, path], status, headers, data)
        if status == 200:
            self.answered.add((method, path))
        return json.loads(data)

    def get(self, path, **values):
        return self.ask("GET", f"/api/v1/{path}", **values)

    def post(self, path, **values):
        return self.ask("POST", f"/api/v1/{path}", **values)

    def refusal(self, method, path, **values):
        """The message of a 400."""
        return self.ask(method, path, wanted=400, name="t", **values)["error"]["message"]

    @staticmethod
    def _check(operation, status, headers, data):
        responses = operation["responses"]
        found = resolved(responses.get(str(status)) or responses[f"{status // 100}XX"])
        schema = found["content"][headers["content-type"].partition(";")[0]]["schema"]
        validator(schema).validate(json.loads(data))


@pytest.fixture
def reader(lone_node):
    return Reader(lone_node(kept_console_actions="true"))


# The document by itself, and the table of routes.


def test_the_document_is_openapi():
    validate(DOCUMENT)
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)


def test_it_has_every_route_and_method_and_no_other():
    served = {
        (method, path)
        for path, methods in route_table.ROUTES.items()
        for method in methods
        if path.startswith("/api/")
    }
    assert served == OPERATIONS.keys()
    listed = set(re.findall(r"^(GET|POST) +(/api/[\w/-]+)", routes.TABLE, re.MULTILINE))
    plain = {
        (method, re.sub("{.*}", "N" if "broker" in path else "NAME", path))
        for method, path in OPERATIONS
    }
    assert listed == plain, "the list that GET / shows"


async def status_of(port, login="", tls=None):
    """That of the answer to a GET which whoever has no login may not make."""
    host = None if tls is None else "localhost"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=host)
    header = f"Authorization: {login}\r\n" if login else ""
    writer.write(f"GET /api/v1/cluster HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    return int(line.split()[1])


def test_it_has_the_logins_that_listeners_take(lone_node, tmp_path):
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert DOCUMENT["security"] == [{}, *({name: []} for name in schemes)]
    assert not any("security" in operation for operation in OPERATIONS.values())
    authority, issuer = Authority(tmp_path), Issuer()
    lone = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN,OAUTHBEARER",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil";',
        sasl_oauthbearer_jwks_endpoint_url=issuer.write(tmp_path / "keys.json"),
        ssl_keystore_location=authority.issue("node", "localhost"),
        ssl_truststore_location=authority.ca,
        ssl_client_auth="requested",
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users="User:ada;User:CN=ada",
    )
    by_sasl, by_tls = lone.node.parts.listeners

    def context(**store):
        return client_context(tls_config({"ssl.truststore.location": authority.ca, **store}))

    shown = context(**{"ssl.keystore.location": authority.issue("ada")})
    tried = {
        "basic": lone.run(status_of(by_sasl.port, basic("ada", "pencil"))),
        "bearer": lone.run(status_of(by_sasl.port, f"Bearer {issuer.token('ada')}")),
        "mutualTLS": lone.run(status_of(by_tls.port, tls=shown)),
    }
    assert tried == {one.get("scheme", one["type"]): 200 for one in schemes.values()}
    assert {name.lower() for name in by_sasl.http_schemes} == {
        one["scheme"] for one in schemes.values() if one["type"] == "http"
    }
    assert lone.run(status_of(by_sasl.port)) == 401
    assert lone.run(status_of(by_tls.port, tls=context())) == 401


def test_every_schema_is_used():
    used = set(re.findall(r"#/components/(\w+/\w+)", json.dumps(DOCUMENT)))
    assert used == {
        f"{kind}/{name}"
        for kind, names in DOCUMENT["components"].items()
        for name in names
        if kind != "securitySchemes"  # which are referred to by their names
    }


def test_it_has_every_value_that_a_field_may_have():
    assert schema_named("RemovalReason")["enum"] == [one.value for one in Reason]
    assert schema_named("OffsetFate")["enum"] == [one.value for one in Fate]
    states = ["IDLE", "WAITING", "DUE", "RUNNING", "UNCLEANABLE"]
    known = [getattr(compaction_status, name) for name in states]
    assert schema_named("CompactionState")["enum"] == known


# Parameters.


def test_parameters_are_those_that_the_node_knows(reader):
    for (method, path), operation in OPERATIONS.items():
        message = reader.refusal(method, path, unknown=1)
        said, _, known = message.partition("; there are ")
        assert said == "unknown parameter unknown", path
        names = set() if known == "none" else set(known.split(", "))
        assert names == given(operation).keys(), path


def test_parameters_are_needed_as_the_document_says(reader):
    for (method, path), operation in OPERATIONS.items():
        needed = [name for name, need in given(operation).items() if need]
        for missing in needed:
            others = {name: EXAMPLES[name] for name in needed if name != missing}
            others |= {"key": "k"} if "key" in given(operation) else {}
            message = reader.refusal(method, path, **others)
            assert re.match(f"{missing} (is missing|must be a number)", message), path


def test_another_node_may_be_asked_but_for_a_stream(reader):
    for (method, path), operation in OPERATIONS.items():
        names = parameters(operation, "query")
        assert ("node" in names) == (path not in NO_NODE), path
        query = {"node": 7} if method == "GET" else {"where": "node=7"}
        message = reader.refusal(method, path, **query)
        known = "there is no node 7" if "node" in names else "unknown parameter node"
        assert message.startswith(known), path


def test_a_post_needs_its_header_and_a_get_none():
    for (method, _), operation in OPERATIONS.items():
        needed = {"X-Kept": True} if method == "POST" else {}
        assert parameters(operation, "header") == needed


# Answers.


def fill(lone):
    """Three topics: ``t`` with two segments to clean and a tombstone, ``plain`` with a header and
    a reader in group ``readers``, ``empty``; nothing moves by itself.
    """
    lone.create("t", cleanup_policy="compact", segment_bytes="1024")
    lone.create("empty", partitions=2, cleanup_policy="compact")
    lone.create("plain", segment_bytes="1024")

    def use(client):
        for n in range(8):
            client.produce("t", [OutRecord(b"k%d" % (n % 2), bytes(300))])
        client.produce("t", [OutRecord(b"k0", None), OutRecord(b"k2", bytes(700))])
        client.produce("t", [OutRecord(b"k2", bytes(700))])
        client.produce(
            "plain", [OutRecord(None, bytes(900), headers=(("h", b"\xff"), ("none", None)))]
        )
        member = GroupConsumer(client, "readers", ["plain"], reset=EARLIEST)
        while not member.poll():
            pass
        member.commit()
        client.produce("plain", [OutRecord(None, bytes(900))])
        client.run(init_producer_id(60_000, "payments"))

    def connect():
        with Client(f"127.0.0.1:{lone.port}") as client:
            use(client)

    lone.run(asyncio.to_thread(connect))


def lose(lone):
    """A report of records that were cut away, and one that cannot be read."""
    parts = lone.node.parts
    hosted = parts.table.replicas[TopicPartition("plain", 0)]
    lost = (LostRecord(5, b"text", False), LostRecord(6, b"\xff", True))
    losing = RecordsLost(5, 7, 6, lost, None)
    lost_records_report.report(parts.runtime, parts.counters, 0, hosted, losing)
    Path(lost_file(hosted.partition.log.directory, 9, 9)).write_text("torn")


async def first_event(lone, path):
    """The first event of a stream."""
    opened, stream = await asyncio.open_connection("127.0.0.1", lone.port)
    stream.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = (await opened.readuntil(b"\r\n\r\n")).decode().lower()
    assert "content-type: text/event-stream" in head
    await opened.readline()  # the chunk's size
    line = await opened.readline()
    stream.close()
    await stream.wait_closed()
    return json.loads(line.removeprefix(b"data: "))


@pytest.fixture
def filled(lone_node):
    lone = lone_node(
        log_cleaner_backoff_ms="3600000",
        log_cleaner_min_cleanable_ratio="1",
        offsets_topic_num_partitions="1",
        transaction_state_log_num_partitions="1",
        kept_console_actions="true",
    )
    lone.run(lone.node.warmed_up())
    fill(lone)
    return Reader(lone)


def test_answers_have_the_fields_of_the_document(filled):
    cluster(filled)
    data(filled)
    before_a_pass(filled)
    during_a_pass(filled)
    after_a_pass(filled)
    what_went_wrong(filled)
    moving(filled)
    actions(filled)
    assert OPERATIONS.keys() - filled.answered == NEEDS_MORE_NODES


def cluster(reader):
    assert reader.get("cluster")["log_directories"]
    assert reader.get("quorum")["members"] and reader.get("quorum", local="true")["members"]
    assert len(reader.get("topics")["topics"]) == 5
    (partition,) = reader.get("topics/{topic}", name="t")["partitions"]
    assert partition["segments"] and partition["compaction"]
    (plain,) = reader.get("topics/{topic}", name="plain", leaders="true")["partitions"]
    assert plain["compaction"] is None and "unanswered" in plain
    assert [one["kind"] for one in plain["segments"]] == ["closed", "active"]
    there = {"topic": "t", "partition": 0}
    reader.post("partitions/elect", wanted=400, **there)
    reader.post("voters/add", wanted=400, node_id=7, address="node-7:10092")
    reader.post("voters/remove", wanted=400, node_id=7)
    reader.get("topics/{topic}", name="none", wanted=404)


def data(reader):
    first, second = reader.get("records", topic="plain", partition=0)["records"]
    assert first["headers"] and not second["headers"]
    assert reader.get("records", topic="t", partition=0, offset=8)["records"][0]["is_tombstone"]
    found = reader.get("search", topic="t", key="k0", limit=1)
    assert found["records"] and found["cursor"] and found["partition_of_key"] == 0
    reader.get("search", topic="none", wanted=404)
    (group,) = reader.get("groups", name="read")["groups"]
    assert (group["lag"], group["topics"]) == (1, ["plain"])
    (of_topic,) = reader.get("topics/{topic}/groups", name="plain")["groups"]
    assert (of_topic["lag"], of_topic["partitions_unknown"], of_topic["members"]) == (1, 0, 1)
    reader.get("topics/{topic}/groups", name="none", wanted=404)
    group = reader.get("groups/{group}", name="readers")
    assert group["members"] and group["partitions"][0]["member_id"]
    reader.get("groups/{group}", name="none", wanted=404)
    (listed,) = reader.get("transactions")["transactions"]
    detail = reader.get("transactions/{transactional_id}", name="payments")
    assert (listed["state"], detail["state"], detail["started_ms"]) == ("Empty", "Empty", -1)
    reader.get("transactions/{transactional_id}", name="none", wanted=404)
    life = reader.get("records/key", topic="t", key="k0")
    assert {one["fate"] for one in life["records"]} >= {"superseded"} and life["passes"] == []


def before_a_pass(reader):
    there = {"topic": "t", "partition": 0}
    assert len(reader.get("compaction")["partitions"]) == 5
    assert reader.get("compaction", topic="plain", wanted=400)
    (one,) = reader.get("compaction/explain", topic="t", key="k0")["partitions"]
    assert one["dry_run"]["segments"] and one["key"] and one["tombstones"]
    none, _ = reader.get("compaction/explain", topic="empty", key_base64="azA=")["partitions"]
    assert none["dry_run"] is None and none["key"] == []
    missing = reader.get("compaction/why-missing", **there, offset=99)
    assert missing["fate"] == "never written" and "winner" not in missing
    assert reader.get("compaction/passes", **there)["last"] is None
    assert reader.get("compaction/replica", **there)["generation"] is None
    found = reader.get("compaction/digests", **there, start=0, end=10)
    assert found["tail"] and not found["covered"]
    reader.lone.run(reader.lone.node.parts.dirty_history.sample())
    assert reader.get("compaction/history", **there)["samples"]
    nothing = reader.post("compaction/now", topic="empty", partition=0, wait=True)
    assert nothing["partitions"][0]["reason"]


def during_a_pass(reader):
    """Of a pass that began and does not move."""
    parts, tp = reader.lone.node.parts, TopicPartition("t", 0)
    cleaner, now_ms = parts.cleaner.started, parts.runtime.now_ms()
    plan = cleaner.plan_for(parts.table.replicas[tp], on_demand=True)
    cleaner.running[tp] = Running(plan, now_ms, leader_epoch=0, truncations=0)
    assert reader.get("cleaner")["running"]
    (one,) = reader.get("compaction", topic="t")["partitions"]
    assert (one["state"], one["progress"]) == ("running", 0) and one["cleaning_to"]
    event(reader, "running", set())
    del cleaner.running[tp]


def after_a_pass(reader):
    there = {"topic": "t", "partition": 0}
    assert len(reader.post("compaction/now", topic="empty")["started"]) == 2
    (done,) = reader.post("compaction/now", topic="t", wait=True)["partitions"]
    assert done["records_removed"]
    passes = reader.get("compaction/passes", **there)
    assert passes["last"]["records_removed"] and passes["passes"][0]["removed"]
    (one,) = reader.get("compaction", topic="t")["partitions"]
    generation = one["generation"]
    assert generation and one["tombstones_pending"] and one["next_horizon_ms"]
    life = reader.get("records/key", topic="t", key="k0")
    assert life["passes"] and life["records"][-1]["removable_at_ms"]
    why = reader.get("compaction/why-missing", **there, offset=0, key="k0")
    assert (why["fate"], why["generation"]) == ("removed", generation) and why["winner"]
    why = reader.get("compaction/why-missing", **there, offset=0, key="none")
    assert why["winner"] is None
    (one,) = reader.get("compaction/explain", topic="t")["partitions"]
    assert one["tombstones"] and "key" not in one
    ends = {"start": 0, "end": 10, "generation": generation}
    assert reader.get("compaction/digests", **there, **ends)["covered"]
    assert reader.get("compaction/digests", **there, **ends, parts=2)["buckets"]
    reader.get("compaction/digests", **there, start=0, end=10, wanted=503)
    assert reader.get("cleaner")["removed_records"]
    (partition,) = reader.get("topics/{topic}", name="t")["partitions"]
    assert partition["segments"][0]["kind"] == "clean"


def what_went_wrong(reader):
    lone, there = reader.lone, {"topic": "t", "partition": 0}
    reader.post("compaction/retry", **there, wanted=400)
    failures = lone.node.parts.cleaner.started.failures
    failures.note(TopicPartition("t", 0), "a test", lone.node.parts.runtime.now_ms(), stopped=True)
    (failed,) = reader.get("cleaner")["uncleanable"]
    assert failed["retry_at_ms"] == -1
    (one,) = reader.get("compaction", topic="t")["partitions"]
    assert (one["state"], one["retry_at_ms"]) == ("uncleanable", None)
    reader.post("compaction/retry", **there)
    lose(lone)
    whole, torn = reader.get("compaction/lost", topic="plain")["reports"]
    assert len(whole["records"]) == 2 and "cannot be read" in torn["incomplete"]
    assert reader.get("compaction/lost", topic="plain", offset=5)["reports"] == [whole]


def event(reader, seen, partition_seen, query="", path="/api/v1/events"):
    """The first event of a stream, which has these fields."""
    content = resolved(OPERATIONS["GET", path])["responses"]["200"]["content"]
    found = reader.lone.run(first_event(reader.lone, path + query))
    validator(content["text/event-stream"]["schema"]["contentSchema"]).validate(found)
    assert found[seen]
    assert partition_seen <= found.get("partition", {}).keys()


def moving(reader):
    reader.lone.run(reader.lone.node.parts.activity_history.sample())
    assert reader.get("history/throughput")["samples"]
    assert reader.get("history/throughput", topic="plain")["samples"]
    reader.get("history/throughput", topic="none", wanted=404)
    assert reader.get("history/lag", group="readers")["interval_ms"] == 15_000
    event(reader, "records_in", set())
    event(reader, "partition", {"segments", "state"}, "?topic=t&partition=0")
    event(reader, "partition", {"segments"}, "?topic=plain&partition=0")
    event(reader, "partitions", set(), "?topic=t", path="/api/v1/tail")
    reader.answered |= {("GET", "/api/v1/events"), ("GET", "/api/v1/tail")}
    assert reader.get("pulse", topic="t", partition=0)["state"]
    assert "state" not in reader.get("pulse", topic="plain", partition=0)
    assert reader.get("pulse", topic="none", partition=0) is None


def actions(reader):
    made = {"topic": "made", "partitions": 2, "config": {"cleanup.policy": "compact"}}
    assert reader.post("topics/create", **made)["done"]
    assert reader.post("topics/create", **made)["error"]
    assert reader.post("topics/alter", topic="made", set={"segment.bytes": "9999"})["done"]
    record = {"topic": "made", "key": "k", "value": "v", "headers": [{"name": "h"}]}
    assert reader.post("produce", **record)["offset"] == 0
    assert reader.post("produce", **record, partition=9)["offset"] is None
    reset = {"group": "others", "topic": "made", "to": "latest"}
    (first, _) = reader.post("groups/reset-offsets", **reset, dry_run=True)["partitions"]
    assert first["before"] is None
    assert reader.post("groups/reset-offsets", **reset)["done"]
    assert reader.post("topics/delete", topic="made")["done"]
    assert reader.post("brokers/config", set={"message.max.bytes": "5000"})["done"]
    assert reader.get("brokers/{broker}/config", name="0")["settings"]
    reader.get("brokers/{broker}/config", name="7", wanted=404)
    assert reader.get("topics/{topic}/config", name="plain")["settings"]
    reader.get("topics/{topic}/config", name="none", wanted=404)


def test_what_is_said_of_other_nodes_has_the_fields_of_the_document(reader, monkeypatch):
    reader.lone.create("t", cleanup_policy="compact")
    tp = TopicPartition("t", 0)
    followers = reader.lone.node.parts.table.replicas[tp].partition.core.followers
    with monkeypatch.context() as patch:
        patch.setitem(followers, 7, ReplicaProgress(log_end_offset=0))
        patch.setitem(followers, 8, ReplicaProgress())
        (partition,) = reader.get("topics/{topic}", name="t")["partitions"]
    assert [one["lag"] for one in partition["followers"]] == [0, None]
    assert [one["replica"] for one in partition["compaction"]["replicas"]] == [7, 8]

    async def refuse(*_):
        raise NetworkException("a test")

    with monkeypatch.context() as patch:
        patch.setattr(ClusterClient, "call", refuse)
        assert reader.get("groups")["unanswered"] == [{"node": 0, "reason": "a test"}]
        assert reader.get("transactions")["unanswered"] == [{"node": 0, "reason": "a test"}]
    validator(schema_named("Voters")).validate({"voters": [1, 2]})


def test_fields_that_are_not_in_the_document_are_found():
    """And so are those that are missing: at every depth, in combined schemas, too."""
    status = {"error": {"status": 400, "message": "no"}}
    error = validator(schema_named("Error"))
    assert error.is_valid(status)
    assert not error.is_valid({"error": {**status["error"], "more": 1}})
    assert not error.is_valid({"error": {"status": 400}})
    outcome = validator(schema_named("PassOutcome"))
    failed = {"topic": "t", "partition": 0, "done": False, "error": "why"}
    assert outcome.is_valid(failed)
    assert not outcome.is_valid({**failed, "more": 1})
    assert not outcome.is_valid({**failed, "done": True})
