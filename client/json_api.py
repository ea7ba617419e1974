"""kept's own API: JSON over HTTP under ``/api/v1/``, on the port that also speaks Kafka. Where that
port wants TLS or a login, so does this: https, and Basic with the user and password of SASL, or
Bearer with its access token.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from kept.client.bootstrap import Bootstrap
from kept.client.connect import connect
from kept.client.core.metadata import Endpoint, parse_bootstrap
from kept.client.security.access_tokens import NoAccessToken
from kept.client.security.security import PLAINTEXT, Security
from kept.client.security.tls_errors import TlsFailure, tls_failure
from kept.storage.errors import KeptError, NoNode

_T = TypeVar("_T")

CONNECT_TIMEOUT_S: Final = 5.0
TIMEOUT_S: Final = 30.0
PRESENT_S: Final = 3.0
"""A node that says nothing at all for so long is passed over for another one."""
BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
UNAVAILABLE: Final = 503
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


class HttpFailed(KeptError):
    """The API answered with an error, or is not there; ``status`` is 0 without an answer.
    ``may_be_done``: a change was asked for, and nobody knows whether it was made.
    """

    def __init__(self, message: str, status: int = 0, *, may_be_done: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.may_be_done = may_be_done


class NoNodeServes(NoNode, HttpFailed):
    """The last of the addresses of a cluster refuses connections, and no other one answers."""


class JsonApi:
    """One node's API. A POST carries the header ``X-Kept``, which no web page sends by accident.

    A request that the node did not begin, since too many passwords wait to be checked (status 503
    with ``Retry-After``), is made again when it says, within ``timeout_s``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float = TIMEOUT_S,
        security: Security = PLAINTEXT,
    ) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.security = security

    def get(self, path: str, **query: object) -> Any:
        """``GET /api/v1/path?query``; parameters that are None are left out."""
        return self._request("GET", _url(path, query), None)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        """``POST /api/v1/path?query`` with a JSON body; parameters that are None are left out."""
        return self._request("POST", _url(path, query), json.dumps(body or {}).encode())

    def is_there(self) -> bool:
        """Whether a node answers here, soon: one that stands still accepts connections, too."""
        connection = self._connection(PRESENT_S)
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port, context = *self.endpoint, self.security.context()
        if context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def _connect(self, connection: http.client.HTTPConnection, timeout_s: float) -> None:
        """As ``connection.connect()``, which tells of the last address of the host."""
        connection.sock = connect(*self.endpoint, timeout_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self.security.context()
        if context is not None:
            host = self.endpoint.host
            connection.sock = context.wrap_socket(connection.sock, server_hostname=host)

    def _request(self, method: str, url: str, body: bytes | None) -> Any:
        until = monotonic() + self.timeout_s
        while True:
            status, again_s, data = self._ask(method, url, body)
            if again_s is None or status != UNAVAILABLE or monotonic() + again_s >= until:
                return self._judge(method, url, status, data)
            sleep(max(1, again_s))

    def _ask(self, method: str, url: str, body: bytes | None) -> tuple[int, int | None, bytes]:
        """The answer: its status, in how many seconds to come again if it says so, its body."""
        headers = {"Accept": "application/json"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "X-Kept": "1"}
        try:
            authorization = self.security.http_authorization(self.endpoint.host)
        except NoAccessToken as error:
            raise HttpFailed(str(error)) from error
        if authorization is not None:
            headers["Authorization"] = authorization
        connect_s = min(CONNECT_TIMEOUT_S, self.timeout_s)
        connection = self._connection(connect_s)
        connected = False
        try:
            self._connect(connection, connect_s)
            connected = True
            connection.sock.settimeout(self.timeout_s)
            connection.request(method, url, body, headers)
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER_BYTES + 1)
            if answer.length and len(data) <= MAX_ANSWER_BYTES:
                raise http.client.IncompleteRead(data, answer.length)
        except (OSError, http.client.HTTPException) as error:
            may_be_done = connected and body is not None and not self._is_mistrusted(error)
            if connected:
                why = self._why_no_answer(error)
            else:
                why = self._why_no_connection(error, connect_s)
            if may_be_done:
                why += "; it may have been done"
            raise HttpFailed(
                f"{self.endpoint}: {method} {url}: {why}", may_be_done=may_be_done
            ) from error
        finally:
            connection.close()
        if len(data) > MAX_ANSWER_BYTES:
            why = f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB"
            raise HttpFailed(f"{self.endpoint}: {method} {url}: {why}", answer.status)
        again = answer.headers.get("Retry-After", "")
        return answer.status, int(again) if again.isdecimal() and len(again) < 10 else None, data

    def _why_no_connection(self, error: Exception, connect_s: float) -> str:
        if isinstance(error, TimeoutError):
            return f"no connection within {connect_s:.3g} s"
        if isinstance(error, socket.gaierror):
            return f"{self.endpoint.host} is not a known host ({error.strerror})"
        if isinstance(error, ssl.SSLError):
            return self._tls_failure(error).why
        text = (isinstance(error, OSError) and error.strerror) or str(error)
        return text[:1].lower() + text[1:]

    def _why_no_answer(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.timeout_s:.3g} s"
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return self._tls_failure(error).why
        if isinstance(error, http.client.IncompleteRead):
            return "the connection broke within the answer"
        if isinstance(error, OSError):
            return "the connection broke before an answer (is it a node of kept?)"
        return "no answer in HTTP: this needs a node of kept"

    def _is_mistrusted(self, error: Exception) -> bool:
        """Whether the other side refused this side's certificate, in place of reading a request:
        with TLS 1.3 it does so after the handshake.
        """
        return isinstance(error, ssl.SSLError) and self._tls_failure(error).lasting

    def _tls_failure(self, error: ssl.SSLError) -> TlsFailure:
        tls = self.security.tls
        return tls_failure(error, has_certificate=tls is not None and tls.keys is not None)

    def _judge(self, method: str, url: str, status: int, data: bytes) -> Any:
        try:
            value = json.loads(data) if data else None
        except ValueError as error:
            asks_tls = status == BAD_REQUEST and b"TLS" in data and self.security.tls is None
            is_it = "it wants TLS (security.protocol)" if asks_tls else "is it kept?"
            raise HttpFailed(
                f"{self.endpoint}: {method} {url}: status {status} and no JSON; {is_it}", status
            ) from error
        if 200 <= status < 300:
            return value
        if status == UNAUTHORIZED:
            user = self.security.user
            if not self.security.mechanism:
                why = "a login is needed"
            elif not user or self.security.http_login(self.endpoint.host):
                why = f"{self.security.who} was not believed"
            else:
                why = (
                    f"a login is needed, and {user}'s password is not sent in the clear: connect "
                    "by SASL_SSL"
                )
            raise HttpFailed(f"{self.endpoint}: {method} {url}: {why}", status)
        said = value.get("error") if isinstance(value, dict) else None
        if isinstance(said, dict):
            said = said.get("message")
        raise HttpFailed(f"{self.endpoint}: {said or f'{method} {url}: status {status}'}", status)


