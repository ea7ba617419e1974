"""What ``make mutate`` makes of a module."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import mutate

SOURCE = '''"""Not a number: 1 < 2."""


if TYPE_CHECKING:
    from nowhere import nothing


@dataclass(frozen=True)
class C:
    """No mutant is in its decorator."""


async def f(size: int, limit: int = 10) -> int:
    log.warning("ü too large", size=size + 1)
    if size < limit and not limit == 3:
        await close("é")
    elif size:
        raise ValueError(f"{size + 1}")
    return max(size, limit) if size else True
'''


def broken():
    """(what was there, the module with it broken) of every mutant."""
    data = SOURCE.encode()
    return [
        (one.was, (data[: one.start] + one.text.encode() + data[one.end :]).decode())
        for one in mutate.mutants(SOURCE)
    ]


@pytest.mark.parametrize(
    ("was", "line"),
    [
        ("10", "async def f(size: int, limit: int = (11)) -> int:"),
        ("10", "async def f(size: int, limit: int = (9)) -> int:"),
        ("size < limit", "    if (size <= limit) and not limit == 3:"),
        ("limit == 3", "    if size < limit and not (limit != 3):"),
        ("not limit == 3", "    if size < limit and (limit == 3):"),
        ("size < limit and not limit == 3", "    if (size < limit or not limit == 3):"),
        ('await close("é")', "        pass"),
        ('raise ValueError(f"{size + 1}")', "        pass"),
        ("max(size, limit)", "    return min(size, limit) if size else True"),
        ("True", "    return max(size, limit) if size else False"),
        ("max(size, limit) if size else True", "    return (True if size else max(size, limit))"),
    ],
)
def test_each_kind_of_edit(was, line):
    assert any(one == was and line in text.splitlines() for one, text in broken())


def test_conditions_are_turned_round():
    turned = [text for was, text in broken() if was.startswith(("if", "elif"))]
    assert len(turned) == 2
    assert "    if not (size < limit and (not limit == 3)):" in turned[0].splitlines()
    assert "    elif not size:" in turned[1].splitlines()


def test_every_mutant_is_a_module_and_differs_in_what_it_does():
    whole = ast.dump(ast.parse(SOURCE))
    for was, text in broken():
        assert ast.dump(ast.parse(text)) != whole, was


def test_docstrings_and_words_stay():
    assert all("1 < 2." in text and 'log.warning("ü too large"' in text for _, text in broken())
    assert not any(was == "size + 1" for was, _ in broken())
    assert all("if TYPE_CHECKING:" in text and "frozen=True" in text for _, text in broken())


def test_every_mapped_path_is_there():
    for name, tests in mutate.TESTS.items():
        assert all((mutate.ROOT / path).is_file() for path in tests), name
        module = mutate.ROOT / name
        assert module.is_dir() if name.endswith("/") else module.is_file(), name
    with pytest.raises(SystemExit, match="no tests are mapped to node/nowhere"):
        mutate.tests_of("node/nowhere.py")
    assert mutate.tests_of("node/replicas/manifests/replica.py")
    assert Path(mutate.__file__).is_relative_to(mutate.ROOT)


@pytest.mark.slow
def test_a_broken_module_is_noticed_and_a_test_that_notices_nothing_is_not():
    for test, survive in (
        ("", "0 of 4"),
        ("::test_an_address_that_is_not_here_is_told", "4 of 4"),
    ):
        command = [
            sys.executable,
            "-P",
            "-m",
            "tests.tools.mutate",
            "node/runtime/connection_quota.py",
            "--count",
            "4",
            "--tests",
            f"tests/node/kafka/test_listener.py{test}",
        ]
        run = subprocess.run(
            command,
            cwd=mutate.ROOT,
            env={**os.environ, "PYTHONPATH": str(mutate.ROOT)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert f"node/runtime/connection_quota.py: {survive} survive" in run.stdout, run.stderr
        assert run.returncode == (survive != "0 of 4")
