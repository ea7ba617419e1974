"""Operations beyond Kafka, over HTTP, on a real node with real passes."""

import base64
import errno
import json

import pytest

from kept.node.admin.compaction.compaction_status import UNCLEANABLE
from kept.node.config.definitions import TOPIC_SETTINGS
from kept.storage.errors import MachineError
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition

NOW = 1_700_000_000_000


def append(lone, topic, records, partition=0):
    """Append (key, value) pairs, one batch each, and roll."""
    tp = TopicPartition(topic, partition)
    hosted = lone.node.parts.table.replicas[tp]
    for number, (key, value) in enumerate(records):
        batch = build_batch([(NOW + number, key, value, ())])
        hosted.partition.append(check(batch, hosted.rules, NOW), NOW)
    hosted.partition.write()
    hosted.partition.log.roll(NOW)


@pytest.fixture
def compacted(lone_node):
    """A node whose cleaner only works when asked, with a compacted topic: a twice, b, c deleted."""
    lone = lone_node(log_cleaner_backoff_ms="3600000", log_cleaner_min_cleanable_ratio="1")
    lone.create("t", cleanup_policy="compact", message_timestamp_before_max_ms=str(2**62))
    append(lone, "t", [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"c", None)])
    return lone


def partition_of(lone, topic="t"):
    (found,) = lone.get(f"/api/v1/compaction?topic={topic}")["partitions"]
    return found


# Cluster and topics.


def test_cluster(lone):
    lone.create("a", 3)
    found = lone.get("/api/v1/cluster")
    assert found["cluster_id"] == lone.node.parts.identity.cluster_id
    assert (found["node_id"], found["controller_id"], found["ready"]) == (0, 0, True)
    assert (found["topics"], found["partitions"], found["offline_partitions"]) == (1, 3, 0)
    assert (found["internal_topics"], found["internal_partitions"]) == (0, 0)
    assert found["brokers"] == [
        {
            "node_id": 0,
            "epoch": lone.node.parts.identity.broker_epoch,
            "rack": None,
            "fenced": False,
            "leads": 3,
            "replicas": 3,
            "internal_leads": 0,
            "internal_replicas": 0,
            "endpoints": [f"PLAINTEXT://localhost:{lone.port}"],
        }
    ]
    (directory,) = found["log_directories"]
    assert directory["offline"] is None
    assert 0 < directory["usable_bytes"] <= directory["total_bytes"]


def test_topics(lone):
    lone.create("b", 2, cleanup_policy="compact,delete")
    lone.create("a")
    lone.create("__consumer_offsets")
    found = {topic["name"]: topic for topic in lone.get("/api/v1/topics")["topics"]}
    assert list(found) == ["__consumer_offsets", "a", "b"]
    assert found["__consumer_offsets"]["internal"]
    assert found["b"]["cleanup_policy"] == ["compact", "delete"]
    assert (found["b"]["partition_count"], found["b"]["replication_factor"]) == (2, 1)
    sums = lone.get("/api/v1/cluster")
    assert (sums["topics"], sums["internal_topics"]) == (3, 1)
    assert (sums["partitions"], sums["internal_partitions"]) == (4, 1)
    (broker,) = sums["brokers"]
    assert (broker["leads"], broker["internal_leads"]) == (4, 1)
    assert (broker["replicas"], broker["internal_replicas"]) == (4, 1)


def test_a_topic_with_its_segments(compacted):
    append(compacted, "t", [(b"d", b"1")])
    found = compacted.get("/api/v1/topics/t")
    assert found["config"]["cleanup.policy"] == "compact"
    assert found["broker_defaults"]["min.cleanable.dirty.ratio"] == "1.0"
    (partition,) = found["partitions"]
    assert (partition["leader"], partition["isr"], partition["offline"]) == (0, [0], None)
    assert (partition["log_start_offset"], partition["high_watermark"]) == (0, 6)
    assert partition["log_end_offset"] == 6
    segments = partition["segments"]
    assert [(s["base_offset"], s["next_offset"], s["kind"]) for s in segments] == [
        (0, 5, "dirty"),
        (5, 6, "dirty"),
        (6, 6, "active"),
    ]
    assert sum(s["size_bytes"] for s in segments) == partition["size_bytes"]
    assert partition["compaction"]["state"] == "waiting"


