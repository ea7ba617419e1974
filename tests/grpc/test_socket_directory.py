"""Where gRPC's unix sockets are: private, and gone with the process that had them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kept.node.grpc import (
    grpc_options,  # noqa: F401 - before grpc
    socket_directory,
)

# isort: split
import grpc.aio


def test_the_unix_socket_is_private_and_gone_after_the_stop():
    async def scene():
        private = socket_directory.PrivateServer("clients")
        await private.start(grpc.aio.server())
        folder = os.path.dirname(private.path)
        assert os.stat(folder).st_mode & 0o777 == 0o700
        await private.stop()
        assert not os.path.exists(folder)

    asyncio.run(scene())


@pytest.fixture
def temporary(monkeypatch):
    """A temporary directory of its own, with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kept-", dir="/tmp") as root:
        monkeypatch.setattr(socket_directory.tempfile, "gettempdir", lambda: root)
        yield Path(root)


HOLDER = """
import sys, tempfile
from kept.node.grpc import socket_directory as private
tempfile.tempdir = sys.argv[1]
print(private.PrivateDirectory().path, flush=True)
sys.stdin.read()
"""


def test_a_directory_lives_as_long_as_its_process(temporary):
    """Whatever its process id means here: nodes in containers may share the directory."""
    command = [sys.executable, "-P", "-c", HOLDER, str(temporary)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        held = Path(holder.stdout.readline().strip())
        assert str(holder.pid) not in held.name
        (held / "grpc").touch()
        first = socket_directory.PrivateDirectory()
        second = socket_directory.PrivateDirectory()
        assert (held / "grpc").exists() and Path(first.path).exists()
        second.remove()
        second.remove()
        assert not Path(second.path).exists()
        holder.kill()
        holder.wait(60)
        assert (held / "grpc").exists(), "kill -9 leaves it behind"
        socket_directory.PrivateDirectory().remove()
        assert not held.exists() and Path(first.path).exists()
        first.remove()
    finally:
        holder.kill()
        holder.communicate(timeout=60)


def test_a_directory_that_is_being_made_is_made_again(temporary, monkeypatch):
    """Another node starts between the directory and its lock, and takes it for one left behind."""
    made = []
    original = tempfile.mkdtemp

    def mkdtemp(**more):
        made.append(original(**more))
        if len(made) == 1:
            socket_directory._remove_left_behind(str(temporary))
        return made[-1]

    monkeypatch.setattr(socket_directory.tempfile, "mkdtemp", mkdtemp)
    found = socket_directory.PrivateDirectory()
    assert found.path == made[1] and not Path(made[0]).exists()
    assert os.stat(f"{found.path}/{socket_directory.LOCK}").st_mode & 0o777 == 0o600
    found.remove()


def test_only_what_is_ours_and_left_behind_is_removed(temporary):
    old = temporary / f"{socket_directory.PREFIX}12345-abc"
    old.mkdir()
    (old / "grpc").touch()  # its version held no lock: nobody knows whether it lives
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / socket_directory.LOCK).touch()
    (temporary / f"{socket_directory.PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{socket_directory.PREFIX}file").touch()
    empty = temporary / f"{socket_directory.PREFIX}empty"
    empty.mkdir()
    socket_directory.PrivateDirectory().remove()
    assert sorted(p.name for p in temporary.iterdir()) == [
        "elsewhere",
        f"{socket_directory.PREFIX}12345-abc",
        f"{socket_directory.PREFIX}file",
        f"{socket_directory.PREFIX}link",
    ]
    assert (elsewhere / socket_directory.LOCK).exists()


def test_long_paths_are_avoided(tmp_path, monkeypatch):
    monkeypatch.setattr(
        socket_directory.tempfile, "gettempdir", lambda: str(tmp_path / ("x" * 100))
    )
    made = socket_directory.PrivateDirectory()
    assert len(made.path) < 90
    made.remove()
