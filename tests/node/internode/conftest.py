"""Nodes that are only peers: a door in front of each, as the node listener's protocols."""

from __future__ import annotations

import asyncio
import inspect
import uuid

import pytest
import uvloop

from kept.node.internode.peers import Peers
from kept.testing.ports import free_port


class Door(asyncio.Protocol):
    """Reads four bytes and hands over, as a node listener."""

    def __init__(self, one: One):
        self.one = one
        self.data = b""

    def connection_made(self, transport):
        self.transport = transport
        self.one.connections.add(transport)

    def data_received(self, data):
        self.data += data
        if len(self.data) < 4:
            return
        if self.one.silent:
            self.transport.pause_reading()
            return
        assert self.data[:4] == b"KEPT"
        self.one.peers.accept(self.transport, self.data)


class One:
    """A node's Peers with its door, and what it heard."""

    def __init__(self, net: Net, node_id: int, port: int, **more):
        self.messages: asyncio.Queue = asyncio.Queue()
        self.down: asyncio.Queue = asyncio.Queue()
        self.lost: asyncio.Queue = asyncio.Queue()
        self.silent = False
        self.connections: set = set()
        cluster = more.pop("cluster_id", "c1")
        self.tls = more.pop("server_tls", None)
        self.port = port
        loop = asyncio.get_running_loop()
        self.peers = Peers(node_id, cluster, uuid.uuid4(), loop, net.addresses)
        for name, value in more.items():
            setattr(self.peers, name, value)
        self.peers.on_message = self.messages.put_nowait
        self.peers.on_peer_down = self.down.put_nowait
        self.peers.on_control_lost = self.lost.put_nowait
        self.server: asyncio.Server | None = None

    async def open(self):
        self.peers.start()
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(
            lambda: Door(self), "127.0.0.1", self.port, ssl=self.tls
        )

    async def die(self):
        """Its process is gone: no port, no connections."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for transport in self.connections:
            transport.abort()
        await self.peers.stop()


class Net:
    """Nodes on one loop; ``ports`` says where each is, ``before`` where nodes think that it is."""

    def __init__(self):
        self.ports: dict[int, tuple[str, int]] = {}
        self.before: dict[int, tuple[str, int]] = {}
        self.nodes: list[One] = []

    def addresses(self, node_id):
        return tuple(known[node_id] for known in (self.before, self.ports) if node_id in known)

    async def node(self, node_id: int, *, at: int | None = None, known: bool = True, **more) -> One:
        port = at or free_port()
        if known:
            self.ports[node_id] = ("127.0.0.1", port)
        one = One(self, node_id, port, **more)
        await one.open()
        self.nodes.append(one)
        return one

    async def close(self):
        for one in self.nodes:
            await one.die()


@pytest.fixture
def net():
    return Net()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function of a ``net``, whose nodes are closed at its end."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def scene():
        try:
            async with asyncio.timeout(30):
                await pyfuncitem.obj(**given)
        finally:
            await given["net"].close()

    uvloop.run(scene())
    return True
