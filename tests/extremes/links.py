"""Three nodes with long lines between them: a proxy before each node's port for nodes.

What a node sends arrives later, in order, in both directions; clients are not concerned.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

from kept.testing import Cluster
from kept.testing.ports import free_port, give_back


class Lines:
    """Proxies that hold back what passes; ``delay_s`` and ``jitter_s`` may change at any time."""

    def __init__(self) -> None:
        self.delay_s = self.jitter_s = 0.0
        self._servers: list[asyncio.Server] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self, port: int, target: int) -> None:
        """Lead from one port of this machine to another one."""

        async def serve() -> None:
            server = await asyncio.start_server(
                lambda reader, writer: self._join(reader, writer, target), "127.0.0.1", port
            )
            self._servers.append(server)

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()

    def close(self) -> None:
        """End all of it."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0)  # their sockets are closed in the loop's next turn
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int
    ) -> None:
        self._writers.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(far_writer)
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def arrives(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data) if data else writer.close()

        at, data = 0.0, b"-"
        while data:
            try:
                data = await reader.read(65536)
            except OSError:
                data = b""
            late_s = self.delay_s + random.uniform(0, self.jitter_s)
            at = max(at, self._loop.time() + late_s)
            self._loop.call_at(at, arrives, data)


class FarCluster(Cluster):
    """Nodes that reach each other through :class:`Lines` only."""

    def __init__(self, nodes: int = 3, **settings: Any) -> None:
        super().__init__(nodes, **settings)
        self.lines = Lines()
        self._far: list[int] = []

    def close(self) -> None:
        """End nodes and lines."""
        super().close()
        self.lines.close()
        give_back(self._far)

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self._far = [free_port() for _ in self._nodes]
        voters = []
        for node, far in zip(self._nodes, self._far, strict=True):
            self.lines.open(far, node.node_port)
            client = f"PLAINTEXT://localhost:{node.port}"
            node.settings["listeners"] = f"{client},NODE://127.0.0.1:{node.node_port}"
            node.settings["advertised.listeners"] = f"{client},NODE://127.0.0.1:{far}"
            voters.append(f"{node.number}@127.0.0.1:{far}")
        self._shared["controller.quorum.voters"] = ",".join(voters)
