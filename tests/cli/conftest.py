"""The command as a user runs it: a process with arguments, input, output and an exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kept.testing import reaper
from tests.cli.command_server import CommandServer

DEADLINE_S = 150


@dataclass(frozen=True)
class Ran:
    """What became of one command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Kept:
    """``kept``, against one cluster or none."""

    server: ClassVar[CommandServer]

    def __init__(self, bootstrap: str = "localhost:1") -> None:
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("KEPT_")}
        self.environ |= {"KEPT_BOOTSTRAP": bootstrap, "COLUMNS": "100"}

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-W", "error", "-m", "kept", *map(str, arguments)]

    @contextmanager
    def started(self, *arguments: object, **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A command that goes on by itself; it is gone when the test is, however that ended."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        with subprocess.Popen(self.command(*arguments), env=self.environ, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def __call__(
        self,
        *arguments: object,
        stdin: str | bytes = b"",
        status: int | None = 0,
        cwd: Path | None = None,
        errors: int = 1,
    ) -> Ran:
        """Run it. Of ``status`` 1 are ``errors`` lines on standard error."""
        given = stdin.encode() if isinstance(stdin, str) else stdin
        where = str(cwd or Path.cwd())
        ran = Ran(
            *self.server.run(
                [str(one) for one in arguments], given, DEADLINE_S, environ=self.environ, cwd=where
            )
        )
        assert "Traceback" not in ran.err, ran.err
        if status is not None:
            assert ran.status == status, ran
        if status == 1:
            told = [line for line in ran.err.splitlines() if not line.endswith("; still trying")]
            assert len(told) == errors, ran
            assert all(line.startswith("kept: ") for line in told), "an error is one line"
        return ran


@pytest.fixture(autouse=True, scope="session")
def _command_server() -> Iterator[None]:
    """Commands hear Ctrl-C: what a shell started in the background ignores SIGINT, as would all
    that it starts.
    """
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    Kept.server = CommandServer()
    yield
    Kept.server.close()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def kept(kept_broker) -> Kept:
    return Kept(kept_broker.bootstrap)


@pytest.fixture(params=["kept", pytest.param("kafka", marks=[pytest.mark.java, pytest.mark.slow])])
def either(request: pytest.FixtureRequest) -> Kept:
    """The command against kept, and against Apache Kafka."""
    if request.param == "kafka":
        return Kept(request.getfixturevalue("apache_kafka"))
    return Kept(request.getfixturevalue("kept_broker").bootstrap)


@pytest.fixture
def offline() -> Kept:
    """The command where no node is needed."""
    return Kept()


@pytest.fixture
def local_dir(offline, tmp_path) -> Iterator[Path]:
    """A --dir for ``kept local``, whose nodes are gone when the test is, however it ended."""
    directory = tmp_path / "nodes"
    reaper.watch(str(tmp_path))
    yield directory
    if directory.exists():
        offline("local", "down", "--purge", "--dir", directory, status=None)
    reaper.forget(str(tmp_path))
