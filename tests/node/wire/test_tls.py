"""A listener that speaks TLS: Kafka, HTTP and gRPC over it, and who is turned away."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kept.client.protocol import messages as protocol
from kept.client.security.tls import client_context, tls_config
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.support.certificates import DAY, Authority
from tests.support.request_values import fetch_values, one_batch, produce_values

API_VERSIONS = 18


class Site:
    """A node with a listener SSL, on ``port``, and certificates for its clients."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.other = Authority(directory, "other")
        self.keys = self.authority.issue("node", "localhost", "127.0.0.1")
        self.port = free_port()
        self.cluster = Cluster(1)

    def start(self) -> None:
        self.cluster.__enter__()
        self.cluster.stop()
        plain = f"PLAINTEXT://localhost:{self.cluster.port()}"
        self.cluster.start(
            listeners=f"{plain},SSL://localhost:{self.port}",
            ssl_keystore_location=self.keys,
            ssl_truststore_location=self.authority.ca,
            ssl_client_auth="requested",
            ssl_principal_mapping_rules="RULE:^CN=([a-z]+)$/$1/",
            kept_silent_ms=1500,
        )

    def context(self, keys: str = "", *, alpn: tuple[str, ...] = ()) -> ssl.SSLContext:
        store = {"ssl.keystore.location": keys} if keys else {}
        context = client_context(
            tls_config({"ssl.truststore.location": self.authority.ca, **store})
        )
        if alpn:
            context.set_alpn_protocols(alpn)
        return context

    def plain(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def connect(self, keys: str = "", *, alpn: tuple[str, ...] = ()) -> ssl.SSLSocket:
        context = self.context(keys, alpn=alpn)
        return context.wrap_socket(self.plain(), server_hostname="localhost")

    def said(self, text: str) -> bool:
        return text in self.cluster.log()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("tls"))
    try:
        made.start()
        yield made
    finally:
        made.cluster.close()


def kafka(sock: socket.socket) -> bool:
    """Whether it answers a request of Kafka's; it is closed otherwise."""
    sock.sendall(protocol.encode_request(API_VERSIONS, 0, 7, "tls", {}))
    try:
        head = sock.recv(8)
    except OSError:
        return False
    return len(head) == 8 and struct.unpack(">ii", head)[1] == 7


def closed(sock: socket.socket) -> bool:
    """Whether the node closes it, and says nothing before."""
    try:
        return sock.recv(1) == b""
    except OSError:
        return True


def test_kafka_http_and_grpc_over_one_port(site: Site) -> None:
    with site.connect() as sock:
        assert kafka(sock) and sock.version() == "TLSv1.3" and kafka_again(sock)
    for alpn in ((), ("http/1.1",), ("h2", "http/1.1")):  # a browser names both
        with site.connect(alpn=alpn) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    credentials = grpc.ssl_channel_credentials(Path(site.authority.ca).read_bytes())
    with grpc.secure_channel(f"localhost:{site.port}", credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_tell_when_the_certificate_expires(site: Site) -> None:
    with site.connect() as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: sock.recv(65_536), b"")).decode()
    (left,) = re.findall(r'^kept_tls_certificate_expiry_seconds{listener="SSL"} (.+)$', text, re.M)
    assert 0 < float(left) < 20 * 366 * 86_400
    assert 'kept_tls_reload_failed{listener="SSL"} 0' in text


def kafka_again(sock: socket.socket) -> bool:
    sock.recv(65536)
    return kafka(sock)


