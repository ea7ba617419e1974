"""The blocking client against real nodes: kept, and Apache Kafka where it can run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kept.client.admin.groups import NotAMember, leave_call
from kept.client.admin.topics import NewTopic
from kept.client.client import BadAddress, Client, OutRecord
from kept.client.consume.consumer import Consumer, GroupConsumer
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.positions import EARLIEST, LATEST, MAX_TIMESTAMP
from kept.client.core.broker_errors import ConnectionFailed, NoNodeAnswers, NoResponse, NotKafka
from kept.client.core.calls import ToCoordinator
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.client.protocol.api_keys import ApiKey
from kept.client.sockets import Sockets
from kept.client.transactional_producer import TransactionalProducer, TransactionEnded
from kept.storage import errors
from kept.storage.errors import NoNode, PeerError
from kept.storage.types import Codec, IsolationLevel, TopicPartition
from kept.testing import Cluster
from kept.testing.ports import free_port

FAST = FetchLimits(max_wait_ms=100)


@pytest.fixture(params=["kept", pytest.param("kafka", marks=[pytest.mark.java, pytest.mark.slow])])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    if request.param == "kept":
        bootstrap = request.getfixturevalue("kept_broker").bootstrap
    else:
        bootstrap = request.getfixturevalue("apache_kafka")
    with Client(bootstrap, client_id="test", timeout_ms=20_000) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest, client: Client) -> str:
    name = f"{request.node.name.partition('[')[0]}-{time.time_ns()}"
    client.create_topic(name, partitions=3, config={"cleanup.policy": "compact"})
    return name


def rows(count: int, start: int = 0) -> list[OutRecord]:
    return [OutRecord(b"k%d" % n, b"v%d" % n) for n in range(start, start + count)]


def eventually(read: Callable[[], object], wanted: object) -> None:
    """Apache Kafka's brokers follow its controller a moment later, markers follow their commit."""
    deadline = time.monotonic() + 60
    while (found := read()) != wanted:
        assert time.monotonic() < deadline, (found, wanted)


def committed_values(client: Client, topic: str) -> list[bytes | None]:
    """Of the records below the last stable offset, which the markers of a commit move later."""
    return [r.value for r in client.read(topic, isolation=IsolationLevel.READ_COMMITTED)]


def test_topics_live_and_die(client):
    name = f"life-{time.time_ns()}"
    client.create_topics([NewTopic(name, 2, 1, {"segment.ms": "1234567"})])
    known = client.topic(name)
    assert sorted(known.partitions) == [0, 1]
    config = {c.name: c for c in client.topic_configs([name])[name]}
    assert (config["segment.ms"].value, config["segment.ms"].source) == ("1234567", "topic")
    client.alter_topic(name, {"retention.ms": "99"}, delete=["segment.ms"])

    def retention_and_segment() -> tuple[str | None, str]:
        config = {c.name: c for c in client.topic_configs([name])[name]}
        return config["retention.ms"].value, config["segment.ms"].source

    eventually(retention_and_segment, ("99", "default"))
    client.create_partitions(name, 4)
    eventually(lambda: sorted(client.topic(name).partitions), [0, 1, 2, 3])
    assert name in client.metadata().topics
    client.delete_topics([name])
    eventually(lambda: name in client.metadata().topics, False)
    with pytest.raises(errors.UnknownTopicOrPartition, match=name):
        client.topic(name)


def test_validate_only_creates_nothing(client):
    name = f"maybe-{time.time_ns()}"
    client.create_topics([NewTopic(name, 1, 1)], validate_only=True)
    assert name not in client.metadata().topics


@pytest.mark.parametrize("codec", list(Codec))
def test_records_come_back_as_they_were(client, topic, codec):
    sent = [
        OutRecord(b"a", b"1", (("h", b"x"), ("h", None), ("ü", b"")), 1_700_000_000_000),
        OutRecord(b"", b"", (), 1_700_000_000_001),
        OutRecord(b"\0\xff", None, (), 1_700_000_000_002),
    ]
    client.produce(topic, sent, codec=codec)
    found = sorted(client.read(topic), key=lambda r: r.timestamp)
    assert [(r.key, r.value, r.headers, r.timestamp) for r in found] == [r[:4] for r in sent]


