"""Searching the records of all partitions: what is found, in which order, within what bounds."""

from __future__ import annotations

import asyncio
import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.client.client import Client, OutRecord
from kept.client.transactional_producer import TransactionalProducer
from kept.node.admin.records import record_search
from kept.node.admin.records.record_filter import RecordFilter
from kept.node.admin.records.search_cursor import (
    MAX_CURSOR_CHARACTERS,
    MAX_SPAN,
    LanePosition,
    decode_cursor,
    encode_cursor,
)
from kept.node.security.client_usage import UNMETERED
from kept.storage.errors import InvalidRequest, NetworkException, UnknownTopicOrPartition
from kept.storage.records import build_batch
from kept.storage.types import MAX_INT64, Codec

T0 = 1_700_000_000_000
PARTITIONS = 3


def written(lone, topic, records, **options):
    def write():
        with Client(f"127.0.0.1:{lone.port}") as client:
            for at in range(0, len(records), 7):
                client.produce(topic, records[at : at + 7], **options)

    lone.run(asyncio.to_thread(write))


def search(lone, topic="t", limit=50, **options):
    wanted = RecordFilter(
        **{name: options.pop(name) for name in RecordFilter.__struct_fields__ if name in options}
    )
    service = lone.node.parts.admin.search
    return lone.run(service.search(UNMETERED, topic, wanted, limit=limit, **options))


def all_of(lone, most=1000, **options):
    """What a search finds until its end, and how many requests it takes."""
    found, cursor, requests = [], None, 0
    while requests < most:
        result = search(lone, cursor=cursor, **options)
        found += result.records
        requests, cursor = requests + 1, result.cursor
        if cursor is None:
            return found, requests
    raise AssertionError("the search does not end")


def order(found):
    return [(one.partition, one.record.offset) for one in found]


def value(found):
    return base64.b64decode(found.record.value_base64 or "")


@pytest.fixture
def filled(lone_node):
    """200 records over three partitions, a second apart, some compressed; ``hit`` in every ninth.
    Each has a header ``n``.
    """
    lone = lone_node(kept_console_actions="true")
    lone.create("t", partitions=PARTITIONS)
    rng, lone.written = random.Random(7), []
    for n in range(200):
        partition = rng.randrange(PARTITIONS)
        text = b"hit %d" % n if n % 9 == 0 else b"miss %d" % n
        lone.written.append(
            OutRecord(
                b"k%d" % (n % 5),
                text + bytes(rng.randrange(100)),
                timestamp=T0 + 1000 * n,
                partition=partition,
                headers=(("n", b"%d" % n),),
            )
        )
    written(lone, "t", lone.written[:90])
    written(lone, "t", lone.written[90:], codec=Codec.GZIP)
    offsets = [0] * PARTITIONS
    lone.places = []
    for record in lone.written:
        lone.places.append((record.partition, offsets[record.partition]))
        offsets[record.partition] += 1
    return lone


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("limit", [3, 50, 200])
def test_every_record_is_found_once_in_the_order_of_time(filled, newest, limit):
    found, _ = all_of(filled, newest=newest, limit=limit)
    places = filled.places[::-1] if newest else filled.places
    assert order(found) == places


