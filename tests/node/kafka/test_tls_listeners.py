"""Listeners with TLS: who speaks what there, whom a certificate makes a node, and for how long."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kept.client.protocol import messages as protocol
from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.tls import client_context, tls_config
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    CLUSTER_NAME,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.config.node_config import NodeConfig
from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.kafka.listener import HandedOver
from kept.node.kafka.tls_handshake import PER_TURN, TlsHandshake
from kept.node.parts import NodeParts
from kept.node.proto import broker_pb2
from kept.node.security.session import Session
from tests.node.conftest import Lone
from tests.support.certificates import Authority
from tests.support.given import Given
from tests.support.grpc_calls import basic, call
from tests.support.loops import turns, until

# isort: split
import grpc

API_VERSIONS = 18
KEY_END = "-----END PRIVATE KEY-----\n"


def trusting(authority: Authority, alpn: str = "") -> ssl.SSLContext:
    context = client_context(tls_config({"ssl.truststore.location": authority.ca}))
    if alpn:
        context.set_alpn_protocols([alpn])
    return context


async def is_answered(port: int, context: ssl.SSLContext) -> bool:
    """Whether ApiVersions is; if not, the connection is closed."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    try:
        writer.write(protocol.encode_request(API_VERSIONS, 0, 7, "tls", {}))
        with suppress(ConnectionError):
            return bool(await asyncio.wait_for(reader.read(1), 30))
        return False
    finally:
        writer.close()


@pytest.mark.parametrize("alpn", ["", "http/1.1", "h2"])
@pytest.mark.parametrize("protocol_name", ["SSL", "SASL_SSL"])
def test_who_names_a_protocol_of_http_speaks_no_kafka(
    lone_node: Any, tmp_path: Path, protocol_name: str, alpn: str
) -> None:
    authority = Authority(tmp_path)
    lone = lone_node(
        listeners=f"{protocol_name}://127.0.0.1:0",
        ssl_keystore_location=authority.issue("node", "localhost"),
        sasl_enabled_mechanisms="PLAIN",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil";',
    )
    assert lone.run(is_answered(lone.port, trusting(authority, alpn))) is not bool(alpn)