def test_an_idempotent_producer_goes_on(client, topic):
    producer = client.init_producer()
    for start in range(0, 50, 10):
        client.produce(topic, rows(10, start), producer=producer)
    assert sorted(r.value for r in client.read(topic)) == sorted(b"v%d" % n for n in range(50))
    with pytest.raises(errors.OutOfOrderSequenceNumber, match=topic):
        gap = {tp: n + 5 for tp, n in producer.sequences.items()}
        client.produce(topic, rows(10), producer=replace(producer, sequences=gap))


def small(client: Client) -> str:
    """A topic that refuses batches of more than a kilobyte."""
    name = f"small-{time.time_ns()}"
    client.create_topic(name, partitions=1, config={"max.message.bytes": "1000"})
    return name


def test_an_idempotent_producer_goes_on_after_a_batch_that_was_refused(client):
    topic, producer = small(client), client.init_producer()
    client.produce(topic, rows(1), producer=producer)
    with pytest.raises(errors.MessageTooLarge):
        client.produce(topic, [OutRecord(b"k", bytes(2000))], producer=producer)
    client.produce(topic, rows(1, 1), producer=producer)
    assert [r.value for r in client.read(topic)] == [b"v0", b"v1"]


@pytest.mark.parametrize("config", ["max.message.bytes", "segment.bytes"])
def test_batches_above_the_limits_of_a_topic_are_split(client, config):
    topic = f"limits-{time.time_ns()}"
    limit = "1048576" if config == "segment.bytes" else "20000"
    client.create_topic(topic, partitions=1, config={"max.message.bytes": "9000000", config: limit})
    producer, size = client.init_producer(), int(limit) // 10
    sent = [OutRecord(None, b"%d " % n + bytes(size)) for n in range(30)]
    client.produce(topic, sent, producer=producer)
    client.produce(topic, sent)
    client.produce(topic, sent, producer=producer)
    transactional = TransactionalProducer(client, f"id-{time.time_ns()}")
    with transactional:
        transactional.produce(topic, sent)
        transactional.produce(topic, sent)
    values = [record.value for record in sent]
    assert [r.value for r in client.read(topic) if r.value] == values * 5


def test_a_transactional_producer_goes_on_after_a_batch_that_was_refused(client):
    topic = small(client)
    producer = TransactionalProducer(client, f"id-{time.time_ns()}")
    producer.produce(topic, rows(1))
    producer.commit()
    producer.produce(topic, rows(1, 1))
    with pytest.raises(errors.MessageTooLarge):
        producer.produce(topic, [OutRecord(b"k", bytes(2000))])
    for refused in (producer.commit, lambda: producer.produce(topic, rows(1))):
        with pytest.raises(errors.InvalidTxnState, match="it can only be aborted"):
            refused()
    producer.abort()
    with producer:
        producer.produce(topic, rows(1, 2))
    eventually(lambda: committed_values(client, topic), [b"v0", b"v2"])


def test_a_transaction_whose_first_request_failed_is_aborted(client):
    """Nobody knows then whether it has begun."""
    producer = TransactionalProducer(client, f"id-{time.time_ns()}")
    with pytest.raises(errors.KeptError):
        producer.produce("no such topic", rows(1))
    producer.abort()
    topic = small(client)
    with producer:
        producer.produce(topic, rows(1))
    eventually(lambda: committed_values(client, topic), [b"v0"])


def test_abort_after_a_commit_without_an_answer_says_that_it_was_committed(client, monkeypatch):
    topic = small(client)
    producer = TransactionalProducer(client, f"id-{time.time_ns()}")
    producer.produce(topic, rows(1))

    def lose_answer(call):
        Client.call(client, call)
        raise NoResponse("no answer")

    with monkeypatch.context() as patched, pytest.raises(NoResponse):
        patched.setattr(client, "call", lose_answer)
        producer.commit()
    with pytest.raises(TransactionEnded, match="it was committed"):
        producer.abort()
    with producer:
        producer.produce(topic, rows(1, 1))
    eventually(lambda: committed_values(client, topic), [b"v0", b"v1"])


