"""kept.Admin says what /api/v1/ says; reflection and health."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kept.client.blocking import OutRecord
from kept.client.consumer import GroupConsumer
from kept.client.records import EARLIEST
from kept.node.grpc.reflection import Symbols
from kept.node.http import routes
from kept.node.proto import admin_pb2
from kept.storage.layout import lost_file

Code = grpc.StatusCode


def to_clean(broker):
    """A compacted topic with something to clean."""
    topic = broker.create_topic(config={"cleanup.policy": "compact", "segment.bytes": "4096"})
    with broker.client() as client:
        for n in range(40):
            key = b"k%d" % (n % 3)
            client.produce(topic, [OutRecord(key, bytes(500)), OutRecord(b"gone", None)])
    return topic


@pytest.fixture
def compacted(kept_broker):
    return to_clean(kept_broker)


def over_http(broker, path):
    url = f"http://127.0.0.1:{broker.port()}{path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        pytest.fail(f"{path}: {error.read().decode()}")


def filled(reply, value):
    """The message that JSON stands for; a field that it has not is an error here."""
    return json_format.ParseDict(value, type(reply)())


def timeless(message):
    """Without the times of tombstones' end, which a dry run counts from now."""
    for field, value in message.ListFields():
        if field.name.endswith("at_ms"):
            setattr(message, field.name, 1)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                timeless(one)
    return message


def test_it_answers_what_http_answers(kept_cluster, dial):
    cluster = kept_cluster(log_cleaner_enable="false")  # nothing moves by itself
    rpc, topic = dial(cluster.port()), to_clean(cluster)
    with cluster.client() as client:
        reader = GroupConsumer(client, "readers", [topic], reset=EARLIEST)
        while not reader.poll():
            pass
        reader.close()
    for method, fields, path in (
        ("Topics", {}, "/api/v1/topics"),
        ("Topic", {"name": topic}, f"/api/v1/topics/{topic}"),
        ("Compaction", {}, "/api/v1/compaction"),
        ("Compaction", {"topic": topic}, f"/api/v1/compaction?topic={topic}"),
        ("Explain", {"topic": topic, "key": b"k1"},
         f"/api/v1/compaction/explain?topic={topic}&key=k1"),
        ("WhyMissing", {"topic": topic, "offset": 1, "key": b"gone"},
         f"/api/v1/compaction/why-missing?topic={topic}&partition=0&offset=1&key=gone"),
        ("Topic", {"name": topic, "leaders": True, "partition": 0, "segments": 2},
         f"/api/v1/topics/{topic}?leaders=true&partition=0&segments=2"),
        ("Records", {"topic": topic, "offset": 5, "limit": 3},
         f"/api/v1/records?topic={topic}&partition=0&offset=5&limit=3"),
        ("Key", {"topic": topic, "key": b"gone"}, f"/api/v1/records/key?topic={topic}&key=gone"),
        ("Passes", {"topic": topic}, f"/api/v1/compaction/passes?topic={topic}&partition=0"),
        ("History", {"topic": topic}, f"/api/v1/compaction/history?topic={topic}&partition=0"),
        ("Groups", {"name": "read"}, "/api/v1/groups?name=read"),
        ("Group", {"name": "readers"}, "/api/v1/groups/readers"),
        ("Cleaner", {}, "/api/v1/cleaner"),
        ("Quorum", {}, "/api/v1/quorum"),
        ("Replica", {"topic": topic}, f"/api/v1/compaction/replica?topic={topic}&partition=0"),
        ("Digests", {"topic": topic, "end": 80},
         f"/api/v1/compaction/digests?topic={topic}&partition=0&start=0&end=80"),
        ("Digests", {"topic": topic, "end": 80, "parts": 4},
         f"/api/v1/compaction/digests?topic={topic}&partition=0&start=0&end=80&parts=4"),
    ):  # fmt: skip
        reply = rpc.call(f"kept.Admin/{method}", **fields)
        assert timeless(reply) == timeless(filled(reply, over_http(cluster, path))), method
        assert topic in str(reply) or method in ("Digests", "Quorum", "Cleaner"), method
        assert method != "Explain" or reply.partitions[0].dry_run.segments
    reply = rpc.call("kept.Admin/Cluster")
    value = over_http(cluster, "/api/v1/cluster")
    for directory in value["log_directories"]:
        del directory["usable_bytes"]  # others use the disk, too
    for known in reply.log_directories:
        assert known.usable_bytes > 0
        known.ClearField("usable_bytes")
    assert reply == filled(reply, value)


FACES = {
    "cluster": "Cluster", "quorum": "Quorum", "topics": "Topics", "topics/NAME": "Topic",
    "groups": "Groups", "groups/NAME": "Group", "records": "Records", "records/key": "Key",
    "compaction": "Compaction", "compaction/explain": "Explain", "compaction/lost": "Lost",
    "compaction/why-missing": "WhyMissing", "compaction/replica": "Replica",
    "compaction/digests": "Digests", "compaction/passes": "Passes",
    "compaction/history": "History", "compaction/now": "CompactNow", "compaction/retry": "Retry",
    "cleaner": "Cleaner", "partitions/elect": "Elect", "voters/add": "AddVoter",
    "voters/remove": "RemoveVoter",
    "events": None, "pulse": None,  # the page's own
}  # fmt: skip


