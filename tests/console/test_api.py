"""What the console asks of the node: records, keys, groups, streams, other nodes, its buttons."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request

import pytest

from kept.client.client import OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from kept.storage.types import TopicPartition
from tests.console.scene import begin_transaction

COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "4096"}


def ask(cluster, path, i=0, body=None, headers=None, **query):
    """(status, value); a body makes it a POST."""
    url = cluster.url(i) + "/api/v1/" + path + "?" + urllib.parse.urlencode(query)
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"X-Kept": "1", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def given(cluster, path, i=0, **query):
    status, value = ask(cluster, path, i, **query)
    assert status == 200, value
    return value


def fill(cluster, topic, records=40, partition=0):
    with cluster.client() as client:
        for n in range(records):
            record = OutRecord(b"k%d" % (n % 3), b"v%d" % n + bytes(500), partition=partition)
            client.produce(topic, [record])


def test_records_by_offset_time_and_from_the_end(kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    with kept_broker.client() as client:
        for n in range(10):
            record = OutRecord(
                b"\xff%d" % n,
                None if n == 4 else bytes(5000),
                timestamp=1000 * (n + 1),
                headers=(("h", b"\0"),),
                partition=1,
            )
            client.produce(topic, [record])
    there = {"topic": topic, "partition": 1}
    found = given(kept_broker, "records", **there, limit=3)
    assert [one["offset"] for one in found["records"]] == [7, 8, 9]
    assert (found["log_start_offset"], found["high_watermark"]) == (0, 10)
    assert (found["first_offset"], found["next_offset"]) == (7, 10)
    found = given(kept_broker, "records", **there, offset=4, limit=2)
    dead, alive = found["records"]
    assert (dead["offset"], dead["is_tombstone"], dead["value_base64"]) == (4, True, None)
    assert base64.b64decode(dead["key_base64"]) == b"\xff4" and not alive["is_tombstone"]
    assert alive["value_bytes"] == 5000 and len(base64.b64decode(alive["value_base64"])) == 4096
    assert alive["headers"] == [{"name": "h", "value_base64": "AA=="}]
    assert found["next_offset"] == 6
    (whole,) = given(kept_broker, "records", **there, offset=5, limit=1)["records"]
    assert base64.b64decode(whole["value_base64"]) == bytes(5000)
    found = given(kept_broker, "records", **there, timestamp=2500, limit=1)
    assert found["records"][0]["offset"] == 2
    found = given(kept_broker, "records", **there, timestamp=10**12)
    assert (found["records"], found["first_offset"]) == ([], 10)
    assert given(kept_broker, "records", **there, offset=99)["records"] == []
    assert given(kept_broker, "records", topic=topic, partition=0)["records"] == []
    for wrong, why in (
        ({"limit": 0}, "limit must be 1 to 200"),
        ({"offset": 1, "timestamp": 1}, "use one of them"),
        ({"partition": 2}, "has no partition 2"),
    ):
        status, said = ask(kept_broker, "records", **{**there, **wrong})
        assert status in (400, 404) and why in said


@pytest.mark.slow
def test_the_life_of_a_key_and_what_passes_removed(kept_cluster):
    cluster = kept_cluster(log_cleaner_enable="false")
    topic = cluster.create_topic(partitions=3, config=COMPACTED)
    plain = cluster.create_topic()
    with cluster.client() as client:
        (at,) = {one.partition for one in client.produce(topic, [OutRecord(b"k1", b"first")])}
    fill(cluster, topic, partition=at)
    fill(cluster, plain, 6)
    life = given(cluster, "records/key", topic=topic, key="k1")
    assert life["partition"] == at and life["passes"] == []
    fates = [one["fate"] for one in life["records"]]
    assert fates[0] == "superseded" and fates[-1] == "not cleanable yet" and len(fates) == 14
    status, _ = ask(cluster, "compaction/now", body={"topic": topic, "partition": at, "wait": True})
    assert status == 200
    life = given(cluster, "records/key", topic=topic, key_base64="azE=", partition=at)
    assert len(life["records"]) == 1
    (told,) = life["passes"]
    assert told["generation"] == "0.1" and told["removed"] == {"superseded": 38}
    passes = given(cluster, "compaction/passes", topic=topic, partition=at)
    assert passes["passes"] == [told] and passes["last"]["records_removed"] == 38
    assert passes["last"]["bytes_after"] < passes["last"]["bytes_before"]
    found = given(cluster, "records/key", topic=plain, key="k2")
    assert [one["offset"] for one in found["records"]] == [2, 5]


def test_groups_and_their_lag(kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    name = f"readers of {topic}/?&"
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(b"k", b"v", partition=1)] * 3)
        reader = GroupConsumer(client, name, [topic], reset=EARLIEST)
        while not reader.poll():
            pass
        reader.commit()
        client.produce(topic, [OutRecord(b"k", b"v", partition=1)] * 4)
        (one,) = given(kept_broker, "groups", name=name)["groups"]
        assert (one["group"], one["state"], one["members"], one["lag"]) == (name, "Stable", 1, 4)
        found = given(kept_broker, "groups/" + urllib.parse.quote(name, safe=""))
        (row,) = [row for row in found["partitions"] if row["partition"] == 1]
        assert (row["committed_offset"], row["high_watermark"], row["lag"]) == (3, 7, 4)
        assert row["member_id"] == found["members"][0]["member_id"]
        reader.close()
    status, said = ask(kept_broker, "groups/nobody")
    assert status >= 400 and "no group nobody" in said


def test_a_group_whose_name_ends_in_a_slash_is_not_another_one(kept_broker):
    topic = kept_broker.create_topic()
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(b"k", b"v")] * 3)
        for name, offset in ((topic, 1), (f"{topic}/", 2)):
            client.commit(name, {TopicPartition(topic, 0): offset})
    for name, spelled, offset in (
        (topic, topic, 1),
        (topic, f"{topic}/", 1),
        (f"{topic}/", f"{topic}%2F", 2),
        (f"{topic}/", f"{topic}%2F/", 2),
    ):
        found = given(kept_broker, f"groups/{spelled}")
        (row,) = found["partitions"]
        assert (found["group"], row["committed_offset"]) == (name, offset), spelled


def test_transactional_ids(kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    name = f"bank of {topic}/?&"
    producer_id = begin_transaction(kept_broker, name, topic, 1)
    listed = given(kept_broker, "transactions", name=name)
    (one,) = listed["transactions"]
    assert (one["transactional_id"], one["state"]) == (name, "Ongoing")
    assert (one["producer_id"], listed["left_out"]) == (producer_id, 0)
    found = given(kept_broker, "transactions/" + urllib.parse.quote(name, safe=""))
    assert found["partitions"] == [{"topic": topic, "partition": 1}]
    assert (found["state"], found["timeout_ms"]) == ("Ongoing", 600_000)
    assert found["started_ms"] > 0 and found["coordinator"] == one["coordinator"]
    status, said = ask(kept_broker, "transactions/nobody")
    assert status == 404 and "nobody" in said


def test_the_page_may_only_do_what_the_setting_allows(kept_cluster):
    body = {"topic": "t", "partition": 0}
    for allowed in (False, True):
        cluster = kept_cluster(kept_console_actions=str(allowed).lower())
        assert given(cluster, "cluster")["actions"] is allowed
        own = {"Origin": cluster.url(), "Sec-Fetch-Site": "same-origin"}
        for path in ("compaction/now", "partitions/elect"):
            status, said = ask(cluster, path, body=body, headers=own)
            if allowed:
                assert status == 404 and "no topic t" in said
            else:
                assert status == 400 and "kept.console.actions" in said
            foreign = {"Origin": "http://elsewhere.example"}
            status, said = ask(cluster, path, body=body, headers=foreign)
            assert status == 400 and "elsewhere" in said
            assert ask(cluster, path, body=body)[0] == 404  # a command, no browser
            status, said = ask(cluster, path)
            assert status == 405


def open_stream(cluster, query="", path="/api/v1/events"):
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port(), timeout=60)
    connection.request("GET", f"{path}{query}")
    return connection, connection.getresponse()


def event(answer):
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    return json.loads(line.removeprefix(b"data: "))


@pytest.mark.slow
def test_a_stream_tells_what_moves_and_there_are_few(kept_cluster):
    cluster = kept_cluster(kept_console_max_streams="2")
    topic = cluster.create_topic(config=COMPACTED)
    first, answer = open_stream(cluster, f"?topic={topic}&partition=0")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert event(answer)["partition"]["high_watermark"] == 0
    second, other = open_stream(cluster)
    assert event(other)["records_in"] == 0
    third, refused = open_stream(cluster)
    assert refused.status == 503 and b"kept.console.max.streams" in refused.read()
    fill(cluster, topic, 12)
    while (seen := event(answer))["partition"]["high_watermark"] < 12:
        pass
    assert seen["partition"]["segments"] > 1 and seen["records_in"] == 12
    for one in (first, second, third, answer, other):
        one.close()

    def admitted():
        connection, answer = open_stream(cluster)
        connection.close()
        answer.close()
        return answer.status == 200

    cluster.wait_until(admitted, "streams that were left make room")
    assert cluster.stop() == 0


def say_the_same_everywhere(cluster, topic, leaders):
    """Whichever node is asked about a partition of one replica, its leader answers."""
    for i in range(3):
        told = given(cluster, "compaction/explain", i, topic=topic, key="k1")["partitions"]
        assert [(one["partition"], one["status"]["node"]) for one in told] == list(leaders.items())
        assert all(len(one["key"]) == 3 for one in told)
        for partition in leaders:
            there = {"topic": topic, "partition": partition}
            life = given(cluster, "records/key", i, **there, key="k1")
            assert [one["offset"] for one in life["records"]] == [1, 4, 7]
            why = given(cluster, "compaction/why-missing", i, **there, offset=99, key="k1")
            assert (why["fate"], why["winner"]["offset"]) == ("never written", 7)
            status, said = ask(cluster, "compaction/retry", i, body=there)
            assert status == 400 and said.startswith(f"{topic}:{partition} is not uncleanable")


@pytest.mark.slow
def test_any_node_answers_for_all(kept_cluster):
    cluster = kept_cluster(3, log_cleaner_enable="false")
    topic = cluster.create_topic(partitions=3, config=COMPACTED)
    for partition in range(3):
        fill(cluster, topic, 9, partition)
    views = [given(cluster, f"topics/{topic}", i, leaders="true", segments=2) for i in range(3)]
    for view in views:
        for one in view["partitions"]:
            assert one["compaction"]["leads"] and one["compaction"]["node"] == one["leader"]
            assert [other["lag"] for other in one["followers"]] == [0, 0]
            assert one["high_watermark"] == 9 and len(one["segments"]) <= 2
    (first,) = given(cluster, f"topics/{topic}", leaders="true", limit=1)["partitions"]
    assert first["partition"] == 0 and first["compaction"]["leads"]
    leader = views[0]["partitions"][0]["leader"]
    other = (leader + 1) % 3
    said = given(cluster, "compaction", other, topic=topic, node=leader)["partitions"]
    assert {one["node"] for one in said} == {leader}
    assert ask(cluster, "compaction", other, topic="none", node=leader)[0] == 404
    status, why = ask(cluster, "cluster", other, node=7)
    assert status == 400 and "nodes: 0, 1, 2" in why
    members = [given(cluster, "quorum", i) for i in range(3)]
    assert len({one["leader_id"] for one in members}) == 1
    for one in members:
        assert [m["node_id"] for m in one["members"]] == [0, 1, 2]
    body = {"topic": topic, "partition": 0, "wait": True}
    _, refused = ask(cluster, "compaction/now", leader, body=body, node=other)
    assert refused["partitions"][0]["error"] == (
        f"node {other} does not lead it: node {leader} does"
    )
    status, done = ask(cluster, "compaction/now", other, body=body)
    assert status == 200 and done["partitions"][0]["done"]
    _, done = ask(cluster, "compaction/now", other, body={"topic": topic, "wait": True})
    told = {one["partition"]: one.get("records_removed") for one in done["partitions"]}
    assert told == {0: None, 1: 6, 2: 6}, done  # the first is clean: asked for above
    _, started = ask(cluster, "compaction/now", other, body={"topic": topic})
    assert [one["partition"] for one in started["started"]] == [0, 1, 2] and len(started) == 1
    records = given(cluster, "records", other, topic=topic, partition=0)["records"]
    assert [one["offset"] for one in records] == [6, 7, 8]
    alone = cluster.create_topic(partitions=3, replication_factor=1, config=COMPACTED)
    at = {
        one["partition"]: one["leader"] for one in given(cluster, f"topics/{alone}")["partitions"]
    }
    for partition in at:
        fill(cluster, alone, 9, partition)
    for i in range(3):  # what other nodes serve is not offline
        assert given(cluster, "cluster", i)["offline_partitions"] == 0
        assert not any(one["offline_partitions"] for one in given(cluster, "topics", i)["topics"])
    say_the_same_everywhere(cluster, alone, at)
    cluster.kill(leader)
    (orphan,) = (partition for partition, node in at.items() if node == leader)
    status, said = ask(cluster, "records/key", other, topic=alone, partition=orphan, key="k1")
    assert (status == 503 and f"{alone}:{orphan} is led by node {leader}" in said) or (
        status == 400 and "no leader now" in said
    )
    _, done = ask(cluster, "compaction/now", other, body={"topic": alone, "wait": True})
    for one in done["partitions"]:
        if at[one["partition"]] != leader:
            assert one["done"] and one["records_removed"] == 6, one
        else:
            assert f"its leader, node {leader}, was asked: " in one["error"] or (
                "no leader for it now" in one["error"]
            )
    assert len(done["partitions"]) == 3
    view = given(cluster, f"topics/{topic}", other, leaders="true")
    assert len(view["partitions"]) == 3


def searched(cluster, i, **query):
    """(partition, offset) of all that a search finds at node i, and why partitions are missing."""
    found, errors, cursor = [], {}, {}
    while True:
        page = given(cluster, "search", i, **query, **cursor)
        found += [(one["partition"], one["offset"]) for one in page["records"]]
        errors |= {one["partition"]: one["error"] for one in page["ends"] if one["error"]}
        # A partition whose leader does not answer is left to a later search: its cursor goes on.
        if page["cursor"] is None or all(one["done"] or one["error"] for one in page["ends"]):
            return found, errors
        cursor = {"cursor": page["cursor"]}


def moved(cluster, i, group):
    """Lag of a group in the list, by itself and by its topic at node i."""
    (listed,) = given(cluster, "groups", i, name=group)["groups"]
    one = given(cluster, f"groups/{group}", i)
    (of_topic,) = given(cluster, f"topics/{one['partitions'][0]['topic']}/groups", i)["groups"]
    lags = [(row["lag"], row["partitions_unknown"]) for row in (listed, one, of_topic)]
    assert len(set(lags)) == 1, "one number everywhere"
    return lags[0]


@pytest.mark.slow
def test_any_node_searches_and_changes_what_others_lead(kept_cluster):
    """Also with one of three killed."""
    cluster = kept_cluster(3, kept_console_actions="true")

    def act(path, i, **body):
        status, result = ask(cluster, path, i, body=body)
        assert status == 200 and result["error"] is None, result
        return result

    act("topics/create", 1, topic="t", partitions=6)
    act("topics/create", 2, topic="one", partitions=3, replication_factor=1)
    act("topics/alter", 0, topic="t", set={"retention.ms": "-1"}, partitions=7)
    assert given(cluster, "topics/t", 2)["partition_count"] == 7
    placed = set()
    for n in range(21):
        result = act("produce", n % 3, topic="t", key=f"k{n}", value=f"v{n}", timestamp=1000 + n)
        placed.add((result["partition"], result["offset"]))
    at = {one["partition"]: one["leader"] for one in given(cluster, "topics/one")["partitions"]}
    for number in at:
        act("produce", 0, topic="one", value="x", partition=number)
    for i in range(3):
        found, errors = searched(cluster, i, topic="t", limit=4)
        assert set(found) == placed and len(found) == 21 and not errors
        newest = given(cluster, "search", i, topic="t", limit=1)["records"][0]
        assert newest["timestamp"] == 1020
        (one,) = given(cluster, "search", i, topic="t", key="k7")["records"]
        assert one["timestamp"] == 1007
        assert given(cluster, f"brokers/{(i + 1) % 3}/config", i)["broker"] == (i + 1) % 3
    reset = {"group": "g", "topic": "t", "to": "earliest"}
    assert not act("groups/reset-offsets", 0, **reset, dry_run=True)["done"]
    assert act("groups/reset-offsets", 1, **reset)["done"]
    assert {moved(cluster, i, "g") for i in range(3)} == {(21, 0)}
    connection, stream = open_stream(cluster, path="/api/v1/tail?topic=t")
    assert event(stream)["partitions"] == 7
    leader = next(node for node in at.values() if node != 0)
    cluster.kill(leader)
    act("produce", 0, topic="t", key="late", value="late")
    tailed = event(stream)
    assert [one["key_base64"] for one in tailed["records"]] == ["bGF0ZQ=="]
    connection.close()
    cluster.wait_until(lambda: len(searched(cluster, 0, topic="t")[0]) == 22, "all are found")
    found, errors = searched(cluster, 0, topic="one")
    orphans = {number for number, node in at.items() if node == leader}
    assert errors.keys() == orphans and {partition for partition, _ in found} == at.keys() - orphans
    other = ({1, 2} - {leader}).pop()
    cluster.wait_until(lambda: bool(given(cluster, "groups", other)["groups"]), "g is found")
    cluster.wait_until(lambda: moved(cluster, other, "g") == (22, 0), "its lag is known")
    status, said = ask(cluster, "groups/reset-offsets", other, body={**reset, "topic": "one"})
    assert status == 200 and not said["done"] and "are not known" in said["error"]
    history = given(cluster, "history/throughput", other, topic="t")
    assert leader not in history["nodes"]
    assert [one["node"] for one in history["unanswered"]] == [leader]
    act("topics/delete", other, topic="t")
    assert ask(cluster, "topics/t")[0] == 404
