"""Processes beside the node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from kept.node.runtime import subprocess as child
from kept.node.runtime.subprocess import ChildFailed, spawn

LINE_BYTES = 1 << 16


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def runner(request):
    with asyncio.Runner(loop_factory=request.param) as found:
        yield found


def python(code):
    return (sys.executable, "-c", code)


async def talk(code, question="{}"):
    made = await spawn(python(code), LINE_BYTES)
    heard = []
    return (*await made.converse(question, heard.append), heard, made)


ECHO = """
import json, os, sys
line = json.loads(sys.stdin.readline())
print(json.dumps({"told": line}))
leads = os.getsid(0) == os.getpid()
print(json.dumps({"session": leads, "open": len(os.listdir("/proc/self/fd"))}))
print("first\\nlast", file=sys.stderr)
sys.exit(3)
"""


def inheritable():
    """What the test's own parent left open for everybody."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(name)):
                found.add(int(name))
    return found


def test_it_is_asked_and_answers(runner):
    kept_open = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    code, words, heard, made = runner.run(talk(ECHO, '{"a": 1}'))
    assert (code, words, heard[0]) == (3, "last", {"told": {"a": 1}})
    pipes_and_listing = {0, 1, 2, *inheritable()}
    assert heard[1] == {"session": True, "open": len(pipes_and_listing) + 1}
    assert not made.is_running
    made.kill()
    for fd in kept_open:
        os.close(fd)


def children() -> set[str]:
    """Processes that this one has not taken leave of, zombies too."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def test_nothing_is_left_open_and_nobody_is_left_over(runner):
    async def many():
        for _ in range(5):
            await talk("")
        for _ in range(3):
            await asyncio.sleep(0)  # transports are closed in the loop's next round
        return len(os.listdir("/proc/self/fd"))

    others = children()  # nodes of fixtures, of tests that ran in this process before
    before = runner.run(many())
    assert runner.run(many()) == before
    assert children() <= others


def test_no_descriptor_of_anybody_else_is_closed(runner):
    """A second close of one of ours would hit a file that a thread opened in between."""
    stop, stolen = threading.Event(), []

    def open_and_close():
        while not stop.is_set():
            fd = os.open("/dev/null", os.O_RDONLY)
            try:
                os.close(fd)
            except OSError as error:
                stolen.append(error)

    async def many():
        for _ in range(60):
            made = await spawn(("/bin/true",), LINE_BYTES)
            with contextlib.suppress(ChildFailed):
                await made.converse("{}", lambda message: None)

    threads = [threading.Thread(target=open_and_close) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        runner.run(many())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not stolen


@pytest.mark.parametrize("said", ["no json", "x" * (LINE_BYTES + 2)])
def test_one_that_talks_nonsense_is_killed(runner, said):
    code = f"import sys, time; print({said!r}, flush=True); time.sleep(60)"
    started = time.monotonic()
    with pytest.raises(ChildFailed):
        runner.run(talk(code))
    assert time.monotonic() - started < 30


def test_one_that_is_given_up_is_killed(runner):
    async def give_up():
        made = await spawn(python("import time; time.sleep(60)"), LINE_BYTES)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await made.converse("{}", lambda message: None)
        return made

    made = runner.run(give_up())
    assert not made.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(made.pid, 0)


def test_a_large_question_reaches_it(runner):
    code = "import sys; print(len(sys.stdin.readline()))"
    assert runner.run(talk(code, "x" * 3_000_000))[2] == [3_000_001]


def test_a_program_that_is_not_there(runner):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        runner.run(spawn(("/nowhere/at/all",), LINE_BYTES))
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_pidfd(runner, monkeypatch):
    monkeypatch.delattr(child.os, "pidfd_open")
    assert runner.run(talk(ECHO))[0] == 3


def test_it_is_spawned_and_not_forked(runner, monkeypatch):
    """A fork copies the page tables of the node: 35 ms of everybody's time for a gigabyte."""
    monkeypatch.setattr(os, "fork", None)
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    assert runner.run(talk(ECHO))[0] == 3
    assert not forks


TALKATIVE = """
import sys, time
sys.stdin.readline()
for _ in range(64):
    sys.stderr.write("x" * (1 << 16) + chr(10))
    sys.stderr.flush()
raise RuntimeError("boom")
"""


def test_whatever_it_says_to_stderr_is_taken_and_the_last_line_is_why(runner):
    """An uncaught error comes in pieces, and its last line says what it was."""
    code, words, heard, _ = runner.run(asyncio.wait_for(talk(TALKATIVE), 60))
    assert (code, words, heard) == (1, "RuntimeError: boom", [])
