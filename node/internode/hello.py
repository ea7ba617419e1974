"""Hello over plain TCP: who serves this address, and is its process alive?

The asker sends ``KEPT``, a length (uint32, big-endian) and its Hello, and reads length and Hello of
the other side. No gRPC in it, so it is quick, and it tells what gRPC hides: that the connection was
*refused*. A refused connection is evidence that the process is gone (nobody listens); a connection
that breaks before the answer is tried again within the time given, because a dying process may
close its connections before its port; silence is no evidence at all.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from kept.node.internode.identity import Hello, check
from kept.node.internode.protobuf_conversion import Codec
from kept.node.proto import peers_pb2
from kept.storage.errors import CorruptMessage, NetworkException

PREFACE: Final = b"KEPT"
MAX_HELLO_BYTES: Final = 64 * 1024
"""A voter list of a thousand nodes is not half of it."""
AGAIN_S: Final = 0.005
"""Between two attempts when a connection broke before the answer."""
ANSWER_S: Final = 5.0
"""A connection that says KEPT and then nothing is closed after this."""

HELLO: Final = Codec(Hello, peers_pb2.Hello)
_LENGTH: Final = struct.Struct(">I")
_NO_SUCH_NAME: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)})
_NO_SUCH_WAY: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH})


class ConnectionRefused(NetworkException):
    """Nobody listens at the address: the process that did is gone."""


class AddressGone(NetworkException):
    """There is no such address: its name is unknown, or no machine has it. So a container's is as
    soon as its process has ended. It may also never have been one."""


def packed(hello: Hello) -> bytes:
    """Length and Hello."""
    data = HELLO.to_bytes(hello)
    return _LENGTH.pack(len(data)) + data


def unpacked(data: bytes | bytearray) -> Hello | None:
    """The Hello at the start of ``data``; None while it is not whole. Raises CorruptMessage."""
    if len(data) < 4:
        return None
    (size,) = _LENGTH.unpack_from(data)
    if size > MAX_HELLO_BYTES:
        raise CorruptMessage(f"a Hello of {size} bytes")
    if len(data) < 4 + size:
        return None
    return hello_from(bytes(data[4 : 4 + size]))


def hello_from(data: bytes) -> Hello:
    """A Hello as it came. Raises CorruptMessage."""
    hello: Hello = HELLO.from_bytes(data)
    check(hello)
    return hello


def hello_in(message: Any) -> Hello:
    """A Hello that begins a stream. Raises CorruptMessage."""
    hello: Hello = HELLO.decode(message)
    check(hello)
    return hello


class Greeter(asyncio.Protocol):
    """The side that is asked: reads one Hello, answers, closes."""

    def __init__(
        self, transport: Any, answer: Any, closed: Callable[[], None] | None = None
    ) -> None:
        """``answer`` is called with the other's Hello and returns ours; ``closed`` at the end."""
        self._transport = transport
        self._answer = answer
        self._closed = closed
        self._data = bytearray()
        self._timer = asyncio.get_running_loop().call_later(ANSWER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Bytes after ``KEPT``."""
        self._data += data
        try:
            other = unpacked(self._data)
        except CorruptMessage:
            self._transport.abort()
            return
        if other is not None:
            self._transport.write(packed(self._answer(other)))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Done."""
        self._timer.cancel()
        if self._closed is not None:
            self._closed()


class _Asker(asyncio.Protocol):
    """The side that asks."""

    def __init__(self, own: Hello) -> None:
        self.answer: asyncio.Future[Hello | None] = asyncio.get_running_loop().create_future()
        self._own = own
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(PREFACE + packed(self._own))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            found = unpacked(self._data)
        except CorruptMessage:
            self._end(None)
            return
        if found is not None:
            self._end(found)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._end(None)

    def _end(self, hello: Hello | None) -> None:
        if not self.answer.done():
            self.answer.set_result(hello)


async def ask(host: str, port: int, own: Hello, timeout_s: float) -> tuple[Hello, str]:
    """The Hello of the node that serves an address, and that address as gRPC names it.

    Raises ConnectionRefused, AddressGone, NetworkException for all else that leaves no answer.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await _attempt(host, port, where, own)
                if found is not None:
                    return found
                await asyncio.sleep(AGAIN_S)
    except TimeoutError:
        raise NetworkException(f"{where}: no answer of a kept node in {timeout_s:g} s") from None


async def _attempt(host: str, port: int, where: str, own: Hello) -> tuple[Hello, str] | None:
    loop = asyncio.get_running_loop()
    failed: list[OSError] = []
    for family, address in await addresses(host, port):
        try:
            transport, asker = await loop.create_connection(
                lambda: _Asker(own), address, port, family=family
            )
        except OSError as error:
            failed.append(error)
            continue
        try:
            found = await asker.answer
        finally:
            transport.abort()
        if found is None:
            return None
        ipv6 = family == socket.AF_INET6
        return found, f"ipv6:[{address}]:{port}" if ipv6 else f"ipv4:{address}:{port}"
    codes = {error.errno for error in failed} - _NO_SUCH_WAY
    if codes == {errno.ECONNREFUSED}:
        raise ConnectionRefused(f"{where}: connection refused; is the node running?")
    why = failed[0].strerror or str(failed[0]) if failed else "no address"
    if codes == {errno.EHOSTUNREACH}:
        raise AddressGone(f"{where}: {why}")
    raise NetworkException(f"{where}: {why}")


async def addresses(host: str, port: int) -> list[tuple[int, str]]:
    """(family, address) of a host. Raises AddressGone, NetworkException."""
    try:
        version = ipaddress.ip_address(host).version
        return [(socket.AF_INET6 if version == 6 else socket.AF_INET, host)]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        kind = AddressGone if getattr(error, "errno", 0) in _NO_SUCH_NAME else NetworkException
        raise kind(f"{host} is not a known host ({why})") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]