def test_a_certificate_that_shows_a_bug_of_ours_leaves_no_connection_behind(
    lone_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """It would be served by nobody, and counted nowhere."""
    authority = Authority(tmp_path)
    lone = lone_node(
        listeners="SSL://127.0.0.1:0", ssl_keystore_location=authority.issue("node", "localhost")
    )
    (listener,) = lone.node.parts.listeners

    def fails(_: Any) -> str:
        raise RecursionError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(listener.acceptor.tls, "principal", fails)
        assert not lone.run(is_answered(lone.port, trusting(authority)))
    assert "planted" in capfd.readouterr().err
    lone.run(until(lambda: listener.quota.count == 0 and not listener.acceptor._handshakes))
    assert lone.run(is_answered(lone.port, trusting(authority))), "it serves the next one"


def files_with(text: str, directory: Path) -> set[str]:
    """The files with ``text`` in them below ``directory``, and among those that are open here."""
    found = set()
    opened = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
    for path in (*opened, *directory.rglob("*")):
        with suppress(FileNotFoundError):  # the descriptor of the list is closed by now
            if path.is_file() and text.encode() in path.read_bytes():
                found.add(os.readlink(path) if path.is_symlink() else str(path))
    return found


def test_a_key_that_is_given_as_text_is_never_in_a_file_of_a_disk(
    lone_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL reads keys from files: at the moment it does, this one's is in memory."""
    authority = Authority(tmp_path)
    store = Path(authority.issue("node", "localhost"))
    key, end, chain = store.read_text().partition(KEY_END)
    store.unlink()
    body = key.splitlines()[1]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    load, seen = ssl.SSLContext.load_cert_chain, []

    def loads(context: ssl.SSLContext, path: str, **more: Any) -> None:
        assert body in Path(path).read_text()
        seen.append(files_with(body, tmp_path))
        load(context, path, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", loads)
    lone = lone_node(
        listeners="SSL://127.0.0.1:0",
        ssl_keystore_key=key + end,
        ssl_keystore_certificate_chain=chain,
    )
    assert lone.run(is_answered(lone.port, trusting(authority)))
    assert seen and all(files == {"/memfd:pem (deleted)"} for files in seen), seen
    assert files_with(body, tmp_path) == set()


def client_hello(authority: Authority) -> bytes:
    outgoing = ssl.MemoryBIO()
    half = trusting(authority).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


def test_however_many_handshakes_begin_others_have_their_turn_after_a_few(
    lone_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another client waits for is a few handshakes, and not all that came meanwhile."""
    authority, count = Authority(tmp_path), 60
    lone = lone_node(
        listeners="SSL://127.0.0.1:0",
        ssl_keystore_location=authority.issue("node", "localhost"),
        socket_listen_backlog_size=str(2 * count),
    )
    hello, loop = client_hello(authority), lone.node.parts.runtime.loop
    turn, ticking, begun, begins = 0, True, Counter[int](), TlsHandshake.begin

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if ticking:
            loop.call_soon(next_turn)

    def begin(handshake: TlsHandshake) -> None:
        begun[turn] += 1
        begins(handshake)

    monkeypatch.setattr(TlsHandshake, "begin", begin)
    strangers = [socket.create_connection(("127.0.0.1", lone.port)) for _ in range(count)]
    for number, sock in enumerate(strangers):
        sock.sendall(hello)
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    async def go() -> None:
        nonlocal ticking
        next_turn()
        await until(lambda: begun.total() >= count // 2)
        assert await is_answered(lone.port, trusting(authority))
        ticking = False

    lone.run(asyncio.wait_for(go(), 60))
    assert max(begun.values()) == PER_TURN
    for sock in strangers[::2]:
        sock.close()


STRANGERS, AT_ONCE, MOST_S = 2_000, 500, 0.05


def strangers(port: int, hello: bytes) -> list[socket.socket]:
    """They begin a handshake each; every other one resets it at once, the rest leave it."""
    left = []
    for number in range(AT_ONCE):
        sock = socket.create_connection(("127.0.0.1", port), 60)
        sock.sendall(hello)
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            left.append(sock)
    return left


@pytest.mark.slow
def test_thousands_of_handshakes_cost_the_requests_of_others_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand left and a thousand reset, hundreds of them at once: 99 of 100 requests of another
    client of the listener, that come meanwhile, are answered within 50 ms of the loop's processor
    time. They wait for nothing else.
    """
    authority, begins = Authority(tmp_path), TlsHandshake.begin
    begun: list[TlsHandshake] = []

    def begin(handshake: TlsHandshake) -> None:
        begun.append(handshake)
        begins(handshake)

    monkeypatch.setattr(TlsHandshake, "begin", begin)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lone = Lone(
            runner,
            str(tmp_path / "data"),
            listeners="SSL://127.0.0.1:0",
            ssl_keystore_location=authority.issue("node", "localhost"),
            socket_listen_backlog_size=str(2 * AT_ONCE),
        )
        hello = client_hello(authority)
        request = protocol.encode_request(API_VERSIONS, 0, 7, "tls", {})

        async def go() -> list[float]:
            taken = []
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", lone.port, ssl=trusting(authority), server_hostname="localhost"
            )
            for _ in range(STRANGERS // AT_ONCE):
                before = len(begun)
                left = strangers(lone.port, hello)
                while len(begun) < before + len(left):
                    began = time.thread_time()
                    writer.write(request)
                    (size,) = struct.unpack(">i", await reader.readexactly(4))
                    await reader.readexactly(size)
                    taken.append(time.thread_time() - began)
                for sock in left:
                    sock.close()
            writer.close()
            while begun[0]._acceptor._handshakes:  # they end, now that all strangers are gone
                await asyncio.sleep(0.01)
            return sorted(taken)

        try:
            taken = lone.run(asyncio.wait_for(go(), 60))
        finally:
            lone.stop()
    print(f"{len(taken)} requests, ms: {1e3 * taken[len(taken) // 2]:.2f}, {1e3 * taken[-1]:.2f}")
    assert taken[len(taken) * 99 // 100] < MOST_S


def test_a_handshake_that_is_cut_in_the_turn_in_which_it_begins_closes_its_socket() -> None:
    """As one for which a flood leaves no room: its descriptor does not wait for the collector."""

    async def go() -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        acceptor: Any = Given(listener=Given(), runtime__loop=loop, done=lambda _: None)
        handshake = TlsHandshake(acceptor, ours, "10.0.0.1:1")
        handshake.begin()
        handshake.abort()
        await turns()
        assert ours.fileno() == -1
        theirs.close()

    asyncio.run(go())


def test_handshakes_at_a_time_are_bounded_by_their_setting(lone_node: Any, tmp_path: Path) -> None:
    """Of those that do not go on the oldest is closed, so that there is always room for another."""
    authority, limit = Authority(tmp_path), 3
    lone = lone_node(
        listeners="SSL://127.0.0.1:0",
        ssl_keystore_location=authority.issue("node", "localhost"),
        kept_tls_handshakes=str(limit),
    )
    acceptor, hello = lone.node.parts.listeners[0].acceptor, client_hello(authority)

    async def go() -> None:
        left = []
        for number in range(3 * limit):
            reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
            writer.write(hello)
            assert await asyncio.wait_for(reader.read(1), 30), "the server's part"
            left.append((reader, writer))
            assert len(acceptor.begun) == len(acceptor._handshakes) == min(number + 1, limit)
        for reader, _ in left[:-limit]:
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 30)  # to its end
        assert len(acceptor.begun) == limit
        assert await is_answered(lone.port, trusting(authority)), "it has room"
        (oldest, _), (next_, _) = left[-limit : 2 - limit]
        with suppress(ConnectionError):
            await asyncio.wait_for(oldest.read(), 30)
        assert len(acceptor.begun) == limit - 1
        assert not next_.at_eof() and next_.exception() is None
        for _, writer in left:
            writer.close()
        await until(lambda: not acceptor._handshakes)
        assert not len(acceptor.begun)

    lone.run(asyncio.wait_for(go(), 60))


async def status_of(port: int, context: ssl.SSLContext, login: str) -> int:
    """That of the answer to a GET for which one must be allowed to describe the cluster."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    header = f"Authorization: {login}\r\n" if login else ""
    writer.write(f"GET /api/v1/cluster HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    return int(line.split()[1])


PROXY, BOB = "proxy", "bob"
RIGHT, MAY_NOT, NOT_BELIEVED = 200, 403, 401


@pytest.mark.parametrize(
    ("shown", "login", "status"),
    [
        (PROXY, "", RIGHT),
        (PROXY, basic("ada", "pencil"), MAY_NOT),
        (PROXY, basic("ada", "wrong"), NOT_BELIEVED),
        (PROXY, "Bearer x", NOT_BELIEVED),
        (PROXY, basic("root", "pencil"), RIGHT),
        (BOB, "", MAY_NOT),
        (BOB, basic("root", "pencil"), RIGHT),
        (BOB, basic("root", "wrong"), NOT_BELIEVED),
    ],
)
def test_a_login_beside_a_certificate_is_whose_a_request_is(
    lone_node: Any, tmp_path: Path, shown: str, login: str, status: int
) -> None:
    """A proxy shows its own certificate, and sends the requests of others."""
    authority = Authority(tmp_path)
    lone = lone_node(
        listeners="SSL://127.0.0.1:0",
        ssl_keystore_location=authority.issue("node", "localhost"),
        ssl_truststore_location=authority.ca,
        ssl_client_auth="required",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil" user_root="pencil";',
        connection_failed_authentication_delay_ms="0",
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users=f"User:CN={PROXY};User:root",
    )
    store = authority.issue(shown)
    stores = {"ssl.truststore.location": authority.ca, "ssl.keystore.location": store}
    context = client_context(tls_config(stores))
    assert lone.run(status_of(lone.port, context, login)) == status
    key, end, chain = Path(store).read_bytes().partition(KEY_END.encode())
    credentials = grpc.ssl_channel_credentials(authority.ca_pem.encode(), key + end, chain)
    create = broker_pb2.CreateTopicRequest(topic="t", partitions=1)
    reply = lone.run(call(lone.port, "CreateTopic", create, login, credentials))
    if status == RIGHT:
        assert reply.topic == "t"
    else:
        code = grpc.StatusCode
        assert reply is (code.PERMISSION_DENIED if status == MAY_NOT else code.UNAUTHENTICATED)


# Between nodes.


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[NodeParts]:
    authority = Authority(tmp_path)
    settings = {
        "node.id": "0",
        "listeners": "PLAINTEXT://127.0.0.1:0,NODE://127.0.0.1:10001",
        "listener.security.protocol.map": "NODE:SSL",
        "controller.quorum.voters": "0@127.0.0.1:10001,1@127.0.0.1:10002",
        "ssl.keystore.location": authority.issue("node", "127.0.0.1"),
        "ssl.truststore.location": authority.ca,
        "authorizer.class.name": STANDARD_AUTHORIZER,
        "super.users": "User:CN=node",
    }
    config = NodeConfig.load(None, settings, {}, port=None, data_dir=str(tmp_path / "data"))

    async def build() -> NodeParts:
        return NodeParts(config)

    with asyncio.Runner() as runner:
        yield runner.run(build())


class Transport:
    """Of a connection between nodes; ``certificate`` is what its other side has shown."""

    aborted = False

    def __init__(self, certificate: bytes | None = None, *, is_reset: bool = False) -> None:
        self._known = {
            "peername": None if is_reset else ("10.0.0.1", 1),
            "ssl_object": Given(getpeercert=lambda binary_form: certificate),
        }

    def get_extra_info(self, name: str) -> Any:
        return self._known[name]

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("name", "is_reset", "is_served"),
    [("node", False, True), ("ada", False, False), ("", False, False), ("node", True, False)],
)
def test_whose_certificate_is_no_node_s_is_closed_unserved(
    parts: NodeParts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    is_reset: bool,
    is_served: bool,
) -> None:
    """Also where the same authority has signed it; and whoever has reset the connection, since his
    address is not known any more.
    """
    listener = parts.node_listener
    assert listener is not None and listener.acceptor is not None
    served: list[str] = []
    monkeypatch.setattr(listener, "open", lambda _, session: served.append(session.principal))
    certificate = None
    if name:
        _, _, pem = Path(Authority(tmp_path).issue(name)).read_text().partition(KEY_END)
        certificate = ssl.PEM_cert_to_DER_cert(pem)
    transport = Transport(certificate, is_reset=is_reset)
    TlsHandshake(listener.acceptor, Given(), "10.0.0.1:1").connection_made(transport)
    assert (served, transport.aborted) == ((["User:CN=node"], False) if is_served else ([], True))


def test_a_node_that_may_be_one_no_more_is_cut_off(
    parts: NodeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name it was allowed ClusterAction; the other one is a super user."""
    listener = parts.node_listener
    assert listener is not None

    def connected(principal: str) -> Transport:
        transport = Transport()
        session = Session(principal, "10.0.0.1", listener.name, "SSL", is_node=True)
        listener.handed_over[HandedOver(listener, transport, session)] = None
        return transport

    def rules_are(index: AclIndex) -> None:
        monkeypatch.setattr(parts.authorizer, "_index", lambda: index)
        parts.metadata.raft_node = Given(image__acls=object())
        parts._access_changed()

    allowed = AclBinding(
        AclResourceType.CLUSTER,
        CLUSTER_NAME,
        PatternType.LITERAL,
        "User:CN=other",
        "*",
        AclOperation.CLUSTER_ACTION,
        AclPermission.ALLOW,
    )
    by_right, by_name = connected("User:CN=other"), connected("User:CN=node")
    rules_are(AclIndex().with_changes([allowed]))
    assert not (by_right.aborted or by_name.aborted)
    rules_are(AclIndex())
    assert by_right.aborted and not by_name.aborted
