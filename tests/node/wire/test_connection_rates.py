"""More connections than are accepted a second: they wait, or are closed; with TLS as without."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kept.client.protocol import messages as protocol
from kept.client.security.tls import client_context, tls_config
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.support.certificates import Authority
from tests.support.kafka_connection import Connection
from tests.support.quota_requests import alter

pytestmark = pytest.mark.slow
RATE = 5
AT_ONCE = 10 * RATE
"""What the window of ten samples allows."""
ASKS = protocol.encode_request(18, 0, 1, "w", {})


class Site:
    def __init__(self, directory: Path) -> None:
        authority = Authority(directory)
        self.tls_port = free_port()
        self.cluster = Cluster()
        self.cluster.__enter__()
        self.cluster.stop()
        plain = f"PLAINTEXT://localhost:{self.cluster.port()}"
        self.cluster.start(
            listeners=f"{plain},SSL://localhost:{self.tls_port}",
            ssl_keystore_location=authority.issue("node", "localhost", "127.0.0.1"),
            **{
                "listener.name.plaintext.max.connection.creation.rate": RATE,
                "listener.name.ssl.max.connection.creation.rate": RATE,
            },
        )
        store = {"ssl.truststore.location": authority.ca}
        self.context: ssl.SSLContext = client_context(tls_config(store))

    def connect(self, *, tls: bool, host: str = "127.0.0.1") -> socket.socket:
        port = self.tls_port if tls else self.cluster.port()
        return socket.create_connection(("127.0.0.1", port), 60, (host, 0))

    def speak(self, sock: socket.socket, *, tls: bool) -> socket.socket:
        """Log in, if need be, and ask something."""
        if tls:
            sock = self.context.wrap_socket(sock, server_hostname="localhost")
        sock.sendall(ASKS)
        return sock


def answered(sock: socket.socket) -> bool:
    try:
        sock.sendall(ASKS)
        return sock.recv(1) != b""
    except ConnectionError:
        return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("rates"))
    yield made
    made.cluster.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_connections_beyond_the_rate_wait_for_their_turn(site: Site, tls: bool) -> None:
    started = time.monotonic()
    answered = []
    with ExitStack() as opened:
        several = [opened.enter_context(site.connect(tls=tls)) for _ in range(AT_ONCE + 2 * RATE)]
        for sock in several:
            with site.speak(sock, tls=tls) as spoken:
                assert spoken.recv(1)
            answered.append(time.monotonic() - started)
    assert answered[-1] - answered[AT_ONCE - 1] > 1.2, "ten waited for 0.2 s each, less what passed"


@pytest.mark.parametrize("says", [b"", ASKS], ids=["silent", "asks"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_connections_that_were_closed_keep_nobody_waiting(
    site: Site, tls: bool, says: bytes
) -> None:
    for _ in range(200):
        with contextlib.suppress(ConnectionError), site.connect(tls=tls) as leaver:
            leaver.sendall(says)
    started = time.monotonic()
    said = b""
    while not said:
        with (
            contextlib.suppress(ConnectionError, ssl.SSLError),
            site.connect(tls=tls) as sock,
            site.speak(sock, tls=tls) as spoken,
        ):
            said = spoken.recv(1)
    assert time.monotonic() - started < 5


def test_an_address_over_its_quota_is_closed_and_others_are_served(site: Site) -> None:
    with Cluster() as cluster:
        mine = Connection(cluster.bootstrap)
        assert alter(mine, {"ip": "127.0.0.9"}, connection_creation_rate=RATE) == (0, None)

        def connect(host: str, count: int = 1) -> list[bool]:
            """Which of so many connections, opened at once, are answered."""
            address = ("127.0.0.1", cluster.port())
            with ExitStack() as opened:
                several = [
                    opened.enter_context(socket.create_connection(address, 30, (host, 0)))
                    for _ in range(count)
                ]
                return [answered(sock) for sock in several]

        served = connect("127.0.0.9", AT_ONCE + 20)
        assert served[:AT_ONCE] == [True] * AT_ONCE
        assert served.count(False) > 5, "they wait, and are closed"
        assert connect("127.0.0.8", 5) == [True] * 5
        assert alter(mine, {"ip": "127.0.0.9"}, connection_creation_rate=None) == (0, None)
        assert connect("127.0.0.9", 5) == [True] * 5
        mine.close()
