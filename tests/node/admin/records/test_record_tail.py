"""Following a topic: what comes, what is left out and counted, when it ends."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from kept.client.client import Client, OutRecord
from kept.client.transactional_producer import TransactionalProducer
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.admin.records import partition_records, record_tail
from kept.node.admin.records.record_filter import RecordFilter
from kept.node.http.messages import HttpRequest
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.client_usage import UNMETERED
from kept.node.security.session import Session
from kept.storage.errors import NetworkException

HEAD = "HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def produced(lone, records, topic="t"):
    def write():
        with Client(f"127.0.0.1:{lone.port}") as client:
            client.produce(topic, records)

    await asyncio.to_thread(write)


def values(event):
    return [base64.b64decode(one.record.value_base64 or "") for one in event.records]


def text(n, partition=0, **more):
    return OutRecord(b"k", b"%d" % n, timestamp=1000 + n, partition=partition, **more)


async def begun(lone, **wanted):
    tail = lone.node.parts.admin.tails.tail(UNMETERED, "t", RecordFilter(**wanted))
    event = await tail.begin()
    assert event.records == []
    return tail


async def test_it_begins_at_the_end_and_merges_partitions(lone):
    await lone.created("t", 3)
    await produced(lone, [text(0), text(0, 1)])
    tail = await begun(lone)
    event = await tail.poll()
    assert (event.partitions, event.records, event.left_out) == (3, [], 0)
    await produced(lone, [text(5, 2), text(7, 0), text(6, 1)])
    event = await tail.poll()
    assert values(event) == [b"5", b"6", b"7"] and event.left_out == 0
    assert [one.partition for one in event.records] == [2, 1, 0]
    assert (await tail.poll()).records == []
    tail.close()


async def test_what_has_no_room_is_counted(lone):
    await lone.created("t", 2)
    everything, some = await begun(lone), await begun(lone, contains=b"1")
    for at in range(0, 400, 100):
        await produced(lone, [text(n, n % 2) for n in range(at, at + 100)])
    event = await everything.poll()
    assert values(event) == [b"%d" % n for n in range(300, 400)] and event.left_out == 300
    event = await some.poll()
    fitting = [b"%d" % n for n in range(400) if "1" in str(n)]
    assert values(event) == fitting[-100:] and event.left_out == len(fitting) - 100
    everything.close()
    some.close()


async def test_events_are_small_whatever_comes(lone):
    await lone.created("t")
    tail = await begun(lone)
    headers = tuple((f"h{n}", bytes(8000)) for n in range(100))
    await produced(lone, [text(n, headers=headers) for n in range(1)])
    for n in range(1, 12):
        await produced(lone, [OutRecord(b"k", bytes(90_000), timestamp=1000 + n, partition=0)] * 10)
    event = await tail.poll()
    assert 0 < len(event.records) <= 100
    assert len(event.records) + event.left_out == 111
    size = sum(record_tail.shown_bytes(one.record) for one in event.records)
    assert size <= record_tail.MAX_EVENT_BYTES
    assert lone.node.parts.memory.inflating.used_bytes == 0
    tail.close()


async def test_more_than_may_be_read_is_passed_over(lone, monkeypatch):
    monkeypatch.setattr(record_tail, "MAX_READ_BYTES", 1)
    await lone.created("t", 3)
    tail = await begun(lone)
    await produced(lone, [text(n, n % 3) for n in range(30)])
    event = await tail.poll()
    assert len(event.records) == 10 and event.left_out == 20
    seen = {one.partition for one in event.records}
    for round_ in range(2):  # each partition has its turn
        await produced(lone, [text(n + 30 * round_, n % 3) for n in range(30)])
        seen |= {one.partition for one in (await tail.poll()).records}
    assert seen == {0, 1, 2}
    tail.close()


async def test_records_behind_an_open_transaction_come_when_it_has_ended(lone):
    await lone.created("t")
    await lone.node.warmed_up()
    tail = await begun(lone)
    with Client(f"127.0.0.1:{lone.port}") as client:
        producer = await asyncio.to_thread(TransactionalProducer, client, "id")
        await produced(lone, [text(0)])
        await asyncio.to_thread(producer.produce, "t", [text(1)])
        await produced(lone, [text(n) for n in range(2, 50)])
        event = await tail.poll()
        assert (values(event), event.left_out) == ([b"0"], 0)
        event = await tail.poll()
        assert (event.records, event.left_out) == ([], 0)
        await asyncio.to_thread(producer.commit)
    event = await tail.poll()
    assert (values(event), event.left_out) == ([b"%d" % n for n in range(1, 50)], 0)
    assert [one.record.transaction for one in event.records[:2]] == ["committed", None]
    tail.close()


LARGE = 90_000


async def test_what_several_fetches_bring_is_searched_as_a_whole(lone):
    """Nothing that fits is left out where it is less than a look may read."""
    await lone.created("t")
    tail = await begun(lone, key=b"hit")
    for n in range(40):
        key = b"hit" if n % 13 == 0 else b"miss"
        await produced(lone, [OutRecord(key, bytes(LARGE), timestamp=1000 + n)])
    event = await tail.poll()
    assert [one.record.offset for one in event.records] == [0, 13, 26, 39]
    assert event.left_out == 0
    tail.close()


@pytest.mark.parametrize("wanted", [{}, {"key": b"k"}])
async def test_of_more_than_a_look_may_read_the_newest_come(lone, wanted):
    await lone.created("t")
    tail = await begun(lone, **wanted)
    some = [OutRecord(b"k", bytes(LARGE), timestamp=1000 + n) for n in range(90)]
    for at in range(0, 90, 5):
        await produced(lone, some[at : at + 5])
    event = await tail.poll()
    offsets = [one.record.offset for one in event.records]
    assert offsets[-15:] == list(range(75, 90))
    assert len(offsets) + event.left_out == 90 and event.left_out > 30
    assert (await tail.poll()).records == []
    tail.close()


async def test_a_leader_that_does_not_answer_loses_nothing(lone, monkeypatch):
    await lone.created("t")
    tail = await begun(lone)
    await produced(lone, [text(n) for n in range(5)])
    with monkeypatch.context() as silent:

        async def refused(reader):
            raise NetworkException("nobody is there")

        silent.setattr(partition_records.Reader, "fetch_marked", refused)
        event = await tail.poll()
        assert (event.records, event.left_out) == ([], 0)
    event = await tail.poll()
    assert (values(event), event.left_out) == ([b"%d" % n for n in range(5)], 0)
    tail.close()


async def test_new_partitions_are_followed_and_a_deleted_topic_ends_it(lone):
    await lone.created("t")
    tail = await begun(lone)
    more = {"name": "t", "count": 2, "assignments": None}
    await lone.request(37, 3, topics=[more], timeout=1000, validate_only=False)
    await produced(lone, [text(1, 1)])
    event = await tail.poll()
    assert (values(event), event.partitions) == ([b"1"], 2)
    gone = {"name": "t", "topic_id": None}
    await lone.request(20, 6, topics=[gone], timeout=1000)
    await lone.created("t")
    await produced(lone, [text(2)])
    assert await tail.poll() is None
    tail.close()


async def opened(lone, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, limit=1 << 23)
    writer.write(f"GET {path} {HEAD}".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200" in head and b"text/event-stream" in head
    return reader, writer


async def next_event(reader):
    while True:
        line = await asyncio.wait_for(reader.readline(), 60)
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))


async def test_it_is_streamed_to_a_browser_and_a_slow_one_loses_records(lone, monkeypatch):
    monkeypatch.setattr("kept.node.http.console.events.POLL_S", 0.02)
    await lone.created("t")
    reader, writer = await opened(lone, "/api/v1/tail?topic=t&contains=no")
    assert await next_event(reader) == {
        "partitions": 1,
        "records": [],
        "left_out": 0,
        "skipped": [],
    }
    await produced(lone, [OutRecord(b"k", b"yes"), OutRecord(b"k", b"no \n\n data: {}")])
    event = await next_event(reader)
    assert [one["offset"] for one in event["records"]] == [1]
    writer.close()
    slow, writer = await opened(lone, "/api/v1/tail?topic=t")
    await next_event(slow)
    headers = tuple((f"h{n}", bytes(4000)) for n in range(10))
    some = [OutRecord(b"k", bytes(4000), headers) for _ in range(8)]

    async def taken(total):
        came = lost = 0
        while came + lost < total:
            event = await next_event(slow)
            came, lost = came + len(event["records"]), lost + event["left_out"]
        assert came + lost == total
        return lost

    for _ in range(3):
        await produced(lone, some)
        assert await taken(8) == 0
    # Nobody reads: the stream stands still, and nothing is held for it but one event.
    slow._transport.pause_reading()
    for _ in range(40):
        await produced(lone, some)
        await asyncio.sleep(0.02)
    slow._transport.resume_reading()
    assert await taken(320) > 0
    writer.close()


ALL = {AclResourceType.TOPIC: "t", AclResourceType.CLUSTER: "kafka-cluster"}


def may(kind):
    """That User:ada may do everything with a resource."""
    operation, permission = AclOperation.ALL, AclPermission.ALLOW
    literal = PatternType.LITERAL
    return AclBinding(kind, ALL[kind], literal, "User:ada", "*", operation, permission)


@pytest.mark.parametrize("path", ["/api/v1/tail", "/api/v1/events"])
async def test_it_ends_with_the_right_to_it(lone, path, monkeypatch):
    """Within a second, also while nothing comes."""
    monkeypatch.setattr("kept.node.security.revocation.CHECK_S", 0.02)
    await lone.created("t")
    rules = [AclIndex().with_changes([may(kind) for kind in ALL], [])]
    authorizer = StandardAuthorizer(lambda: rules[0], [])
    session = Session("User:ada", "10.0.0.1", "PLAINTEXT", authorizer=authorizer)
    await lone.node.parts.http._import()
    routes = lone.node.parts.http._started().routes
    query = {"topic": "t", "partition": "0"}
    response = await routes.respond(HttpRequest("GET", path, query, session=session))
    chunks = response.chunks
    assert (await anext(chunks)).startswith(b"data: ")
    waiting = asyncio.ensure_future(anext(chunks, None))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    rules[0] = AclIndex()
    assert await asyncio.wait_for(waiting, 60) is None
    while routes.context.streams._open:  # its place is free again
        await asyncio.sleep(0.01)


def test_what_is_wrong_is_refused(lone_node):
    lone = lone_node(kept_console_max_streams="0")
    lone.create("t")
    status, _, body = lone.http(f"GET /api/v1/tail?topic=t {HEAD}")
    assert status == 503 and "kept.console.max.streams" in body.decode()
    other = lone_node()
    other.create("t")
    for query, status, message in (
        ("", 400, "topic is missing"),
        ("topic=none", 404, "no topic none"),
        ("topic=t&partition=5", 404, "no partition 5"),
        ("topic=t&header=%3Dx", 400, "the name is missing"),
        ("topic=t&node=0", 400, "unknown parameter node"),
        ("topic=t&from=5", 400, "unknown parameter from"),
    ):
        found, _, body = other.http(f"GET /api/v1/tail?{query} {HEAD}")
        assert (found, message in body.decode()) == (status, True), query


async def test_what_was_deleted_before_it_was_seen_is_told_and_it_goes_on_behind(lone):
    await lone.created("t")
    tail = await begun(lone)
    await produced(lone, [text(number) for number in range(5)])
    wanted = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 3}]}]
    deleted = await lone.request(21, 2, topics=wanted, timeout=1000)
    assert deleted.topics[0].partitions[0].low_watermark == 3
    event = await tail.poll()
    (skipped,) = event.skipped
    assert (skipped.partition, skipped.begin, skipped.end) == (0, 0, 3)
    assert "it begins at 3" in skipped.why and event.left_out == 3
    event = await tail.poll()
    assert values(event) == [b"3", b"4"] and event.skipped == []
