"""A short run of the stage ``groups``."""

from __future__ import annotations

from collections import Counter

from tests.sim.groups_checks import GroupChecks
from tests.sim.runner import report, run_one


def test_no_rule_is_broken() -> None:
    counts: Counter[str] = Counter()
    for seed in (2, 8):  # a timer of a coordinator span; a coordinator is deposed
        result, _ = run_one("groups", seed)
        assert not result.check, report(result)
        counts.update(result.counts)
    assert counts["checks of all records"] == 2
    for what in ("commits acknowledged", "offsets read", "groups described", "members that left"):
        assert counts[what], what
    assert counts["coordinators struck at leaves"] and counts["coordinators deposed"]


def test_what_is_given_up_ends_what_was_promised_and_nothing_else() -> None:
    now_s, give_ups = 1.0, 0
    checks = GroupChecks(lambda _: give_ups, lambda: now_s)
    commits = checks.commit_begins("g", 1, {0: 7})
    checks.commit_acknowledged("g", commits)
    checks.read("g", "n0", 2.0, {0: 7})
    give_ups = 1
    checks.read("g", "n0", 2.0, {0: -1})
    checks.read("g", "n0", 2.0, {0: 7})
