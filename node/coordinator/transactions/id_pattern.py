"""Patterns of transactional ids, in a time that is bounded.

Kafka's RE2 takes a time that grows with the text. Python's ``re`` tries again at every character
for each repetition, and doubles what there is to try with each ``?``. So a pattern has no groups
and few repetitions, and leaves out ids that are too long to be tried.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

MAX_REPEATS: Final = 2
MAX_PATTERN: Final = 1_000
"""Characters of a pattern."""
MAX_TRIES: Final = 500_000
"""Steps that an id may cost, at most: about 2 ms. Two repetitions and twenty characters beside an
id of 158 are as many; with one repetition it may be as long as ids can be."""
_TOKEN: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class IdPattern(Struct, frozen=True):
    """A pattern that whole ids match or not."""

    regex: re.Pattern[str]
    repeats: int

    def matches(self, transactional_id: str) -> bool:
        """Whether it matches; False for an id that it would take too long to try."""
        tries = len(transactional_id) ** self.repeats * len(self.regex.pattern)
        return tries <= MAX_TRIES and self.regex.fullmatch(transactional_id) is not None


def compile_pattern(pattern: str | None) -> IdPattern | None:
    """None where there is no text. Raises re.error."""
    if not pattern:
        return None
    if len(pattern) > MAX_PATTERN:
        raise re.error(f"more than {MAX_PATTERN} characters")
    tokens = _TOKEN.findall(pattern)
    repeats = sum(token in {"*", "+", "?", "{"} for token in tokens)
    if "(" in tokens or repeats > MAX_REPEATS:
        raise re.error(f"groups, or more than {MAX_REPEATS} repetitions")
    return IdPattern(re.compile(pattern), repeats)
