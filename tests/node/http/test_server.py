"""HTTP on the client port: routes, refusals, limits. Raw bytes over a real socket."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from importlib import import_module

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.node.admin.views.cluster_view import ClusterView
from kept.node.http import json_results, lazy_server, server
from kept.node.http.host_header import host_is_known, with_port
from kept.node.http.messages import status_of
from kept.node.http.server import MAX_HEAD_BYTES, _is_held
from kept.node.internode.controller_rpc import PeerHttpRequest
from kept.node.kafka.listener import PROBE_CONNECTIONS
from kept.storage import errors
from kept.storage.errors import InvariantViolation, PolicyViolation
from tests.support.grpc_calls import basic
from tests.support.loops import until

GET = "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n"


def failure(answer):
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    value = json.loads(body)["error"]
    assert value["status"] == status
    return status, value["message"]


def post(lone, path="/api/v1/compaction/now", body="{}", **headers):
    lines = {"Host": "localhost", "X-Kept": "1", "Content-Length": str(len(body.encode()))}
    lines |= {name.replace("_", "-"): text for name, text in headers.items()}
    head = "".join(f"{name}: {text}\r\n" for name, text in lines.items() if text is not None)
    return lone.http(f"POST {path} HTTP/1.1\r\n{head}\r\n{body}")


# Routes.


def test_health(lone):
    status, headers, body = lone.http(GET.format("/healthz"))
    assert (status, body) == (200, b"ok\n")
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["server"].startswith("kept/")


def test_ready_and_not(lone):
    assert lone.http(GET.format("/readyz"))[0] == 200
    lone.node.parts.table.directories[0].offline = "it burns"
    status, _, body = lone.http(GET.format("/readyz"))
    assert status == 503
    assert b"it burns" in body
    assert lone.http(GET.format("/healthz"))[0] == 200
    lone.node.parts.table.directories[0].offline = None
    lone.node.parts.readiness.started = False
    assert lone.http(GET.format("/readyz"))[0] == 503
    lone.node.parts.readiness.started = True


def test_the_index_lists_the_routes(lone):
    _, _, body = lone.http(GET.format("/"))
    assert "/api/v1/compaction/why-missing" in body.decode()


def test_head_is_get_without_a_body(lone):
    status, headers, _ = lone.http(GET.format("/healthz"))
    assert _head(lone) == (status, headers, b"")


def _head(lone):
    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        rest = await reader.read()
        writer.close()
        await writer.wait_closed()
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        headers = {name.lower(): text for name, text in headers.items()}
        headers.pop("connection")
        return int(head[0].split()[1]), headers, rest

    return lone.run(ask())


@pytest.mark.parametrize("path", ["/nope", "/api/v1", "/api/v1/topicsx", "/healthz/x"])
def test_nothing_there(lone, path):
    status, message = failure(lone.http(GET.format(path)))
    assert status == 404
    assert path in message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/healthz", "GET, HEAD"),
        ("POST", "/api/v1/cluster", "GET, HEAD"),
        ("GET", "/api/v1/compaction/now", "POST"),
        ("OPTIONS", "/api/v1/compaction/now", "POST"),
        ("PUT", "/api/v1/topics/t", "GET, HEAD"),
    ],
)
def test_wrong_method(lone, method, path, allowed):
    answer = lone.http(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\nContent-Length: 0\r\n\r\n"
    )
    assert failure(answer)[0] == 405
    assert answer[1]["allow"] == allowed


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/v1/cluster?x=1", "unknown parameter x"),
        ("/api/v1/compaction/explain", "topic is missing"),
        ("/api/v1/compaction/explain?topic=t&partition=x", "partition must be a number"),
        ("/api/v1/compaction/explain?topic=t&partition=-1", "partition must be a number"),
        ("/api/v1/compaction/explain?topic=t&key=a&key_base64=YQ==", "use one of them"),
        ("/api/v1/compaction/explain?topic=t&key_base64=%", "the address is not right"),
        ("/api/v1/compaction/explain?topic=t&key_base64=_", "key_base64 is not base64"),
        ("/api/v1/compaction/why-missing?topic=t&partition=0", "offset must be a number"),
        (f"/api/v1/records?topic=t&partition=0&timestamp={2**63}", "timestamp must be a number"),
        ("/api/v1/compaction?" + "&".join(f"a{n}=1" for n in range(99)), "address is not right"),
        ("/%ff", "the address is not right"),
    ],
)
def test_wrong_parameters(lone, path, message):
    if path.endswith("%"):
        path += "ff"
    status, said = failure(lone.http(GET.format(path)))
    assert status == 400
    assert message in said


# POST.


def test_a_post_needs_the_header(lone):
    status, message = failure(post(lone, X_Kept=None))
    assert status == 400
    assert "X-Kept" in message


def test_all_but_probes_needs_a_known_host(lone):
    """A name that its owner points at this node makes a web page of that name same-origin."""
    ask = "GET {} HTTP/1.1\r\nHost: evil.example.org\r\n\r\n"
    paths = ("/api/v1/cluster", "/metrics", "/metrics/", "/", "/console/page.js", "/nothing")
    for answer in (post(lone, Host="evil.example.org"), *(lone.http(ask.format(p)) for p in paths)):
        status, message = failure(answer)
        assert status == 400
        assert "evil.example.org" in message
        assert "kept.http.hosts" in message
    for path in ("/healthz", "/readyz", "/readyz/"):
        assert lone.http(ask.format(path))[0] == 200


@pytest.mark.parametrize(
    "host", ["10.1.2.3:9092", "[fd00::7]:9092", "localhost", socket.gethostname().upper()]
)
def test_metrics_are_scraped_by_address_and_by_the_names_of_the_node(lone, host):
    """Prometheus in Kubernetes uses the pod's address, with static targets a node's name."""
    assert lone.http(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n")[0] == 200


def test_a_stream_is_not_asked_through_another_node(lone):
    """It has no end: the node that asks would wait until its answer is too large."""

    def asked(path):
        request = PeerHttpRequest("GET", path, "{}", "{}")
        return lone.run(asyncio.wait_for(lone.node.parts.http.respond_to_node(request), 10))

    with pytest.raises(PolicyViolation, match="is a stream"):
        asked("/api/v1/events")
    assert [asked(f"/api/v1/events{end}").status for end in ("/", "//")] == [404, 404]


@pytest.mark.parametrize(
    ("target", "held"),
    [
        ("/api/v1/records?topic=t", True),
        ("/api/v1/records/", True),
        ("/api/v1/%72ecords//?topic=t", True),
        ("http://localhost/api/v1/compaction", True),
        ("/api/v1/topics/t", True),
        ("/api/v1/cluster", False),
        ("/metrics", False),
        ("//[", False),
    ],
)
def test_large_answers_wait_for_their_turn_however_they_are_spelled(
    lone, monkeypatch, target, held
):
    seen = []

    def is_held(path):
        seen.append(_is_held(path))
        return seen[-1]

    monkeypatch.setattr(server, "_is_held", is_held)
    lone.http(GET.format(target))
    assert any(seen) is held


def test_pages_of_other_sites_are_refused(lone):
    ask = "GET {} HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n\r\n"
    status, message = failure(lone.http(ask.format("/api/v1/cluster")))
    assert status == 400
    assert "other sites" in message
    assert lone.http(ask.format("/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("//[", ""),
        ("http://[::1/api/v1/cluster", ""),
        ("/api/v1/cluster?a=%ff", ""),
        ("/%ff", ""),
        ("/api/v1/cluster", "Host: [::1\r\n"),
    ],
)
def test_addresses_that_are_none(lone, target, more):
    """They are the client's fault, and no bug of ours."""
    head = more or "Host: localhost\r\n"
    status, _ = failure(lone.http(f"GET {target} HTTP/1.1\r\n{head}\r\n"))
    assert status == 400