@pytest.mark.parametrize("newest", [True, False])
def test_what_little_a_request_may_look_at_loses_nothing(filled, newest, monkeypatch):
    monkeypatch.setattr(record_search, "MAX_SCANNED_RECORDS", 1)
    found, requests = all_of(filled, newest=newest, contains=b"hit")
    assert requests >= PARTITIONS
    expected = [place for n, place in enumerate(filled.places) if n % 9 == 0]
    assert sorted(order(found)) == sorted(expected)
    # Of each partition they still come in their order.
    for number in range(PARTITIONS):
        offsets = [offset for partition, offset in order(found) if partition == number]
        assert offsets == sorted(offsets, reverse=newest)


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("fails", ["ends", "fetch"])
def test_a_partition_without_an_answer_is_searched_by_a_later_request(
    filled, newest, fails, monkeypatch
):
    """Before it has begun, and where it stood."""
    first = search(filled, newest=newest, limit=20)
    away = first.records[-1].partition
    found = list(first.records)
    with monkeypatch.context() as silent:
        if fails == "ends":
            offsets = record_search.offsets_from_leaders

            async def without(client, image, wanted):
                there = {tp: when for tp, when in wanted.items() if tp.partition != away}
                return await offsets(client, image, there)

            silent.setattr(record_search, "offsets_from_leaders", without)
        else:
            fetch = record_search.Reader.fetch_marked

            async def refused(reader):
                if reader.tp.partition == away:
                    raise NetworkException("nobody is there")
                return await fetch(reader)

            silent.setattr(record_search.Reader, "fetch_marked", refused)
        fresh = search(filled, newest=newest, limit=200)
        of_others = [place for place in filled.places if place[0] != away]
        assert sorted(order(fresh.records)) == sorted(of_others)
        cursor = first.cursor
        for _ in range(2):  # and again: its standing goes through cursors
            result = search(filled, newest=newest, limit=200, cursor=cursor)
            found += result.records
            cursor = result.cursor
            end = result.ends[away]
            assert not end.done and end.error and cursor is not None
            assert all(end.done for end in result.ends if end.partition != away)
    result = search(filled, newest=newest, limit=200, cursor=cursor)
    assert (result.cursor, result.ends[away].error) == (None, None)
    found += result.records
    assert sorted(order(found)) == sorted(filled.places)
    result = search(filled, newest=newest, limit=200, cursor=fresh.cursor)
    mine = [place for place in filled.places if place[0] == away]
    assert (order(result.records), result.cursor) == (mine[::-1] if newest else mine, None)


def test_filters(filled):
    found, _ = all_of(filled, contains=b"hit", limit=200)
    assert order(found) == [p for n, p in enumerate(filled.places) if n % 9 == 0][::-1]
    assert all(value(one).startswith(b"hit") for one in found)
    found, _ = all_of(filled, header=("n", b"77"))
    assert order(found) == [filled.places[77]]
    found, _ = all_of(filled, header=("n", None), limit=200)
    assert len(found) == 200
    assert all_of(filled, header=("m", None)) == ([], 1)
    found, _ = all_of(filled, key=b"k3", contains=b"hit", header=("n", b"63"))
    assert order(found) == [filled.places[63]]
    found, _ = all_of(filled, from_ms=T0 + 50_000, to_ms=T0 + 60_000)
    assert order(found) == filled.places[50:60][::-1]
    found, _ = all_of(filled, from_ms=T0 + 50_000, to_ms=T0 + 60_000, newest=False, limit=4)
    assert order(found) == filled.places[50:60]
    assert all_of(filled, from_ms=T0 + 10**9) == ([], 1)
    found, _ = all_of(filled, partition=1, limit=200)
    assert order(found) == [place for place in filled.places if place[0] == 1][::-1]


def test_a_key_is_first_looked_for_where_clients_put_it(filled):
    result = search(filled, key=b"k3", limit=200)
    expected = result.partition_of_key
    assert expected is not None
    partitions = [one.partition for one in result.records]
    first = partitions.count(expected)
    assert set(partitions[:first]) == {expected} and len(set(partitions)) == PARTITIONS
    assert sorted(order(result.records)) == sorted(filled.places[3::5])
    assert [end.position for end in result.ends if not end.done] == []


def test_a_compacted_log_with_holes(lone):
    lone.create("t", cleanup_policy="compact", segment_bytes="2048")
    records = [OutRecord(b"k%d" % (n % 2), bytes(200), timestamp=T0 + n) for n in range(60)]
    records.insert(1, OutRecord(b"early", b"here", timestamp=T0))
    written(lone, "t", records)
    status, done = lone.post("/api/v1/compaction/now", topic="t", wait=True)
    assert status == 200 and done["partitions"][0]["records_removed"] > 30
    for newest in (True, False):
        found, _ = all_of(lone, newest=newest, limit=2)
        offsets = [offset for _, offset in order(found)]
        assert offsets == sorted(offsets, reverse=newest) and 1 in offsets
        assert len(offsets) < 30


def test_transactions_are_marked(lone_node):
    lone = lone_node(transaction_state_log_num_partitions="1", offsets_topic_num_partitions="1")
    lone.create("t")
    lone.run(lone.node.warmed_up())

    def write():
        with Client(f"127.0.0.1:{lone.port}") as client:
            producer = TransactionalProducer(client, "id")
            producer.produce("t", [OutRecord(b"k", b"yes")])
            producer.commit()
            producer.produce("t", [OutRecord(b"k", b"no")])
            producer.abort()
            client.produce("t", [OutRecord(b"k", b"plain")])
            producer.produce("t", [OutRecord(b"k", b"who knows")])

    lone.run(asyncio.to_thread(write))
    found, _ = all_of(lone, newest=False)
    marks = {value(one): one.record.transaction for one in found}
    assert marks == {b"yes": "committed", b"no": "aborted", b"plain": None, b"who knows": "open"}
    page = lone.get("/api/v1/records?topic=t&partition=0")["records"]
    assert [one["transaction"] for one in page] == ["committed", "aborted", None, "open"]


