"""The API's client: which node of a list it asks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kept.client import json_api as http
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi, each_node, nodes_away, request_any
from kept.testing.ports import free_port


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
    with pytest.raises(HttpFailed, match=f"{hangs}: POST /api/v1/cluster: no answer") as failed:
        request_any(f"{hangs},{alive}", lambda api: api.post("cluster"), 0.3)
    assert failed.value.may_be_done


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


def test_a_network_that_is_not_reached_is_named():
    api = JsonApi(Endpoint("255.255.255.255", 1), 1.0)
    with pytest.raises(HttpFailed, match=r"GET /api/v1/cluster: (network|no route|permission)"):
        api.get("cluster")


def test_parameters_that_are_none_are_left_out():
    assert http._url("a b", {"x": None, "y": 1}) == "/api/v1/a%20b?y=1"


def test_each_node_is_reached_by_the_listener_that_the_first_was(alive):
    assert {number: str(api.endpoint) for number, api in each_node(alive).items()} == {1: "b:2"}


def test_who_is_away(alive):
    assert nodes_away(alive) == [4]
