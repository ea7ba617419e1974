"""Questions to leaders: one request to each, and what is asked again of whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.admin.topics import run_concurrently
from kept.client.client import Client
from kept.client.consume import leader_offsets as leaders
from kept.client.consume.leader_offsets import MOST_PARTITIONS, OffsetAt
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.broker_errors import NoResponse
from kept.client.core.calls import Call, ToLeader
from kept.client.core.metadata import ClusterMetadata, Endpoint, PartitionMetadata, TopicMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import build, message_type
from kept.storage.errors import KeptError, NotLeaderOrFollower
from kept.storage.types import IsolationLevel, TopicPartition

COMMITTED = IsolationLevel.READ_COMMITTED
NOT_LEADER, UNKNOWN_TOPIC, NOT_AUTHORIZED = 6, 3, 29


def topic(name: str, led_by: dict[int, int]) -> TopicMetadata:
    partitions = {
        number: PartitionMetadata(number, leader, 1, (0, 1), (0, 1))
        for number, leader in led_by.items()
    }
    return TopicMetadata(name, None, False, partitions)


def view(**led_by: dict[int, int]) -> ClusterMetadata:
    nodes = {n: Endpoint("node", n) for n in range(3)}
    return ClusterMetadata(nodes, topics={name: topic(name, led) for name, led in led_by.items()})


def partitions(name: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(name, number) for number in numbers]


def asked(call: Call) -> dict[TopicPartition, Any]:
    request: Any = build(message_type(call.api_key, 4, EntityType.request), call.values)
    return {
        TopicPartition(str(getattr(t, "name", getattr(t, "topic", ""))), number(p)): p
        for t in request.topics
        for p in t.partitions
    }


def number(one: Any) -> int:
    return int(one.partition_index if hasattr(one, "partition_index") else one.partition)


def answer(call: Call, errors: dict[TopicPartition, int] | None = None) -> Any:
    """Offset 100 + partition for all that was asked for but the errors; -1 leaves one out."""
    names = ("name", "partition_index", "offset")
    if call.api_key == ApiKey.OFFSET_FOR_LEADER_EPOCH:
        names = ("topic", "partition", "end_offset")
    topics: dict[str, list[dict[str, Any]]] = {}
    for tp in reversed(asked(call)):  # in any order
        code = (errors or {}).get(tp, 0)
        if code >= 0:
            one = {names[1]: tp.partition, "error_code": code, names[2]: 100 + tp.partition}
            topics.setdefault(tp.topic, []).append({"timestamp": -1, "leader_epoch": 5, **one})
    values = {"topics": [{names[0]: name, "partitions": all_} for name, all_ in topics.items()]}
    return build(message_type(call.api_key, 4, EntityType.response), values)


def ended(operation: Any, answers: list[Any]) -> Any:
    with pytest.raises(StopIteration) as end:
        operation.send(answers)
    return end.value.value


def list_offsets(seen: ClusterMetadata, tps: list[TopicPartition]) -> Any:
    return leaders.list_offsets(seen, dict.fromkeys(tps, LATEST), COMMITTED, 700)


def test_each_leader_is_asked_once_about_all_its_partitions_of_all_topics():
    seen = view(t={0: 0, 1: 1, 2: 0}, u={0: 1})
    wanted = {tp: 7 + at for at, tp in enumerate(partitions("t", 0, 1, 2) + partitions("u", 0))}
    operation = leaders.list_offsets(seen, wanted, COMMITTED, 700)
    calls = next(operation)
    assert [call.route for call in calls] == [ToLeader("t", 0), ToLeader("t", 1)]
    assert [list(asked(call)) for call in calls] == [
        partitions("t", 0, 2),
        partitions("t", 1) + partitions("u", 0),
    ]
    assert {tp: p.timestamp for call in calls for tp, p in asked(call).items()} == wanted
    assert {call.values["isolation_level"] for call in calls} == {1}
    assert {call.timeout_ms for call in calls} == {700}
    assert all(call.check(answer(call)) is None for call in calls)
    found = ended(operation, [answer(call) for call in calls])
    assert list(found.items()) == [(tp, OffsetAt(100 + tp.partition, -1, 5)) for tp in wanted]


def test_the_ends_of_epochs_too():
    seen = view(t={0: 0, 1: 0})
    operation = leaders.epoch_ends(seen, {TopicPartition("t", 0): 3, TopicPartition("t", 1): 4}, 9)
    (call,) = next(operation)
    assert [p.leader_epoch for p in asked(call).values()] == [3, 4]
    assert ended(operation, [answer(call)]) == {("t", 0): 100, ("t", 1): 101}


def test_many_partitions_are_asked_about_in_several_requests():
    count = 2 * MOST_PARTITIONS + 1
    seen = view(t=dict.fromkeys(range(count), 0))
    operation = list_offsets(seen, partitions("t", *range(count)))
    calls = next(operation)
    assert [len(asked(call)) for call in calls] == [MOST_PARTITIONS, MOST_PARTITIONS, 1]
    assert len(ended(operation, [answer(call) for call in calls])) == count


def test_what_a_leader_leads_no_more_is_asked_again_alone():
    seen = view(t={0: 0, 1: 0, 2: 0}, u={0: 1})
    operation = list_offsets(seen, partitions("t", 0, 1, 2) + partitions("u", 0))
    first, second = next(operation)
    moved = answer(first, {TopicPartition("t", 1): NOT_LEADER, TopicPartition("t", 2): -1})
    assert first.check(moved) is None
    (again,) = operation.send([moved, answer(second)])
    assert "t" not in seen.topics and "u" in seen.topics, "who leads it has to be asked"
    assert again.route == ToLeader("t", 1) and list(asked(again)) == partitions("t", 1, 2)
    seen.topics["t"] = topic("t", {0: 0, 1: 1, 2: 2})  # as the core has found out by now
    elsewhere = answer(again, {TopicPartition("t", 2): NOT_LEADER})
    (last,) = operation.send([elsewhere])
    assert "t" in seen.topics, "it was not asked of the leader that is known now"
    assert last.route == ToLeader("t", 2) and list(asked(last)) == partitions("t", 2)
    assert len(ended(operation, [answer(last)])) == 4


def test_a_request_goes_again_as_a_whole_when_it_brought_nothing():
    (call,) = next(list_offsets(view(t={0: 0, 1: 0}), partitions("t", 0, 1)))
    codes = {TopicPartition("t", 0): UNKNOWN_TOPIC, TopicPartition("t", 1): NOT_LEADER}
    error = call.check(answer(call, codes))
    assert str(error) == (
        "ListOffsets of t:0: UNKNOWN_TOPIC_OR_PARTITION (no such topic or partition)"
    )
    lacking = call.check(answer(call, dict.fromkeys(codes, -1)))
    assert str(lacking) == "ListOffsets of t:0: the answer lacks it"


def test_an_error_that_no_other_try_mends_names_its_partition():
    (call,) = next(list_offsets(view(t={0: 0, 1: 0, 2: 0}), partitions("t", 0, 1, 2)))
    codes = {TopicPartition("t", 0): NOT_LEADER, TopicPartition("t", 2): NOT_AUTHORIZED}
    error = call.check(answer(call, codes))
    assert isinstance(error, NotAuthorized) and str(error).startswith("ListOffsets of t:2: ")


def test_partitions_whose_leader_is_not_known_are_asked_about_by_topic():
    calls = next(list_offsets(view(t={0: -1, 1: 0}), partitions("t", 1, 0) + partitions("u", 3, 4)))
    routes = [ToLeader("t", 1), ToLeader("t", 0), ToLeader("u", 3)]
    assert [call.route for call in calls] == routes
    assert calls[2].name == "ListOffsets of u:3, u:4"
    (many,) = next(list_offsets(ClusterMetadata(), partitions("t", *range(9))))
    assert many.name == "ListOffsets of t:0, t:1, t:2 and more"


def test_nothing_is_asked_about_nothing():
    with pytest.raises(StopIteration):
        next(list_offsets(view(), []))


def test_operations_run_side_by_side_each_at_its_own_pace():
    def steps(name: str, count: int):
        said = []
        for at in range(count):
            said += yield [f"{name}{at}"] * (at + 1)
        return said

    operation = run_concurrently(steps("a", 2), steps("b", 0), steps("c", 1))
    assert next(operation) == ["a0", "c0"]
    assert operation.send([1, 2]) == ["a1", "a1"]
    assert ended(operation, [3, 4]) == [[1, 3, 4], [], [2]]


def counted(client: Client, count: Callable[[int], None]) -> None:
    run = client._sockets.run

    def counting(calls):
        count(len(calls))
        return run(calls)

    client._sockets.run = counting  # type: ignore[method-assign]


@pytest.mark.slow
def test_two_hundred_partitions_of_three_nodes_while_leaders_go(kept_cluster):
    cluster = kept_cluster(nodes=3)
    name = cluster.create_topic(partitions=200)
    tps = partitions(name, *range(200))
    with Client(cluster.bootstrap) as client:
        led = {n: one.leader for n, one in client.metadata([name]).topics[name].partitions.items()}
        asked_for: list[int] = []
        counted(client, asked_for.append)
        assert {at.offset for at in client.list_offsets(dict.fromkeys(tps, LATEST)).values()} == {0}
        assert asked_for == [3]
        asked_for.clear()
        cluster.kill(led[0])
        found = client.list_offsets(dict.fromkeys(tps, EARLIEST))
        assert list(found) == tps and {at.offset for at in found.values()} == {0}
        assert sum(asked_for) <= 12, f"not one by one: {asked_for}"
        assert set(client.epoch_ends(dict.fromkeys(tps, 0))) == set(tps)


def test_a_partition_that_is_not_there_is_named_beside_others(kept_broker):
    with kept_broker.client() as client:
        name = kept_broker.create_topic(partitions=2)
        with pytest.raises(KeptError, match=f"ListOffsets of {name}:7: .*no partition 7"):
            client.list_offsets(dict.fromkeys(partitions(name, 0, 7, 1), LATEST))
        client.metadata([name])
        with pytest.raises(KeptError, match=f"ListOffsets of {name}:7: .*no partition 7"):
            client.list_offsets(dict.fromkeys(partitions(name, 0, 1, 7), LATEST))


def test_what_is_optional_may_be_an_error_that_waiting_mends():
    seen = view(t={0: 0, 1: 0, 2: 1})
    operation = leaders.partition_states(seen, seen.topics["t"], 700)
    calls = next(operation)
    nothing = NoResponse("node 0 stands still")
    answers = [nothing, answer(calls[1]), nothing, answer(calls[3]), nothing, nothing]
    found = ended(operation, answers)
    assert found[0] == found[1] == (None, None, None, nothing) and found[2][:2] == (102, 102)
    final = answer(calls[0], {TopicPartition("t", 1): NOT_AUTHORIZED})
    assert isinstance(calls[0].check(final), NotAuthorized)
    both = {TopicPartition("t", 0): NOT_LEADER, TopicPartition("t", 1): NOT_LEADER}
    assert isinstance(calls[0].check(answer(calls[0], both)), NotLeaderOrFollower)