def test_a_key_goes_to_its_partition_among_those_that_came_later(client, monkeypatch):
    name = f"grows-{time.time_ns()}"
    client.create_topic(name, partitions=1)
    client.produce(name, rows(30))
    with Client(client.bootstrap) as other:
        other.create_partitions(name, 8)
        eventually(lambda: len(other.metadata([name]).topics[name].partitions), 8)
        monkeypatch.setitem(client._count_at, name, 0.0)
        client.produce(name, rows(30))
        other.produce(name, rows(30))
    where: dict[bytes, list[int]] = {}
    for record in client.read(name, range(1, 8)):
        where.setdefault(record.key, []).append(record.partition)
    assert len(where) > 15
    assert all(len(of_key) == 2 and len(set(of_key)) == 1 for of_key in where.values()), "of both"


def test_records_without_a_key_share_a_partition_of_their_own(client):
    name = f"keyless-{time.time_ns()}"
    client.create_topic(name, partitions=6)
    for _ in range(20):
        assert len(client.produce(name, [OutRecord(None, b"x"), OutRecord(None, b"y")])) == 1
    assert sum(1 for _ in client.read(name)) == 40
    used = {r.partition for r in client.read(name)}
    assert len(used) > 1


def test_acks_0_is_written_too(client, topic):
    client.produce(topic, rows(3))  # all leaders are there then; nobody would say so with acks=0
    client.produce(topic, rows(3), acks=0)
    end = time.monotonic() + 60
    while sum(hi for _, hi in client.bounds(topic).values()) < 6:
        assert time.monotonic() < end


def test_offsets_by_time(client, topic):
    records = [OutRecord(b"k", b"%d" % n, (), 1_700_000_000_000 + n, 1) for n in range(10)]
    client.produce(topic, records)
    tp = TopicPartition(topic, 1)
    ask = lambda t: client.list_offsets({tp: t})[tp].offset  # noqa: E731
    assert (ask(EARLIEST), ask(LATEST), ask(MAX_TIMESTAMP)) == (0, 10, 9)
    assert ask(1_700_000_000_004) == 4
    assert ask(1_800_000_000_000) == -1


def test_what_is_refused_says_why(client, topic):
    with pytest.raises(errors.InvalidRecord, match=f"Produce to {topic}:0"):
        client.produce(topic, [OutRecord(None, b"no key", partition=0)])
    with pytest.raises(errors.UnknownTopicOrPartition, match="no partition 9"):
        client.produce(topic, [OutRecord(b"k", b"v", partition=9)])
    with pytest.raises(errors.TopicAlreadyExists, match=topic):
        client.create_topic(topic)
    with pytest.raises(errors.InvalidConfig, match=r"no\.such\.setting"):
        client.create_topic(f"x-{time.time_ns()}", config={"no.such.setting": "1"})
    with pytest.raises(errors.InvalidConfig):
        client.alter_topic(topic, {"segment.ms": "soon"})
    with pytest.raises(errors.InvalidPartitions):
        client.create_partitions(topic, 1)
    with pytest.raises(errors.UnknownTopicOrPartition):
        client.delete_topics(["no-such-topic"])
    with pytest.raises(errors.GroupIdNotFound):
        client.delete_group("no-such-group")


def test_a_consumer_follows_and_stops_at_the_end(client, topic):
    tps = [TopicPartition(topic, p) for p in range(3)]
    follower = Consumer(client, dict.fromkeys(tps, LATEST), FAST)
    assert follower.poll() == []
    client.produce(topic, rows(30))
    seen = []
    end = time.monotonic() + 60
    while len(seen) < 30:
        seen += follower.poll()
        assert time.monotonic() < end
    assert {r.value for r in seen} == {r.value for r in rows(30)}
    middle = Consumer(client, {tps[0]: 2}, FAST)
    assert [r.offset for r in middle.until_end()] == list(range(2, client.bounds(topic)[0][1]))


def test_an_offset_above_the_end_starts_at_the_end(client, topic):
    client.produce(topic, [OutRecord(b"k", b"v", partition=0)])
    consumer = Consumer(client, {TopicPartition(topic, 0): 1000}, FAST)
    assert consumer.poll() == []
    client.produce(topic, [OutRecord(b"k", b"w", partition=0)])
    end = time.monotonic() + 60
    while not (found := consumer.poll()):
        assert time.monotonic() < end
    assert [(r.offset, r.value) for r in found] == [(1, b"w")]


