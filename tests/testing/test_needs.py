"""A test that cannot run is skipped where that is allowed, and nowhere else."""

from __future__ import annotations

import pytest

from tests.tools import needs

SKIPPED, FAILED = pytest.skip.Exception, pytest.fail.Exception


@pytest.mark.parametrize(
    ("require", "excepted", "outcome"),
    [
        ("", "", SKIPPED),
        ("0", "", SKIPPED),
        ("1", "", FAILED),
        ("1", "other,small_disks", FAILED),
        ("1", "other,small_disk", SKIPPED),
    ],
)
def test_what_cannot_run_fails_where_all_has_to(monkeypatch, require, excepted, outcome) -> None:
    monkeypatch.setenv("REQUIRE_ALL", require)
    monkeypatch.setenv("CANNOT_RUN", excepted)
    with pytest.raises(outcome, match="small_disk: not allowed to mount"):
        needs.cannot_run("small_disk", "not allowed to mount")


def test_a_tool_that_is_missing_ends_the_test_and_one_that_is_here_does_not(monkeypatch) -> None:
    monkeypatch.setenv("REQUIRE_ALL", "1")
    monkeypatch.setattr(needs, "missing", {"here": None, "gone": "gone: not found"}.get)
    needs.need("here")
    with pytest.raises(FAILED, match="gone: not found, and REQUIRE_ALL=1"):
        needs.need("gone")
