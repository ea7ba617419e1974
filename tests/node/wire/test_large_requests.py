"""Requests of many entries: bounded, served in slices in their order, dropped with their client."""

from __future__ import annotations

import time
import urllib.request

from kept.storage.records import build_batch
from tests.support.request_values import fetch_values, one_batch, produce_values

ENTRIES = 5_000
MOST = 6_000


def offsets(topic, count):
    wanted = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
    topics = [{"name": topic, "partitions": [wanted] * count}]
    return {"replica_id": -1, "isolation_level": 0, "topics": topics, "timeout": 1000}


def commits(topic, count, offset):
    partitions = [
        {
            "partition_index": number,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        for number in range(count)
    ]
    return {
        "group_id": "large",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": topic, "partitions": partitions}],
    }


def fetches(topic, count):
    topics = [{"name": topic, "partition_indexes": range(count)}]
    groups = [{"group_id": "large", "topics": topics}]
    return {"groups": groups, "require_stable": True}


def open_connections(cluster):
    with urllib.request.urlopen(f"{cluster.url()}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("kept_connections "):
                return float(line.split()[1])
    raise AssertionError("no such metric")


def test_a_request_of_too_many_entries_is_refused_and_others_are_served(
    kept_cluster, connect
) -> None:
    cluster = kept_cluster(kept_request_max_entries=MOST)
    topic = cluster.create_topic()
    wire, other = connect(cluster.port()), connect(cluster.port())
    # With an error of its own where the response has one, the connection stays.
    refused = wire.ask(
        9, 7, group_id="g", topics=fetches(topic, MOST)["groups"][0]["topics"], require_stable=False
    )
    assert (int(refused.error_code), refused.topics) == (42, ())
    assert wire.end_offset(topic) == 0
    # Else it is closed; Produce and Fetch have codecs of their own.
    produced, fetched = produce_values(topic, *[b""] * MOST), fetch_values(topic, count=MOST)
    for key, version, values in ((2, 6, offsets(topic, MOST)), (0, 9, produced), (1, 11, fetched)):
        one = connect(cluster.port())
        one.send(key, version, **values)
        assert one.is_closed(), key
        assert other.end_offset(topic) == 0
    said = cluster.log()
    for name in ("ListOffsetsRequest", "ProduceRequest", "FetchRequest", "OffsetFetchRequest"):
        assert f"a {name} v" in said
    assert "kept.request.max.entries" in said
    assert "Traceback" not in said


def test_a_request_with_too_much_to_decode_is_refused_and_records_do_not_count(
    kept_cluster, connect
) -> None:
    """Few entries, each as long as a string may be."""
    cluster = kept_cluster(kept_request_decoded_max_bytes=65536)
    topic = cluster.create_topic()
    long = "x" * 30_000
    wire = connect(cluster.port())
    refused = wire.ask(
        9,
        7,
        group_id="g",
        topics=[{"name": long, "partition_indexes": [0]}] * 3,
        require_stable=False,
    )
    assert int(refused.error_code) == 42
    batch = build_batch([(int(time.time() * 1000), None, b"v" * 200_000, ())])
    assert int(wire.produce(topic, batch).error_code) == 0
    produced, fetched = produce_values(long, batch), fetch_values(long, count=0)
    produced["topic_data"] *= 3
    fetched["topics"] *= 3
    for key, version, values in ((0, 9, produced), (1, 11, fetched)):
        one = connect(cluster.port())
        one.send(key, version, **values)
        assert one.is_closed(), key
    assert wire.end_offset(topic) == 1
    said = cluster.log()
    assert said.count("kept.request.decoded.max.bytes") == 3 and "Traceback" not in said


def test_answers_come_in_order_and_later_requests_see_what_earlier_ones_did(
    kept_broker, connect
) -> None:
    cluster = kept_broker
    topic = cluster.create_topic(partitions=600)
    wire = connect(cluster.port())
    wire.ask(10, 4, key_type=0, coordinator_keys=["large"])
    sent = []
    for offset in (1, 2):
        sent.append((8, 8, wire.send(8, 8, **commits(topic, 600, offset))))
        sent.append((2, 6, wire.send(2, 6, **offsets(topic, ENTRIES))))
        sent.append((9, 8, wire.send(9, 8, **fetches(topic, 600))))
        sent.append(
            (
                12,
                4,
                wire.send(
                    12, 4, group_id="x", generation_id=1, member_id="m", group_instance_id=None
                ),
            )
        )
    answers = []
    for key, version, wanted in sent:
        correlation_id, response = wire.response(key, version)
        assert correlation_id == wanted
        answers.append(response)
    for nth, offset in ((0, 1), (4, 2)):
        (committed,) = answers[nth].topics
        assert [int(p.error_code) for p in committed.partitions] == [0] * 600
        (listed,) = answers[nth + 1].topics
        assert [p.offset for p in listed.partitions] == [0] * ENTRIES
        (group,) = answers[nth + 2].groups
        (fetched,) = group.topics
        found = [(p.partition_index, p.committed_offset) for p in fetched.partitions]
        assert found == [(number, offset) for number in range(600)]


def test_a_client_that_leaves_in_the_middle_is_forgotten(kept_broker, connect) -> None:
    cluster = kept_broker
    topic = cluster.create_topic(partitions=600)
    steady = connect(cluster.port())
    assert steady.end_offset(topic) == 0
    steady_connections = open_connections(cluster)
    for _ in range(5):
        leaver = connect(cluster.port())
        leaver.send(2, 6, **offsets(topic, 12_000))
        leaver.send(1, 11, **fetch_values(topic, count=600))
        leaver.send(0, 9, **produce_values(topic, *[one_batch()] * 600, acks=-1))
        leaver.close()
    cluster.wait_until(
        lambda: open_connections(cluster) <= steady_connections, "those that left are forgotten"
    )
    assert "Traceback" not in cluster.log()
    assert len(steady.ask(2, 6, **offsets(topic, ENTRIES)).topics[0].partitions) == ENTRIES


def test_many_partitions_are_produced_and_fetched_in_slices(kept_broker, connect) -> None:
    cluster = kept_broker
    topic = cluster.create_topic(partitions=600)
    wire = connect(cluster.port())
    first = wire.send(0, 9, **produce_values(topic, *[one_batch()] * 600, acks=-1))
    second = wire.send(1, 11, **fetch_values(topic, count=600))
    correlation_id, produced = wire.response(0, 9)
    assert correlation_id == first
    results = produced.responses[0].partition_responses
    assert [(p.index, int(p.error_code), p.base_offset) for p in results] == [
        (number, 0, 0) for number in range(600)
    ]
    correlation_id, fetched = wire.response(1, 11)
    assert correlation_id == second
    found = fetched.responses[0].partitions
    assert [(p.partition_index, p.high_watermark) for p in found] == [(n, 1) for n in range(600)]
    assert sum(1 for p in found if p.records) == 600


def test_a_parked_fetch_of_many_partitions_wakes_for_each(kept_broker, connect) -> None:
    """What was read in slices rests, and is watched."""
    topic = kept_broker.create_topic(partitions=300)
    consumer, producer = connect(kept_broker.port()), connect(kept_broker.port())
    first = consumer.ask(1, 11, **fetch_values(topic, count=300, session_epoch=0))
    assert len(first.responses[0].partitions) == 300
    moved = []
    for epoch, number in enumerate((0, 299, 7, 150), start=1):
        asked = {"session_id": first.session_id, "session_epoch": epoch, "max_wait": 50_000}
        consumer.send(1, 11, **{**fetch_values(topic, count=0, **asked), "topics": moved})
        producer.produce(topic, one_batch(), partition=number, acks=-1)
        _, response = consumer.response(1, 11)
        (answered,) = response.responses
        (found,) = answered.partitions
        assert (found.partition_index, bool(found.records)) == (number, True)
        after = {"partition": number, "fetch_offset": 1, "partition_max_bytes": 1000}
        moved = [{"topic": topic, "partitions": [after]}]