def test_all_settings_of_a_topic(lone_node):
    """With the value in force, what it would be by default, and where it comes from."""
    lone = lone_node(log_retention_hours="2", log_segment_bytes="4000000")
    lone.create("t", cleanup_policy="compact", segment_bytes="70000")
    found = lone.get("/api/v1/topics/t/config")
    settings = {one.pop("name"): one for one in found["settings"]}
    assert found["topic"] == "t" and list(settings) == sorted(TOPIC_SETTINGS)
    assert all(one["documentation"] for one in settings.values())
    shown = {
        name: tuple(settings[name][field] for field in ("value", "default", "source"))
        for name in (
            "cleanup.policy",
            "segment.bytes",
            "retention.ms",
            "segment.ms",
            "kept.compaction.latest.n",
        )
    }
    assert shown == {
        "cleanup.policy": ("compact", "delete", "topic"),
        "segment.bytes": ("70000", "4000000", "topic"),
        "retention.ms": ("7200000", "7200000", "broker file"),
        "segment.ms": ("604800000", "604800000", "default"),
        "kept.compaction.latest.n": (None, None, "default"),
    }
    assert settings["segment.bytes"]["allowed"] == "at least 1024"
    assert settings["cleanup.policy"]["type"] == "list"


def test_segments_of_a_topic_that_is_not_compacted(lone):
    lone.create("t", message_timestamp_before_max_ms=str(2**62))
    append(lone, "t", [(b"a", b"1")])
    (partition,) = lone.get("/api/v1/topics/t")["partitions"]
    assert [s["kind"] for s in partition["segments"]] == ["closed", "active"]
    assert partition["compaction"] is None


def test_thousands_of_partitions_in_pieces(lone):
    lone.create("many", 300)
    found = lone.get("/api/v1/topics/many")
    assert [p["partition"] for p in found["partitions"]] == list(range(300))


def test_an_offline_directory(lone):
    lone.create("t")
    directory = lone.node.parts.table.directories[0]

    async def fail():
        lone.node.parts.failures.fail(
            directory, MachineError("x", "write", OSError(errno.EIO, "EIO"))
        )

    lone.run(fail())
    (partition,) = lone.get("/api/v1/topics/t")["partitions"]
    assert "EIO" in partition["offline"]
    assert "segments" not in partition
    found = lone.get("/api/v1/cluster")
    assert found["offline_partitions"] == 1
    assert not found["ready"]
    assert "EIO" in found["reason"]


# Compaction.


def test_status_of_a_dirty_log(compacted):
    found = partition_of(compacted)
    assert (found["topic"], found["partition"], found["state"]) == ("t", 0, "waiting")
    assert "min.cleanable.dirty.ratio" in found["reason"]
    assert found["dirty_ratio"] == 1.0
    assert (found["first_dirty_offset"], found["cleanable_end_offset"]) == (0, 5)
    assert found["dirty_bytes"] > 0
    assert (found["generation"], found["last_compaction_ms"]) == (None, None)


def test_only_compacted_topics_are_listed(compacted):
    compacted.create("plain")
    compacted.create("other", cleanup_policy="compact")
    found = compacted.get("/api/v1/compaction")["partitions"]
    assert [(p["topic"], p["partition"]) for p in found] == [("other", 0), ("t", 0)]
    assert found[0]["state"] == "idle"


def test_explain_says_what_a_pass_would_do_and_writes_nothing(compacted):
    before = partition_of(compacted)
    (found,) = compacted.get("/api/v1/compaction/explain?topic=t&key=a")["partitions"]
    assert found["due"] is False
    assert found["reason"] == "100 % dirty, limit 100 % (min.cleanable.dirty.ratio)"
    assert found["status"]["summary"] == f"waiting: {found['reason']}"
    assert found["status"]["dirty_ratio_limit"] == 1
    dry = found["dry_run"]
    assert (dry["first_dirty"], dry["end_offset"], dry["records"]) == (0, 5, 5)
    assert dry["removed"]["superseded"] == 2
    assert dry["tombstones_kept"] == 1
    assert [(r["offset"], r["fate"]) for r in found["key"]] == [(0, "superseded"), (2, "survives")]
    assert partition_of(compacted) == before


def test_explain_with_nothing_cleanable(compacted):
    compacted.create("empty", cleanup_policy="compact")
    (found,) = compacted.get("/api/v1/compaction/explain?topic=empty&partition=0&key=a")[
        "partitions"
    ]
    assert (found["due"], found["dry_run"], found["key"]) == (False, None, [])


def test_compact_now_and_why_missing(compacted):
    status, answer = compacted.post("/api/v1/compaction/now", topic="t", wait=True)
    assert status == 200
    (done,) = answer["partitions"]
    assert done["done"] is True
    assert done["records_removed"] == 2
    assert done["clean_to"] >= 5
    found = partition_of(compacted)
    assert found["state"] == "idle"
    assert found["generation"] == done["identity"]
    assert found["last_compaction_ms"] is not None

    def why(offset, key=""):
        return compacted.get(
            f"/api/v1/compaction/why-missing?topic=t&partition=0&offset={offset}{key}"
        )

    removed = why(0, "&key_base64=" + base64.b64encode(b"a").decode())
    assert (removed["fate"], removed["reason"]) == ("removed", "superseded")
    assert removed["generation"] == done["identity"]
    assert removed["winner"]["offset"] == 2
    assert why(2)["fate"] == "present"
    assert why(4)["fate"] == "present"
    assert why(99)["fate"] == "never written"
    assert why(0, "&key=nobody")["winner"] is None


