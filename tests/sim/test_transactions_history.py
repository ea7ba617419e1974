"""A short run of the stage ``transactions``."""

from __future__ import annotations

import pytest

from tests.sim.runner import report, run_one


def test_no_rule_is_broken() -> None:
    result, _ = run_one("transactions", 1)
    assert not result.check, report(result)
    for what in (
        "commits",
        "aborts",
        "records read committed",
        "stable offsets read",
        "requests held in an old connection",
    ):
        assert result.counts[what], what


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 15])
def test_no_rule_is_broken_where_a_topic_is_created_anew(seed) -> None:
    result, _ = run_one("transactions", seed, recreates=True)
    assert not result.check, report(result)