def test_each_route_has_its_method():
    listed = re.findall(r"/api/v1/([\w/-]+)", routes.__doc__)
    assert set(listed) == FACES.keys()
    methods = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name.keys()
    assert set(methods) == set(filter(None, FACES.values()))


def test_compacting_now(kept_broker, rpc, compacted):
    reply = rpc.call("kept.Admin/CompactNow", topic=compacted, partition=0, wait=True)
    (outcome,) = reply.partitions
    assert (outcome.topic, outcome.partition, outcome.done) == (compacted, 0, True)
    assert outcome.records_removed > 0 and sum(outcome.removed.values()) > 0
    assert outcome.keys_checked > 0
    (last,) = [rpc.call("kept.Admin/Passes", topic=compacted).last]
    shared = {field.name for field in last.DESCRIPTOR.fields}
    assert shared <= {field.name for field in outcome.DESCRIPTOR.fields}
    assert all(getattr(outcome, name) == getattr(last, name) for name in shared)
    (state,) = rpc.call("kept.Admin/Compaction", topic=compacted).partitions
    assert state.generation == outcome.identity
    found = rpc.call("kept.Admin/WhyMissing", topic=compacted, offset=0)
    assert found.generation and found.reason == "superseded"
    started = rpc.call("kept.Admin/CompactNow", topic=compacted).started
    assert [(one.topic, one.partition) for one in started] == [(compacted, 0)]


def test_lost_records_are_told(kept_cluster, dial):
    cluster = kept_cluster()
    topic = cluster.create_topic()
    rpc = dial(cluster.port())
    assert not rpc.call("kept.Admin/Lost").reports
    report = {
        "topic": topic, "topic_id": "x", "partition": 0, "node": 0, "leader": 1, "leader_epoch": 3,
        "first_offset": 5, "end_offset": 7, "committed_to": 6, "at_ms": 1, "why": "a test",
        "incomplete": None,
        "records": [
            {"offset": 5, "key": "k"}, {"offset": 6, "key_base64": "/w==", "tombstone": True},
        ],
    }  # fmt: skip
    Path(lost_file(f"{cluster.log_dir()}/{topic}-0", 3, 5)).write_text(json.dumps(report))
    (told,) = rpc.call("kept.Admin/Lost", topic=topic).reports
    assert told == filled(told, report)
    assert told.records[1].key_base64 == b"\xff"
    assert not rpc.call("kept.Admin/Lost", topic=topic, offset=7).reports


def test_what_is_refused(kept_broker, rpc, compacted):
    plain = kept_broker.create_topic()
    for method, fields, status, said in (
        ("Topic", {}, Code.INVALID_ARGUMENT, "name is missing"),
        ("Topic", {"name": "none"}, Code.NOT_FOUND, "there is no topic none"),
        ("Compaction", {"topic": plain}, Code.FAILED_PRECONDITION, "is not compacted"),
        ("Explain", {}, Code.INVALID_ARGUMENT, "topic is missing"),
        ("Explain", {"topic": compacted, "partition": 1}, Code.NOT_FOUND, "it has 0 to 0"),
        ("Explain", {"topic": compacted, "partition": -1}, Code.INVALID_ARGUMENT, "0 or more"),
        ("WhyMissing", {"topic": compacted, "offset": -1}, Code.INVALID_ARGUMENT, "offset"),
        ("Digests", {"topic": compacted, "start": 5}, Code.INVALID_ARGUMENT, "not 5..0"),
        ("Retry", {"topic": compacted}, Code.INVALID_ARGUMENT, "is not uncleanable"),
        ("AddVoter", {"node_id": 7}, Code.FAILED_PRECONDITION, "runs alone"),
        ("RemoveVoter", {"node_id": 7}, Code.FAILED_PRECONDITION, "runs alone"),
    ):
        code, why = rpc.refusal(f"kept.Admin/{method}", **fields)
        assert (code, said in why) == (status, True), (method, fields, code, why)


def test_reflection_lists_every_service_with_its_types(rpc):
    database = ProtoReflectionDescriptorDatabase(rpc.channel)
    services = set(database.get_services())
    assert services >= {"broker.Broker", "kept.Admin", "grpc.health.v1.Health"}
    file = database.FindFileContainingSymbol("broker.Broker")
    assert [m.name for m in file.service[0].method] == ["CreateTopic", "Produce", "Consume"]
    for member in ("broker.Broker.Produce", "broker.ProduceRequest.payload", "kept.Admin.Topic"):
        assert database.FindFileContainingSymbol(member).package == member.split(".")[0]
    for nothing in ("broker.Broker.Consum", "broker.None", "kept.Admin.", "x.y.z"):
        with pytest.raises(KeyError):
            Symbols().FindFileContainingSymbol(nothing)


def test_health(rpc):
    stub = health_pb2_grpc.HealthStub(rpc.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "broker.Broker", "kept.Admin"):
        request = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(request, timeout=60).status == serving
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watch).status == serving
    watch.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="none"), timeout=60)
    assert caught.value.code() is Code.NOT_FOUND
    assert "broker.Broker" in caught.value.details()
