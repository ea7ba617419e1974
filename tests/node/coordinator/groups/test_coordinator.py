"""Which groups this node serves: as the image says, as partitions come and go."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.cluster.metadata.records import RemoveTopicRecord, TopicRecord
from kept.node.coordinator.common.events import EndMarker
from kept.node.coordinator.common.partitioner import partition_for
from kept.node.coordinator.groups import events as ev
from kept.node.kafka.handlers.groups.describe_groups import (
    GROUPS_PER_DELETION,
    DescribeGroupsHandler,
)
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.replicas.local_replica import LocalTopic
from kept.steps import run_to_end
from kept.storage.errors import (
    CoordinatorLoadInProgress,
    NotCoordinator,
    TransactionCoordinatorFenced,
)
from kept.storage.records import headers
from kept.storage.types import TopicPartition
from tests.support.coordinators import (
    ME,
    PARTITIONS,
    TOPIC,
    FakeNode,
    filled,
    group_in,
    partition_record,
)
from tests.support.given import Given
from tests.support.loops import result, run, turns

NOT_COORDINATOR = ErrorCode.not_coordinator


def commit(node: FakeNode, group: str) -> asyncio.Future[Any]:
    topic = ev.CommitTopic("orders", uuid.UUID(int=9), (ev.CommitPartition(0, 5),))
    return node.groups.shards.submit(group, lambda n: ev.CommitOffsets(n, group, (topic,)))


@run
async def test_without_the_topic_nobody_coordinates() -> None:
    node = FakeNode()
    assert node.groups.shards.leader_of("g") is None
    with pytest.raises(NotCoordinator):
        node.groups.shards.shard("g")
    assert run_to_end(node.groups.list_groups()) == []
    await node.groups.shards.wait_for(["g"])


@run
async def test_what_is_being_opened_is_waited_for() -> None:
    """The image says that we lead before the log is open."""
    node = FakeNode()
    node.apply(*node.created())
    group = group_in(2)
    with pytest.raises(CoordinatorLoadInProgress):
        node.groups.shards.shard(group)
    waiting = asyncio.ensure_future(node.groups.shards.wait_for([group]))
    await asyncio.sleep(0)
    assert not waiting.done()
    node.host(2)
    node.apply(partition_record(1, ME, 1))
    await result(waiting)
    assert (await result(commit(node, group))).error is ErrorCode.none
    assert list(node.groups.committed()) == [(group, "orders", 0, 5)]
    node.apply(TopicRecord("orders", uuid.UUID(int=10)))
    assert list(node.groups.committed()) == [], "an offset of another topic tells no lag"


@run
async def test_what_is_being_read_is_in_progress() -> None:
    node = FakeNode()
    node.host(2, await filled(2_000))
    node.apply(*node.created())
    group = group_in(2)
    with pytest.raises(CoordinatorLoadInProgress):
        node.groups.shards.submit(group, lambda n: ev.Heartbeat(n, group, "m", 1))
    request: Any = Given(group_id=group, generation_id=1, member_id="m")
    # Kafka lets members go on meanwhile.
    assert node.heartbeat(request) == {"error_code": ErrorCode.none}
    listed: Any = node.described(0, "list_groups", Given())
    assert listed["error_code"] is ErrorCode.coordinator_load_in_progress
    described: Any = node.described(6, "describe_groups", Given(groups=[group]))
    (of_group,) = described["groups"]
    assert of_group["error_code"] is ErrorCode.coordinator_load_in_progress
    await result(node.groups.shards.wait_for([group]))
    assert node.groups.describe(group).state == "Dead"


@run
async def test_another_nodes_groups_are_refused() -> None:
    node = FakeNode()
    node.apply(*node.created(leader=1))
    assert node.groups.shards.leader_of("g") == 1
    with pytest.raises(NotCoordinator):
        node.groups.shards.shard("g")


@run
async def test_leadership_comes_and_goes() -> None:
    node = FakeNode()
    group = group_in(3)
    partition = node.host(3)
    node.apply(*node.created())
    assert (await result(commit(node, group))).error is ErrorCode.none
    partition.hold = True
    waiting = commit(node, group)
    node.apply(partition_record(3, 1, 1))
    assert (await result(waiting)).error is ErrorCode.not_coordinator
    with pytest.raises(NotCoordinator):
        node.groups.shards.shard(group)
    partition.commit()
    node.apply(partition_record(3, ME, 2))
    await result(node.groups.shards.wait_for([group]))
    assert [g.group for g in run_to_end(node.groups.list_groups())] == [group]


@run
async def test_groups_that_go_to_another_node_while_they_are_deleted_are_refused() -> None:
    """DeleteGroups is served in slices; its connection is answered all the same."""
    node = FakeNode()
    node.host(3)
    node.apply(*node.created())
    here = [f"g{i}" for i in range(9_999) if partition_for(f"g{i}", PARTITIONS) == 3]
    names = here[: GROUPS_PER_DELETION + 1]
    handler = DescribeGroupsHandler(node.groups)
    nothing: Any = None
    steps = handler.delete_groups(nothing, Given(groups_names=names))
    for _ in names:
        next(steps)
    next(steps)  # the first part is under way
    node.apply(partition_record(3, 1, 1))
    answer: Any = run_to_end(steps)
    if not isinstance(answer, dict):
        answer = await result(answer)
    refused = [r["group_id"] for r in answer["results"] if r["error_code"] is NOT_COORDINATOR]
    assert refused == names[GROUPS_PER_DELETION:]
    assert len(answer["results"]) == len(names)


@run
async def test_a_partition_is_not_read_before_it_is_led() -> None:
    """The image says that we lead, as it did before a restart, and we may not serve yet."""
    node = FakeNode()
    node.lead = lambda partition, record: None  # type: ignore[method-assign]
    partition = node.host(2, await filled(10))
    partition.is_leader, partition.leader_epoch = False, -1
    node.apply(*node.created())
    group = group_in(2)
    with pytest.raises(CoordinatorLoadInProgress):
        node.groups.shards.shard(group)
    partition.is_leader, partition.leader_epoch = True, 0
    node.groups.shards.roles_taken(node.image)
    await result(node.groups.shards.wait_for([group]))
    assert (await result(commit(node, group))).error is ErrorCode.none


@run
async def test_a_node_that_stood_still_answers_for_no_group() -> None:
    """Others may lead by now, and have taken commits that it knows nothing of."""
    node = FakeNode()
    partition = node.host(2)
    node.apply(*node.created())
    group = group_in(2)
    assert (await result(commit(node, group))).error is ErrorCode.none
    partition.is_leader = False  # suspended
    with pytest.raises(NotCoordinator):
        node.groups.shards.shard(group)
    assert run_to_end(node.groups.list_groups()) == []
    partition.is_leader = True
    node.groups.shards.roles_taken(node.image)
    assert [g.group for g in run_to_end(node.groups.list_groups())] == [group]


@run
async def test_a_lost_partition_takes_its_groups_along() -> None:
    node = FakeNode()
    group = group_in(0)
    node.host(0).hold = True
    node.apply(*node.created())
    waiting = commit(node, group)
    tp = TopicPartition(CONSUMER_OFFSETS, 0)
    del node.table.replicas[tp]
    topic = LocalTopic(tp.topic, TOPIC, PARTITIONS)
    topic.offline[0] = "disk"
    node.table.by_name[tp.topic.encode()] = topic
    node.groups.shards.partition_gone(tp)
    assert (await result(waiting)).error is ErrorCode.not_coordinator
    with pytest.raises(NotCoordinator):
        node.groups.shards.shard(group)
    await node.groups.shards.wait_for([group])


@run
async def test_offsets_go_with_their_topic_and_groups_with_theirs() -> None:
    node = FakeNode()
    group = group_in(1)
    node.host(1)
    orders = TopicRecord("orders", uuid.UUID(int=9))
    node.apply(*node.created(), orders)
    assert (await result(commit(node, group))).error is ErrorCode.none
    node.apply(RemoveTopicRecord(orders.topic_id))
    await turns()
    assert list(node.groups.committed()) == []
    node.apply(RemoveTopicRecord(TOPIC))
    assert node.groups.shards.leader_of(group) is None
    await node.groups.shards.stop()


@run
async def test_stopping_answers_those_who_wait() -> None:
    node = FakeNode()
    for number in range(PARTITIONS):
        node.host(number).hold = True
    node.apply(*node.created())
    waiting = [commit(node, group_in(number)) for number in range(PARTITIONS)]
    await node.groups.shards.stop()
    assert {(await result(w)).error for w in waiting} == {ErrorCode.not_coordinator}


@run
async def test_a_marker_goes_to_the_partition_that_it_names() -> None:
    node = FakeNode()
    marker = EndMarker(7, 0, 0, is_commit=True)
    assert await result(node.groups.end_transaction(1, marker)) is ErrorCode.not_coordinator
    partition = node.host(1)
    node.apply(*node.created())
    assert await result(node.groups.end_transaction(1, marker)) is ErrorCode.none
    (batch,) = [header for _, header in headers(partition.log)]
    assert batch.is_control and batch.producer_id == 7
    assert await result(node.groups.end_transaction(2, marker)) is (
        ErrorCode.coordinator_load_in_progress
    )
    partition.refuse = TransactionCoordinatorFenced("a newer coordinator is known")
    error = await result(node.groups.end_transaction(1, marker))
    assert error is ErrorCode.transaction_coordinator_fenced
