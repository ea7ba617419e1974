"""Faults to a leader under checked loads; `make chaos` has all of them, at random."""

from __future__ import annotations

import pytest

from tests.chaos.faults import BRIEF
from tests.chaos.run import Run, cluster_of

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(900)]


def test_no_fault_loses_repeats_or_brings_back_anything():
    with cluster_of(3) as cluster:
        run = Run(cluster)
        try:
            passes = run.checked(1, run.one_by_one(BRIEF))
        finally:
            print(f"\n{run.table()}")
    assert passes > 0, "nothing was compacted meanwhile: the check of deleted keys shows nothing"
