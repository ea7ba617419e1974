"""The client's decisions, against brokers and a clock that live in this file."""

from __future__ import annotations

import struct

import pytest

from kept.client.core.broker_errors import (
    ConnectionFailed,
    NoController,
    NoNodeAnswers,
    NoResponse,
    NotKafka,
    failure,
)
from kept.client.core.calls import (
    UNKNOWN_TOPIC_GRACE_MS,
    Anywhere,
    ToController,
    ToCoordinator,
    ToLeader,
    ToNode,
)
from kept.client.core.client_core import (
    CONNECT_TIMEOUT_MS,
    NOTICE_MS,
    SLOW_MS,
)
from kept.client.core.events import Lost, Received
from kept.client.core.leader_errors import GRACE_MS, LINGERING_MS
from kept.client.core.metadata import parse_bootstrap
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import (
    encode_response,
)
from kept.storage.errors import (
    CoordinatorLoadInProgress,
    KafkaStorageError,
    NotCoordinator,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from tests.support.client_world import A, B, World, offsets

BEAT = {"group_id": "g", "generation_id": 1, "member_id": "m"}


def code_of_first_partition(response):
    return failure(int(response.topics[0].partitions[0].error_code), "ListOffsets of t:0")


def test_a_call_finds_the_leader_and_both_sides_newest_version():
    world = World(served={ApiKey.LIST_OFFSETS: (1, 5)})
    world.leader = 1
    call = offsets(world)
    assert world.result(call).topics[0].partitions[0].offset == 7
    assert world.sent_to(ApiKey.METADATA) == [A]
    assert [r for r in world.requests if r[1] == ApiKey.LIST_OFFSETS] == [
        (B, ApiKey.LIST_OFFSETS, 5)
    ]


def test_an_old_broker_is_asked_for_its_versions_again():
    """KIP-511: an unknown version of ApiVersions is answered in version 0."""
    world = World()

    def old(api, version, endpoint, request):
        if version <= 2:
            return {"error_code": 0, "api_keys": world.table()}
        keys = struct.pack(">hi hhh", 35, 1, ApiKey.API_VERSIONS, 0, 2)
        return struct.pack(">ii", 4 + len(keys), 1) + keys

    world.answers[ApiKey.API_VERSIONS] = old
    call = offsets(world)
    assert world.result(call).topics[0].partitions[0].offset == 7
    assert [v for e, a, v in world.requests if a == ApiKey.API_VERSIONS] == [4, 2]


def test_an_api_that_the_broker_lacks_is_named():
    world = World(served={ApiKey.LIST_OFFSETS: ()})
    with pytest.raises(
        UnsupportedVersion, match=r"a:1: ListOffsets of t:0: .*not serve ListOffsets"
    ):
        world.result(offsets(world))


def test_no_common_version_is_named():
    world = World(served={ApiKey.LIST_OFFSETS: (900, 901)})
    with pytest.raises(UnsupportedVersion, match="versions 900 to 901 of ListOffsets"):
        world.result(offsets(world))


def test_a_broker_without_find_coordinator_ends_calls_to_a_coordinator():
    world = World(served={ApiKey.FIND_COORDINATOR: ()})
    call = world.call(api_key=ApiKey.HEARTBEAT, values=BEAT, route=ToCoordinator("g"))
    world.run()
    with pytest.raises(UnsupportedVersion, match="FindCoordinator"):
        world.result(call)


def test_a_leader_that_moved_is_looked_up_again():
    world = World()
    refused = []

    def answer(api, version, endpoint, request):
        code = 6 if endpoint == A else 0
        if code:
            refused.append(endpoint)
            world.leader = 1
        partition = {"partition_index": 0, "error_code": code, "offset": 9}
        return {"topics": [{"name": "t", "partitions": [partition]}]}

    world.answers[ApiKey.LIST_OFFSETS] = answer
    call = offsets(world, check=code_of_first_partition)
    world.run()
    assert world.result(call).topics[0].partitions[0].offset == 9
    assert refused == [A]
    assert world.sent_to(ApiKey.LIST_OFFSETS) == [A, B]
    assert call.may_have_effect, "it may have appended what it was sent, and led no longer then"


def test_an_error_that_lasts_is_the_one_reported():
    world = World()
    world.answers[ApiKey.LIST_OFFSETS] = lambda *_: {
        "topics": [{"name": "t", "partitions": [{"partition_index": 0, "error_code": 6}]}]
    }
    call = offsets(world, check=code_of_first_partition, timeout_ms=5000)
    world.run()
    with pytest.raises(NotLeaderOrFollower, match="ListOffsets of t:0: NOT_LEADER_OR_FOLLOWER"):
        world.result(call)
    assert world.now == 6000
    assert 4 < len(world.sent_to(ApiKey.LIST_OFFSETS)) < 20  # with growing pauses


def test_a_topic_that_is_not_there_is_said_soon():
    world = World()
    world.topic_error = 3
    call = offsets(world)
    world.run()
    with pytest.raises(UnknownTopicOrPartition, match="ListOffsets of t:0"):
        world.result(call)
    assert world.now <= 1000 + UNKNOWN_TOPIC_GRACE_MS


def test_a_partition_that_is_not_there_is_named():
    world = World()
    call = offsets(world, route=ToLeader("t", 5))
    world.run()
    with pytest.raises(UnknownTopicOrPartition, match="has 1 partition, there is no partition 5"):
        world.result(call)


def test_a_topic_that_appears_is_found():
    world = World()
    world.topic_error = 3
    call = offsets(world)
    world.run(until_ms=1100)
    world.topic_error = 0
    world.run()
    assert world.result(call).topics[0].partitions[0].offset == 7


@pytest.mark.parametrize(("nodes", "patience_ms"), [((A,), GRACE_MS), ((A, B), LINGERING_MS)])
def test_an_offline_partition_is_said_soon(nodes, patience_ms):
    """No election mends it. Of a node that died a moment ago others say the same for a while."""
    world = World()
    world.nodes, world.leader = nodes, -1
    world.replicas = {"replica_nodes": [0], "isr_nodes": [0], "offline_replicas": [0]}
    call = offsets(world)
    world.run()
    with pytest.raises(KafkaStorageError, match=r"t:0 has no leader: it is offline on node 0, its"):
        world.result(call)
    assert world.now - 1000 <= patience_ms + 1000
    assert len(world.waited) == (patience_ms == LINGERING_MS)


def test_an_election_is_waited_for_and_told_of():
    world = World()
    world.leader = -1
    world.replicas = {"replica_nodes": [0, 7, 1], "isr_nodes": [7, 1], "offline_replicas": [7, 1]}
    call = offsets(world)
    world.run(until_ms=20_000)
    (waited,) = world.waited
    assert waited.call is call
    assert str(waited.why) == (
        "ListOffsets of t:0: t:0 has no leader now: node 7 is away; node 1 is offline; "
        "in sync: nodes 7, 1"
    )
    world.leader = 1
    world.run()
    assert world.result(call).topics[0].partitions[0].offset == 7


def test_a_directory_that_failed_under_a_leader_is_waited_for_until_another_leads():
    world = World()
    refused = []

    def answer(api, version, endpoint, request):
        code = 56 if endpoint == A else 0
        refused.append(code)
        if len(refused) == 3:
            world.leader = 1
        partition = {"partition_index": 0, "error_code": code, "offset": 9}
        return {"topics": [{"name": "t", "partitions": [partition]}]}

    world.answers[ApiKey.LIST_OFFSETS] = answer
    call = offsets(world, check=code_of_first_partition)
    world.run()
    assert world.result(call).topics[0].partitions[0].offset == 9
    assert refused == [56, 56, 56, 0]


def test_a_coordinator_that_moved_is_looked_up_again():
    world = World()

    def answer(api, version, endpoint, request):
        world.coordinator = 1
        return {"error_code": 16 if endpoint == A else 0}

    world.answers[ApiKey.HEARTBEAT] = answer
    call = world.call(
        api_key=ApiKey.HEARTBEAT,
        values=BEAT,
        route=ToCoordinator("g"),
        check=lambda r: failure(int(r.error_code), "Heartbeat"),
    )
    world.run()
    assert world.result(call).error_code == 0
    assert world.sent_to(ApiKey.HEARTBEAT) == [A, B]


@pytest.mark.parametrize(("code", "kind"), [(14, CoordinatorLoadInProgress), (16, NotCoordinator)])
def test_codes_become_our_errors(code, kind):
    assert isinstance(failure(code, "Heartbeat"), kind)


def test_a_broken_connection_is_made_again_for_calls_that_may_be_repeated():
    world = World()
    assert world.result(offsets(world)) is not None
    world.mute.add(A)
    again = offsets(world)
    change = world.call(
        api_key=ApiKey.DELETE_TOPICS,
        values={"topics": [{"name": "t", "topic_id": None}], "topic_names": ("t",), "timeout": 1},
        what="DeleteTopics of t",
        repeatable=False,
    )
    world.mute.clear()
    world.step(Lost(1, "connection reset by peer"))
    with pytest.raises(ConnectionFailed, match="a:1: DeleteTopics of t: connection reset by peer"):
        world.result(change)
    world.run()
    assert world.result(again).topics[0].partitions[0].offset == 7
    assert len(world.sent_to(ApiKey.DELETE_TOPICS)) == 1


def test_nobody_at_any_bootstrap_address_is_said_at_once():
    world = World(bootstrap=(A, B))
    world.down = {A, B}
    call = offsets(world)
    world.run()
    both = r"ListOffsets of t:0: no node answers: a:1: connection refused; b:2: connection refused$"
    with pytest.raises(NoNodeAnswers, match=both):
        world.result(call)
    assert world.now < 2000


def test_nodes_that_are_gone_for_good_are_all_named():
    world = World()
    assert world.result(offsets(world)) is not None
    world.down = {A, B}
    for number in list(world.connections):
        world.step(Lost(number, "connection reset by peer"))
    call = offsets(world, timeout_ms=5000)
    world.run()
    with pytest.raises(ConnectionFailed, match=r"no node answers: (a:1.*; b:2|b:2.*; a:1): "):
        world.result(call)


def test_the_second_bootstrap_address_serves_when_the_first_does_not():
    world = World(bootstrap=(A, B))
    world.down = {A}
    world.leader = 1
    call = offsets(world)
    world.run()
    assert world.result(call).topics[0].partitions[0].offset == 7


def test_a_node_that_comes_back_within_the_deadline_is_waited_for():
    world = World()
    assert world.result(offsets(world)) is not None
    world.down.add(A)
    world.step(Lost(1, "connection reset by peer"))
    call = offsets(world)
    world.run(until_ms=4000)
    assert call.id not in world.finished
    world.down.clear()
    world.run()
    assert world.result(call).topics[0].partitions[0].offset == 7


def test_silence_ends_at_the_deadline_and_a_late_answer_is_ignored():
    world = World()
    late = []

    def answer(api, version, endpoint, request):
        late.append(version)

    world.answers[ApiKey.LIST_OFFSETS] = answer
    call = offsets(world, timeout_ms=2000)
    world.run(until_ms=20_000)
    with pytest.raises(NoResponse, match="a:1: ListOffsets of t:0: no answer within 2 s"):
        world.result(call)
    correlation = max(c for n in world.core._connections.values() for c in n.in_flight)
    frame = encode_response(ApiKey.LIST_OFFSETS, late[0], correlation, world.default(2, 0, A, None))
    world.step(Received(1, frame))
    del world.answers[ApiKey.LIST_OFFSETS]
    assert world.result(offsets(world)).topics[0].partitions[0].offset == 7


def test_silence_after_a_refusal_tells_the_refusal_too():
    world = World()
    answers = [
        {
            "topics": [
                {"name": "t", "partitions": [{"partition_index": 0, "error_code": 7, "offset": -1}]}
            ]
        }
    ]
    world.answers[ApiKey.LIST_OFFSETS] = lambda *_: answers.pop() if answers else None
    call = offsets(world, timeout_ms=2000, check=code_of_first_partition)
    world.run(until_ms=20_000)
    said = "no answer within 2 s; before that: ListOffsets of t:0: "
    with pytest.raises(NoResponse, match=said):
        world.result(call)


def test_a_long_silence_makes_the_core_neither_busy_nor_late():
    """Doubts come ever more seldom, however long a call is waited for."""
    world = World()
    world.answers[ApiKey.LIST_OFFSETS] = lambda *_: None
    call = offsets(world, timeout_ms=86_400_000)
    ticks = 0
    while call.id not in world.finished and ticks < 100:
        due_ms = world.core.next_tick_ms()
        assert due_ms is not None and due_ms > world.now, "it would tick without end"
        world.now = due_ms
        world.tick()
        ticks += 1
    with pytest.raises(NoResponse, match="no answer within"):
        world.result(call)


def test_a_connection_that_never_stands_is_given_up():
    world = World()
    world.mute.add(A)  # accepts, says nothing
    call = offsets(world, timeout_ms=60_000)
    world.run()
    with pytest.raises(ConnectionFailed, match="no connection within 10 s"):
        world.result(call)
    assert world.now == 1000 + CONNECT_TIMEOUT_MS


def test_a_node_that_stands_still_is_passed_over():
    world = World(bootstrap=(A, B))
    world.mute.add(A)  # accepts, says nothing
    world.leader = 1
    call = offsets(world, timeout_ms=60_000)
    while call.id not in world.finished:
        world.now = world.core.next_tick_ms()
        world.tick()
    assert world.result(call).topics[0].partitions[0].offset == 7
    assert world.now == 1000 + SLOW_MS


@pytest.mark.parametrize(
    "garbage",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\1x", b"\0\0\0\6\0\0\0\x63\0\0", b"\xff" * 8],
)
def test_something_else_than_kafka_is_named(garbage):
    world = World()
    world.answers[ApiKey.API_VERSIONS] = lambda *_: garbage
    call = offsets(world)
    with pytest.raises(NotKafka, match="a:1: "):
        world.result(call)


def test_calls_without_an_answer_end_when_they_are_sent():
    world = World()
    call = offsets(world, expects_response=False)
    assert world.result(call) is None
    assert world.sent_to(ApiKey.LIST_OFFSETS) == [A]


def test_routes_to_a_node_and_to_the_controller():
    world = World()
    node = offsets(world, route=ToNode(1))
    controller = offsets(world, route=ToController())
    anywhere = offsets(world, route=Anywhere())
    for call in (node, controller, anywhere):
        world.result(call)
    assert world.sent_to(ApiKey.LIST_OFFSETS)[:2] == [B, B]


def test_a_controller_that_does_not_answer_is_told_of_in_seconds():
    world = World()
    world.result(offsets(world, route=ToController()))
    world.mute = {A, B}
    change = {"values": {"topics": (), "topic_names": ("t",), "timeout": 1}, "repeatable": False}
    call = world.call(
        api_key=ApiKey.DELETE_TOPICS, route=ToController(), what="DeleteTopics", **change
    )
    leader = offsets(world)
    world.run(until_ms=world.now + NOTICE_MS)
    (told,) = world.waited
    assert told.call is call and isinstance(told.why, NoController)
    assert str(told.why) == "b:2: DeleteTopics: no controller has answered yet"
    world.run()
    assert len(world.waited) == 1, "once"
    assert world.finished[call.id].error and world.finished[leader.id].error


def test_a_node_that_does_not_exist_is_said_at_the_deadline():
    world = World()
    call = offsets(world, route=ToNode(9), timeout_ms=3000)
    world.run()
    with pytest.raises(ConnectionFailed, match="no node 9"):
        world.result(call)


def test_many_calls_share_one_connection_and_one_question():
    world = World()
    calls = [offsets(world) for _ in range(20)]
    for call in calls:
        world.result(call)
    assert len(world.sent_to(ApiKey.METADATA)) == 1
    assert len(world.sent_to(ApiKey.API_VERSIONS)) == 1


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("localhost:9092", [("localhost", 9092)]),
        ("a:1,b:2", [("a", 1), ("b", 2)]),
        ("host", [("host", 9092)]),
        ("[::1]:9093", [("::1", 9093)]),
        ("::1", [("::1", 9092)]),
    ],
)
def test_bootstrap_addresses(text, endpoints):
    assert list(parse_bootstrap(text)) == endpoints


