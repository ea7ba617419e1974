"""What is told although a node does not answer: operations, and who asks for them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kept.client.admin import groups
from kept.client.client import Client
from kept.client.consume import leader_offsets as leaders
from kept.client.consume.leader_offsets import PartitionState
from kept.client.core.broker_errors import NoResponse
from kept.client.core.calls import Call, ToLeader, ToNode
from kept.client.core.client_core import SLOW_MS
from kept.client.core.events import Send
from kept.client.core.metadata import ClusterMetadata, Endpoint, PartitionMetadata, TopicMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import InvalidRequest, KeptError
from tests.support.client_world import A, B, World, offsets
from tests.support.fake_client import response

PATIENCE_MS = 700


def ended(operation: Any, answers: list[Any]) -> Any:
    with pytest.raises(StopIteration) as end:
        operation.send(answers)
    return end.value.value


def offset(partition: int, value: int) -> Any:
    one = {"partition_index": partition, "error_code": 0, "offset": value}
    return response(ApiKey.LIST_OFFSETS, 6, topics=[{"name": "t", "partitions": [one]}])


def directory(topic: str, sizes: dict[int, int]) -> Any:
    partitions = [
        {"partition_index": n, "partition_size": size, "offset_lag": 0} for n, size in sizes.items()
    ]
    one = {"error_code": 0, "log_dir": "/d", "topics": [{"name": topic, "partitions": partitions}]}
    return response(ApiKey.DESCRIBE_LOG_DIRS, 1, results=[one])


def view(led_by: dict[int, int]) -> TopicMetadata:
    partitions = {
        number: PartitionMetadata(number, leader, 1, (1, 2), (1, 2))
        for number, leader in led_by.items()
    }
    return TopicMetadata("t", None, False, partitions)


def test_partitions_stand_where_their_leaders_say_and_the_silent_ones_are_done_without():
    topic = view({0: 1, 1: 2, 2: -1})
    known = ClusterMetadata({n: Endpoint("node", n) for n in (1, 2)}, topics={"t": topic})
    asked = leaders.partition_states(known, topic, PATIENCE_MS)
    calls: list[Call] = next(asked)
    assert [call.route for call in calls] == [
        ToLeader("t", 0),
        ToLeader("t", 1),
        ToLeader("t", 0),
        ToLeader("t", 1),
        ToNode(1),
        ToNode(2),
    ]
    assert all(call.optional and call.timeout_ms == PATIENCE_MS for call in calls)
    nothing = NoResponse("node 2 stands still")
    answers = [offset(0, 5), nothing, offset(0, 9), nothing, directory("t", {0: 77}), nothing]
    assert ended(asked, answers) == {
        0: PartitionState(5, 9, 77),
        1: PartitionState(None, None, None, nothing),
    }


@pytest.mark.parametrize("told", [True, False])
def test_groups_are_listed_without_a_silent_node_where_it_is_named(told):
    silent: list[int] | None = [] if told else None
    asked = groups.list_groups(silent, PATIENCE_MS)
    next(asked)
    brokers = [
        {"broker_id": n, "host": "h", "port": n, "rack": None, "is_fenced": n == 3}
        for n in (1, 2, 3)
    ]
    described = response(ApiKey.DESCRIBE_CLUSTER, 2, error_code=0, cluster_id="c", brokers=brokers)
    calls = asked.send([described])
    assert [call.route for call in calls] == [ToNode(1), ToNode(2)], "3 is fenced"
    assert {call.optional for call in calls} == {told}
    one = {"group_id": "g", "protocol_type": "consumer", "group_state": "Stable"}
    first = response(ApiKey.LIST_GROUPS, 4, error_code=0, groups=[one])
    second = NoResponse("2") if told else response(ApiKey.LIST_GROUPS, 4, error_code=0, groups=[])
    (found,) = ended(asked, [first, second])
    assert found.group == "g" and silent == ([2] if told else None)


def test_an_optional_call_ends_with_its_error_in_place_of_an_answer():
    with (
        socket.create_server(("127.0.0.1", 0)) as hangs,
        Client("{}:{}".format(*hangs.getsockname())) as client,
    ):
        call = Call(3, {"topics": (), "allow_auto_topic_creation": False}, timeout_ms=50)
        call.optional = True
        (answer,) = client.calls([call])
        assert isinstance(answer, NoResponse)
        call.optional = False
        with pytest.raises(NoResponse):
            client.calls([call])


def test_what_is_refused_is_no_silence(kept_broker):
    def refuse(_: Any) -> KeptError:
        return InvalidRequest("no")

    with kept_broker.client() as client:
        call = Call(3, {"topics": (), "allow_auto_topic_creation": False}, check=refuse)
        call.optional = True
        with pytest.raises(InvalidRequest):
            client.calls([call])


class Late(World):
    """Nodes whose answers come ``late_ms`` after the requests."""

    late_ms = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.coming: list[tuple[int, Send]] = []

    def deliver(self, sent: Send) -> None:
        if self.late_ms:
            self.coming.append((self.now + self.late_ms, sent))
        else:
            super().deliver(sent)

    def pass_time(self, ms: int) -> None:
        for _ in range(0, ms, 50):
            self.now += 50
            due = [sent for at, sent in self.coming if at <= self.now]
            self.coming = [(at, sent) for at, sent in self.coming if at > self.now]
            for sent in due:
                super().deliver(sent)
            if (tick := self.core.next_tick_ms()) is not None and tick <= self.now:
                self.tick()


def told(world: World, **kwargs: Any) -> Call:
    values = {"topics": (), "allow_auto_topic_creation": False}
    return world.call(api_key=ApiKey.METADATA, values=values, **kwargs)


def test_what_anybody_answers_is_asked_of_another_node_when_a_known_one_falls_silent():
    world = Late()
    offsets(world)
    world.mute.add(A)
    call = told(world)
    world.pass_time(SLOW_MS - 50)
    assert call.id not in world.finished and world.sent_to(ApiKey.METADATA) == [A, A]
    world.pass_time(100)
    assert world.result(call).cluster_id == "c"
    assert world.sent_to(ApiKey.METADATA) == [A, A, B]
    assert told(world).id in world.finished, "the silent one is not asked next time"


def test_where_all_answers_come_late_they_are_waited_for():
    world = Late(bootstrap=(A, B))
    offsets(world)
    world.late_ms = 3 * SLOW_MS
    call = told(world)
    world.pass_time(15 * SLOW_MS)
    assert world.result(call).cluster_id == "c"


def test_a_call_to_a_leader_that_fell_silent_goes_to_the_next_one():
    world = Late()
    offsets(world)
    world.mute.add(A)
    call = offsets(world)
    world.pass_time(2 * SLOW_MS)
    assert world.sent_to(ApiKey.METADATA)[-1] == B, "another node is asked who leads"
    assert world.sent_to(ApiKey.LIST_OFFSETS) == [A, A] and call.id not in world.finished
    world.leader = 1
    world.pass_time(8 * SLOW_MS)
    assert world.result(call).topics[0].partitions[0].offset == 7
    assert world.sent_to(ApiKey.LIST_OFFSETS) == [A, A, B]
    world.mute.clear()


def test_a_change_that_may_have_been_made_is_not_asked_for_again():
    world = Late()
    offsets(world)
    world.mute.add(A)
    call = told(world, repeatable=False)
    world.pass_time(29 * SLOW_MS)
    assert call.id not in world.finished and world.sent_to(ApiKey.METADATA) == [A, A]
    world.pass_time(2 * SLOW_MS)
    with pytest.raises(NoResponse):
        world.result(call)


def test_a_lone_node_is_waited_for():
    world = Late()
    world.nodes = (A,)
    offsets(world)
    world.late_ms = 9 * SLOW_MS
    call = told(world)
    world.pass_time(10 * SLOW_MS)
    assert world.result(call).cluster_id == "c" and world.sent_to(ApiKey.METADATA) == [A, A]
