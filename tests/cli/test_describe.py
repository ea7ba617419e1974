"""What ``kept topic describe`` says of leaders that do not tell where their partitions stand."""

from __future__ import annotations

from typing import Any

from kept.cli.commands import topic
from kept.client.consume.leader_offsets import PartitionState
from kept.client.core.broker_errors import NoResponse, failure
from kept.client.core.metadata import PartitionMetadata, TopicMetadata

OFFSET_NOT_AVAILABLE = 78


def test_a_leader_that_does_not_know_yet_is_not_called_silent(capsys):
    partitions = {
        number: PartitionMetadata(number, leader, 1, (1, 2), (1, 2))
        for number, leader in ((0, 1), (1, 2))
    }
    not_yet = failure(OFFSET_NOT_AVAILABLE, "ListOffsets of t:0")
    states = {
        0: PartitionState(0, None, 5, not_yet),
        1: PartitionState(None, None, None, NoResponse("no answer within 3 s")),
    }

    class Answers:
        """A client that knows the topic."""

        topic = staticmethod(lambda _: TopicMetadata("t", None, False, partitions))
        partition_states = staticmethod(lambda _: states)
        topic_configs = staticmethod(lambda _: {"t": []})

    client: Any = Answers()
    described = topic._describe(client, "t", all_settings=False)
    assert [p["high_watermark"] for p in described["partitions"]] == [None, None]
    assert [p["log_start_offset"] for p in described["partitions"]] == [0, None]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("kept: ListOffsets of t:0: OFFSET_NOT_AVAILABLE")
    assert second.startswith("kept: node 2 does not answer;")
