"""From options to offsets, against a client that says what it is told to: no node is needed."""

from __future__ import annotations

import json
import time

from kept.pipeline.options import parse_read
from kept.pipeline.read import offsets
from kept.pipeline.read.admission import limited
from tests.support.fake_client import FakeClient

MANY = 10_000
SOON_S = 2.0
"""Of CPU: it takes a twentieth of it. A time that grows with the square was three times as much."""


def test_ten_thousand_partitions_are_planned_soon() -> None:
    client = FakeClient({"t": MANY}, start=9, end=9)
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
