"""The example of a user's strategy installs, is found by its entry point, and keeps the laws."""

import subprocess
import sys
from pathlib import Path

import pytest

from kept.testing.ports import free_port
from tests.docs.blocks import LOCAL_PORTS, ROOT, Command, given_to, run, typed

HERE = "tests/compaction/test_example_strategy.py"
EXAMPLE = ROOT / "examples" / "strategies"

USE = """
from kept.compaction.strategy import resolve
from kept.storage.types import LogConfig
found = resolve(LogConfig(compaction_strategy="first-and-latest"))
print(type(found).__name__)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A directory for sys.path in which it is installed."""
    folder = tmp_path_factory.mktemp("strategy")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--disable-pip-version-check",
            "--target",
            str(folder / "site"),
            str(copy(folder)),
        ],
        check=True,
        timeout=280,
    )
    return folder / "site"


def test_it_is_found_when_installed(site):
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{USE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "FirstAndLatest", done.stderr


def copy(tmp_path):
    """Building leaves files beside the sources."""
    target = tmp_path / "source"
    target.mkdir()
    for name in ("pyproject.toml", "first_and_latest.py", "README.md"):
        (target / name).write_bytes((EXAMPLE / name).read_bytes())
    return target


@pytest.mark.slow
def test_a_topic_of_the_readme_keeps_two_records_of_a_key(site, tmp_path):
    page = "examples/strategies/README.md"
    ((_, text, line),) = given_to(HERE, ROOT / page)
    install, create = typed(text, page, line)
    assert install.text == "pip install ./examples/strategies", "what the fixture does"
    compact = typed(
        "$ printf 'a:1\\na:2\\na:3\\n' | kept produce users --key-separator :\n"
        "$ kept compact now users --wait\n"
        "$ kept consume users --until-end --value-only\n1\n3",
        page,
        line,
    )
    try:
        run(
            [Command("kept local up", (), page, line), create, *compact],
            tmp_path,
            free_port(LOCAL_PORTS),
            100,
            environ={"PYTHONPATH": str(site)},
        )
    finally:
        end = (sys.executable, "-m", "kept", "local", "down", "--purge")
        subprocess.run(end, cwd=tmp_path, capture_output=True, check=False, timeout=120)


@pytest.mark.slow
def test_its_own_tests_pass():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=EXAMPLE,
        env={"PYTHONPATH": str(EXAMPLE), "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