def test_aborted_records_behind_a_gap_are_not_open(lone_node, monkeypatch):
    """As a pass leaves it: index entries of aborted transactions whose records are gone."""
    monkeypatch.setattr("kept.storage.log.log_reader.MOST_ABORTED", 1)
    lone = lone_node()
    lone.create("t")
    partition = lone.node.parts.table.replicas["t", 0].partition

    def build(offset, producer_id, key, **more):
        return build_batch(
            [(1000, key, b"v", ())],
            base_offset=offset,
            producer_id=producer_id,
            producer_epoch=0,
            is_transactional=True,
            leader_epoch=partition.leader_epoch,
            **more,
        )

    async def fill():
        for offset, producer_id in ((0, 9), (100, 8)):
            partition.log.append_as_follower(build(offset, producer_id, b"k", base_sequence=0), 1)
        for offset, producer_id in ((101, 9), (102, 8)):
            marker = build(offset, producer_id, bytes(4), is_control=True)
            partition.log.append_as_follower(marker, 1)

    lone.run(fill())
    written(lone, "t", [OutRecord(b"k", b"plain")])
    for offset in (0, 1, 50, 100):
        page = lone.get(f"/api/v1/records?topic=t&partition=0&offset={offset}")["records"]
        marks = {one["offset"]: one["transaction"] for one in page}
        assert marks == ({0: "aborted"} if offset == 0 else {}) | {100: "aborted", 103: None}


def test_large_batches_hold_what_they_may(filled):
    """A large value is looked through as a whole, shown cut, and nothing stays drawn."""
    for _ in range(3):
        written(filled, "t", [OutRecord(b"big", bytes(900_000) + b"hit big", partition=0)])
    found, _ = all_of(filled, contains=b"hit big", limit=2)
    assert len(found) == 3 and all(one.record.value_bytes == 900_007 for one in found)
    assert all(len(one.record.value_base64) < 6000 for one in found)
    budget = filled.node.parts.memory.inflating
    assert budget.used_bytes == 0


def test_a_bomb_is_passed_over(filled, monkeypatch):
    """A batch that inflates beyond what a search takes is counted; its neighbours are found."""
    monkeypatch.setattr("kept.node.admin.records.record_filter.MAX_INFLATED_BYTES", 100_000)
    written(filled, "t", [OutRecord(b"z", bytes(800_000), partition=0)], codec=Codec.GZIP)
    result = search(filled, contains=b"hit", limit=200)
    assert result.scanned.batches_skipped == 1
    assert len(result.records) == 23


def test_what_is_wrong_is_refused_by_name(filled):
    wrong = [
        ({"limit": 0}, "limit must be 1 to 200"),
        ({"limit": 201}, "limit must be 1 to 200"),
        ({"contains": b"x" * 5000}, "contains has 5000 bytes"),
        ({"header": ("", None)}, "the name is missing"),
        ({"from_ms": 5, "to_ms": 5}, "is not before"),
        ({"cursor": "A" * 30_000}, "cursor has 30000 characters"),
    ]
    for options, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            search(filled, **options)
    with pytest.raises(UnknownTopicOrPartition, match="has no partition 9"):
        search(filled, partition=9)
    with pytest.raises(UnknownTopicOrPartition, match="no topic"):
        search(filled, topic="none")