@pytest.mark.parametrize(
    "origin", ["null", "http://[", "http://evil.example.org", "https://localhost@evil", "localhost"]
)
def test_pages_from_elsewhere_change_nothing(lone_node, origin):
    lone = lone_node(kept_console_actions="true")
    status, message = failure(post(lone, Origin=origin))
    assert status == 400 and "pages are refused" in message
    status, message = failure(post(lone, body='{"topic": "no"}', Origin="http://localhost"))
    assert status == 404


def test_a_connection_goes_on_after_the_head_of_a_stream(lone):
    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(b"HEAD /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(GET.format("/healthz").encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return answer

    assert b" 200 " in lone.run(ask())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "the body is not JSON"),
        ("[1]", "the body is not a JSON object"),
        ('{"topic": "\\ud800"}', "the body is not JSON"),
        ('{"\\udfff": 1}', "the body is not JSON"),
        ("[" * 100_000, "the body is not JSON"),
        ('{"topic": 3}', "topic is missing"),
        ('{"topic": "t", "partition": true}', "partition must be a number"),
        ('{"topic": "t", "wait": 7}', "wait must be true or false"),
        ('{"tpic": "t"}', "unknown parameter tpic"),
        ('{"topic": "nope"}', "nope"),
    ],
)
def test_wrong_bodies(lone, body, message):
    status, said = failure(post(lone, body=body))
    assert status in (400, 404)
    assert message in said or "cleaner" in said


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LOCALHOST:9092", True),
        ("kept.example.org.", True),
        (".", False),
        ("127.0.0.1:9092", True),
        ("[::1]:9092", True),
        ("10.1.2.3", True),
        ("kept.example.org:80", True),
        ("kept-0.kept", True),
        ("evil.example.org", False),
        ("", False),
        ("localhost.evil.example.org", False),
        ("localhost@evil.example.org", False),
        ("evil.example.org:80@localhost", False),
        ("localhost/", False),
        ("[::1", False),
        ("localhost:http", False),
        ("localhost:99999", False),
        ("]", False),
    ],
)
def test_hosts(lone_node, host, known):
    lone = lone_node(
        listeners="PLAINTEXT://127.0.0.1:0",
        advertised_listeners="PLAINTEXT://kept.example.org:9092",
        kept_http_hosts="kept-0.kept",
    )
    assert host_is_known(lone.node.config, host) is known


