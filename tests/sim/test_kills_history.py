"""A short run of the stage ``kills``."""

from __future__ import annotations

import pytest

from tests.sim.kills_history import ROUNDS
from tests.sim.runner import report, run_one


@pytest.mark.slow
@pytest.mark.parametrize("large", [True, False])
def test_two_of_three_that_were_killed_together_go_on_within_two_seconds(*, large: bool) -> None:
    result, _ = run_one("kills", 1, large=large)
    assert not result.check, report(result)
    assert result.counts["times all died"] == ROUNDS
    assert result.counts["times two went on"] > 0
    if large:
        assert result.counts["times two went on before they had applied"] > 0