@pytest.mark.parametrize(
    ("alpn", "first"),
    [
        ("h2", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("h2", protocol.encode_request(API_VERSIONS, 0, 7, "tls", {})),
        ("http/1.1", protocol.encode_request(API_VERSIONS, 0, 7, "tls", {})),
        ("http/1.1", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ],
)
def test_who_names_a_protocol_speaks_it(site: Site, alpn: str, first: bytes) -> None:
    with site.connect(alpn=(alpn,)) as sock:
        assert sock.selected_alpn_protocol() == alpn
        sock.sendall(first)
        assert closed(sock)


def test_grpc_is_known_by_its_first_bytes_where_no_protocol_is_named(site: Site) -> None:
    settings = b"\0\0\0\x04\0\0\0\0\0"
    with site.connect() as sock:
        assert sock.selected_alpn_protocol() is None
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        assert exactly(sock, 9)[3:4] == settings[3:4], "the server's own settings"


@pytest.mark.parametrize(
    "first",
    [
        protocol.encode_request(API_VERSIONS, 0, 7, "tls", {}),
        b"\x15\x03\x03\x00\x02\x02\x28" + bytes(8),
        b"\x16\x02\x00" + bytes(20),
        b"\x16\x03\x01\x7f\xff\x01\x00\x7f\xff",
        b"\x16\x03\x01\x00\x80\x01\xff\xff\xff" + bytes(128),
        b"\x16\x03\x01\x00\x80\x02\x00\x00\x7c" + bytes(128),
        b"\x00" * 4096,
    ],
)
def test_what_does_not_begin_a_handshake_is_closed(site: Site, first: bytes) -> None:
    with site.plain() as sock:
        sock.sendall(first)
        assert closed(sock)


def test_http_without_tls_is_told_of_https(site: Site) -> None:
    with site.plain() as sock:
        # A form that a page elsewhere posts, with a request of Kafka's as its body.
        body = protocol.encode_request(API_VERSIONS, 0, 7, "tls", {})
        sock.sendall(b"POST / HTTP/1.1\r\nHost: localhost:1\r\n\r\n" + body)
        answer = sock.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"https://" in answer
        assert closed(sock)


def test_tls_where_it_is_not_spoken(site: Site) -> None:
    plain = socket.create_connection(("127.0.0.1", site.cluster.port()), 20)
    with plain, pytest.raises(OSError):
        site.context().wrap_socket(plain, server_hostname="localhost")
    site.cluster.wait_until(
        lambda: site.said("speaks TLS, which this listener does not"), "complaint"
    )


def subject(*parts: list[tuple[x509.ObjectIdentifier, str]]) -> x509.Name:
    return x509.Name(
        [
            x509.RelativeDistinguishedName([x509.NameAttribute(oid, value) for oid, value in part])
            for part in parts
        ]
    )


@pytest.mark.parametrize(
    ("name", "believed"),
    [
        ("ada", True),
        ("expired", False),
        ("early", False),
        ("other", False),
        ("self", False),
        ("server", False),
        ("Upper", False),
        ("multi", False),
        ("nul", False),
        ("lookalike", False),
        ("imitates", False),
        ("two", False),
    ],
)
def test_whose_certificate_is_believed(
    site: Site, tmp_path: Path, name: str, *, believed: bool
) -> None:
    """One that no mapping rule takes is refused, whatever it imitates."""
    cn, unit = NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME
    subjects = {
        "multi": subject([(cn, "ada"), (unit, "x")]),
        "nul": subject([(cn, "ada\0evil")]),
        "lookalike": subject([(cn, "аda")]),
        "imitates": subject([(cn, "User:admin")]),
        "two": subject([(cn, "admin")], [(cn, "ada")]),
    }
    authority = site.authority
    if name in ("other", "self"):
        authority = Authority(tmp_path, name)
    keys = {
        "self": lambda: authority.own("self"),
        "expired": lambda: authority.issue(name, not_before=-2 * DAY, not_after=-DAY),
        "early": lambda: authority.issue(name, not_before=DAY),
        "server": lambda: authority.issue(name, usage=(ExtendedKeyUsageOID.SERVER_AUTH,)),
    }.get(name, lambda: authority.issue(name, subject=subjects.get(name)))()
    try:
        with site.connect(keys) as sock:
            assert kafka(sock) == believed  # TLS 1.3: the client learns of it when it reads
    except ssl.SSLError:
        assert not believed


@pytest.mark.slow
def test_half_a_hello_and_one_that_does_not_go_on_are_gone_in_time(site: Site) -> None:
    hello = client_hello(site)
    started = time.monotonic()
    socks = [site.plain() for _ in range(4)]
    socks[1].sendall(hello[:3])
    socks[2].sendall(hello[: len(hello) // 2])
    socks[3].sendall(hello)
    while socks[3].recv(65536):  # the server's part
        pass
    assert all(closed(sock) for sock in socks[:3])
    assert time.monotonic() - started > 1, "they had their time"
    for sock in socks:
        sock.close()


def client_hello(site: Site) -> bytes:
    outgoing = ssl.MemoryBIO()
    half = site.context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


def leave(sock: socket.socket, left: deque[socket.socket]) -> None:
    """Let it go no further; those of long before are closed, as the node has closed them."""
    left.append(sock)
    if len(left) > 600:
        left.popleft().close()


@pytest.mark.slow
def test_handshakes_that_are_left_or_reset_keep_nobody_out(site: Site) -> None:
    hello = client_hello(site)
    left: deque[socket.socket] = deque()
    reset = struct.pack("ii", 1, 0)
    with site.connect() as live:
        assert kafka(live)
        for i in range(2000):
            sock = site.plain()
            sock.sendall(hello)
            if i % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                sock.close()
            else:
                leave(sock, left)
        assert kafka_again(live)
        with site.connect() as sock:
            assert kafka(sock)
    for sock in left:
        sock.close()
    with site.connect() as sock:
        assert kafka(sock)


def test_an_end_of_the_client_is_answered_with_close_notify(site: Site) -> None:
    """So that whoever reads an end without one knows that somebody cut the connection."""
    with site.connect() as sock:
        sock.sendall(protocol.encode_request(API_VERSIONS, 0, 8, "tls", {}))
        read_frame(sock)
        sock.unwrap().close()


@pytest.mark.slow
def test_large_responses_and_a_client_that_does_not_read(site: Site) -> None:
    """40 MiB in pieces, to two clients at once, of which one reads late."""
    topic = site.cluster.create_topic(partitions=1)
    batch = one_batch(1, 1_000_000)
    with site.connect() as sock:
        for i in range(40):
            values = produce_values(topic, batch)
            sock.sendall(protocol.encode_request(0, 9, i, "tls", values))
            read_frame(sock)
    values = fetch_values(topic, 0, max_bytes=55 << 20, partition_max_bytes=55 << 20)
    request = protocol.encode_request(1, 11, 1, "tls", values)
    with site.connect() as late, site.connect() as prompt:
        late.sendall(request)
        prompt.sendall(request)
        frames = [read_frame(prompt), read_frame(late)]
        assert frames[0] == frames[1] and len(frames[0]) > 40_000_000
        assert frames[0].count(batch[61:]) == 40
        assert kafka(late)


def read_frame(sock: socket.socket) -> bytes:
    """The next response without its length."""
    (size,) = struct.unpack(">i", exactly(sock, 4))
    return exactly(sock, size)


def exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(min(size - len(data), 1 << 18))
        assert more, f"closed after {len(data)} of {size} bytes"
        data += more
    return bytes(data)


@pytest.mark.openssl
@pytest.mark.parametrize(
    ("options", "agreed"),
    [
        (["-tls1_3"], "TLSv1.3"),
        (["-tls1_2"], "TLSv1.2"),
        (["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"], ""),
        (["-tls1", "-cipher", "ALL:@SECLEVEL=0"], ""),
        (["-tls1_2", "-cipher", "NULL:@SECLEVEL=0"], ""),
        (["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0"], ""),
        (["-tls1_2", "-cipher", "AES128-GCM-SHA256:@SECLEVEL=0"], ""),
    ],
)
def test_versions_and_suites_with_openssl(site: Site, options: list[str], agreed: str) -> None:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{site.port}", *options]
    done = subprocess.run(
        command, input="", capture_output=True, text=True, check=False, timeout=30
    )
    if agreed:
        assert f"Protocol: {agreed}" in done.stdout or f"New, {agreed}" in done.stdout
        assert "Compression: NONE" in done.stdout
    else:
        assert done.returncode != 0 or "Cipher is (NONE)" in done.stdout


@pytest.mark.openssl
def test_nobody_renegotiates_and_no_tickets_are_given(site: Site) -> None:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{site.port}"]
    renegotiating = subprocess.run(
        [*command, "-tls1_2"], input="R\n", capture_output=True, text=True, check=False, timeout=30
    )
    assert "no renegotiation" in renegotiating.stdout + renegotiating.stderr
    asking = subprocess.run(
        [*command, "-tls1_3", "-ign_eof"],
        input="GET /healthz HTTP/1.1\nHost: localhost\nConnection: close\n\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "ok\n" in asking.stdout, "it has read what comes behind tickets"
    assert "New Session Ticket" not in asking.stdout
