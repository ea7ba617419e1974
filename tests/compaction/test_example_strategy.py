"""The example of a user's strategy installs, is found by its entry point, and keeps the laws."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "strategies"

USE = """
from kept.compaction.strategy import resolve
from kept.storage.types import LogConfig
found = resolve(LogConfig(compaction_strategy="first-and-latest"))
print(type(found).__name__)
"""


def test_it_is_found_when_installed(tmp_path):
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
            str(tmp_path / "site"),
            str(copy(tmp_path)),
        ],
        check=True,
        timeout=280,
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{USE}"
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
