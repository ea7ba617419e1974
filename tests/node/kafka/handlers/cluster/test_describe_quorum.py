"""DescribeQuorum, against a real node that is its whole quorum."""

from __future__ import annotations

import pytest

from kept.storage.errors import KeptError


def ask(lone, *partitions, version=2):
    topics = [
        {"topic_name": name, "partitions": [{"partition_index": n}]} for name, n in partitions
    ]
    return lone.ask(55, version, topics=topics)


@pytest.mark.parametrize("version", range(3))
def test_the_quorum_of_one(lone, version):
    lone.create("t")
    before = lone.node.parts.runtime.now_ms()
    answer = ask(lone, ("__cluster_metadata", 0), version=version)
    assert answer.error_code.name == "none"
    ((found,),) = (topic.partitions for topic in answer.topics)
    member = lone.node.parts.metadata.raft_node
    assert (found.error_code.name, found.leader_id) == ("none", 0)
    assert found.leader_epoch == member.term > 0
    assert found.high_watermark == lone.node.parts.metadata.image.index
    (voter,) = found.current_voters
    assert (voter.replica_id, voter.log_end_offset) == (0, lone.node.parts.metadata.image.index)
    assert found.observers == ()
    if version >= 1:
        assert voter.last_fetch_timestamp == voter.last_caught_up_timestamp >= before
    if version >= 2:
        assert voter.replica_directory_id == member.directory_id
        assert answer.nodes == ()  # a lone node has no listener for others


def test_there_is_no_other_log(lone):
    lone.create("t")
    answer = ask(lone, ("t", 0), ("__cluster_metadata", 1))
    for topic in answer.topics:
        (found,) = topic.partitions
        assert found.error_code.name == "unknown_topic_or_partition"
        assert "__cluster_metadata:0" in found.error_message
        assert (found.leader_id, found.current_voters) == (-1, ())


def test_who_does_not_lead_does_not_answer(lone, monkeypatch):
    """The request goes on to the next controller then."""
    monkeypatch.setattr(type(lone.node.parts.metadata.raft_node), "controller_ready", False)
    with pytest.raises(KeptError, match="not the active controller"):
        ask(lone, ("__cluster_metadata", 0))
