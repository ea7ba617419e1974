"""Every strategy travels through manifests, with transactions, aborted data and idempotent
producers; one that draws lots cannot make replicas differ, for only the leader asks it.
"""

from __future__ import annotations

import os
import random
import secrets

import pytest

from kept.compaction import strategy
from kept.compaction.strategy import From, Only
from tests.support.follower_pair import HOUR_MS, Pair, write

STRATEGIES = {
    "latest": {},
    "latest-n": {"kept.compaction.latest.n": "2"},
    "highest-version": {},
    "by-key-prefix": {"kept.compaction.prefixes": "k1=latest-n:2,k2=highest-version"},
    "lots": {"-": "-"},
}
SEEDS = int(os.environ.get("SEEDS", "2"))


class Lots:
    """Keeps whatever it comes upon of each key, another thing each time."""

    def __init__(self, config) -> None:
        del config

    def key(self, record):
        return record.key

    def init(self, max_keys):
        return {}

    def reduce(self, state, key, record):
        state.setdefault(key, []).append(record.offset)
        return False

    def collect(self, state):
        dice = secrets.SystemRandom()
        return {
            key: dice.choice(
                [
                    From(dice.choice(offsets)),
                    Only(frozenset(dice.sample(offsets, dice.randint(1, len(offsets))))),
                ]
            )
            for key, offsets in state.items()
        }


def last_data(both, rnd) -> None:
    """An idempotent producer whose last batch loses all its records: it stays, empty."""
    both.leader.append((b"k1", rnd.randbytes(10)), pid=90, sequence=0)
    both.leader.append((b"k1", rnd.randbytes(10)))
    both.leader.roll()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_are_equal(kit, monkeypatch, name: str, seed: int) -> None:
    monkeypatch.setitem(strategy.BUILT_IN, "lots", Lots)
    rnd = random.Random(seed)
    both = Pair(
        kit,
        compaction_strategy=name,
        raw=STRATEGIES[name],
        delete_retention_ms=HOUR_MS,
        segment_bytes=2_000,
        index_interval_bytes=256,
    )
    last_data(both, rnd)
    passes = 0
    for _ in range(5):
        write(both, rnd)
        both.leader.now += rnd.choice((0, 2 * HOUR_MS))
        both.follower.now = both.leader.now
        passes += both.leader.clean() is not None
        both.fetch(roll_at=lambda base: rnd.random() < 0.15)
        if both.leader.state.applied is not None and rnd.random() < 0.7:
            both.apply()
    both.leader.roll()
    both.leader.clean()
    both.fetch()
    both.apply()
    assert passes
    headers = {(h.base_offset, h.record_count, h.is_control) for h in both.follower.headers()}
    assert headers == {(h.base_offset, h.record_count, h.is_control) for h in both.leader.headers()}
    assert any(is_control for _, _, is_control in headers)
    mine, theirs = both.follower.log.producers, both.leader.log.producers
    assert {p: s.epoch for p, s in mine.items()} == {p: s.epoch for p, s in theirs.items()}


def test_it_does_draw_lots(kit, monkeypatch) -> None:
    """Or the test above would show nothing: two leaders of one log come to different records."""
    monkeypatch.setitem(strategy.BUILT_IN, "lots", Lots)
    left = []
    for _ in range(2):
        world = kit.World(compaction_strategy="lots", raw=STRATEGIES["lots"])
        for i in range(200):
            world.append((b"k%d" % (i % 20), b"%d" % i))
        world.roll()
        world.clean()
        left.append(world.offsets())
    assert left[0] != left[1]
