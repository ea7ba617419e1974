"""Who is told of a failed file call: whoever takes the directory offline that holds the file."""

from __future__ import annotations

import errno

import pytest

from kept.node.replicas.log_dir_failures import LogDirFailureChannel
from kept.storage.errors import MachineError
from tests.support.given import Given


def failed(path: str) -> MachineError:
    return MachineError(path, "write", OSError(errno.EIO, "I/O error"))


@pytest.fixture
def channel() -> tuple[LogDirFailureChannel, list[tuple[str, str]]]:
    """One for the directories /a and /b, and what it told."""
    table = Given(
        directory_of=lambda error: next(
            (one for one in ("/a", "/b") if error.path.startswith(one + "/")), None
        )
    )
    told: list[tuple[str, str]] = []
    channel = LogDirFailureChannel(table)
    channel.on_failure = lambda directory, error: told.append((str(directory), str(error)))
    return channel, told


def test_a_failure_takes_the_directory_offline_that_holds_the_file(channel, capsys) -> None:
    failures, told = channel
    failures.machine_failed(failed("/b/t-0/x.log"))
    failures.fail("/a", failed("/elsewhere"))
    assert told == [
        ("/b", "/b/t-0/x.log: write failed: I/O error"),
        ("/a", "/elsewhere: write failed: I/O error"),
    ]
    assert not capsys.readouterr().err


def test_a_failure_elsewhere_is_said_and_costs_no_directory(channel, capsys) -> None:
    failures, told = channel
    failures.machine_failed(failed("/ab/x"))
    assert not told
    said = capsys.readouterr().err
    assert "level=error" in said and "path=/ab/x" in said and "I/O error" in said
