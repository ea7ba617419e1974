"""A newcomer's hour: the wheel in an empty environment, completion, the tutorial, the console."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kept.testing.ports import free_port
from tests.docs.blocks import INSTALLS, LOCAL_PORTS, ROOT, commands, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]
CONSTRAINTS = ROOT / "constraints.txt"


class Installed(NamedTuple):
    """An environment with nothing but kept in it."""

    wheel: Path
    programs: Path

    def pip(self, *arguments: str) -> None:
        call(self.programs / "python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *arguments)


def call(*command: object, **given) -> str:
    """What a program prints; AssertionError where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        **given,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """A wheel of what is committed, installed."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "source").mkdir()
    call("git", "-C", ROOT, "archive", "-o", folder / "source.tar", "HEAD")
    call("tar", "-x", "-f", folder / "source.tar", "-C", folder / "source")
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder)
    call(sys.executable, *build, folder / "source")
    (wheel,) = folder.glob("*.whl")
    call(sys.executable, "-m", "venv", folder / "venv")
    made = Installed(wheel, folder / "venv" / "bin")
    made.pip(str(wheel))
    return made


def test_commands_complete(installed, tmp_path):
    script = """
eval "$(kept completion bash)"
COMP_LINE="kept topic cr" COMP_POINT=13
$(complete -p kept | sed 's/.*-F \\([^ ]*\\).*/\\1/') kept
echo "${COMPREPLY[@]}"
"""
    said = call("bash", "-c", script, env=environment(1, installed.programs), cwd=tmp_path)
    assert said.split() == ["create"]


def test_the_tutorial_from_the_wheel(installed, tmp_path):
    tutorial = [
        command._replace(text=command.text.replace("'.[spark]'", f"'{installed.wheel}[spark]'"))
        for command in commands(ROOT / "docs" / "tutorial.md")
    ]
    spark = next(command for command in tutorial if "[spark]" in command.text)
    installed.pip(f"{installed.wheel}[spark]")
    typed = [c for c in tutorial if c is spark or not c.text.startswith(INSTALLS)]
    try:
        run(typed, tmp_path, free_port(LOCAL_PORTS), 900, installed.programs)
        assert list((tmp_path / "kept-local").iterdir()) == [], "the tutorial cleans up"
    finally:  # where it did not come so far
        end = (installed.programs / "kept", "local", "down", "--purge")
        subprocess.run(end, cwd=tmp_path, capture_output=True, check=False, timeout=120)


@pytest.mark.chromium
def test_the_console_shows_what_was_written(installed, tmp_path):
    from tests.console.browser import chromium, opened

    port = free_port(LOCAL_PORTS)
    kept = installed.programs / "kept"
    given = {"cwd": tmp_path, "env": environment(port, installed.programs)}
    try:
        call(kept, "local", "up", "--port", port, **given)
        call(kept, "topic", "create", "users", "--config", "cleanup.policy=compact", **given)
        call(kept, "produce", "users", "--key-separator", ":", input="ada:countess\n", **given)
        with chromium() as browser:
            page, wrong = opened(browser)
            page.goto(f"http://localhost:{port}/#records/users/0")
            page.get_by_text("countess").first.wait_for()
            assert not wrong
    finally:
        call(kept, "local", "down", "--purge", **given)
