"""All three nodes are killed together under a producer whose messages time out."""

from __future__ import annotations

import statistics

import pytest

from tests.failover.all_killed import CLEANER, kill_again_and_again

pytestmark = [pytest.mark.slow, pytest.mark.boot_id, pytest.mark.timeout(600)]


def test_two_of_three_acknowledge_soon_and_nothing_is_lost(kept_cluster):
    outcome = kill_again_and_again(kept_cluster(nodes=3, **CLEANER), 4, 1, {})
    print(outcome)
    assert not outcome.lost
    assert not outcome.twice or outcome.load.failed, "only a producer that gave up sends again"
    assert statistics.median(one.probe_s for one in outcome.rounds) < 2
