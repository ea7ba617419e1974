"""Scripts of raw transaction requests: a text file with the answers of Apache Kafka 4.3 in it.

A line that is not indented is a step, the indented lines below it are its answer::

    scenario an end of the other kind is refused
    topic orders 2
    init bank v4
      p1/0
    end bank p1/0 commit v4
      invalid_txn_state
      kept: none [it is empty, and so are both ends of it]

``p1/0`` is a producer: the first id that the scenario was given, and its epoch. An answer that
depends on the finalized level of ``transaction.version`` stands behind ``level 0:`` or
``level 2:``; a step ``level 2`` at the head of a scenario says that it is played at that level
alone. ``kept:`` (or ``kept level 0:``) is what kept answers where it differs on purpose, and why.
Names of topics, groups and transactional ids are a scenario's own; ``missing`` exists nowhere. The
verbs are the methods of :class:`Verbs`.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.golden.transactions.verbs import Verbs

FOLDER = Path(__file__).parent
LEVELS = (0, 2)
SETTINGS = {
    "transaction_abort_timed_out_transaction_cleanup_interval_ms": 200,
    "transaction_max_timeout_ms": 900_000,
    "transaction_state_log_num_partitions": 1,
    "offsets_topic_num_partitions": 1,
}
"""Of the broker that is asked."""
_WHY = re.compile(r"(.*) \[(.+)\]")
SETUP = ("scenario", "level", "topic", "hold", "release")
"""Steps without an answer."""


@dataclass
class Step:
    """A step with its answers; a comment or an empty line is one without ``words``."""

    line: str
    words: list[str] = field(default_factory=list)
    kafka: dict[int, str] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)
    levels: Sequence[int] = LEVELS

    def expected(self, level: int, of_kept: bool) -> str:
        """The answer at a level of ``transaction.version``."""
        return self.kept.get(level, self.kafka[level]) if of_kept else self.kafka[level]

    def lines(self) -> Iterator[str]:
        """The step as it stands in its file."""
        yield self.line
        yield from _answers("  ", self.kafka, {})
        yield from _answers("  kept: ", self.kept, self.why)


def _answers(head: str, answers: dict[int, str], why: dict[int, str]) -> Iterator[str]:
    ends = {level: f" [{why[level]}]" if level in why else "" for level in answers}
    if len(answers) == len(LEVELS) and len(set(answers.values())) == 1:
        yield head + answers[LEVELS[0]] + ends[LEVELS[0]]
        return
    for level, answer in sorted(answers.items()):
        yield f"{head.replace(':', '')}level {level}: {answer}{ends[level]}"


def parse(text: str) -> list[Step]:
    """The steps of a file. Raises ValueError for a line that is none."""
    steps: list[Step] = []
    levels: Sequence[int] = LEVELS
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("  "):
            title = line.startswith(("#", "scenario "))
            words = line.split()[: 1 - line.startswith("#")] if title else shlex.split(line)
            if words and not hasattr(Verbs, words[0].replace("-", "_")):
                raise ValueError(f"line {number}: no step is called {words[0]!r}")
            if words[:1] in (["scenario"], ["level"]):
                levels = (int(words[1]),) if words[0] == "level" else LEVELS
            steps.append(Step(line, words, levels=levels))
            continue
        _read_answer(steps[-1], line, number)
    return steps


def _read_answer(step: Step, line: str, number: int) -> None:
    """One indented line."""
    body = line.strip()
    ours = body.startswith("kept")
    body = body.removeprefix("kept").lstrip(": " if body.startswith("kept:") else " ")
    levels: Sequence[int] = LEVELS
    if at := re.match(r"level (\d): (.*)", body):
        levels, body = (int(at[1]),), at[2]
    if ours:
        explained = _WHY.fullmatch(body)
        if explained is None:
            raise ValueError(f"line {number}: an answer of kept alone ends with its [reason]")
        body = explained[1]
        step.why |= dict.fromkeys(levels, explained[2])
    (step.kept if ours else step.kafka).update(dict.fromkeys(levels, body))


def render(steps: Sequence[Step]) -> str:
    """The file of some steps."""
    return "".join(f"{line}\n" for step in steps for line in step.lines())


def files(*, held: bool | None = None) -> list[Path]:
    """All scripts, or those in which markers are held back, or the others."""
    found = sorted(FOLDER.glob("*.txt"))
    return [path for path in found if held is None or held == ("\nhold\n" in path.read_text())]


def play(steps: Sequence[Step], verbs: Verbs, level: int) -> Iterator[tuple[Step, str]]:
    """Each step that has an answer, with that of the broker behind ``verbs``."""
    for step in steps:
        if not step.words or level not in step.levels:
            continue
        verb, *arguments = step.words
        try:
            answer = _call(getattr(verbs, verb.replace("-", "_")), arguments)
        except Exception as error:
            error.add_note(f"in step {step.line!r}")
            raise
        if verb not in SETUP:
            yield step, answer


def _call(method: Callable[..., str], words: Sequence[str]) -> str:
    """Call a verb: ``v4`` is the version, ``name=value`` a named argument."""
    plain: list[str] = []
    named: dict[str, Any] = {}
    takes = inspect.signature(method).parameters
    for word in words:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"v\d+", word):
            named["version"] = int(word[1:])
        elif equals and name in takes:
            named[name] = value
        else:
            plain.append(word)
    return method(*plain, **named)
