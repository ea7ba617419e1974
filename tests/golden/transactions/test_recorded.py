"""The scripts of this folder: whole in themselves, and true of Apache Kafka 4.3.

``record.py`` wrote their answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from kept.testing import Cluster
from tests.golden.transactions import held, script
from tests.golden.transactions.verbs import Verbs


@pytest.mark.parametrize("path", script.files(), ids=lambda path: path.stem)
def test_every_step_has_its_answers(path: Path) -> None:
    steps = script.parse(path.read_text())
    assert script.render(steps) == path.read_text()
    for step in steps:
        answered = step.levels if step.words and step.words[0] not in script.SETUP else ()
        assert sorted(step.kafka) == list(answered), step.line
        assert all(step.kept[level] != step.kafka[level] for level in step.kept), step.line


def test_a_line_that_is_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2: no step is called 'ini'"):
        script.parse("# text\nini bank v4\n")
    with pytest.raises(ValueError, match="an answer of kept alone ends with its"):
        script.parse("init bank v4\n  kept: p1/0\n")


def test_an_answer_is_of_a_level_and_of_kept() -> None:
    text = "end bank p1/0 commit v4\n  level 0: none\n  level 2: x\n  kept level 2: y [reason]\n"
    (step,) = script.parse(text)
    assert [step.expected(level, of_kept=True) for level in (0, 2)] == ["none", "y"]
    assert [step.expected(level, of_kept=False) for level in (0, 2)] == ["none", "x"]
    assert script.render([step]) == text


@pytest.fixture(scope="module")
def kept() -> Iterator[Verbs]:
    with Cluster(**script.SETTINGS) as cluster, closing(Verbs(cluster.bootstrap)) as verbs:
        verbs.ready()
        yield verbs


@pytest.fixture(scope="module")
def kept_held() -> Iterator[Verbs]:
    with held.kept() as verbs:
        yield verbs


@pytest.fixture(scope="module", params=script.LEVELS)
def kafka(
    request: pytest.FixtureRequest, kafka_dist: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Verbs, int]]:
    """Apache Kafka at a level of ``transaction.version``."""
    level = int(request.param)
    with held.kafka(tmp_path_factory.mktemp("kafka"), level) as verbs:
        yield verbs, level


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", script.files(held=False), ids=lambda path: path.stem)
def test_kept_answers_so(kept: Verbs, path: Path) -> None:
    check(kept, path, script.LEVELS[-1], of_kept=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", script.files(held=True), ids=lambda path: path.stem)
def test_kept_answers_so_while_markers_wait(kept_held: Verbs, path: Path) -> None:
    check(kept_held, path, script.LEVELS[-1], of_kept=True)


@pytest.mark.java
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", script.files(), ids=lambda path: path.stem)
def test_apache_kafka_answers_so(kafka: tuple[Verbs, int], path: Path) -> None:
    verbs, level = kafka
    check(verbs, path, level, of_kept=False)


def check(verbs: Verbs, path: Path, level: int, *, of_kept: bool) -> None:
    """Play a script and compare; all differences at once."""
    differences = [
        f"{step.line}\n    {answer}\n    not {step.expected(level, of_kept)}"
        for step, answer in script.play(script.parse(path.read_text()), verbs, level)
        if answer != step.expected(level, of_kept)
    ]
    assert not differences, "\n".join(differences)
