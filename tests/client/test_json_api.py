"""The API's client: which node of a list it asks."""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kept.client import json_api as http
from kept.client.address_errors import UNUSABLE_ADDRESS
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi, each_node, nodes_away, request_any
from kept.client.security.security import Security
from kept.testing.ports import free_port
from tests.support.certificates import Authority


class Node(BaseHTTPRequestHandler):
    """One that answers."""

    def do_GET(self) -> None:
        brokers = [
            {"node_id": 4, "fenced": True},
            {"node_id": 1, "fenced": False, "endpoints": ["INTERNAL://a:1", "EXTERNAL://b:2"]},
        ]
        status = 200 if self.path in ("/healthz", "/api/v1/cluster") else 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"brokers": brokers, "listener": "EXTERNAL"}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def alive() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Node)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hangs() -> Iterator[str]:
    """A process that stands still: the kernel accepts for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "{}:{}".format(*server.getsockname())


@pytest.fixture
def says() -> Iterator[Callable[[bytes], str]]:
    """The address of one that reads a request, says these bytes, and closes the connection."""
    stopped: list[Callable[[], object]] = []

    def start(said: bytes) -> str:
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                length = 0
                while (line := lines.readline().strip()) != b"":
                    name, _, value = line.partition(b": ")
                    length = int(value) if name == b"Content-Length" else length
                lines.read(length)
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        stopped.extend((thread.join, server.close))
        return "{}:{}".format(*server.getsockname())

    yield start
    for stop in stopped:
        stop()


def test_one_that_stands_still_is_passed_over(alive, hangs, monkeypatch):
    monkeypatch.setattr(http, "PRESENT_S", 0.2)
    found: list[object] = []

    def ask() -> None:
        found.append(request_any(f"{hangs},{alive}", lambda api: api.get("cluster"), 3600.0))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert len(found) == 1


def test_the_last_one_says_why_nobody_answers(hangs, monkeypatch):
    monkeypatch.setattr(http, "PRESENT_S", 0.2)
    with pytest.raises(HttpFailed, match=f"{hangs}: GET /api/v1/cluster: no answer within 0.3 s"):
        request_any(f"{hangs},{hangs}", lambda api: api.get("cluster"), 0.3)


def test_a_change_without_an_answer_is_asked_of_no_other_node(alive, hangs, monkeypatch):
    monkeypatch.setattr(JsonApi, "is_there", lambda _: True)
    with pytest.raises(
        HttpFailed, match=f"{hangs}: POST /api/v1/cluster: no answer within .*; it may have"
    ) as failed:
        request_any(f"{hangs},{alive}", lambda api: api.post("cluster"), 0.3)
    assert failed.value.may_be_done


BROKE = "the connection broke before an answer (is it a node of kept?)"
CUT = "the connection broke within the answer"
NOT_HTTP = "no answer in HTTP: this needs a node of kept"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", BROKE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{", CUT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", CUT),
        (b"\0\0\0\4\0\0\0\0", NOT_HTTP),
    ],
)
def test_an_answer_that_does_not_come_whole_says_why(says, said, why):
    where = says(said)
    with pytest.raises(HttpFailed) as failed:
        request_any(where, lambda api: api.get("cluster"))
    assert str(failed.value) == f"{where}: GET /api/v1/cluster: {why}"
    where = says(said)
    with pytest.raises(HttpFailed) as failed:
        request_any(where, lambda api: api.post("cluster"))
    assert str(failed.value) == f"{where}: POST /api/v1/cluster: {why}; it may have been done"
    assert failed.value.may_be_done


def test_a_port_of_tls_is_told_from_one_that_is_not_kept(says):
    for text, why in (
        (b"This port speaks TLS", "it wants TLS (security.protocol)"),
        (b"no", "is it kept?"),
    ):
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        where = says(head + text)
        with pytest.raises(HttpFailed) as failed:
            request_any(where, lambda api: api.get("cluster"))
        said = f"{where}: GET /api/v1/cluster: status 400 and no JSON; {why}"
        assert str(failed.value) == said


def test_a_change_of_whom_the_other_side_does_not_trust_is_not_done(tmp_path):
    """With TLS 1.3 the refusal comes after the handshake, as if it were the answer."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(authority.issue("node", "localhost"))
    context.verify_mode = ssl.CERT_REQUIRED

    def refuse() -> None:
        accepted, _ = server.accept()
        with context.wrap_socket(accepted, True, do_handshake_on_connect=False) as secured:
            with pytest.raises(ssl.SSLError):
                secured.do_handshake()
            with socket.socket(fileno=secured.detach()) as connection:
                while connection.recv(1000):  # a reset would overtake the alert
                    pass

    security = Security({"security.protocol": "SSL", "ssl.truststore.location": authority.ca})
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse)
        thread.start()
        api = JsonApi(Endpoint("localhost", server.getsockname()[1]), 60.0, security)
        with pytest.raises(HttpFailed, match=r"and there is none$") as failed:
            api.post("cluster")
        thread.join()
    assert not failed.value.may_be_done


