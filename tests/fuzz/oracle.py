"""What must hold while a node is attacked: others are served, nothing is kept, nothing gets out."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from kio.schema.errors import ErrorCode

from kept.node.runtime.logging import bugs, log
from kept.storage.records import build_batch
from tests.fuzz.site import ADMIN, PASSWORD, PLAINTEXT, SASL, STEADY, Site
from tests.support.raw_client import RawClient
from tests.support.request_values import fetch_values, produce_values

SERVED_S: Final = 20
"""A connection that is not served within that is not served; it takes a millisecond."""
SETTLED_S: Final = 20
GROWTH_BYTES: Final = 96 << 20
"""Resident memory that an attack may add to what the attempts before the first check left: arenas
of the allocator, caches of bounded size, gRPC's buffers."""
BATCH: Final = build_batch([(1, b"k", b"steady", ())])


class Broken(Exception):
    """What must hold does not."""


class NotServed(Broken):
    """The node leads the partition, and says that it may not serve it now."""


class Escaped:
    """Exceptions that nobody was to see: of callbacks and tasks of the loop, those that the node
    calls bugs of its own, and what libraries log.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.found: list[str] = []
        self.stalls = 0
        """How often the node noticed that this process stood still, and suspended serving."""
        self._loop = loop
        self._exception, self._warning = log.exception, log.warning
        self._handler = _Handler(self.found)

    def __enter__(self) -> Escaped:
        bugs.clear()
        self._loop.set_exception_handler(self._of_loop)
        log.exception = self._of_node  # type: ignore[method-assign]
        log.warning = self._warned  # type: ignore[method-assign]
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.set_exception_handler(None)
        log.exception = self._exception  # type: ignore[method-assign]
        log.warning = self._warning  # type: ignore[method-assign]
        logging.getLogger().removeHandler(self._handler)

    def _of_loop(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, UnicodeDecodeError) and _is_of_grpcio(error):
            return  # its server is started anew
        trace = "".join(traceback.format_exception(error)) if error else ""
        self.found.append(f"{context.get('message')}\n{trace}")

    def _of_node(self, event: str, error: BaseException, **fields: Any) -> None:
        trace = "".join(traceback.format_exception(error))
        self.found.append(f"{event} {fields}\n{trace}")

    def _warned(self, event: str, **fields: Any) -> None:
        stood_still = str(fields.get("reason")).startswith("this process stood still")
        self.stalls += event == "serving suspended" and stood_still
        self._warning(event, **fields)

    def check(self) -> None:
        """Raises :class:`Broken`."""
        if self.found:
            found, self.found[:] = self.found[0], []
            raise Broken(f"an exception got out: {found}")


def _is_of_grpcio(error: BaseException) -> bool:
    """Whether it was raised in grpcio, not in what the node reads itself."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and "grpc/_cython" in frames[-1][0].f_code.co_filename


class _Handler(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Invalid encoding on"):
            return  # gRPC says so of metadata, to a handler that writes nothing
        if record.name.startswith("grpc.") and "codec can't decode" in str(record.msg):
            return  # a method that is no text ends its server, which is started anew
        self._found.append(f"{record.name}: {self.format(record)}")


class Steady:
    """Connections that were there before, and are served all along: one that is logged in and
    produces and reads what it produced, and one of HTTP. Where the node noticed that this process
    stood still, a request may be refused until the controller has answered, and not for longer.
    """

    def __init__(self, site: Site, escaped: Escaped) -> None:
        self._site = site
        self._escaped = escaped
        self._produced = 0
        self._stalls = 0
        """As many as there were when the last request was sent that was served."""
        self.slowest_s = 0.0

    async def open(self) -> None:
        """Connect, and use both for the first time; they are used until :meth:`close`."""
        self._client = await RawClient.connect(self._site.ports[SASL], ADMIN, PASSWORD)
        port = self._site.ports[PLAINTEXT]
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await self._get()  # at once: who is silent at first is closed
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Broken(f"the steady HTTP connection is not served: {error!r}") from error
        await self.use()

    async def use(self) -> None:
        """Once more. Raises :class:`Broken`."""
        started = time.monotonic()
        if not self._site.parts.metadata.leads:
            raise Broken("the only voter leads the metadata log no more")
        try:
            async with asyncio.timeout(SERVED_S):
                await self._served(self._produce)
                await self._served(self._fetch)
                await self._get()
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise Broken(f"a steady connection is not served: {error!r}") from error
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)

    async def _served(self, request: Callable[[], Awaitable[None]]) -> None:
        while True:
            stalls = self._escaped.stalls
            try:
                await request()
            except NotServed:
                if self._escaped.stalls == self._stalls:
                    raise
                await asyncio.sleep(0.02)
            else:
                self._stalls = stalls
                return

    async def _produce(self) -> None:
        answer = await self._client.ask(0, 9, **produce_values(STEADY, BATCH, acks=-1))
        done = answer.responses[0].partition_responses[0]
        if done.error_code is ErrorCode.not_leader_or_follower:
            raise NotServed(f"the steady producer got {done}, after {self._produced} records")
        if int(done.error_code) or done.base_offset != self._produced:
            raise Broken(f"the steady producer got {done}, after {self._produced} records")
        self._produced += 1

    async def _fetch(self) -> None:
        wanted = fetch_values(STEADY, self._produced - 1, max_wait=5000, max_bytes=1000)
        answer = await self._client.ask(1, 12, **wanted)
        part = answer.responses[0].partitions[0]
        if part.error_code is ErrorCode.not_leader_or_follower:
            raise NotServed(f"the steady consumer got {part}")
        if int(part.error_code) or b"steady" not in bytes(part.records or b""):
            raise Broken(f"the steady consumer got {part}")

    async def _get(self) -> None:
        self._writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise Broken(f"the steady HTTP connection got {head!r}")
        size = int(head.lower().partition(b"content-length:")[2].split()[0])
        await self._reader.readexactly(size)

    def close(self) -> None:
        """Close them."""
        self._client.close()
        self._writer.close()


class Kept:
    """What the node holds, and the process."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._resident: int | None = None

    async def check(self, steady: int) -> None:
        """Wait until only the ``steady`` connections are left. Raises :class:`Broken` where they,
        or what they drew on the node's memory, are not given back, or the process has grown.
        """
        deadline = time.monotonic() + SETTLED_S
        while held := self._held(steady):
            if time.monotonic() > deadline:
                raise Broken(f"held although nobody is there any more: {', '.join(held)}")
            await asyncio.sleep(0.02)
        gc.collect()
        resident = resident_bytes()
        if self._resident is None:
            self._resident = resident
        elif resident - self._resident > GROWTH_BYTES:
            raise Broken(f"the process grew from {self._resident} to {resident} bytes")

    def _held(self, steady: int) -> list[str]:
        parts = self._site.parts
        listeners = parts.listeners
        held = {
            # The node has one to itself, for gRPC and HTTP.
            "connections": parts.client_connections.count
            - parts.client_connections.of("")
            - steady,
            "connections of nodes": parts.node_connections.count,
            "handshakes": sum(
                len(listener.acceptor.begun) for listener in listeners if listener.acceptor
            ),
            "bytes": parts.memory.in_flight.used_bytes,
            "waiting bytes": parts.memory.waiting.used_bytes,
            "inflated bytes": parts.memory.inflating.used_bytes,
        }
        return [f"{count} {what}" for what, count in held.items() if count]

    @property
    def grown_bytes(self) -> int:
        """Since the first check."""
        return resident_bytes() - (self._resident or 0)


def resident_bytes() -> int:
    """What of the process is in memory."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4096
