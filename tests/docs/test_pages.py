"""Pages of the documentation do what they say: their blocks are run (``tests/docs/blocks.py``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kept.testing.ports import free_port
from tests.docs.blocks import INSTALLS, LOCAL_PORTS, ROOT, Command, blocks, commands, run, typed
from tests.tools.needs import need

DOCS = ROOT / "docs"


ELSEWHERE = {"docs/spark.md": "tests/spark/test_docs.py"}
"""Pages whose blocks another test runs."""
WITH_A_NODE = ("docs/transactions.md", "docs/command-line.md")
"""Pages that take a node on localhost:9092 for granted."""
ALONE = (
    "README.md",
    "docs/testing.md",
    "docs/console.md",
    "docs/security.md",
    "docs/security-setup.md",
)
NEEDS = {
    "docs/security-setup.md": ("openssl", "curl"),
    "docs/security.md": ("openssl",),
    "docs/console.md": ("curl",),
}
"""What pages need besides kept, as markers."""
RUNNABLE = ("console", "python")
SHELLS = ("sh", "bash", "shell", "zsh", "pycon")
PROGRAM = (
    r"(kept|pip3?|pipx|uv|python3?|pytest|make|git|docker(-compose)?|helm|kubectl|systemctl|sudo"
    r"|cp|mkdir|cat|echo|export|curl|openssl|bash|sh|java|mvn|npm|apt(-get)?)( |$)"
)
TYPED = re.compile(
    rf"^[ ]*(\$ |[A-Z_]+=\S*[ ]+\S|(\./|\S*\bbin/|tests/)\S|{PROGRAM})", re.MULTILINE
)
"""How a line begins that is typed: with a program, with a path to one, with a variable for it."""
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (
        *DOCS.rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    )
)


def run_page(name: str, folder: Path, timeout_s: float, *, node: bool = False) -> None:
    """Run the blocks of a page but those that install kept: here it is installed, in place, where
    Spark does not find it by its name (``test_newcomer.py`` runs those programs).
    """
    of_page = [
        command
        for command in commands(ROOT / name)
        if not command.text.startswith(INSTALLS) and "SparkSession" not in command.text
    ]
    assert of_page
    first = [Command("kept local up", (), name, 0)] if node else []
    run([*first, *of_page], folder, free_port(LOCAL_PORTS), timeout_s)


@pytest.fixture
def folder(tmp_path):
    """A directory to run commands in; nodes that a page left running are ended."""
    yield tmp_path
    subprocess.run(
        [sys.executable, "-m", "kept", "local", "down", "--purge"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_tutorial(folder):
    run_page("docs/tutorial.md", folder, 800)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*WITH_A_NODE, *ALONE])
def test_a_page(page, folder):
    for tool in NEEDS.get(page, ()):
        need(tool)
    run_page(page, folder, 200, node=page in WITH_A_NODE)


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_or_says_why_not(page):
    here = page in {*ELSEWHERE, *WITH_A_NODE, *ALONE, "docs/tutorial.md"}
    for _, _, reason, line in blocks(ROOT / page):
        if reason is not None and reason.startswith("run by "):
            test = ROOT / reason.removeprefix("run by ")
            text = test.read_text(encoding="utf-8")
            assert "given_to(" in text and Path(page).name in text, f"{page}:{line}: {test}"
        else:
            assert here or reason, f"{page}:{line}: no test runs this block, and nothing says why"
            assert reason is None or len(reason.split()) > 1
            for named in re.findall(r"\btests/[\w/]+\.py", reason or ""):
                assert (ROOT / named).exists(), f"{page}:{line}: there is no {named}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_in_blocks_that_can_be_run(page):
    """A fence with another name is passed over by the runner."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^[ ]*```(\w*)\n(.*?)^[ ]*```$", text, re.M | re.S)
    wrong = [name for name, block in fences if name not in RUNNABLE and has_command(name, block)]
    assert not wrong


def has_command(language: str, block: str) -> bool:
    """Whether a fenced block holds what is typed in a shell."""
    return language in SHELLS or (language in {"", "text"} and TYPED.search(block) is not None)


@pytest.mark.parametrize(
    "line",
    [
        "$ true",
        "kept topic list",
        "make sim SEEDS=10000          # so many of each stage",
        ".venv/bin/python -m tests.sim --stage raft --seed 5077",
        "MINUTES=10 .venv/bin/python -m pytest -m slow",
        "SEED=1 MINUTES=10 ...",
        "tests/tools/base-image",
        "/opt/kept/bin/kept serve",
        "  docker run kept:0.1.0",
        "# a comment\nmake",
    ],
)
def test_a_command_is_told_by_how_it_begins(line):
    assert has_command("", f"{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "client ──► listener",
        "maker ──► taker",
        "KEY = value",
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \\",
        "  cluster/raft  ◄─────── frames",
        "/var/lib/kept/data/users-0/00000000000000000000.log",
    ],
)
def test_a_picture_is_no_command(line):
    assert not has_command("", f"{line}\n")


def test_what_the_first_steps_leave_in_a_clone_is_no_change_of_it():
    made = ["venv/", "kept-local/", "data/", "build/", "kept_log.egg-info/"]
    done = subprocess.run(
        ["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == made, done.stderr


class TestRunner:
    """A test of a page can fail."""

    def run(self, tmp_path: Path, text: str) -> None:
        run(list(typed(text, "page.md", 1)), tmp_path, 1000, 20)

    def test_output_and_status_count(self, tmp_path):
        self.run(tmp_path, "$ echo a b\na …\n$ true")
        self.run(tmp_path, "$ seq 9\n1\n…\n8\n9")
        with pytest.raises(AssertionError, match=r"page.md:2: echo a\nprinted:\na"):
            self.run(tmp_path, "$ echo a\nb")
        with pytest.raises(AssertionError, match=r"page.md:2: false\nended with 1"):
            self.run(tmp_path, "$ false\n$ true")

    def test_a_heredoc_and_a_line_that_goes_on_are_one_command(self, tmp_path):
        text = "$ cat <<'END'\n$ x\nEND\n$ x\n$ echo \\\nb\nb"
        found = [command.text for command in typed(text, "page.md", 1)]
        assert found == ["cat <<'END'\n$ x\nEND", "x", "echo \\\nb"]

    def test_a_command_that_reads_takes_nothing_from_those_behind_it(self, tmp_path):
        self.run(tmp_path, "$ cat\n$ echo a\na")

    def test_the_ports_of_the_page_are_moved(self, tmp_path):
        self.run(tmp_path, "$ echo localhost:9093 kept serve\nlocalhost:9093 kept serve")