def test_cursors_of_anybody_are_checked(filled):
    cursor = search(filled, limit=3).cursor
    assert cursor is not None
    rng = random.Random(3)
    for text in ("", "x", "é", "====", cursor[:-2], cursor + "AA", "A" * 100, cursor[::-1]):
        with pytest.raises(InvalidRequest, match="cursor"):
            search(filled, cursor=text)
    # Of another search, or one of other words.
    for options in ({"contains": b"hit"}, {"newest": False}, {"partition": 0}):
        with pytest.raises(InvalidRequest, match="begin without it"):
            search(filled, cursor=cursor, **options)
    raw = bytearray(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    for _ in range(200):
        bent = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            bent[rng.randrange(5, len(bent))] = rng.randrange(256)
        text = base64.urlsafe_b64encode(bent).decode().rstrip("=")
        try:
            result = search(filled, cursor=text, limit=200)
        except InvalidRequest:
            continue
        assert set(order(result.records)) <= set(filled.places)


@given(
    st.lists(
        st.one_of(
            st.just(LanePosition()),
            st.just(LanePosition(done=True)),
            st.builds(
                LanePosition,
                st.integers(0, MAX_INT64),
                st.sampled_from([1, 2, 128, MAX_SPAN]),
                bound_ms=st.none() | st.integers(1_700_000_000_000, 1_702_000_000_000),
            ),
        ),
        max_size=20,
    )
)
def test_a_cursor_is_what_was_put_into_it(positions):
    text = encode_cursor(7, positions)
    assert decode_cursor(text, 7, len(positions)) == positions
    for bound in (-(2**60), 0, 2**60):  # whatever timestamps are, it stays a cursor
        there = [LanePosition(5, 1, bound_ms=bound), LanePosition(6, 1, bound_ms=3)]
        first, second = decode_cursor(encode_cursor(7, there), 7, 2)
        assert (first.position, second.position) == (5, 6)


def test_a_cursor_of_a_thousand_partitions_is_short_enough():
    far = [
        LanePosition(2**40 + n, MAX_SPAN, bound_ms=1_700_000_000_000 + 2**22 * n)
        for n in range(1000)
    ]
    assert len(encode_cursor(7, far)) < MAX_CURSOR_CHARACTERS


def test_it_is_served_over_http(filled):
    found = filled.get("/api/v1/search?topic=t&contains=hit&limit=2")
    assert [one["partition"] for one in found["records"]] == [
        place[0] for place in (filled.places[198], filled.places[189])
    ]
    assert found["scanned"]["bytes"] > 0 and found["cursor"]
    more = filled.get(f"/api/v1/search?topic=t&contains=hit&limit=200&cursor={found['cursor']}")
    assert len(more["records"]) == 21 and more["cursor"] is None
    last = filled.get("/api/v1/search?topic=t&newest=false&limit=1&header=n%3D9")
    assert last["records"][0]["timestamp"] == T0 + 9000
    head = "HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for query, message in (
        ("cursor=", "cursor is missing"),
        ("contains=", "contains is missing"),
        ("from=yesterday", "from must be a number"),
        ("newest=maybe", "newest must be true or false"),
        ("key=a&key_base64=YQ==", "both given"),
        ("contains=%FF", "the address is not right"),
    ):
        status, _, body = filled.http(f"GET /api/v1/search?topic=t&{query} {head}")
        assert status == 400 and message in body.decode(), query


def test_searches_wait_for_their_turn(filled, monkeypatch):
    """So many run at a time; beyond those that may wait one more is refused."""
    monkeypatch.setattr(record_search, "SEARCHES_WAITING", 6)
    service, held = filled.node.parts.admin.search, []

    async def many():
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                work = service.search(UNMETERED, "t", RecordFilter(), limit=5)
                held.append(group.create_task(outcome(work)))

    async def outcome(work):
        try:
            return len((await work).records)
        except record_search.TooManySearches as error:
            return str(error)

    filled.run(many())
    results = [task.result() for task in held]
    assert results.count(5) == 6 and "6 searches wait already; try again" in results


def test_answers_are_bounded_whatever_records_hold(lone):
    """Sixteen records of sixty headers of eight kilobytes each are no page of eight megabytes."""
    lone.create("t", max_message_bytes="20000000")
    headers = tuple((f"h{n}" + "x" * 4000, bytes(4000)) for n in range(60))
    written(lone, "t", [OutRecord(bytes(5000), bytes(5000), headers) for _ in range(16)])
    most = 2 * 1024 * 1024 + 600_000
    for path in (
        "search?topic=t&limit=200",
        "search?topic=t&limit=200&newest=false",
        "records?topic=t&partition=0&offset=0&limit=200",
    ):
        status, _, body = lone.http(f"GET /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 200 and len(body) < most, (path, len(body))
    found, requests = all_of(lone, limit=200)
    assert len(found) == 16 and requests > 2
    assert lone.node.parts.memory.inflating.used_bytes == 0
