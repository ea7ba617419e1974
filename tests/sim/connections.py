"""In-memory sockets and transports of :class:`tests.sim.loop.SimLoop`.

A connection is TCP's: bytes arrive in order, some time later, cut into pieces anywhere. What is
sent over a link that is cut, one way or both, arrives when it is whole again. Who writes faster
than the other side reads is told (``pause_writing``). What a process gave to a connection arrives
even if the process dies after that; what comes last is then a reset.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.sim.process import PROCESS, Process

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop

DELAY_S: Final = (0.0001, 0.003)
HIGH_WATER_BYTES: Final = 64 * 1024
FIRST_PORT: Final = 40_000
RETRY_S: Final = 0.05
"""How soon a connection looks again whether its link is whole."""
WHOLE: Final = 0.5
"""How often a write arrives in one piece."""


@dataclass(frozen=True)
class Accepting:
    """Who accepts at an address, and as code of which process."""

    factory: Callable[[], Any]
    context: contextvars.Context


class Network:
    """Who listens where, and which hosts are cut off from which."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.client_host = "10.0.0.100"
        self.listeners: dict[tuple[str, int], Accepting] = {}
        self.bound: set[tuple[str, int]] = set()
        self.cuts: set[tuple[str, str]] = set()
        """(source, target): nothing that one sends arrives at the other."""
        self.delay_s = DELAY_S
        self.made = 0
        """Ends of connections."""
        self._next_port = FIRST_PORT

    def delay(self) -> float:
        """How long something travels."""
        return self.loop.random.uniform(*self.delay_s)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing passes from one host to another."""
        return (source, target) in self.cuts

    def free_port(self) -> int:
        """A port that nobody had."""
        self._next_port += 1
        return self._next_port

    def listen(
        self, sock: SimSocket, factory: Callable[[], Any], context: contextvars.Context
    ) -> SimServer:
        """Accept at a bound socket."""
        self.listeners[sock.address] = Accepting(factory, context)
        return SimServer(self, sock)

    def forget(self, process: Process) -> None:
        """Its ports are free."""
        for address in process.addresses:
            self.bound.discard(address)
            self.listeners.pop(address, None)


class SimSocket:
    """What a listener needs of a socket before it accepts."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self.address = ("", 0)

    def setsockopt(self, *_: Any) -> None:
        """No option matters here."""

    def bind(self, address: tuple[str, int]) -> None:
        """Take an address; port 0: any. Raises OSError."""
        host, port = address
        address = (host, port or self._network.free_port())
        if address in self._network.bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._network.bound.add(address)
        self._process.addresses[address] = None
        self.address = address

    def getsockname(self) -> tuple[str, int]:
        """The address."""
        return self.address

    def close(self) -> None:
        """Give the address up."""
        self._network.bound.discard(self.address)
        self._process.addresses.pop(self.address, None)


class SimServer(asyncio.AbstractServer):
    """Accepts at one socket."""

    def __init__(self, network: Network, sock: SimSocket) -> None:
        self._network = network
        self._sock = sock

    def close(self) -> None:
        """Accept nobody any more."""
        self._network.listeners.pop(self._sock.address, None)
        self._sock.close()


