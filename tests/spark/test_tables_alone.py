"""When a kept table must be made anew from all of its topic, decided without a cluster."""

from __future__ import annotations

from typing import Any

from kept.pipeline.session import Bounds
from kept.pipeline.tables import _why_whole

BEFORE: dict[str, Any] = {
    "topic_id": "ab", "starts": {"0": 5, "1": 0}, "offsets": {"0": 20, "1": 9},
    "refreshed_ms": 1000,
}  # fmt: skip


def why(policy: str, starts: dict[int, int], at_ms: int = 1500) -> str | None:
    config = {"cleanup.policy": policy, "delete.retention.ms": "1000"}
    return _why_whole(BEFORE, Bounds("t", "ab", starts, {0: 30, 1: 30}, config), at_ms)


def test_what_retention_removed_is_in_the_table_still():
    for policy in ("delete", "compact,delete"):
        assert why(policy, {0: 6, 1: 0}) == "retention removed records since"
        assert why(policy, {0: 5, 1: 0}) is None
    assert why("compact", {0: 6, 1: 0}) is None, "every key is there, wherever its log begins"


def test_a_tombstone_may_have_come_and_gone():
    for at_ms in (2000, 900):  # too late, or the clock was set back
        assert "delete.retention.ms only" in str(why("compact", BEFORE_STARTS, at_ms))
    assert why("compact", BEFORE_STARTS, 1999) is None
    assert why("delete", BEFORE_STARTS, 10**9) is None


BEFORE_STARTS = {0: 5, 1: 0}
