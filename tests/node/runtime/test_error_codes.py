"""What a peer is told of an error, and what the log has of it."""

from __future__ import annotations

import pytest

from kept.node.runtime import logging
from kept.node.runtime.error_codes import code_for, error_values
from kept.storage.errors import InvariantViolation, NotLeaderOrFollower
from tests.support.given import Given


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


def test_the_same_bug_is_in_the_log_once_in_a_while(capsys, monkeypatch) -> None:
    """A client that asks again and again must not fill the disk."""
    now = Given(now=1e6)
    monkeypatch.setattr(logging.time, "monotonic", lambda: now.now)
    for _ in range(5):
        assert code_for(_raised(), "request failed", api=3) == -1
    assert capsys.readouterr().err.count("request failed") == 1
    assert code_for(_raised(), "another event") == -1
    assert capsys.readouterr().err.count("another event") == 1
    now.now += logging.BUG_INTERVAL_S
    assert code_for(_raised(), "request failed", api=3) == -1
    said = capsys.readouterr().err
    assert said.count("request failed") == 1
    assert " api=3 " in said and " left_out=4 " in said


def _raised() -> Exception:
    try:
        raise KeyError("a bug of ours")
    except KeyError as error:
        return error
