"""A newcomer's hour: the wheel in an empty environment, completion, the tutorial, the console."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_platform
from typing import NamedTuple

import pytest

from kept.testing.ports import free_port
from tests.docs.blocks import INSTALLS, LOCAL_PORTS, ROOT, commands, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]
KERNEL_SOURCES = ("*.pyx", "*.pxd", "*.h", "pyproject.toml")
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
    """A wheel, installed: that of ``KEPT_WHEEL``, else one of what is committed."""
    folder = tmp_path_factory.mktemp("newcomer")
    wheel = Path(given) if (given := os.environ.get("KEPT_WHEEL")) else built(folder)
    call(sys.executable, "-m", "venv", folder / "venv")
    made = Installed(wheel.resolve(), folder / "venv" / "bin")
    made.pip(str(made.wheel))
    return made


def built(folder: Path) -> Path:
    """A wheel of what is committed, with the kernels that this checkout has compiled, where their
    sources are those of the commit: to compile them again takes minutes.
    """
    source = folder / "source"
    source.mkdir()
    call("git", "-C", ROOT, "archive", "-o", folder / "source.tar", "HEAD")
    call("tar", "-x", "-f", folder / "source.tar", "-C", source)
    changed = call("git", "-C", ROOT, "diff", "--name-only", "HEAD", "--", *KERNEL_SOURCES)
    compiled = source / "build" / f"lib.{get_platform()}-{sys.implementation.cache_tag}" / "kept"
    for kernel in () if changed else source.rglob("_*.pyx"):
        file = kernel.relative_to(source)
        translated, library = file.with_suffix(".c"), file.with_suffix(".abi3.so")
        if (ROOT / translated).exists() and (ROOT / library).exists():
            shutil.copyfile(ROOT / translated, source / translated)
            (compiled / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / library, compiled / library)
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder)
    call(sys.executable, *build, source, env=os.environ | {"KEPT_REQUIRE_KERNELS": "1"})
    (wheel,) = folder.glob("*.whl")
    return wheel


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
