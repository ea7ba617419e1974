"""The judge of the soak can say no."""

from __future__ import annotations

import pytest

from tests.soak.table import Key, Read, strategy_of, wrong


def key(*sent):
    """Numbers from 1 on; None is a tombstone; timestamps are given or rise."""
    made = Key()
    for number, one in enumerate(sent, 1):
        timestamp = one if isinstance(one, int) else number
        made.sent(number, timestamp, tombstone=one is None)
    return made


def read(*numbers):
    return [Read(number, 0) for number in numbers]


@pytest.mark.parametrize(
    ("strategy", "sent", "seen", "cleaned"),
    [
        ("latest", "abc", (1, 2, 3), False),
        ("latest", "abc", (3,), True),
        ("latest", ("a", None), (1, None), False),
        ("latest", ("a", None), (None,), True),
        ("latest", ("a", None), (), True),
        ("latest", ("a", None, "b"), (1, None, 3), False),
        ("latest-n", "abcd", (2, 3, 4), True),
        ("latest-n", ("a", None, "b"), (None, 3), True),
        ("highest-version", (9, 7, 8), (1, 3), False),
        ("highest-version", (9, 7, 8), (1,), True),
        ("highest-version", (9, None), (None,), True),
    ],
)
def test_what_may_be_seen(strategy, sent, seen, cleaned):
    assert wrong(strategy, key(*sent), read(*seen), cleaned=cleaned) is None


@pytest.mark.parametrize(
    ("strategy", "sent", "seen", "cleaned", "says"),
    [
        ("latest", "abc", (1, 2), False, "must be the newest"),
        ("latest", "abc", (), False, "must be the newest"),
        ("latest", ("a", None), (1,), False, "are back"),
        ("latest", ("a", None, "b"), (1, 3), False, "are back"),
        ("latest", "abc", (2, 3), True, "are to be left"),
        ("latest", "abc", (3, 2, 3), False, "do not rise"),
        ("latest-n", "abcd", (2, 4), False, "must be the newest"),
        ("highest-version", (9, 7, 8), (3,), False, "must be the newest"),
        ("highest-version", (9, None), (1,), False, "are back"),
    ],
)
def test_what_may_not(strategy, sent, seen, cleaned, says):
    assert says in wrong(strategy, key(*sent), read(*seen), cleaned=cleaned)


def test_prefixes():
    found = [strategy_of("by-key-prefix", k) for k in ("n1", "v1", "c1")]
    assert found == ["latest-n", "highest-version", "latest"]
    assert strategy_of("latest", "n1") == "latest"