@pytest.mark.parametrize(
    ("host", "https", "address"),
    [
        ("localhost:9092", False, "localhost:9092"),
        ("localhost:9092", True, "localhost:9092"),
        ("kept.example.org", False, "kept.example.org:80"),
        ("kept.example.org", True, "kept.example.org:443"),
        ("kept.example.org:", False, "kept.example.org:80"),
        ("10.1.2.3", True, "10.1.2.3:443"),
        ("[::1]", False, "[::1]:80"),
        ("[::1]:9092", False, "[::1]:9092"),
    ],
)
def test_a_host_without_a_port_has_the_usual_one(host, https, address):
    assert with_port(host, https=https) == address


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("", "localhost:80"),
        ("http://localhost", "localhost:80"),
        ("https://localhost", "localhost:443"),
    ],
)
def test_command_lines_go_where_the_request_came(lone_node, origin, address):
    """Through a proxy that ends TLS, too: a page's Origin says that it came by HTTPS."""
    lone = lone_node(kept_console_actions="true")
    body = '{"topic": "t"}'
    headers = ["Host: localhost", "X-Kept: 1", f"Content-Length: {len(body)}"]
    if origin:
        headers.append(f"Origin: {origin}")
    lines = ["POST /api/v1/topics/delete HTTP/1.1", *headers, "", body]
    status, _, answer = lone.http("\r\n".join(lines))
    assert status == 200
    assert json.loads(answer)["command"] == f"kept topic delete t --bootstrap {address}"


# The protocol.


def test_several_requests_on_one_connection(lone):
    answers = lone.exchange(GET.format("/healthz").encode() * 3 + GET.format("/no").encode(), 4)
    assert [status for status, _, _ in answers] == [200, 200, 200, 404]


