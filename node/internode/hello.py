"""Hello: how a connection between nodes begins, and how a node is probed.

Whoever connects sends ``KEPT``, a length (uint32, big-endian) and its Hello, and reads length and
Hello of the other side. This format never changes: nodes of different versions learn so from each
other's Hello (``protocol``). A probe ends there; who stays sends frames (:mod:`.frames`).

A refused connection is evidence that the process is gone (nobody listens); a connection that breaks
before the answer is tried again within the time given, because a dying process may close its
connections before its port; silence is no evidence at all.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
import struct
from typing import Any, Final

from kept.client.address_errors import UNUSABLE_ADDRESS
from kept.node.internode.identity import Hello, check
from kept.node.internode.protobuf_conversion import codecs
from kept.storage.errors import CorruptMessage, NetworkException

PREFACE: Final = b"KEPT"
MAX_HELLO_BYTES: Final = 64 * 1024
"""A voter list of a thousand nodes is not half of it."""
RETRY_S: Final = 0.005
"""Between two attempts when a connection broke before the answer."""

_LENGTH: Final = struct.Struct(">I")
_NO_SUCH_NAME: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)})


class ConnectionRefused(NetworkException):
    """Nobody listens at the address: the process that did is gone."""


class AddressGone(NetworkException):
    """There is no such address: its name is unknown, or no machine has it. So a container's is as
    soon as its process has ended. It may also never have been one."""


def packed(hello: Hello) -> bytes:
    """Length and Hello."""
    data = codecs().hello.to_bytes(hello)
    return _LENGTH.pack(len(data)) + data


def unpacked(data: bytes | bytearray) -> tuple[Hello, int] | None:
    """The Hello at the start of ``data`` and where it ends; None while it is not whole. Raises
    CorruptMessage.
    """
    if len(data) < 4:
        return None
    (size,) = _LENGTH.unpack_from(data)
    if size > MAX_HELLO_BYTES:
        raise CorruptMessage(f"a Hello of {size} bytes; at most {MAX_HELLO_BYTES} are right")
    if len(data) < 4 + size:
        return None
    return hello_from(bytes(data[4 : 4 + size])), 4 + size


def hello_from(data: bytes) -> Hello:
    """A Hello as it came. Raises CorruptMessage."""
    hello: Hello = codecs().hello.from_bytes(data)
    check(hello)
    return hello


class _Greeting(asyncio.Protocol):
    """Sends a Hello, and waits for the other side's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own: Hello) -> None:
        self.answer: asyncio.Future[Hello | None] = loop.create_future()
        """None: the connection broke first, or what came was no Hello."""
        self._own = own
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(PREFACE + packed(self._own))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            parsed = unpacked(self._data)
        except CorruptMessage:
            self._end(None)
            return
        if parsed is not None:
            hello, end = parsed
            # Who was connected to says nothing more until it is spoken to.
            self._end(hello if end == len(self._data) else None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._end(None)

    def _end(self, hello: Hello | None) -> None:
        if not self.answer.done():
            self.answer.set_result(hello)


async def identify(
    host: str, port: int, own: Hello, timeout_s: float, tls: ssl.SSLContext | None = None
) -> Hello:
    """The Hello of the node that serves an address. Raises as :func:`connect`."""
    transport, hello = await connect(host, port, own, timeout_s, tls)
    transport.abort()
    return hello


async def connect(
    host: str, port: int, own: Hello, timeout_s: float, tls: ssl.SSLContext | None = None
) -> tuple[Any, Hello]:
    """A connection to the node that serves an address, with ``tls`` in TLS, and its Hello.

    Raises ConnectionRefused, AddressGone, NetworkException for all else that leaves no answer.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                connection = await _attempt(host, port, where, own, tls)
                if connection is not None:
                    return connection
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise NetworkException(f"{where}: no answer of a kept node in {timeout_s:g} s") from None


async def _attempt(
    host: str, port: int, where: str, own: Hello, tls: ssl.SSLContext | None
) -> tuple[Any, Hello] | None:
    loop = asyncio.get_running_loop()
    failed: list[OSError] = []
    for family, address in await addresses(host, port):
        try:
            transport, greeting = await loop.create_connection(
                lambda: _Greeting(loop, own),
                address,
                port,
                family=family,
                ssl=tls,
                server_hostname=host if tls is not None else None,
            )
        except ssl.SSLCertVerificationError as error:
            raise NetworkException(f"{where}: its certificate: {error.verify_message}") from None
        except OSError as error:
            failed.append(error)
            continue
        try:
            hello = await greeting.answer
        except BaseException:
            transport.abort()
            raise
        if hello is None:
            transport.abort()
            return None
        return transport, hello
    codes = {error.errno for error in failed} - UNUSABLE_ADDRESS
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
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        kind = AddressGone if getattr(error, "errno", 0) in _NO_SUCH_NAME else NetworkException
        raise kind(f"{host} is not a known host ({why})") from error
    return [(family, str(address[0])) for family, _, _, _, address in infos]
