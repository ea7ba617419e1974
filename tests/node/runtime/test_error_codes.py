"""What a peer is told of an error, and what the log has of it."""

from __future__ import annotations

import pytest

from kept.node.runtime.error_codes import error_values
from kept.storage.errors import InvariantViolation, NotLeaderOrFollower


@pytest.mark.parametrize("error", [InvariantViolation("HW 9 of a log of 7"), KeyError("x")])
def test_a_bug_of_ours_is_in_the_log_and_not_in_the_answer(capsys, error) -> None:
    try:
        raise error
    except type(error) as raised:
        values = error_values(raised)
    assert values["error_code"] == -1
    assert values["error_message"] == "internal error; the node's log has the details"
    said = capsys.readouterr().err
    assert type(error).__name__ in said
    assert "Traceback" in said


def test_what_is_raised_on_purpose_is_told_and_not_logged(capsys) -> None:
    values = error_values(NotLeaderOrFollower("node 2 leads"))
    assert values == {"error_code": 6, "error_message": "node 2 leads"}
    assert not capsys.readouterr().err