def test_a_body_in_pieces_and_100_continue(lone):
    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        body = b'{"topic": "nope"}'
        head = (
            b"POST /api/v1/compaction/retry HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        for byte in head:
            writer.write(bytes([byte]))
            await writer.drain()
        assert b"100" in await reader.readuntil(b"\r\n\r\n")
        writer.write(body[:3])
        await writer.drain()
        writer.write(body[3:])
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return answer

    assert b" 400 " in lone.run(ask())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",  # smuggled past a proxy
        b"POST" + b"\x00" * 40 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http(lone, data):
    """Refused with JSON, the connection closed, the node well."""

    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    answer = lone.run(ask())
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in answer.lower()
    assert lone.http(GET.format("/healthz"))[0] == 200


@pytest.mark.parametrize("first", [b"", b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("method", [b"HEAD", b"POST"])
def test_a_request_that_goes_wrong_after_its_head(lone, capfd, method, first):
    """Found by random requests: a refused HEAD was answered with a body, which h11 forbids."""
    wrong = method + b" / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"

    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(first + wrong)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await writer.wait_closed()
        return answer

    answer = lone.run(ask())
    assert answer.startswith(b"HTTP/1.1 200 " if first else b"HTTP/1.1 400 ")
    assert answer.count(b" 400 Bad Request") == 1
    assert answer.endswith(b"\r\n\r\n" if method == b"HEAD" else b"}\n")
    assert "Traceback" not in capfd.readouterr().err


def test_large_headers_and_bodies_are_refused(lone_node):
    lone = lone_node(kept_http_request_max_bytes="2000")
    status, _ = failure(lone.http("GET / HTTP/1.1\r\nHost: a\r\nX: " + "x" * 5000 + "\r\n\r\n"))
    assert status == 431
    status, message = failure(post(lone, body=" " * 5000))
    assert status == 413
    assert "2000" in message


def test_a_slow_request_is_ended(lone_node):
    lone = lone_node(kept_http_idle_ms="150")

    async def ask(data):
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(data)
        started = time.monotonic()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await writer.wait_closed()
        return answer, time.monotonic() - started

    answer, took = lone.run(ask(b"GET / HTTP/1.1\r\nHost:"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert 0.1 < took < 20, "it is 30 s where nothing is set"
    answer, _ = lone.run(ask(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    answer, _ = lone.run(ask(GET.format("/healthz").encode()))
    assert answer.count(b"HTTP/1.1") == 1


def test_connections_that_wait_make_room(lone_node):
    """One that is idle, and one whose request comes a byte at a time, keep nobody out."""
    lone = lone_node(kept_http_max_connections="2")

    async def ask():
        held = []
        for data in (GET.format("/healthz").encode(), b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
            writer.write(data + b"GET /healthz HTTP/1.1\r\nHost:")
            if data:
                await reader.readuntil(b"ok\n")
            held.append((reader, writer))
        answers = [await _once(lone) for _ in range(3)]
        end = await held[0][0].read()
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        return answers, end

    answers, end = lone.run(ask())
    assert all(one.startswith(b"HTTP/1.1 200 ") for one in answers)
    assert end.startswith(b"HTTP/1.1 503 ")


def test_streams_of_one_address_leave_room_for_others(lone_node):
    """Also where they do not end: of an address that has more than its share the newest goes."""
    lone = lone_node(kept_http_max_connections="8", kept_console_max_streams="100")
    event = GET.format("/api/v1/events").encode()

    async def stream(host):
        far = (host, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, local_addr=far)
        writer.write(event)
        head = await reader.readuntil(b"\r\n\r\n")
        return head.split()[1], reader, writer

    async def ask():
        many = [await stream("127.0.0.2") for _ in range(8)]
        beyond = await stream("127.0.0.2")
        few = [await stream("127.0.0.3") for _ in range(3)]
        ends = [await one[1].read() for one in many[6:]]
        statuses = [status for status, *_ in (*many, beyond, *few)]
        other = await _once(lone, "/metrics", "127.0.0.4")
        for *_, writer in (*many, beyond, *few):
            writer.close()
        return statuses, len(ends), other

    statuses, ended, other = lone.run(asyncio.wait_for(ask(), 60))
    assert statuses == 8 * [b"200"] + [b"503"] + 2 * [b"200"] + [b"503"]
    assert ended == 2 and other.startswith(b"HTTP/1.1 200 ")


async def _silent(lone, host):
    """A connection that says no more than that it speaks HTTP, once it has its place."""
    far = (host, 0)
    _, writer = await asyncio.open_connection("127.0.0.1", lone.port, local_addr=far)
    before = {*lone.node.parts.http._started()._connections.members()}
    writer.write(b"GET ")
    places = lone.node.parts.http._started()._connections
    await asyncio.wait_for(until(lambda: {*places.members()} - before), 20)
    return writer


@pytest.mark.parametrize("networks", [8, 3])
def test_silent_connections_end_no_request_and_keep_nobody_out(lone_node, networks):
    """Neither one of each of many networks, nor several of few."""
    lone = lone_node(kept_http_max_connections="8", kept_console_max_streams="100")

    async def stream():
        far = ("127.0.0.2", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, local_addr=far)
        writer.write(GET.format("/api/v1/events").encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        return head.split()[1], writer

    async def ask():
        streams = [await stream() for _ in range(4)]
        places = lone.node.parts.http._started()._connections
        silent = [await _silent(lone, f"127.0.0.{3 + n % networks}") for n in range(9)]
        served = places.of_rank(server._SERVED)
        streams += [await stream() for _ in range(2)]
        counts = served, places.of_rank(server._SERVED), len(places)
        for writer in (*silent, *(writer for _, writer in streams)):
            writer.close()
        return [status for status, _ in streams], counts

    statuses, counts = lone.run(ask())
    assert statuses == 6 * [b"200"] and counts == (4, 6, 8)


PASSWORDS = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl_enabled_mechanisms": "PLAIN",
    "plain_sasl_jaas_config": f'{PLAIN_MODULE} required user_ada="pencil";',
}
ADAS = f"GET {{}} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {basic('ada', 'pencil')}\r\n\r\n"


def test_who_has_logged_in_keeps_his_place_from_strangers(lone_node):
    """However many they are; but for a quarter of them, which he keeps from nobody."""
    lone = lone_node(**PASSWORDS, kept_http_max_connections="4", kept_console_max_streams="100")

    async def get(path, host):
        far = (host, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, local_addr=far)
        writer.write(ADAS.format(path).encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        return head.split()[1], writer

    async def ask():
        known = [await get("/api/v1/events", "127.0.0.2") for _ in range(3)]
        writers = [await _silent(lone, f"127.0.0.{3 + number}") for number in range(6)]
        known.append(await get("/api/v1/events", "127.0.0.2"))
        places = lone.node.parts.http._started()._connections
        assert places.of_rank(server._KNOWN) == 4
        beyond = await get("/metrics", "127.0.0.3")
        writers += [await _silent(lone, f"127.0.0.{3 + number}") for number in range(6)]
        ranks = places.of_rank(server._KNOWN), len(places)
        for writer in (*writers, beyond[1], *(writer for _, writer in known)):
            writer.close()
        return [status for status, _ in known], beyond[0], ranks

    statuses, beyond, ranks = lone.run(ask())
    assert statuses == 4 * [b"200"] and ranks == (3, 4)
    assert beyond == b"200", "whoever has yet to log in has a quarter"


def test_where_a_login_is_asked_for_a_request_without_one_keeps_no_place(lone_node, monkeypatch):
    """It is a probe's, and its answer may not be taken."""
    lone = lone_node(**PASSWORDS, kept_http_max_connections="1")
    respond, hanging = server.HttpConnection._respond, []

    async def hang_once(connection, request, response):
        if not hanging:
            hanging.append(connection)
            await asyncio.Event().wait()
        await respond(connection, request, response)

    monkeypatch.setattr(server.HttpConnection, "_respond", hang_once)

    async def ask():
        _, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(GET.format("/healthz").encode())
        await until(lambda: hanging)
        reader, other = await asyncio.open_connection("127.0.0.1", lone.port)
        other.write(ADAS.format("/metrics").encode())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        for one in (writer, other):
            one.close()
        return answer

    assert lone.run(ask()).startswith(b"HTTP/1.1 200 ")


async def _once(lone, path="/healthz", host="127.0.0.1"):
    far = (host, 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, local_addr=far)
    writer.write(GET.format(path).encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return answer


def test_too_many_connections(lone_node, request):
    """Those that are served are not ended for others, but some probes are served beside them; those
    that are closed count no more, whether their objects are collected or not.
    """
    lone = lone_node(kept_http_max_connections="2")
    gc.disable()
    request.addfinalizer(gc.enable)

    async def ask():
        held = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
            writer.write(GET.format("/api/v1/events").encode())
            await reader.readuntil(b"data: ")
            held.append(writer)
        answers = [await _once(lone, path) for path in ("/metrics", "/healthz", "/readyz")]
        probes = lone.node.parts.http._started()._probes
        for path in ("/healthz", "/metrics"):  # which the first bytes to come do not tell
            await until(lambda: not len(probes))
            reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
            writer.write(b"GET ")
            await asyncio.wait_for(until(lambda: len(probes) == 1), 20)
            writer.write(GET.format(path).encode().removeprefix(b"GET "))
            answers.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()
            await writer.wait_closed()
        await until(lambda: not len(probes))
        slow = []
        for _ in range(PROBE_CONNECTIONS):  # whose requests do not come whole
            slow.append(await asyncio.open_connection("127.0.0.1", lone.port))
            slow[-1][1].write(b"GET /healthz HTTP/1.1\r\n")
        await until(lambda: len(probes) == PROBE_CONNECTIONS)
        answers += [await _once(lone, path) for path in ("/healthz", "/metrics")]
        for one in (*held, *(writer for _, writer in slow)):
            one.close()
            await one.wait_closed()
        return answers

    refused, *probes, other, beyond, still = lone.run(ask())
    assert len(probes) == 3
    for one in (refused, other, beyond, still):
        assert one.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    for one in probes:
        assert one.startswith(b"HTTP/1.1 200 ") and b"\r\nConnection: close\r\n" in one
    deadline = time.monotonic() + 20
    while lone.http(GET.format("/metrics"))[0] != 200:
        assert time.monotonic() < deadline


FIELDS = "X-A: b\r\n" * 10_000


@pytest.mark.parametrize(
    "head",
    [
        f"GET /{'%c3%a4' * 12_000} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{FIELDS}\r\n",
    ],
    ids=["address", "headers"],
)
def test_address_and_headers_are_small_though_a_request_may_be_large(lone, head):
    """They are read at a stretch; a body of that size is taken."""
    assert lone.node.config.http_request_max_bytes > len(head) > MAX_HEAD_BYTES
    assert lone.http(head)[0] == 431
    status, answer = lone.post("/api/v1/compaction/now", topic="t" * len(head), partition=0)
    assert status == 400 and "topic" in str(answer), "its name is too long, nothing else"


def test_a_peer_that_leaves_early(lone):
    async def leave():
        for data in (b"GET ", GET.format("/metrics").encode(), b"POST / HTTP/1.1\r\nHost: a\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", lone.port)
            writer.write(data)
            await writer.drain()
            writer.transport.abort()

    lone.run(leave())
    assert lone.http(GET.format("/healthz"))[0] == 200


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), InvariantViolation("secret")])
def test_a_bug_of_ours_is_one_answer(lone, monkeypatch, capsys, error):
    def broken(self):
        raise error

    monkeypatch.setattr(ClusterView, "describe", broken)
    status, message = failure(lone.http(GET.format("/api/v1/cluster")))
    assert status == 500
    assert "secret" not in message
    assert "Traceback" in capsys.readouterr().err
    assert lone.http(GET.format("/healthz"))[0] == 200


@pytest.mark.parametrize("path", ["/api/v1/cluster", "/api/v1/topics"], ids=["whole", "chunks"])
def test_a_response_that_cannot_be_encoded_ends_the_connection(lone, monkeypatch, path):
    monkeypatch.setattr(json_results, "plain", lambda _: object())
    lone.create("t")

    async def read():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(GET.format(path).encode())
        data = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return data

    with contextlib.suppress(ConnectionResetError):
        assert not lone.run(read()).endswith(b"0\r\n\r\n")


def test_wrong_passwords_keep_nobody_out(lone_node):
    """The answer to a failed login waits, and its connection has one of few places meanwhile."""
    lone = lone_node(
        **PASSWORDS,
        connection_failed_authentication_delay_ms="5000",
        kept_http_max_connections="2",
    )
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: {basic('ada', 'wrong')}\r\n\r\n"
    counters = lone.node.parts.counters

    async def ask():
        held = []
        for number in range(2):
            held.append(await asyncio.open_connection("127.0.0.1", lone.port))
            held[-1][1].write(head.encode())
            await until(lambda number=number: counters.failed_logins == number + 1)
        answer = await _once(lone)
        for _, writer in held:
            writer.close()
        return answer

    assert lone.run(asyncio.wait_for(ask(), 60)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UnknownTopicOrPartition("x"), 404),
        (errors.InvalidRequest("x"), 400),
        (errors.RequestTimedOut("x"), 503),
        (errors.MachineError("x", "read", OSError(5, "x")), 503),
        (errors.DamagedData("x", 0, 0, "x"), 500),
    ],
)
def test_statuses(error, status):
    assert status_of(error) == status


def test_the_server_is_imported_in_a_thread_while_the_first_clients_wait(lone, monkeypatch):
    threads = []

    def imported(name):
        threads.append(threading.get_ident())
        return import_module(name)

    monkeypatch.setattr(lazy_server, "import_module", imported)

    async def two():
        wires = [await asyncio.open_connection("127.0.0.1", lone.port) for _ in range(2)]
        for _, writer in wires:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for reader, writer in wires:
            assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
            writer.close()

    lone.run(two())
    assert threads and threading.get_ident() not in threads
    threads.clear()
    lone.http(GET.format("/healthz"))
    assert not threads
