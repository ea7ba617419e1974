"""The code blocks of a page of documentation, run in order in one shell, as a reader types them.

A ``console`` block has commands after ``$ `` (with what a heredoc or a backslash continues) and
below each what it prints. ``…`` stands for any text of a line, a line ``…`` for any lines; a
command without lines below it may print anything. A ``python`` block is a program. A block after
``<!-- not run: REASON -->`` is not run, and one after ``<!-- run by tests/…/test_….py -->`` by that
test, which gives it what it needs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kept.node.config.local_cluster import NODE_PORT_OFFSET

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(sys.executable).parent
LOCAL_PORTS = (1, 2, NODE_PORT_OFFSET, NODE_PORT_OFFSET + 1, NODE_PORT_OFFSET + 2)
"""What `kept local up --nodes 3` takes besides the first one."""
INSTALLS = ("pip install", "python3 -m venv", ". venv/bin/activate")
_BLOCK = re.compile(
    r"(?:<!-- (?:not run: )?(?P<reason>(?<=not run: )[^>]+|run by tests/[^> ]+) -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>console|python)\n(?P<text>.*?)\n[ ]*```",
    re.DOTALL,
)
_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
_PORT = re.compile(r"\b(9|10)09([2-4])\b")
_DONE = "-- done"


class Command(NamedTuple):
    """What is typed, and the lines that it must print; none: any."""

    text: str
    expected: tuple[str, ...]
    page: str
    line: int


def blocks(page: Path) -> Iterator[tuple[str, str, str | None, int]]:
    """(language, text, reason not to run it here, line number) of each block of ``page``."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        indent = found["indent"]
        body = "\n".join(line.removeprefix(indent) for line in found["text"].split("\n"))
        line = text.count("\n", 0, found.start("language")) + 1
        yield found["language"], body, found["reason"], line


def commands(page: Path) -> list[Command]:
    """The commands of ``page`` that are to be run."""
    made: list[Command] = []
    name = page.relative_to(ROOT).as_posix()
    for language, text, reason, line in blocks(page):
        if reason is not None:
            continue
        if language == "python":
            made.append(Command(f"python3 - <<'BLOCK'\n{text}\nBLOCK", (), name, line))
        else:
            made += typed(text, name, line)
    return made


def given_to(test: str, page: Path) -> list[tuple[str, str, int]]:
    """(language, text, line number) of each block of ``page`` that is run by the test of that path
    below the root.
    """
    found = [
        (language, text, line)
        for language, text, reason, line in blocks(page)
        if reason == f"run by {test}"
    ]
    assert found, f"{page}: no block is run by {test}"
    return found


def typed(text: str, page: str, line: int) -> Iterator[Command]:
    """The commands of a console block whose fence is at ``line``."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        start = at
        assert lines[at].startswith("$ "), f"{page}:{line + 1 + at}: {lines[at]!r} is no command"
        parts = [lines[at][2:]]
        heredoc = _HEREDOC.search(lines[at])
        at += 1
        while heredoc is not None and parts[-1] != heredoc[1]:
            parts.append(lines[at])
            at += 1
        while heredoc is None and parts[-1].endswith("\\"):
            parts.append(lines[at])
            at += 1
        printed = []
        while at < len(lines) and not lines[at].startswith("$ "):
            printed.append(lines[at])
            at += 1
        yield Command("\n".join(parts), tuple(printed), page, line + 1 + start)


def run(
    page_commands: list[Command],
    folder: Path,
    port: int,
    timeout_s: float,
    programs: Path = HERE,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run the commands in ``folder``, and compare what they print.

    Ports 9092 to 9094 of the page become ``port`` to ``port + 2``, and 10092 to 10094 those of
    nodes; ``kept`` and ``python3`` are those of the folder ``programs``; ``environ`` is exported,
    too. Standard input is empty. What is left running in the background is ended. AssertionError
    names the page, the line and the command that failed, with what it printed.
    """
    script = ["set -o pipefail"]
    for command in page_commands:
        script += [_moved(command.text, port), f'printf "\\n{_DONE} %s\\n" $?']
    env = {**environment(port, programs), **environ}
    stdout = _output("\n".join(script) + "\n", folder, env, timeout_s)
    outputs = re.split(rf"\n{_DONE} (\d+)\n", stdout)
    for number, command in enumerate(page_commands):
        where = f"{command.page}:{command.line}: {command.text}"
        assert len(outputs) > 2 * number + 1, f"{where}\nwas not run; before it: {stdout}"
        printed, status = outputs[2 * number], outputs[2 * number + 1]
        assert status == "0", f"{where}\nended with {status}:\n{printed}"
        expected = [_moved(line, port) for line in command.expected]
        if expected and any(line.strip() for line in expected):
            assert _matches(expected, printed), (
                f"{where}\nprinted:\n{printed}\nexpected:\n" + "\n".join(expected)
            )


def _output(script: str, folder: Path, env: dict[str, str], timeout_s: float) -> str:
    """What a shell prints that runs ``script``; nothing that it began in its group outlives it."""
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**env, "XDG_CONFIG_HOME": str(folder / "config")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            return shell.communicate(timeout=timeout_s)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


def environment(port: int, programs: Path = HERE) -> dict[str, str]:
    """The environment of a reader whose node is on ``port``."""
    kept = {**os.environ, "KEPT_BOOTSTRAP": f"localhost:{port}", "COLUMNS": "250"}
    kept["PATH"] = f"{programs}:{kept['PATH']}"
    kept.pop("PYTHONSAFEPATH", None)
    return kept


def _moved(text: str, port: int) -> str:
    def moved_port(found: re.Match[str]) -> str:
        return str(port + int(found[2]) - 2 + (NODE_PORT_OFFSET if found[1] == "10" else 0))

    moved = _PORT.sub(moved_port, text)
    # A file of settings, and listeners, have ports of their own.
    own = r"\bkept (local up|serve)\b(?! --config-file|.*\blisteners=)"
    return re.sub(own, rf"kept \1 --port {port}", moved)


def _matches(expected: list[str], printed: str) -> bool:
    pattern = ""
    for line in expected:
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            parts = (re.escape(" ".join(part.split())) for part in line.split("…"))
            pattern += r".*".join(parts).replace(r"\ ", " ") + r"\n"
    text = "".join(" ".join(line.split()) + "\n" for line in printed.splitlines() if line.strip())
    return re.fullmatch(pattern, text) is not None