def test_compact_now_without_waiting(compacted):
    status, answer = compacted.post("/api/v1/compaction/now", topic="t", partition=0)
    assert (status, answer) == (200, {"started": [{"topic": "t", "partition": 0}]})
    status, answer = compacted.post("/api/v1/compaction/now", topic="t", wait=True)
    assert status == 200


def test_nothing_to_compact(compacted):
    compacted.create("empty", cleanup_policy="compact")
    _, answer = compacted.post("/api/v1/compaction/now", topic="empty", wait=True)
    (found,) = answer["partitions"]
    assert found["done"] is False
    assert found["reason"]


def test_an_uncleanable_partition(compacted):
    parts = compacted.node.parts
    failures, now_ms = parts.cleaner.started.failures, parts.runtime.now_ms()
    failures.note(TopicPartition("t", 0), "offset map too small", now_ms)
    found = partition_of(compacted)
    assert (found["state"], found["reason"]) == (UNCLEANABLE, "offset map too small")
    assert found["failures"] == 1
    assert found["retry_at_ms"] > now_ms
    assert compacted.post("/api/v1/compaction/retry", topic="t", partition=0) == (
        200,
        {"topic": "t", "partition": 0, "retrying": True},
    )
    assert partition_of(compacted)["retry_at_ms"] == 0


def test_a_dry_run_over_a_damaged_log_says_so(compacted, tmp_path):
    log = compacted.node.parts.table.partition(TopicPartition("t", 0)).log
    path = f"{log.directory}/00000000000000000000.log"
    with open(path, "r+b") as file:
        file.seek(70)
        file.write(b"\xff")
    status, _, body = compacted.http(
        "GET /api/v1/compaction/explain?topic=t HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    assert status == 500
    assert "00000000000000000000.log: damaged at byte " in json.loads(body)["error"]["message"]


def test_only_so_many_dry_runs_wait(compacted, monkeypatch):
    from kept.node.compaction import dry_run

    monkeypatch.setattr(dry_run, "MAX_WAITING", -1)
    status, _, body = compacted.http(
        "GET /api/v1/compaction/explain?topic=t HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    assert status == 503
    assert "dry runs" in json.loads(body)["error"]["message"]
    monkeypatch.undo()
    assert compacted.get("/api/v1/compaction/explain?topic=t")["partitions"]


def test_with_the_cleaner_off(lone_node):
    lone = lone_node(log_cleaner_enable="false")
    lone.create("t", cleanup_policy="compact", message_timestamp_before_max_ms=str(2**62))
    append(lone, "t", [(b"a", b"1"), (b"a", b"2")])
    found = partition_of(lone)
    assert (found["state"], found["reason"]) == (
        "waiting",
        "the cleaner is off: log.cleaner.enable is false",
    )
    _, answer = lone.post("/api/v1/compaction/now", topic="t", wait=True)
    assert answer["partitions"][0]["records_removed"] == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/api/v1/topics/nope", None, 404, "there is no topic nope"),
        ("GET", "/api/v1/compaction?topic=nope", None, 404, "there is no topic nope"),
        ("GET", "/api/v1/compaction?topic=plain", None, 400, "plain is not compacted"),
        ("GET", "/api/v1/compaction/explain?topic=plain", None, 400, "plain is not compacted"),
        ("GET", "/api/v1/compaction/explain?topic=t&partition=9", None, 404, "no partition 9"),
        (
            "GET",
            "/api/v1/compaction/why-missing?topic=t&partition=9&offset=1",
            None,
            404,
            "t has no partition 9; it has 0 to 0",
        ),
        ("POST", "/api/v1/compaction/now", {"topic": "plain"}, 400, "plain is not compacted"),
        ("POST", "/api/v1/compaction/now", {"topic": "nope"}, 404, "there is no topic nope"),
        (
            "POST",
            "/api/v1/compaction/retry",
            {"topic": "t", "partition": 0},
            400,
            "t:0 is not uncleanable",
        ),
    ],
)
def test_refused(compacted, method, path, body, *, status, message):
    compacted.create("plain")
    if method == "POST":
        found, answer = compacted.post(path, **body)
    else:
        found, _, raw = compacted.http(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = json.loads(raw)
    assert found == status
    assert message in answer["error"]["message"]
