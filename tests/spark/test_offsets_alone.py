"""From options to offsets, against a client that says what it is told to: no node is needed."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

from kept.client.core.metadata import ClusterView, PartitionView, TopicView
from kept.pipeline.options import parse_read
from kept.pipeline.read import offsets
from kept.pipeline.read.admission import limited

MANY = 10_000
SOON_S = 2.0
"""Of CPU: it takes a twentieth of it. A time that grows with the square was three times as much."""


def cluster(partitions: int) -> Any:
    known = {p: PartitionView(p, 0, 0, (0,), (0,)) for p in range(partitions)}
    view = ClusterView(topics={"t": TopicView("t", None, False, known)})
    return SimpleNamespace(
        view=view,
        metadata=lambda names: view,
        list_offsets=lambda asked, isolation=None: {tp: SimpleNamespace(offset=9) for tp in asked},
    )


def test_ten_thousand_partitions_are_planned_soon() -> None:
    client = cluster(MANY)
    given = {
        "bootstrap": "x",
        "assign": json.dumps({"t": list(range(MANY))}),
        "startingOffsets": json.dumps({"t": {str(p): 9 for p in range(MANY)}}),
    }
    options = parse_read(given, streaming=True)
    before = time.process_time()
    tps = offsets.find_partitions(client, options.topics)
    starts = offsets.starts(client, tps, options)
    ends = {tp: at + 1000 + tp.partition for tp, at in starts.items()}
    taken = limited(starts, ends, 500 * MANY)
    assert time.process_time() - before < SOON_S
    assert sum(taken[tp] - starts[tp] for tp in tps) == 500 * MANY
