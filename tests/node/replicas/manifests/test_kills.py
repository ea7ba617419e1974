"""Passes, writes, deletions and deaths at random, with the cleaner running all the time."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress

import pytest

from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.storage.errors import KeptError
from tests.node.replicas.manifests.trio import DEADLINE_S, Trio, trio

pytestmark = pytest.mark.slow

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "1 2").split()]
ROUNDS = int(os.environ.get("ROUNDS", "6"))
KEYS = 40
SOON_S = 2.0
"""One that stands still is not waited for: another one is to lead."""


def write(three: Trio, rng: random.Random, model: dict[bytes, set[bytes | None]]) -> None:
    """Values and tombstones for some seconds, and until another pass was applied by the leader,
    however slow the machine is. What was not acknowledged may be there or not.
    """
    until = time.monotonic() + 2
    deadline = until + DEADLINE_S
    before, producer = generation(three), None
    while time.monotonic() < until or generation(three) in (before, None):
        assert time.monotonic() < deadline, f"no pass has followed {before}"
        rows = []
        for _ in range(rng.randrange(1, 8)):
            key = b"k%d" % rng.randrange(KEYS)
            value = None if rng.random() < 0.3 else b"%x" % rng.getrandbits(200)
            rows.append((key, value))
        try:
            if producer is None:
                producer = three.client.init_producer()
            three.put(*rows, producer=rng.choice([None, producer]))
        except (KeptError, OSError):
            producer = None  # what became of its last batch is not known
            for key, value in rows:
                model.setdefault(key, {None}).add(value)
        else:
            for key, value in rows:
                model[key] = {value}


def generation(three: Trio) -> str | None:
    """What the leader has applied; None while there is none, or it does not answer."""
    with suppress(KeptError, HttpFailed, OSError):
        node = three.leader
        api = JsonApi(Endpoint(three.cluster.host(node), three.cluster.port(node)), SOON_S)
        (found,) = api.get("compaction", topic=three.topic)["partitions"]
        return found["generation"]
    return None


def back(three: Trio, node: int) -> None:
    """Start it again, or let it go on."""
    if three.cluster.running(node):
        three.cluster.resume(node)
    else:
        three.cluster.start(node)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_table_is_what_was_written_last(seed):
    rng = random.Random(seed)
    config = {"min.cleanable.dirty.ratio": "0.05", "segment.bytes": "4000"}
    settings = {
        "log_cleaner_enable": "true",
        "log_cleaner_backoff_ms": "100",
        "broker_session_timeout_ms": "3000",
        "broker_heartbeat_interval_ms": "500",
    }
    with trio(config | {"min.insync.replicas": "2"}, **settings) as three:
        model: dict[bytes, set[bytes | None]] = {}
        down: int | None = None
        for _ in range(ROUNDS):
            write(three, rng, model)
            if down is not None:
                back(three, down)
                down = None
                if rng.random() < 0.6:
                    three.until_in_sync(0, 1, 2)
            else:
                down = rng.randrange(3)
                rng.choice([three.cluster.kill, three.cluster.stop, three.cluster.pause])(down)
        if down is not None:
            back(three, down)
        three.until_in_sync(0, 1, 2)
        table = three.table()
        for key, allowed in model.items():
            assert table.get(key) in allowed, key
        three.clean()
        three.until_applied(0, 1, 2)
        three.until_equal()
