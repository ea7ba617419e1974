"""Tab completion: what shells ask, and bash, zsh and fish themselves in a terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Kept
from tests.tools.needs import cannot_run

DEADLINE_S = 60


@pytest.fixture
def candidates(kept):
    """What bash is offered for a line up to the cursor."""

    def offered(line: str, shell: str = "bash", **environ: str) -> list[str]:
        kept.environ |= {"_KEPT_COMPLETE": f"{shell}_complete", "COMP_LINE": line, **environ}
        ran = kept(status=None)
        assert ran.err == ""
        return [row.split("\t")[1] for row in ran.lines if row]

    return offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kept top", ["topic", "top"]),
        ("kept topic ", ["create", "list", "describe", "alter", "delete"]),
        ("kept produce x --ack", ["--acks"]),
        ("kept produce x --acks ", ["all", "1", "0"]),
        ("kept produce x --acks=a", ["all"]),
        ("kept completion f", ["fish"]),
        ("kept topic create x --config min.ins", ["min.insync.replicas="]),
        ("kept topic create x --config compression.type=l", ["lz4"]),
        ("kept topic alter x --config unclean.leader.election.enable=", ["true", "false"]),
        ("kept topic alter x --delete-config min.ins", ["min.insync.replicas"]),
        ("kept serve --set num.part", ["num.partitions="]),
        ("kept broker config describe --name log.cleaner.thr", ["log.cleaner.threads"]),
        ("kept nonsense ", []),
        ("kept 'unfinished ", []),
    ],
)
def test_commands_options_and_values(candidates, line, offered):
    found = candidates(line)
    assert [name for name in offered if name in found] == offered
    if " " in line[5:]:
        assert len(found) == len(offered) or line.endswith(("topic ", "nonsense "))


def test_words_are_replaced_as_each_shell_does_it(candidates):
    assert candidates("kept produce x --acks=a", "zsh") == ["--acks=all"]
    assert candidates("kept produce x --acks=a", "fish") == ["--acks=all"]


def test_names_come_from_the_cluster(candidates, kept, kept_broker, tmp_path):
    one = kept_broker.create_topic(f"tab-{time.time_ns()}", partitions=2)
    two = kept_broker.create_topic(f"{one}.more")
    assert candidates("kept produce tab-") == sorted([one, two])
    assert candidates(f"kept consume {two} {one}.") == [], "it is there already"
    assert candidates(f"kept consume {one}:") == ["0", "1"]
    assert candidates(f'kept consume "{one}:') == [f"{one}:0", f"{one}:1"]
    assert candidates(f"kept consume {one}:", "zsh") == [f"{one}:0", f"{one}:1"]
    assert "__consumer_offsets" not in candidates("kept consume ")
    kept_broker_group = f"tab-group-{time.time_ns()}"
    consume = ("consume", one, "--group", kept_broker_group, "--from-beginning", "--max", 1)
    del kept.environ["_KEPT_COMPLETE"]
    kept("produce", one, stdin="x\n")
    kept(*consume)
    assert candidates("kept consume x --group tab-group-") == [kept_broker_group]
    assert candidates("kept consume __c", KEPT_BOOTSTRAP=kept_broker.bootstrap) == [
        "__consumer_offsets"
    ]
    del kept.environ["_KEPT_COMPLETE"]
    kept.environ["XDG_CONFIG_HOME"] = str(tmp_path)
    kept("context", "add", "here", "--bootstrap", kept_broker.bootstrap)
    assert candidates("kept topic list --context ", KEPT_BOOTSTRAP="localhost:1") == ["here"]
    assert one in candidates(f"kept consume --context here {one}")
    assert candidates(f"kept consume {one}") == []


def test_brokers_users_and_places_come_from_the_cluster(candidates, kept, kept_broker):
    user, topic = f"tab-{time.time_ns()}", kept_broker.create_topic(partitions=2)
    kept("user", "add", user, "--password-file", "-", stdin="a secret\n")
    try:
        for line, offered in (
            ("kept broker config describe ", ["default", "0"]),
            ("kept broker config set default ", ["0"]),
            ("kept broker config delete d", ["default"]),
            ("kept cluster drain ", ["0"]),
            ("kept cluster unregister 1", []),
            ("kept cluster voter remove ", ["0"]),
            ("kept cluster reassign x --to ", ["0"]),
            ("kept cluster reassign x --to 0,", []),
            ("kept cluster reassign x --to 7,", ["7,0"]),
            (f"kept cluster elect {topic}:", ["0", "1"]),
            (f"kept compact explain {topic}:1 {topic}:", ["0", "1"]),
            (f"kept produce {topic}:", ["0", "1"]),
            ("kept group list --state e", ["Empty"]),
            (
                "kept transaction list --state prep",
                ["PrepareCommit", "PrepareAbort", "PrepareEpochFence"],
            ),
            (f"kept user delete {user[:-1]}", [user]),
            (f"kept quota set --user {user[:-1]}", [user]),
            (f"kept acl add User:{user[:-1]}", [user]),
            ("kept acl add User:x describe,rea", ["describe,read"]),
            ("kept acl add User:x read,REA", []),
            ("kept acl add User:x describe,REA", ["describe,read"]),
            ("kept acl add User:x read to", ["topic:"]),
            (f"kept acl add User:x read topic:{topic}", [topic]),
        ):
            assert candidates(line) == offered, line
        assert candidates(f"kept acl add User:x read topic:{topic}", "zsh") == [f"topic:{topic}"]
    finally:
        del kept.environ["_KEPT_COMPLETE"]
        kept("user", "delete", user)


def test_a_cluster_that_does_not_answer_is_not_waited_for(candidates):
    with socket.create_server(("localhost", 0)) as silent:
        port = silent.getsockname()[1]
        before = time.monotonic()
        assert candidates("kept consume ", KEPT_BOOTSTRAP=f"localhost:{port}") == []
        assert time.monotonic() - before < 10


def test_the_scripts_are_those_of_click_s_variable(offline):
    for shell in ("bash", "zsh", "fish"):
        script = offline("completion", shell).out
        offline.environ["_KEPT_COMPLETE"] = f"{shell}_source"
        assert offline().out == script
        del offline.environ["_KEPT_COMPLETE"]
    assert "'powershell' is not one of" in offline("completion", "powershell", status=2).err


class Terminal:
    """A shell in a terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def type(self, keys: str, until: str) -> str:
        """Type ``keys``; what the terminal shows up to ``until``."""
        os.write(self._fd, keys.encode())
        shown = ""
        end = time.monotonic() + DEADLINE_S
        while until not in shown:
            ready = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"{until!r} did not come after {keys!r}: {shown!r}"
            shown += os.read(self._fd, 65536).decode("utf-8", "replace")
        return shown