def test_a_member_commits_what_it_returned_and_resumes(client, topic):
    group = f"g-{time.time_ns()}"
    client.produce(topic, rows(30))
    member = GroupConsumer(client, group, [topic], reset=EARLIEST, limits=FAST)
    seen = []
    end = time.monotonic() + 60
    while len(seen) < 30:
        seen += member.poll(100)
        assert time.monotonic() < end
    assert [tp.partition for tp in member.assignment] == [0, 1, 2]
    described = client.describe_group(group)
    assert (described.state, described.protocol, len(described.members)) == ("Stable", "range", 1)
    assert described.members[0].partitions == tuple(member.assignment)
    with pytest.raises(errors.NonEmptyGroup):
        client.delete_group(group)
    member.give_back(seen[-1:])
    member.close()
    assert sum(client.committed(group).values()) == 29
    again = GroupConsumer(client, group, [topic], limits=FAST)
    end = time.monotonic() + 60
    while not (more := again.poll(100)):
        assert time.monotonic() < end
    assert more == seen[-1:]
    again.close()
    assert group in [g.group for g in client.list_groups()]
    client.commit(group, {TopicPartition(topic, 1): 0})
    assert client.committed(group, [TopicPartition(topic, 1)]) == {TopicPartition(topic, 1): 0}
    client.delete_group(group)
    assert client.describe_group(group).state == "Dead"


def test_a_member_that_was_removed_hears_that_its_commit_was_refused(client, topic):
    group = f"g-{time.time_ns()}"
    client.produce(topic, rows(3))
    member = GroupConsumer(client, group, [topic], reset=EARLIEST, limits=FAST)
    end = time.monotonic() + 60
    seen: list[object] = []
    while len(seen) < 3:
        seen += member.poll(100)
        assert time.monotonic() < end
    client.call(leave_call(group, member.member_id))
    with pytest.raises(NotAMember, match="UNKNOWN_MEMBER_ID"):
        member.close()
    assert client.committed(group) == {}


def test_offset_delete_answers_for_a_topic_that_is_named_twice(client, topic):
    group = f"g-{time.time_ns()}"
    client.commit(group, {TopicPartition(topic, 0): 0})
    twice = [{"name": topic, "partitions": [{"partition_index": n}]} for n in (77, 88)]
    values = {"group_id": group, "topics": twice}
    answer = client.request(ApiKey.OFFSET_DELETE, values, ToCoordinator(group))
    assert int(answer.error_code) == 0
    found = [int(p.partition_index) for t in answer.topics for p in t.partitions]
    assert sorted(found) == [77, 88]


def test_two_members_share_and_take_over(client, topic):
    """One member in a thread of its own, since both have to join while the group rebalances."""
    group = f"g-{time.time_ns()}"
    client.produce(topic, rows(60))
    seen: list[bytes] = []
    stop, shared = threading.Event(), threading.Event()

    def other() -> None:
        with Client(client.bootstrap) as mine:
            member = GroupConsumer(mine, group, [topic], reset=EARLIEST, limits=FAST)
            while not stop.is_set():
                seen.extend(r.value for r in member.poll(50))
                if len(member.assignment) in (1, 2):
                    shared.set()
            member.close()

    thread = threading.Thread(target=other)
    thread.start()
    member = GroupConsumer(client, group, [topic], reset=EARLIEST, limits=FAST)
    try:
        end = time.monotonic() + 60
        mine: list[bytes] = []
        while not shared.is_set() or len(member.assignment) not in (1, 2):
            mine.extend(r.value for r in member.poll(50))
            assert time.monotonic() < end
    finally:
        stop.set()
        thread.join()
    while len(member.assignment) != 3:
        mine.extend(r.value for r in member.poll(50))
        assert time.monotonic() < end
    while len({*seen, *mine}) < 60:
        mine.extend(r.value for r in member.poll(50))
        assert time.monotonic() < end
    member.close()


def test_log_sizes(client, topic):
    client.produce(topic, rows(30))
    sizes = client.log_sizes(topic)
    assert set(sizes) == {0, 1, 2}
    assert all(size > 0 for size in sizes.values())


def test_auto_creation(client):
    name = f"auto-{time.time_ns()}"
    client.produce(name, rows(1), auto_create=True)
    assert [r.value for r in client.read(name)] == [b"v0"]


def test_a_request_of_any_api(client):
    answer = client.request(60, {"include_cluster_authorized_operations": False})
    assert int(answer.error_code) == 0
    assert [int(b.broker_id) for b in answer.brokers] == sorted(client.metadata([]).nodes)


