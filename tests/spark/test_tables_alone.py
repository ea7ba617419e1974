"""When a kept table must be made anew from all of its topic, decided without a cluster."""

from __future__ import annotations

from typing import Any

from kept.pipeline.jobs.tables import _remove_older, _remove_unfinished, _why_whole
from kept.pipeline.session import TopicBounds

BEFORE: dict[str, Any] = {
    "topic_id": "ab",
    "starts": {"0": 5, "1": 0},
    "offsets": {"0": 20, "1": 9},
    "refreshed_ms": 1000,
}


def why(policy: str, starts: dict[int, int], at_ms: int = 1500) -> str | None:
    config = {"cleanup.policy": policy, "delete.retention.ms": "1000"}
    return _why_whole(BEFORE, TopicBounds("t", "ab", starts, {0: 30, 1: 30}, config), at_ms)


def test_what_retention_removed_is_in_the_table_still():
    for policy in ("delete", "compact,delete", "compact"):  # compaction leaves the start alone
        assert why(policy, {0: 6, 1: 0}) == "retention removed records since"
        assert why(policy, {0: 5, 1: 0}) is None


def test_a_tombstone_may_have_come_and_gone():
    for at_ms in (2000, 900):  # too late, or the clock was set back
        assert "delete.retention.ms only" in str(why("compact", BEFORE_STARTS, at_ms))
    assert why("compact", BEFORE_STARTS, 1999) is None
    assert why("delete", BEFORE_STARTS, 10**9) is None


BEFORE_STARTS = {0: 5, 1: 0}


class Directories:
    """Stands for a store; refreshes made these."""

    def __init__(self, *names: str) -> None:
        self.there = ["_kept.json", "table-of-mine", *names]

    def names(self) -> list[str]:
        return list(self.there)

    def remove(self, name: str) -> None:
        self.there.remove(name)


def test_two_refreshes_that_end_at_once_leave_each_others_tables():
    store: Any = Directories("table-000003-a", "table-000004-b", "table-000005-c", "table-000005-d")
    _remove_older(store, "table-000004-b")
    assert store.names()[2:] == ["table-000004-b", "table-000005-c", "table-000005-d"]
    store = Directories("table-000004-b", "table-000004-dead", "table-000005-c")
    _remove_older(store, "table-000004-b")
    assert store.names()[2:] == ["table-000004-b", "table-000005-c"]


def test_refreshes_that_are_killed_again_and_again_do_not_pile_up():
    store: Any = Directories("table-000003-a", "table-000004-b", "table-000006-d", "table-000005-c")
    _remove_unfinished(store, {"directory": "table-000004-b"})
    assert store.names()[2:] == ["table-000003-a", "table-000004-b", "table-000006-d"]
    _remove_unfinished(store, None)
    assert store.names()[2:] == ["table-000006-d"]
