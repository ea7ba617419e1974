"""Sessions from before a reload, and connections that are cut in the middle of a response."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from kept.client.client import Client, OutRecord
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.client.protocol import messages as protocol
from kept.client.security.security import Security
from kept.client.security.tls import client_context, tls_config
from kept.storage.errors import KeptError
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.support.certificates import Authority
from tests.support.request_values import fetch_values

pytestmark = pytest.mark.slow

ASKS = protocol.encode_request(18, 0, 7, "tls", {})
RECORDS = 300


class Site:
    """A node with one listener, of TLS, where no certificate is asked for: it gives tickets."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.directory = directory
        self.port = free_port()
        self.issue()
        self.cluster = Cluster()
        self.cluster.__enter__()
        self.cluster.stop()
        plain = f"PLAINTEXT://localhost:{self.cluster.port()}"
        self.cluster.start(
            listeners=f"{plain},SSL://localhost:{self.port}",
            ssl_keystore_location=directory / "node.pem",
            kept_tls_reload_ms=100,
        )

    def issue(self) -> None:
        self.authority.issue("node", "localhost", "127.0.0.1")

    def context(self, version: ssl.TLSVersion) -> ssl.SSLContext:
        context = client_context(tls_config({"ssl.truststore.location": self.authority.ca}))
        context.maximum_version = version
        return context

    def session(self, context: ssl.SSLContext, session: Any = None) -> tuple[Any, bool]:
        """A session to go on with, and whether the one given was gone on with."""
        sock = socket.create_connection(("127.0.0.1", self.port), 30)
        with context.wrap_socket(sock, server_hostname="localhost", session=session) as tls:
            tls.sendall(ASKS)
            assert struct.unpack(">ii", read(tls, 8))[1] == 7
            return tls.session, bool(tls.session_reused)


def read(sock: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more
        data += more
    return data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("tls"))
    yield made
    made.cluster.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_ticket_from_before_a_reload_opens_nothing_new(
    site: Site, version: ssl.TLSVersion
) -> None:
    """The connection is made, by a whole handshake with the certificate of now."""
    context = site.context(version)
    session, _ = site.session(context)
    session, reused = site.session(context, session)
    assert reused, "tickets are given, and taken"
    before = site.cluster.log().count("certificate replaced")
    site.issue()
    site.cluster.wait_until(
        lambda: site.cluster.log().count("certificate replaced") > before, "it is replaced"
    )
    _, reused = site.session(context, session)
    assert not reused


def test_connections_of_before_a_reload_go_on(site: Site) -> None:
    """One that is idle, and one whose fetch waits meanwhile: both are answered afterwards, and who
    connects then is shown the new certificate.
    """
    topic = site.cluster.create_topic(partitions=1)
    context = site.context(ssl.TLSVersion.TLSv1_3)

    def connected() -> ssl.SSLSocket:
        sock = socket.create_connection(("127.0.0.1", site.port), 30)
        return context.wrap_socket(sock, server_hostname="localhost")

    def shown() -> bytes:
        with connected() as tls:
            return tls.getpeercert(binary_form=True) or b""

    wanted = fetch_values(topic, max_wait=600_000, min_bytes=1)
    with connected() as idle, connected() as waiting:
        idle.sendall(ASKS)
        answer = read(idle, 4)
        read(idle, *struct.unpack(">i", answer))
        waiting.sendall(protocol.encode_request(1, 11, 9, "t", wanted))
        for _ in range(3):
            before = site.cluster.log().count("certificate replaced"), shown()
            site.issue()
            site.cluster.wait_until(
                lambda seen=before[0]: site.cluster.log().count("certificate replaced") > seen,
                "it is replaced",
            )
            assert shown() != before[1], "who connects now sees the new one"
            idle.sendall(ASKS)
            assert struct.unpack(">ii", read(idle, 8))[1] == 7, "the same connection"
            read(idle, struct.unpack(">i", answer)[0] - 4)
        with site.cluster.client() as client:
            client.produce(topic, [OutRecord(b"k", b"written after the reload")])
        size, number = struct.unpack(">ii", read(waiting, 8))
        assert number == 9 and b"written after the reload" in read(waiting, size - 4)


@contextmanager
def cut(port: int, after: Callable[[int], int], hard: bool) -> Iterator[int]:
    """A port that passes connections on, and cuts the ``n``th after so many bytes of the node's,
    with an end of TCP or a reset: without TLS's own end.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    several: list[socket.socket] = []

    def forward(source: socket.socket, to: socket.socket, left: int) -> None:
        with suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 1 << 16))):
                to.sendall(data)
                left -= len(data)
        with suppress(OSError):
            if hard:
                to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            to.shutdown(socket.SHUT_RDWR)
            source.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        number = 0
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                far = socket.create_connection(("127.0.0.1", port), 30)
                several.extend((near, far))
                for args in ((near, far, 1 << 40), (far, near, after(number))):
                    threading.Thread(target=forward, args=args, daemon=True).start()
                number += 1

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        for sock in several:
            sock.close()


@pytest.mark.parametrize("hard", [False, True], ids=["end", "reset"])
def test_a_response_that_is_cut_is_no_response(site: Site, hard: bool) -> None:
    """What came of it is not taken for the whole: by HTTP, where an end might end a body, and in
    Kafka's protocol, where the client asks anew.
    """
    topic = site.cluster.create_topic(partitions=1)
    with site.cluster.client() as client:
        client.produce(topic, [OutRecord(b"%d" % n, b"v" * 900) for n in range(RECORDS)])
    security = Security({"security.protocol": "SSL", "ssl.truststore.location": site.authority.ca})
    with cut(site.port, lambda _: 6000, hard) as port, pytest.raises(KeptError):
        JsonApi(Endpoint("localhost", port), security=security).get(
            "records", topic=topic, partition=0, limit=100
        )
    # The first connections are cut in the middle of a response; the node tells its own address.
    with (
        cut(site.port, lambda number: 20_000 if number < 2 else 1 << 40, hard) as port,
        Client(f"localhost:{port}", security=security) as client,
    ):
        assert len(list(client.read(topic))) == RECORDS


def test_a_client_that_cuts_leaves_nothing(site: Site) -> None:
    """In the middle of a response it is gone, without an end of TLS; others are served."""
    topic = site.cluster.create_topic(partitions=1)
    with site.cluster.client() as client:
        for _ in range(10):
            client.produce(topic, [OutRecord(None, b"v" * 900_000)])
    context = site.context(ssl.TLSVersion.TLSv1_3)
    wanted = fetch_values(topic, partition_max_bytes=50 << 20, max_bytes=50 << 20)
    fetch = protocol.encode_request(1, 11, 1, "t", wanted)
    for number in range(20):
        sock = socket.create_connection(("127.0.0.1", site.port), 30)
        tls = context.wrap_socket(sock, server_hostname="localhost")
        tls.sendall(fetch)
        assert tls.recv(1000)
        if number % 2:
            tls.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tls.close()

    def held() -> float:
        with urlopen(f"{site.cluster.url()}/metrics", timeout=30) as page:
            rows = [line.split() for line in page.read().decode().splitlines()]
        return sum(float(row[1]) for row in rows if row[0] == "kept_inflight_bytes")

    site.cluster.wait_until(lambda: not held(), "what they were sent is given back")
    site.session(context)
