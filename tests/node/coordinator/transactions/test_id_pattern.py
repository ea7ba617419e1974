"""Patterns of transactional ids: what they match, and what would take too long."""

from __future__ import annotations

import re

import pytest

from kept.node.coordinator.transactions.id_pattern import (
    MAX_PATTERN,
    IdPattern,
    compile_pattern,
)


def compiled(text: str) -> IdPattern:
    pattern = compile_pattern(text)
    assert pattern is not None
    return pattern


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("b.*", 1),
        ("bank-[0-9]+", 1),
        (r"a\.b", 0),
        ("x|y", 0),
        ("[(]+", 1),
        (r"\(a", 0),
        ("ab?", 1),
    ],
)
def test_patterns_of_ids(text: str, repeats: int) -> None:
    assert compiled(text) == IdPattern(re.compile(text), repeats)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+b",
        "(bank)",
        "a*b*c*",
        "a{1,9}b+c+",
        "a?b?c?",
        "a*?b*",
        "[",
        "*",
        "a" * (MAX_PATTERN + 1),
    ],
)
def test_patterns_that_are_wrong_or_cost_too_much(text: str) -> None:
    with pytest.raises(re.error):
        compile_pattern(text)


def test_no_pattern_lets_all_through() -> None:
    assert compile_pattern(None) is None
    assert compile_pattern("") is None


def test_an_id_that_would_take_long_to_try_is_left_out() -> None:
    """A thousand ids of 32 kB and two repetitions would hold a node up for half an hour."""
    long = "a" * 32_000 + "b"
    assert compiled(".*a.*b").matches("a" * 200 + "b")
    assert not compiled(".*a.*b").matches(long)
    assert not compiled("a*" + "a" * 900 + "b").matches(long)
    assert compiled("a.*b").matches(long)
    assert not compiled("a.*c").matches(long)
