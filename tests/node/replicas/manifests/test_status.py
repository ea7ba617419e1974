"""What a replica says of itself, and when it tries again what failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kept.cluster.metadata.image import Image
from kept.node.replicas.manifests import status
from kept.node.replicas.manifests.retry import RetrySchedule
from kept.node.replicas.manifests.status import (
    base_name,
    generation_text,
    is_alone,
    others_apply,
    started_leading,
)
from kept.replication import manifests_events as ev
from kept.replication.manifests import ManifestCore
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition_core import PartitionCore
from kept.replication.progress import ReplicaProgress
from kept.storage.errors import KeptError
from kept.storage.types import Generation, TopicPartition
from tests.support.replicas import ManualLoop, local_replica, manifest_context, record

REF = ManifestRef(Generation(3, 7), 100)
OLD, NEW = Generation(3, 6), Generation(3, 7)


class Clock:
    """A node at 5 s whose timers are run by hand."""

    def __init__(self) -> None:
        self.context = manifest_context([])
        runtime: Any = self.context.runtime
        runtime.at_ms = 5_000
        self.loop: ManualLoop = runtime.loop
        self.retries = 0
        self.retry_schedule = RetrySchedule(
            runtime, self.context.counters, TopicPartition("t", 0), self.retry
        )

    def retry(self) -> None:
        self.retries += 1


def test_each_failure_waits_twice_as_long_up_to_five_minutes() -> None:
    clock = Clock()
    waits = []
    for number in range(1, 31):
        clock.retry_schedule.failed("x", "1.5", KeptError("why"))
        (wait,) = clock.loop.waits
        waits.append(wait)
        assert clock.retry_schedule.retry_at_ms == 5_000 + 1000 * wait
        assert (clock.retry_schedule.count, clock.retry_schedule.reason) == (number, "why")
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, *[300] * 21]
    clock.loop.timers[-1].function()
    assert clock.retries == 1
    clock.retry_schedule.reset()
    assert (clock.loop.waits, clock.retry_schedule.retry_at_ms) == ([], None)
    assert (clock.retry_schedule.count, clock.retry_schedule.reason) == (0, "")
    clock.retry_schedule.failed("x", "1.5", ValueError())
    assert clock.loop.waits == [1]
    assert clock.retry_schedule.reason == "ValueError; the node's log has the details"


def test_what_a_check_stopped_waits_for_somebody(monkeypatch) -> None:
    monkeypatch.setattr("kept.node.replicas.manifests.retry.check_stopped", lambda _: True)
    clock = Clock()
    clock.retry_schedule.failed("x", "1.5", KeptError("wrong"))
    assert (clock.loop.waits, clock.retry_schedule.retry_at_ms, clock.retry_schedule.count) == (
        [],
        None,
        1,
    )
    assert clock.context.counters.checks_failed == 1 and clock.retry_schedule.reason == "wrong"


@pytest.mark.parametrize("adopted", [True, False])
def test_a_missing_record_is_an_error_unless_kafka_compacted_here(adopted, capfd) -> None:
    Clock().retry_schedule.record_missing("1.5", 42, epoch=1, adopted=adopted)
    said = capfd.readouterr().err
    assert ("level=warning" in said, "level=error" in said) == (adopted, not adopted)
    assert "offset=42" in said and "generation=1.5" in said
    assert ("before it was adopted" in said) is adopted
    assert ("unclean election" in said) is not adopted


def test_names_of_generations() -> None:
    assert (generation_text(None), generation_text(REF)) == ("none", "3.7")
    assert base_name(ev.CreateBaseGeneration(9, None)) == (9, 0)
    assert base_name(ev.CreateBaseGeneration(9, REF)) == (9, 8)


@pytest.mark.parametrize(
    ("leading", "isr", "pending", "alone"),
    [
        (True, (1,), None, True),
        (False, (1,), None, False),
        (True, (1, 2), None, False),
        (True, (2,), None, False),
        (True, (1,), (1, 2), False),
    ],
)
def test_who_is_alone(leading, isr, pending, alone) -> None:
    core = PartitionCore(1, leading=leading, isr=isr, pending_isr=pending)
    assert is_alone(core, 1) is alone


@pytest.mark.parametrize(
    ("held", "applied", "eligible", "applies"),
    [(NEW, OLD, {2}, True), (NEW, NEW, {2}, False), (OLD, OLD, {2}, False), (NEW, OLD, {3}, False)],
)
def test_who_still_applies(held, applied, eligible, applies) -> None:
    follower = ReplicaProgress(held=held, applied=applied)
    core = PartitionCore(1, followers={2: follower}, published=NEW, eligible=frozenset(eligible))
    assert others_apply(core) is applies


@pytest.mark.parametrize("unclean", [True, False])
@pytest.mark.parametrize("isr", [(1,), (1, 2), (2,)])
@pytest.mark.parametrize("why", ["", "configured", "held", "lost", "once"])
def test_only_what_was_ever_compacted_begins_anew_after_an_unclean_election(
    monkeypatch, *, why, isr, unclean
) -> None:
    monkeypatch.setattr(status, "was_compacted", lambda image, topic: why == "once")
    partition = local_replica().partition
    policy = frozenset({"compact" if why == "configured" else "delete"})
    config = replace(partition.config, cleanup_policy=policy)
    partition.log.update_config(config)
    core = ManifestCore(1, held=REF if why == "held" else None, lost=why == "lost")
    expected = ev.StartedLeading(4, unclean and why != "", isr == (1,))
    assert started_leading(Image(), partition, record(isr, 4, unclean=unclean), core, 1) == expected