class SimTransport(asyncio.Transport):
    """One end of a connection; :meth:`pair` makes both."""

    def __init__(
        self,
        loop: SimLoop,
        own: tuple[str, int],
        peer: tuple[str, int],
        context: contextvars.Context,
    ) -> None:
        super().__init__()
        self._loop = loop
        loop.network.made += 1
        self._number = loop.network.made
        self._own = own
        self._peername = peer
        self._context = context
        self._other: SimTransport
        self._random = Random(loop.random.getrandbits(32))
        """Its own: the product may go through its connections in any order."""
        self._protocol: Any = None
        self._closing = False
        self._paused = False
        self._held = bytearray()
        """Came, and is not read yet."""
        self._travelling: deque[bytes] = deque()
        """On its way to the other end, in order."""
        self._held_back: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What a cut holds back; one timer for all of it."""
        self.held_until_s = 0.0
        """What is written arrives no earlier, whatever becomes of the links."""
        self.arrives_whole = False
        """What was written arrives although this end breaks off: somebody in between has it."""
        self._arrives_at = 0.0
        """When the last of it does."""
        self._unread_bytes = 0
        """Of what was written here: not read by the other end."""
        self._high = HIGH_WATER_BYTES
        self._low = HIGH_WATER_BYTES // 4
        self._full = False

    def __hash__(self) -> int:
        """Its place in a set follows from the history, not from its address."""
        return self._number

    @staticmethod
    def pair(
        loop: SimLoop, host: str, address: tuple[str, int], accepting: contextvars.Context
    ) -> tuple[SimTransport, SimTransport]:
        """The end of whoever connects, in the context of now, and that of whoever accepts."""
        own = (host, loop.network.free_port())
        near = SimTransport(loop, own, address, contextvars.copy_context())
        far = SimTransport(loop, address, own, accepting.copy())
        near._other, far._other = far, near
        for end in (near, far):
            process = end._context.get(PROCESS)
            if process is not None:
                process.transports[end] = None
        return near, far

    def attach(self, protocol: Any) -> None:
        """Whom bytes go to."""
        self._protocol = protocol

    def accept_later(self, factory: Callable[[], Any]) -> None:
        """The other side hears of the connection; bytes come after that."""
        self._other._arrives_at = self._arrives_at = self._loop.time() + self._loop.network.delay()
        self._loop.call_at(self._arrives_at, self._accept, factory, context=self._context)

    def _accept(self, factory: Callable[[], Any]) -> None:
        if self._closing:
            return
        self._protocol = factory()
        self._protocol.connection_made(self)

    # What protocols use.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Another protocol goes on."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Whom bytes go to."""
        found: asyncio.BaseProtocol = self._protocol
        return found

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Both addresses; there is no socket."""
        return {"peername": self._peername, "sockname": self._own}.get(name, default)

    def is_closing(self) -> bool:
        """Nothing is sent or received any more."""
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """When the protocol is told to pause and to go on."""
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        """What the other end has not read."""
        return self._unread_bytes

    def write(self, data: Any) -> None:
        """Send bytes."""
        data = bytes(data)
        if self._closing or not data:
            return
        start = 0
        random = self._random
        while start < len(data):
            whole = random.random() < WHOLE
            size = len(data) - start if whole else random.randint(1, len(data) - start)
            self._travelling.append(data[start : start + size])
            self._schedule(self._arrive)
            start += size
        self._unread_bytes += len(data)
        if self._unread_bytes > self._high and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send them as one."""
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        """What comes waits."""
        self._paused = True

    def resume_reading(self) -> None:
        """What waits is read soon."""
        if self._paused:
            self._paused = False
            if self._held:
                self._loop.call_soon(self._read, context=self._context)

    @property
    def holds(self) -> bool:
        """Whether something that was written is held back on its way."""
        return bool(self._held_back)

    def is_reading(self) -> bool:
        """Whether what comes is read."""
        return not self._paused

    def close(self) -> None:
        """What was written arrives, then the end."""
        self._end(None)

    def abort(self) -> None:
        """The other end sees a reset; what is on its way is lost."""
        if not self.arrives_whole:
            self._travelling.clear()
        self._end(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    # The way.

    def _schedule(self, arrive: Callable[..., None], *args: Any) -> None:
        due = self._loop.time() + self._random.uniform(*self._loop.network.delay_s)
        self._arrives_at = max(self._arrives_at + 1e-6, due)
        self._loop.call_at(self._arrives_at, arrive, *args, context=self._other._context)

    def _arrive(self) -> None:
        """The oldest piece arrives at the other end."""
        if self._is_cut():
            self._hold_back(self._arrive)
        elif self._travelling:
            self._other._received(self._travelling.popleft())

    def _is_cut(self) -> bool:
        if self._loop.time() < self.held_until_s:
            return True
        return self._loop.network.is_cut(self._own[0], self._peername[0])

    def _hold_back(self, arrive: Callable[..., None], *args: Any) -> None:
        self._held_back.append((arrive, args))
        if len(self._held_back) == 1:
            self._retry_later()

    def _retry_later(self) -> None:
        at = self._loop.time() + RETRY_S
        self._loop.call_at(at, self._retry, context=self._other._context)

    def _retry(self) -> None:
        """What was held back arrives, in order, if the link is whole."""
        if self._is_cut():
            self._retry_later()
            return
        held_back, self._held_back = self._held_back, []
        for arrive, args in held_back:
            self._loop.call_soon(arrive, *args, context=self._other._context)

    def _received(self, data: bytes) -> None:
        if self._closing:
            return
        self._held += data
        if not self._paused:
            self._read()

    def _read(self) -> None:
        while self._held and not self._paused and not self._closing:
            protocol = self._protocol
            if isinstance(protocol, asyncio.BufferedProtocol):
                buffer: Any = protocol.get_buffer(len(self._held))
                size = min(len(buffer), len(self._held))
                buffer[:size] = self._held[:size]
                del self._held[:size]
                protocol.buffer_updated(size)
            else:
                data, size = bytes(self._held), len(self._held)
                self._held.clear()
                protocol.data_received(data)
            self._other._was_read(size)

    def _was_read(self, size: int) -> None:
        self._unread_bytes -= size
        if self._full and self._unread_bytes <= self._low and not self._closing:
            self._full = False
            self._loop.call_soon(self._protocol.resume_writing, context=self._context)

    def _end(self, error: OSError | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._forget()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, None, context=self._context)
        self._schedule(self._lose, error)

    def break_off(self) -> None:
        """The process is dead: what was written arrives, then a reset."""
        if not self._closing:
            self._closing = True
            reset = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._schedule(self._lose, reset)

    def _lose(self, error: OSError | None) -> None:
        """The end arrives at the other end, after all that was on its way."""
        if self._is_cut() or self._travelling:  # pieces that a cut held back come first
            self._hold_back(self._lose, error)
            return
        self._other._lost(error)

    def _lost(self, error: OSError | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._forget()
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _forget(self) -> None:
        process = self._context.get(PROCESS)
        if process is not None:
            process.transports.pop(self, None)