def test_reading_goes_on_after_a_kill(kept_cluster):
    """The node dies under a consumer and a producer; both go on when it is back."""
    cluster = kept_cluster()
    topic = cluster.create_topic()
    with cluster.client() as client:
        client.produce(topic, rows(5))
        consumer = Consumer(client, {TopicPartition(topic, 0): 0}, FAST)
        seen = consumer.poll()
        cluster.kill(0)
        restart = threading.Thread(target=cluster.start, args=(0,))
        restart.start()
        end = time.monotonic() + 60
        client.produce(topic, rows(5, 5))
        while len(seen) < 10:
            seen += consumer.poll()
            assert time.monotonic() < end
        restart.join()
    assert [r.value for r in seen] == [r.value for r in rows(10)]


def test_nobody_there():
    port = free_port()
    with (
        Client(f"localhost:{port}") as client,
        pytest.raises(NoNodeAnswers, match=rf"localhost:{port}: Metadata: connection refused"),
    ):
        client.metadata()
    with (
        Client("no-such-host.invalid:9092") as client,
        pytest.raises(ConnectionFailed, match="not a known host") as unknown,
    ):
        client.metadata()
    assert not isinstance(unknown.value, NoNode)
    with pytest.raises(BadAddress, match="host:port"):
        Client("localhost:none")


def test_a_cluster_that_is_known_is_waited_for_though_nobody_answers_at_first():
    cluster = Cluster()
    with (
        cluster,
        Client(cluster.bootstrap, known=True, on_wait=lambda _: started.set()) as client,
        Client(cluster.bootstrap) as another,
    ):
        started = threading.Event()
        cluster.kill()
        with pytest.raises(ConnectionFailed, match="connection refused"):
            another.metadata()
        starting = threading.Thread(target=lambda: started.wait(60) and cluster.start())
        starting.start()
        assert client.metadata().nodes
        starting.join()


def test_the_cluster_is_asked_for_as_long_as_the_client_says(monkeypatch):
    asked = []

    def calls(some):
        asked.extend(some)
        raise PeerError("nobody")

    with Client("127.0.0.1:1", timeout_ms=1234) as client:
        monkeypatch.setattr(client, "calls", calls)
        with pytest.raises(PeerError, match="nobody"):
            client.metadata()
    assert [call.timeout_ms for call in asked] == [1234]


def test_something_that_is_not_kafka():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with Client(f"127.0.0.1:{port}") as client, pytest.raises(NotKafka, match=str(port)):
            client.metadata()
    finally:
        thread.join()
        listener.close()


def test_json_api(kept_broker):
    api = JsonApi(Endpoint("localhost", kept_broker.port()))
    topic = kept_broker.create_topic(config={"cleanup.policy": "compact"})
    assert api.get(f"topics/{topic}")["name"] == topic
    assert api.get("compaction", topic=topic)["partitions"][0]["partition"] == 0
    with pytest.raises(HttpFailed, match="no topic nope") as caught:
        api.get("topics/nope")
    assert caught.value.status == 404
    assert api.post("compaction/now", {"topic": topic, "wait": True})["partitions"]
    with pytest.raises(HttpFailed, match="connection refused"):
        JsonApi(Endpoint("localhost", free_port())).get("cluster")


def test_what_may_be_sent_only_once_does_not_go_to_a_node_that_was_killed_before():
    with Cluster() as cluster, Client(cluster.bootstrap) as client:
        client.metadata()
        cluster.kill(0)
        cluster.start(0)
        client.create_topic("again", partitions=1)
        assert sorted(client.topic("again").partitions) == [0]


def test_a_change_that_nobody_takes_is_tried_again_after_a_pause(monkeypatch):
    tried = []

    def counted(sockets, effect, before=Sockets._open):
        tried.append(effect)
        before(sockets, effect)

    monkeypatch.setattr(Sockets, "_open", counted)
    with Cluster() as cluster, Client(cluster.bootstrap) as client:
        client.metadata()
        cluster.kill(0)
        client.timeout_ms = 1000
        with pytest.raises(ConnectionFailed, match="CreateTopics of again: connection refused"):
            client.create_topic("again", partitions=1)
    assert len(tried) < 50