FORKED = """
import json, os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as server:
    message = {"arguments": sys.argv[2:], "environ": dict(os.environ), "cwd": os.getcwd()}
    socket.send_fds(server, [json.dumps(message).encode()], [0, 1, 2])
    sys.exit(int(server.recv(64)))
"""
"""``kept`` as the process that serves commands forks it: nothing is imported anew at each Tab."""


@contextmanager
def shell(kept: Kept, directory: Path, *command: str) -> Iterator[Terminal]:
    """A shell where ``kept`` completes, and otherwise prints what it was given."""
    (directory / "forked.py").write_text(FORKED)
    server = kept.server.fileno()
    program = directory / "kept"
    program.write_text(
        "#!/bin/sh\n"
        f'test -z "$COMP_LINE" && test "$1" != completion && echo "ran=<$*>" && exit\n'
        f'exec {sys.executable} -I -S {directory}/forked.py {server} "$@"\n'
    )
    program.chmod(0o755)
    more = {"PATH": f"{directory}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(directory)}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=kept.environ | more,
        start_new_session=True,
        cwd=directory,
        pass_fds=[server],
    )
    os.close(theirs)
    try:
        yield Terminal(ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def completed_in(terminal: Terminal, topic: str) -> None:
    """What each of these becomes, and how the shell then runs it."""
    for typed, ran in (
        ("kept topi\tcr\tx\n", "topic create x"),
        ("kept produce x --comp\tgz\t\n", "produce x --compression gzip"),
        (
            "kept topic create x --config compression.ty\tlz\t\n",
            "topic create x --config compression.type=lz4",
        ),
        ("kept produce x --compression=gz\t\n", "produce x --compression=gzip"),
        (f"kept consume {topic[:-2]}\t--until-\t\n", f"consume {topic} --until-end"),
        (f"kept consume {topic}:\t\n", f"consume {topic}:0"),
    ):
        assert f"ran=<{ran}" in terminal.type(typed, "ran=<" + ran), typed


@pytest.fixture
def topic(kept_broker) -> str:
    """A topic of one partition, whose name is known by all but its end."""
    name: str = kept_broker.create_topic(f"shell-{time.time_ns()}-zz")
    return name


def needs(name: str) -> None:
    if shutil.which(name) is None:
        cannot_run(name, f"{name} is not installed")


def test_bash(kept, tmp_path, topic):
    with shell(kept, tmp_path, "bash", "--norc", "--noprofile", "-i") as terminal:
        terminal.type('PS1="$ "; eval "$(kept completion bash)"; echo load"ed"\n', "loaded")
        completed_in(terminal, topic)


def test_zsh(kept, tmp_path, topic):
    needs("zsh")
    with shell(kept, tmp_path, "zsh", "-f", "-i") as terminal:
        terminal.type("PS1='$ '; autoload -U compinit; compinit -u -D; echo beg'un'\n", "begun")
        terminal.type('eval "$(kept completion zsh)"; echo load"ed"\n', "loaded")
        completed_in(terminal, topic)


def test_fish(kept, tmp_path, topic):
    needs("fish")
    kept.environ |= {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    program = tmp_path / "kept"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kept "$@"\n')
    program.chmod(0o755)
    kept.environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    lines = (
        "kept topic cr",
        "kept produce x --compression=gz",
        f"kept consume {topic[:-2]}",
        f"kept consume {topic}:",
    )
    script = "kept completion fish | source\n" + "".join(f"complete -C '{x}'\n" for x in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        env=kept.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0][1].startswith("Create "), "with what it does"
    assert [row[0] for row in rows] == [
        "create",
        "--compression=gzip",
        topic,
        f"{topic}:0",
    ]
