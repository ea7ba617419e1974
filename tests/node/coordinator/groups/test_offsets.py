"""What a coordinator keeps of the offsets of its groups."""

from __future__ import annotations

import gc

from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups import records as r
from kept.node.coordinator.groups.core import GroupCore
from tests.support.coordinators import TOPIC_ID

COUNT = 2_000


def test_the_garbage_collector_follows_no_offset_that_is_loaded() -> None:
    """It would stop the loop for as long as it looks at a hundred thousand of them."""
    value = r.OffsetCommitValue(5, "text", 1, topic_id=TOPIC_ID)
    keys = (r.OffsetCommitKey("g", f"t{number % 10}", number) for number in range(COUNT))
    log = [r.GroupRecord(key, value).encode() for key in keys]
    core = GroupCore(ev.GroupSettings())
    gc.collect()
    before = len(gc.get_objects())
    for offset, (key, data) in enumerate(log):
        record = r.decode_record(key, data)
        assert record is not None
        core.replay(record, offset)
    assert sum(1 for _ in core.committed) == COUNT
    assert len(gc.get_objects()) - before < COUNT // 10


def test_offsets_that_are_committed_by_the_id_of_a_topic_share_it(lone) -> None:
    lone.create("t")
    lone.ask(10, 4, key_type=0, coordinator_keys=["g"])
    topic_id = lone.node.parts.metadata.image.topics["t"].topic_id
    part = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1}
    part["committed_metadata"] = ""
    answer = lone.ask(
        8,
        10,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        topics=[{"topic_id": topic_id, "partitions": [part]}],
    )
    assert answer.topics[0].partitions[0].error_code.name == "none"
    ((_, topics),) = lone.node.parts.groups.committed_by_group()
    assert topics["t"][0].value.topic_id is topic_id
