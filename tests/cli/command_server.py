"""Runs commands in forked children: ``kept`` is imported once, and a command is still a process
with descriptors, an environment and an exit of its own.

``python -m tests.cli.command_server FD``: each message on the socket FD is one command, as JSON,
with the descriptors that become its 0, 1 and 2; the answer is its exit status.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from typing import Any, Final

import click

MESSAGE_BYTES: Final = 1 << 20


class CommandServer:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "error", "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def fileno(self) -> int:
        """The socket on which it is asked, for a process that asks in the place of this one."""
        return self._socket.fileno()

    def run(
        self, arguments: list[str], given: bytes, deadline_s: float, **more: Any
    ) -> tuple[int, str, str]:
        """Status, output and errors of a command. TimeoutError ends the server as well."""
        with (
            tempfile.TemporaryFile() as read,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            read.write(given)
            read.seek(0)
            message = json.dumps({"arguments": arguments, **more}).encode()
            fds = [read.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [message], fds)
            if not select.select([self._socket], [], [], deadline_s)[0]:
                self.close()
                raise TimeoutError(f"{arguments} ran longer than {deadline_s} s")
            status = int(self._socket.recv(MESSAGE_BYTES))
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return status, texts[0], texts[1]

    def close(self) -> None:
        """End it, and a command that still runs."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def preload() -> None:
    """Import every command, and what most of them use: also the messages, a half of what a short
    command takes.
    """
    from kio.static.constants import EntityType

    from kept.cli.root import kept

    groups: list[click.Group] = [kept]
    while groups:
        group = groups.pop()
        context = click.Context(group)
        found = [group.get_command(context, name) for name in group.list_commands(context)]
        groups += [one for one in found if isinstance(one, click.Group)]
    import kept.cli.run
    import kept.client.client
    import kept.node.process
    from kept.client.protocol import messages as protocol
    from kept.node.kafka import api

    for served in api.APIS:
        for kind in (EntityType.request, EntityType.response):
            protocol.message_type(served.key, served.max_version, kind)
    "localhost".encode("idna")  # as a name is resolved
    gc.freeze()  # no command collects what it did not make


def serve(requests: socket.socket) -> None:
    """Fork for each command, until nobody is there to want one."""
    from kept.cli import main

    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
        if not message:
            return
        child = os.fork()
        if not child:
            requests.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            wanted = json.loads(message)
            os.environ.clear()
            os.environ.update(wanted["environ"])
            os.chdir(wanted["cwd"])
            try:
                main(wanted["arguments"])
            except SystemExit as leave:
                sys.stdout.flush()
                os._exit(int(leave.code or 0))  # all modules' end would take 0.1 s
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(child, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    sys.modules.setdefault("hypothesis", None)  # type: ignore[arg-type]  # as kept.cli.main does
    preload()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        serve(requests)
