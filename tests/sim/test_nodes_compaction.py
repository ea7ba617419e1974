"""A short run of the stage ``nodes-compaction``."""

from __future__ import annotations

import pytest

from tests.sim.short_runs import no_rule_broken


@pytest.mark.slow
def test_no_rule_is_broken() -> None:
    # 3: followers left a segment in which nothing changed but a delete horizon
    no_rule_broken("nodes-compaction", (3,), "generations applied", "power losses")
