"""A short run of the stage ``groups``."""

from __future__ import annotations

from tests.sim.groups_checks import GroupChecks
from tests.sim.short_runs import no_rule_broken


def test_no_rule_is_broken() -> None:
    # Of 20 seeds, a second each, two depose a coordinator.
    # 2: a timer of a coordinator span; 8: a coordinator is deposed
    no_rule_broken(
        "groups",
        (2, 8),
        "commits acknowledged",
        "offsets read",
        "groups described",
        "members that left",
        "coordinators struck at leaves",
        "coordinators deposed",
        more=20,
    )


def test_what_is_given_up_ends_what_was_promised_and_nothing_else() -> None:
    now_s, give_ups = 1.0, 0
    checks = GroupChecks(lambda _: give_ups, lambda: now_s)
    commits = checks.commit_begins("g", 1, {0: 7})
    checks.commit_acknowledged("g", commits)
    checks.read("g", "n0", 2.0, {0: 7})
    give_ups = 1
    checks.read("g", "n0", 2.0, {0: -1})
    checks.read("g", "n0", 2.0, {0: 7})
