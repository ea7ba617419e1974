"""kept's own API: JSON over HTTP under ``/api/v1/``, on the port that also speaks Kafka."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from kept.client.core.metadata import Endpoint, parse_bootstrap
from kept.storage.errors import KeptError

_T = TypeVar("_T")

CONNECT_TIMEOUT_S: Final = 5.0
TIMEOUT_S: Final = 30.0
PRESENT_S: Final = 3.0
"""A node that says nothing at all for so long is passed over for another one."""
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


class HttpFailed(KeptError):
    """The API answered with an error, or is not there; ``status`` is 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class JsonApi:
    """One node's API. A POST carries the header ``X-Kept``, which no web page sends by accident."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s

    def get(self, path: str, **query: object) -> Any:
        """``GET /api/v1/path?query``; parameters that are None are left out."""
        given = {k: str(v) for k, v in query.items() if v is not None}
        return self._request("GET", _url(path, given), None)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        """``POST /api/v1/path?query`` with a JSON body."""
        given = {k: str(v) for k, v in query.items()}
        return self._request("POST", _url(path, given), json.dumps(body or {}).encode())

    def is_there(self) -> bool:
        """Whether a node answers here, soon: one that stands still accepts connections, too."""
        connection = http.client.HTTPConnection(
            self.endpoint.host, self.endpoint.port, timeout=PRESENT_S
        )
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    def _request(self, method: str, url: str, body: bytes | None) -> Any:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "X-Kept": "1"}
        connection = http.client.HTTPConnection(
            self.endpoint.host, self.endpoint.port, timeout=min(CONNECT_TIMEOUT_S, self.timeout_s)
        )
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout_s)
            connection.request(method, url, body, headers)
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER_BYTES)
        except TimeoutError as error:
            why = f"{self.endpoint}: {method} {url}: no answer within {self.timeout_s:.0f} s"
            raise HttpFailed(why) from error
        except ConnectionRefusedError as error:
            raise HttpFailed(f"{self.endpoint}: {method} {url}: connection refused") from error
        except socket.gaierror as error:
            why = f"{self.endpoint}: {self.endpoint.host} is not a known host ({error.strerror})"
            raise HttpFailed(why) from error
        except (OSError, http.client.HTTPException) as error:
            raise HttpFailed(
                f"{self.endpoint} does not answer HTTP: this needs a node of kept"
            ) from error
        finally:
            connection.close()
        return self._judge(method, url, answer.status, data)

    def _judge(self, method: str, url: str, status: int, data: bytes) -> Any:
        try:
            value = json.loads(data) if data else None
        except ValueError as error:
            raise HttpFailed(
                f"{self.endpoint}: {method} {url}: status {status} and no JSON; is it kept?", status
            ) from error
        if 200 <= status < 300:
            return value
        said = value.get("error") if isinstance(value, dict) else None
        if isinstance(said, dict):
            said = said.get("message")
        raise HttpFailed(f"{self.endpoint}: {said or f'{method} {url}: status {status}'}", status)


def request_any(
    bootstrap: str, request: Callable[[JsonApi], _T], timeout_s: float = TIMEOUT_S
) -> _T:
    """Ask the first node of a bootstrap list that is there. Raises HttpFailed."""
    endpoints = parse_bootstrap(bootstrap)
    for endpoint in endpoints[:-1]:
        api = JsonApi(endpoint, timeout_s)
        if not api.is_there():
            continue
        try:
            return request(api)
        except HttpFailed as error:
            if error.status:
                raise
    return request(JsonApi(endpoints[-1], timeout_s))


def each_node(bootstrap: str, timeout_s: float = TIMEOUT_S) -> dict[int, JsonApi]:
    """Every node of the cluster that takes part, by its id. Raises HttpFailed."""
    cluster = request_any(bootstrap, lambda api: api.get("cluster"))
    nodes: dict[int, JsonApi] = {}
    for broker in cluster["brokers"]:
        if not broker["fenced"]:
            (endpoint,) = parse_bootstrap(broker["endpoints"][0].partition("://")[2])
            nodes[broker["node_id"]] = JsonApi(endpoint, timeout_s)
    return nodes


def nodes_away(bootstrap: str) -> list[int]:
    """Nodes that are registered and do not take part: :func:`each_node` lacks them. Raises
    HttpFailed.
    """
    cluster = request_any(bootstrap, lambda api: api.get("cluster"))
    return sorted(broker["node_id"] for broker in cluster["brokers"] if broker["fenced"])


def cluster_is_up(endpoints: Sequence[Endpoint]) -> str | None:
    """Whether each of these nodes is ready and knows all of them as brokers that take part.

    Says who is not, and why; None when all are.
    """
    for endpoint in endpoints:
        try:
            cluster = JsonApi(endpoint, CONNECT_TIMEOUT_S).get("cluster")
        except HttpFailed as error:
            return str(error)
        if not cluster["ready"]:
            return f"{endpoint} is not ready: {cluster['reason']}"
        active = sum(not broker["fenced"] for broker in cluster["brokers"])
        if active < len(endpoints):
            return f"{endpoint} knows {active} of {len(endpoints)} brokers"
    return None


def _url(path: str, query: Mapping[str, str]) -> str:
    suffix = f"?{urlencode(query)}" if query else ""
    return f"/api/v1/{quote(path)}{suffix}"
