"""Two nodes in the test's process, with TLS between them and logins of clients: what both show."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kept.client.security.scram import ScramClient
from kept.node.config.node_config import NodeConfig
from kept.node.kafka import api
from kept.node.node import Node
from kept.testing.ports import free_port, give_back
from tests.support.certificates import Authority
from tests.support.loops import until
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, RawClient
from tests.support.request_values import one_batch, produce_values, topic_values

KEY_END = "-----END PRIVATE KEY-----\n"
BOTH = 0, 1


class Pair:
    """The nodes 0 and 1, each with a key store of its own."""

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        self._runner = runner
        self._authority = Authority(directory)
        self.ports = [free_port() for _ in BOTH]
        voters = ",".join(f"{number}@127.0.0.1:{port}" for number, port in enumerate(self.ports))
        configs = []
        for number, port in enumerate(self.ports):
            given = {
                "node.id": str(number),
                "listeners": f"SASL_PLAINTEXT://127.0.0.1:0,NODE://127.0.0.1:{port}",
                "listener.security.protocol.map": "NODE:SSL",
                "controller.quorum.voters": voters,
                "ssl.keystore.location": self._path(number),
                "ssl.truststore.location": self._authority.ca,
                "kept.tls.reload.ms": "100",
                "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
                "kept.sasl.plain.users": "scram",
                "kept.bootstrap.scram": "SCRAM-SHA-512=[name=admin,password=secret]",
            }
            data_dir = str(directory / f"data-{number}")
            configs.append(NodeConfig.load(None, given, {}, port=None, data_dir=data_dir))
        api.preload()

        async def start() -> list[Node]:
            nodes = [Node(config) for config in configs]
            await asyncio.gather(*(node.start() for node in nodes))
            return nodes

        self.nodes = self.run(start())

    def _path(self, number: int) -> str:
        return self._authority.issue(f"node-{number}", "127.0.0.1")

    def run(self, work: Any) -> Any:
        return self._runner.run(asyncio.wait_for(work, 60))

    def stop(self) -> None:
        async def stop(node: Node) -> None:
            node.parts.shutdown.failure = "the test is over"  # nobody is left to hand over to
            await node.stop()

        async def both() -> None:
            await asyncio.gather(*map(stop, self.nodes))

        self.run(both())
        give_back(self.ports)

    # Certificates.

    def replace(self) -> list[bytes]:
        """New ones in the same files."""
        return [_certificate(self._path(number)) for number in BOTH]

    def in_force(self) -> list[Any]:
        return [node.parts.node_tls.config for node in self.nodes]  # type: ignore[union-attr]

    # Connections between the nodes.

    def dialed(self, number: int) -> Any:
        """The transport by which a node sends the other one messages; None: there is none now."""
        session = self.nodes[number].parts.peers.channel(1 - number)._session
        return None if session is None else session.connection._transport

    def shown_on(self, dialed: Any, number: int) -> tuple[bytes, bytes]:
        """What this node showed on the connection that it made, and what it was shown."""
        listener = self.nodes[1 - number].parts.node_listener
        own = dialed.get_extra_info("sockname")
        (accepted,) = [
            other.transport
            for other in listener.handed_over
            if other.transport.get_extra_info("peername") == own
        ]
        return _shown(accepted), _shown(dialed)

    def fetching(self, leader: int) -> list[Any]:
        """Transports on which the other node fetches from this one."""
        listener = self.nodes[leader].parts.node_listener
        return [connection.transport for connection in listener.connections]

    # Clients.

    async def client(self, number: int) -> RawClient:
        port = self.nodes[number].parts.listeners[0].port
        return await RawClient.connect(port, "admin", "secret")

    async def created(self, topic: str) -> int:
        """Create a topic with a replica on each; who leads it."""
        wanted = {**topic_values(topic), "replication_factor": 2}
        async with await self.client(0) as client:
            answer = await client.ask(19, 7, topics=[wanted], timeout=30_000, validate_only=False)
        (result,) = answer.topics
        assert result.error_code.name == "none", result
        return int(self.nodes[0].parts.metadata.image.topics[topic].partitions[0].leader)

    async def written(self, topic: str, leader: int) -> bool:
        """Whether a record is on both."""
        async with await self.client(leader) as client:
            answer = await client.ask(0, 9, **produce_values(topic, one_batch(), acks=-1))
        (partition,) = answer.responses[0].partition_responses
        return str(partition.error_code.name) == "none"

    async def told(self, number: int, user: str) -> bytes:
        """Salt and iterations, as a node tells them who says that he is ``user``."""
        port = self.nodes[number].parts.listeners[0].port
        async with await RawClient.connect(port) as client:
            await client.ask(HANDSHAKE, 1, mechanism="SCRAM-SHA-512")
            token = ScramClient("SCRAM-SHA-512", user, "x").step(None)
            answer = await client.ask(AUTHENTICATE, 2, auth_bytes=token)
            return bytes(answer.auth_bytes.partition(b",s=")[2])


def _certificate(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text().partition(KEY_END)[2])


def _shown(transport: Any) -> bytes:
    return transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = Pair(runner, tmp_path_factory.mktemp("pair"))
        yield made
        made.stop()


def test_both_tell_an_unknown_user_the_same(pair: Pair) -> None:
    """So that nobody learns by asking two nodes who is a user: it comes with the first of them."""

    async def go() -> None:
        told = [[await pair.told(number, name) for name in ("eve", "joe")] for number in BOTH]
        assert told[0] == told[1] and len({*told[0], await pair.told(0, "admin")}) == 3

    pair.run(go())
    decoys = [node.parts.metadata.image.decoy_credential for node in pair.nodes]
    assert decoys[0] == decoys[1] is not None


def test_connections_of_before_a_reload_go_on_and_later_ones_show_the_new_certificates(
    pair: Pair,
) -> None:
    """Both sides of those that carry messages and calls, and of those that followers fetch on."""

    async def go() -> None:
        old = [_certificate(str(pair._authority.directory / f"node-{n}.pem")) for n in BOTH]
        leader = await pair.created("t")
        follower = 1 - leader
        assert await pair.written("t", leader)
        await until(lambda: all(map(pair.dialed, BOTH)))
        dialed, fetching = [pair.dialed(number) for number in BOTH], pair.fetching(leader)
        assert fetching

        def show(certificates: list[bytes]) -> None:
            for number in BOTH:
                shown = pair.shown_on(pair.dialed(number), number)
                assert shown == (certificates[number], certificates[1 - number])
            assert {_shown(each) for each in pair.fetching(leader)} == {certificates[follower]}

        show(old)
        in_force, new = pair.in_force(), pair.replace()
        await until(lambda: all(a is not b for a, b in zip(pair.in_force(), in_force, strict=True)))

        await pair.created("over-the-old-ones")
        assert await pair.written("t", leader)
        assert [pair.dialed(number) for number in BOTH] == dialed
        assert set(fetching) <= set(pair.fetching(leader))
        show(old)

        for transport in (*dialed, *fetching):
            transport.abort()
        await until(lambda: all(pair.dialed(number) not in (None, *dialed) for number in BOTH))
        await until(lambda: pair.fetching(leader) and not {*fetching} & {*pair.fetching(leader)})
        assert await pair.written("t", leader)
        show(new)

    pair.run(go())