@pytest.mark.parametrize(
    "text",
    ["a:b", "a:0", "a:70000", "a:-1", ":9092", "[]:9092", "a:1,b:c", "http://a:1", "a:1,http://b"],
)
def test_bootstrap_addresses_that_are_none(text):
    with pytest.raises(ValueError) as raised:
        parse_bootstrap(text)
    assert str(raised.value) == f"{text.rpartition(',')[2]!r} is not host:port"


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_no_bootstrap_address(text):
    with pytest.raises(ValueError) as raised:
        parse_bootstrap(text)
    assert str(raised.value) == "no bootstrap address given, such as localhost:9092"


def test_a_call_that_lasts_while_it_is_heard_of_ends_when_no_byte_comes_any_more():
    """A large answer over a slow line is no silence."""
    world = World()
    assert world.result(offsets(world)) is not None
    world.mute.add(A)
    began = world.now
    call = offsets(world, timeout_ms=1_000, while_heard=True, patient=False)
    for piece in (struct.pack(">i", 100), b"a", b"b", b"c", b"d"):
        world.now += 900
        world.step(Received(1, piece))
        world.tick()
    assert call.id not in world.finished
    world.run(until_ms=world.now + 1_001)
    assert isinstance(world.finished[call.id].error, NoResponse)
    assert world.now - began == 5_500
