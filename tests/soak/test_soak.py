"""A short soak; ``make soak MINUTES=n`` is a long one."""

from __future__ import annotations

import pytest

from tests.soak.run import SETTINGS, TRIES, Soak, soak

SEED = 20261121
SECONDS = 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tables_replicas_and_disk_under_faults(kept_cluster):
    cluster = kept_cluster(nodes=3, **SETTINGS)
    run = soak(cluster, SEED, SECONDS, per_second=1500)
    assert run.sent > 1000 and run.events


class Finishing(Soak):
    """Its checks come to what a test says, and it counts them."""

    def __init__(self, *outcomes):
        self.outcomes, self.checks = list(outcomes), 0
        self.writers, self.events = [], {}
        self.cluster = self

    def check(self):
        self.checks += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def largest(self):
        return 0

    def wait_until(self, condition, what, deadline_s):
        assert condition()


LEFT = {"latest": {"k1": "2 records are left, 1 is promised"}}


def test_the_end_forgives_nothing_that_contradicts_a_promise():
    run = Finishing(AssertionError("k1 is lost"), {})
    with pytest.raises(AssertionError, match="k1 is lost"):
        run.finish()
    run = Finishing(LEFT, AssertionError("replicas differ"), {})
    with pytest.raises(AssertionError, match="replicas differ"):
        run.finish()


def test_the_end_asks_for_another_pass_where_more_is_left_than_promised():
    run = Finishing(LEFT, LEFT, {}, AssertionError("not checked again"))
    run.finish()
    assert run.checks == 3
    with pytest.raises(AssertionError, match=f"{TRIES} passes did not remove .*k1"):
        Finishing(*[LEFT] * TRIES).finish()
