"""What a replica may lack without a fault: what a generation had dropped, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from kept.replication.manifests_events import ManifestRef
from kept.storage.types import Generation, TopicPartition
from tests.sim.batches import Batch, Rec
from tests.sim.nodes_compaction import NodesCompactionHistory
from tests.sim.world import Violation

TP, OTHER, TOPIC_ID = TopicPartition("t", 0), TopicPartition("t", 1), UUID(int=1)
BASE, LATER = ManifestRef(Generation(3, 0), 20), ManifestRef(Generation(4, 1), 30)
BEFORE, ITSELF = ManifestRef(Generation(2, 9), 20), ManifestRef(Generation(1, 4), 10)
DROPPED, KEPT, KEPT_EMPTY, BEYOND = 4, 5, 7, 12


@pytest.fixture(scope="module")
def history() -> Iterator[NodesCompactionHistory]:
    """Generation 1.4, which ends at 10, dropped offset 4; a leader of epoch 3 began anew."""
    made = NodesCompactionHistory(1)
    checks = made.checks
    checks.topics["t"] = (TOPIC_ID, 2)
    content = ([Batch(KEPT_EMPTY, KEPT_EMPTY, 1, 0, -1, -1, -1, 0, 0)], [Rec(KEPT, b"k", b"v")])
    checks.generations[TOPIC_ID, 0, ITSELF.generation] = (content, 1, ITSELF.end_offset)
    checks.bases[TP] = 3
    yield made
    made.close()


@pytest.mark.parametrize(
    ("tp", "topic_id", "ref", "offset", "excused"),
    [
        (TP, TOPIC_ID, BASE, DROPPED, True),
        (TP, TOPIC_ID, LATER, DROPPED, True),
        (TP, TOPIC_ID, BASE, KEPT, False),
        (TP, TOPIC_ID, LATER, KEPT, False),
        (TP, TOPIC_ID, BASE, KEPT_EMPTY, False),
        (TP, TOPIC_ID, BASE, BEYOND, False),
        (TP, TOPIC_ID, BEFORE, DROPPED, False),
        (TP, UUID(int=2), BASE, DROPPED, False),
        (OTHER, TOPIC_ID, BASE, DROPPED, False),
    ],
    ids=[
        "dropped",
        "dropped, since then",
        "kept",
        "kept, since then",
        "kept, empty",
        "never dropped",
        "before it began anew",
        "another topic of that name",
        "another partition",
    ],
)
def test_only_what_a_generation_had_dropped_where_a_leader_began_anew(
    history: NodesCompactionHistory,
    *,
    tp: TopicPartition,
    topic_id: UUID,
    ref: ManifestRef,
    offset: int,
    excused: bool,
) -> None:
    assert history.checks.had_dropped(tp, topic_id, ref, offset) == excused
    if excused:
        history.missing(tp, topic_id, ref, offset)
        return
    with pytest.raises(Violation, match="survivor-missing"):
        history.missing(tp, topic_id, ref, offset)


def test_not_what_the_generation_itself_says(
    history: NodesCompactionHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists the offset: nothing but another one can have dropped it."""
    monkeypatch.setitem(history.checks.bases, TP, 1)
    assert not history.checks.had_dropped(TP, TOPIC_ID, ITSELF, DROPPED)


def test_nothing_where_no_leader_began_anew(
    history: NodesCompactionHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(history.checks.bases, TP)
    assert not history.checks.had_dropped(TP, TOPIC_ID, BASE, DROPPED)