def test_a_change_that_nobody_got_is_asked_of_the_next_node(alive, monkeypatch):
    monkeypatch.setattr(JsonApi, "is_there", lambda _: True)
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(HttpFailed, match=f"{alive}: POST") as failed:  # which has no POST
        request_any(f"{nobody},{alive}", lambda api: api.post("cluster"), 30.0)
    assert failed.value.status == 501


def test_an_answer_that_is_too_large_says_so(alive, monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 10)
    with pytest.raises(HttpFailed, match="the answer is larger than 0 MiB"):
        request_any(alive, lambda api: api.get("cluster"))


def test_a_network_that_is_not_reached_is_named(monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(HttpFailed, match=r"POST /api/v1/cluster: no route to host$") as failed:
        JsonApi(Endpoint("localhost", 1), 1.0).post("cluster")
    assert not failed.value.may_be_done


def test_parameters_that_are_none_are_left_out():
    assert http._url("a b", {"x": None, "y": 1}) == "/api/v1/a%20b?y=1"


def test_each_node_is_reached_by_the_listener_that_the_first_was(alive):
    assert {number: str(api.endpoint) for number, api in each_node(alive).items()} == {1: "b:2"}


def test_who_is_away(alive):
    assert nodes_away(alive) == [4]


REFUSED, SILENT = errno.ECONNREFUSED, errno.ETIMEDOUT


@pytest.mark.parametrize("useless", sorted(UNUSABLE_ADDRESS))
@pytest.mark.parametrize(
    ("others", "told"),
    [
        ((REFUSED,), "connection refused"),
        ((SILENT,), "no connection within 5 s"),
        ((REFUSED, SILENT), "no connection within 5 s"),
        ((SILENT, REFUSED), "connection refused"),
        ((), None),
    ],
)
def test_the_last_address_that_is_of_use_here_is_told_of(others, told, useless, monkeypatch):
    """In a container ``localhost`` is ``::1``, too, where there is no IPv6."""

    def fail(*_: object, **__: object) -> None:
        errors = [OSError(code, os.strerror(code)) for code in (*others, useless)]
        raise ExceptionGroup("create_connection failed", errors)

    monkeypatch.setattr(socket, "create_connection", fail)
    text = os.strerror(useless)
    with pytest.raises(HttpFailed, match=told or text[:1].lower() + text[1:]):
        JsonApi(Endpoint("both", 9)).get("cluster")


def test_an_address_without_use_here_does_not_hide_that_another_one_refused(monkeypatch):
    """In a container ``localhost`` is ``::1``, too, where there is no IPv6."""
    nobody = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", free_port()))
    no_family = (socket.AF_INET + 97, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [nobody, no_family])
    with pytest.raises(HttpFailed, match="connection refused"):
        JsonApi(Endpoint("both", 9)).get("cluster")


def crowded(times: int, again: str, asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """A node that cannot check a password so many times."""

    class Crowded(Node):
        def do_GET(self) -> None:
            asked.append(self.command)
            if len(asked) > times:
                super().do_GET()
                return
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(503)
            if again:
                self.send_header("Retry-After", again)
            self.end_headers()
            self.wfile.write(b'{"error": {"status": 503, "message": "too many logins"}}')

        do_POST = do_GET

    return Crowded


@pytest.mark.parametrize(
    ("crowd", "slept", "served"),
    [
        ((2, "1"), [1, 1], True),
        ((2, "0"), [1, 1], True),
        ((3, "7"), [7, 7], False),
        ((1, "20"), [], False),
        ((1, ""), [], False),
        ((1, "Wed, 21 Oct 2026 07:28:00 GMT"), [], False),
        ((1, "-1"), [], False),
    ],
)
@pytest.mark.parametrize("method", ["get", "post"])
def test_a_password_that_was_not_checked_is_shown_again_within_the_time(
    method: str,
    crowd: tuple[int, str],
    slept: list[int],
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    now, waited = [0.0], []

    def wait(seconds: int) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(http, "sleep", wait)
    monkeypatch.setattr(http, "monotonic", lambda: now[0])
    server = ThreadingHTTPServer(("127.0.0.1", 0), crowded(*crowd, asked))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        api = JsonApi(Endpoint("127.0.0.1", server.server_port), timeout_s=20.0)
        if served:
            assert getattr(api, method)("cluster")["brokers"]
        else:
            with pytest.raises(HttpFailed, match="too many logins") as failed:
                getattr(api, method)("cluster")
            assert failed.value.status == 503 and not failed.value.may_be_done
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert waited == slept and asked == [method.upper()] * (len(slept) + 1)