def request_any(
    bootstrap: str | Bootstrap, request: Callable[[JsonApi], _T], timeout_s: float = TIMEOUT_S
) -> _T:
    """What ``request`` returns for the first node of a bootstrap list that answers. After a request
    without an answer the next node is asked only where nothing can have been changed. Raises
    HttpFailed, and NoNodeServes where none answers.
    """
    where = Bootstrap.of(bootstrap)
    endpoints = parse_bootstrap(where.servers)
    for endpoint in endpoints[:-1]:
        api = JsonApi(endpoint, timeout_s, where.security)
        if not api.is_there():
            continue
        try:
            return request(api)
        except HttpFailed as error:
            if error.status or error.may_be_done:
                raise
    try:
        return request(JsonApi(endpoints[-1], timeout_s, where.security))
    except HttpFailed as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise NoNodeServes(str(error)) from error
        raise


def each_node(bootstrap: str | Bootstrap, timeout_s: float = TIMEOUT_S) -> dict[int, JsonApi]:
    """Every node of the cluster that takes part, by its id. Raises HttpFailed."""
    security = Bootstrap.of(bootstrap).security
    cluster = request_any(bootstrap, lambda api: api.get("cluster"), timeout_s)
    nodes: dict[int, JsonApi] = {}
    for broker in cluster["brokers"]:
        if not broker["fenced"]:
            address = listener_address(broker["endpoints"], cluster["listener"])
            (endpoint,) = parse_bootstrap(address)
            nodes[broker["node_id"]] = JsonApi(endpoint, timeout_s, security)
    return nodes


def listener_address(endpoints: Sequence[str], listener: str) -> str:
    """``host:port`` of the listener of that name, else of the first: endpoints are written
    ``NAME://host:port``.
    """
    named = dict(endpoint.split("://", 1) for endpoint in endpoints)
    return named.get(listener, next(iter(named.values())))


def nodes_away(bootstrap: str | Bootstrap) -> list[int]:
    """Nodes that are registered and do not take part: :func:`each_node` lacks them. Raises
    HttpFailed.
    """
    cluster = request_any(bootstrap, lambda api: api.get("cluster"))
    return sorted(broker["node_id"] for broker in cluster["brokers"] if broker["fenced"])


def _url(path: str, query: Mapping[str, object]) -> str:
    given = {name: str(value) for name, value in query.items() if value is not None}
    suffix = f"?{urlencode(given)}" if given else ""
    return f"/api/v1/{quote(path)}{suffix}"
