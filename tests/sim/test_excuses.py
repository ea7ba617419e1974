"""What a replica may lack without a fault: what a generation had dropped, and nothing else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from kept.replication.manifests_events import ManifestRef
from kept.storage.types import Generation, TopicPartition
from tests.sim.compaction import CompactingReplicas
from tests.sim.compaction_checks import CompactionChecks
from tests.sim.rows import Rec
from tests.sim.world import Violation

TP, TOPIC_ID = TopicPartition("t", 0), UUID(int=1)
BASE = ManifestRef(Generation(3, 0), 20)
DROPPED, KEPT, KEPT_EMPTY, BEYOND = 4, 5, 7, 12


@pytest.fixture
def checks() -> CompactionChecks:
    """Generation 1.4, which ends at 10, dropped offset 4; a leader of epoch 3 began anew."""
    made = CompactionChecks(SimpleNamespace())
    content: Any = ([SimpleNamespace(base=KEPT_EMPTY)], [Rec(KEPT, b"k", b"v")])
    made.generations[TOPIC_ID, 0, (1, 4)] = (content, 1, 10)
    made.bases[TP] = 3
    return made


@pytest.mark.parametrize("offset", [DROPPED, KEPT, KEPT_EMPTY, BEYOND])
def test_only_what_a_generation_had_dropped(checks: CompactionChecks, offset: int) -> None:
    assert checks.had_dropped(TP, TOPIC_ID, BASE, offset) == (offset == DROPPED)
    later = ManifestRef(Generation(4, 1), 30)
    assert checks.had_dropped(TP, TOPIC_ID, later, offset) == (offset == DROPPED)


def test_only_where_a_leader_began_anew_and_since_then(checks: CompactionChecks) -> None:
    before = ManifestRef(Generation(2, 9), 20)
    assert not checks.had_dropped(TP, TOPIC_ID, before, DROPPED)
    assert not checks.had_dropped(TP, UUID(int=2), BASE, DROPPED), "another topic of that name"
    checks.bases.clear()
    assert not checks.had_dropped(TP, TOPIC_ID, BASE, DROPPED)


def test_not_what_the_generation_itself_says(checks: CompactionChecks) -> None:
    """It lists the offset: nothing but another one can have dropped it."""
    checks.bases[TP] = 1
    assert not checks.had_dropped(TP, TOPIC_ID, ManifestRef(Generation(1, 4), 10), DROPPED)


OTHER = TopicPartition("t", 1)


@pytest.mark.parametrize(
    ("tp", "ref", "offset", "excused"),
    [
        (TP, BASE, DROPPED, True),
        (TP, BASE, KEPT, False),
        (TP, BASE, BEYOND, False),
        (TP, ManifestRef(Generation(2, 9), 20), DROPPED, False),
        (OTHER, BASE, DROPPED, False),
    ],
    ids=["dropped", "kept", "never dropped", "before it began anew", "another partition"],
)
def test_that_somebody_began_anew_excuses_no_other_loss(
    checks: CompactionChecks, tp: TopicPartition, ref: ManifestRef, offset: int, excused: bool
) -> None:
    """All of these once passed: a lone leader had begun anew in the history, and a machine with
    damaged manifests had lost power.
    """
    counts = Counter({"lone leaders that begin anew": 1})
    here: Any = SimpleNamespace(
        world=SimpleNamespace(counts=counts, note=lambda *_: None),
        machine=SimpleNamespace(name="n1", deaths=[(0, "power")]),
        node=SimpleNamespace(history=SimpleNamespace(rots=True)),
        checks=checks,
        partitions={tp: SimpleNamespace(topic_id=TOPIC_ID)},
    )
    if excused:
        CompactingReplicas.missing(here, tp, ref, offset)
        return
    with pytest.raises(Violation, match="survivor-missing"):
        CompactingReplicas.missing(here, tp, ref, offset)
