"""A short soak; ``make soak MINUTES=n`` is a long one."""

from __future__ import annotations

import pytest

from tests.soak.run import SETTINGS, soak

SEED = 20261121
SECONDS = 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tables_replicas_and_disk_under_faults(kept_cluster):
    cluster = kept_cluster(nodes=3, **SETTINGS)
    run = soak(cluster, SEED, SECONDS, per_second=1500)
    assert run.sent > 1000 and run.events
