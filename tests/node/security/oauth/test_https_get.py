"""One GET over HTTPS: what is taken, and what of an endpoint that is not right is not."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kept.node.security.oauth.https_get import FetchFailed, https_get
from kept.testing.ports import free_port
from tests.support.certificates import Authority
from tests.support.token_issuer import Endpoint, Issuer, served


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def endpoint(authority: Authority) -> Iterator[Endpoint]:
    with served(Endpoint(Issuer()), authority.issue("issuer", "localhost")) as endpoint:
        yield endpoint


def get(url: str, authority: Authority, timeout_s: float = 10.0) -> bytes:
    tls = ssl.create_default_context(cafile=authority.ca)
    return asyncio.run(https_get(url, tls, most_bytes=1000, timeout_s=timeout_s))


def test_what_is_there(endpoint, authority):
    endpoint.respond = lambda *_: (200, {}, b"body")
    assert get(endpoint.url, authority) == b"body"
    assert get(endpoint.url + "?a=b", authority) == b"body"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((302, {"Location": "https://169.254.169.254/keys"}, b""), "status 302"),
        ((404, {}, b"none"), "status 404"),
        ((200, {}, b"x" * 1001), "more than 1000 bytes"),
        ((200, {"Content-Length": "1000000000"}, b"x" * 5000), "more than 1000 bytes"),
        ((200, {"X": "y" * 300_000}, b""), "not a whole answer of HTTP"),
        ((200, {"Content-Length": "x"}, b""), "not a whole answer of HTTP"),
    ],
)
def test_what_is_refused(endpoint, authority, answer, why):
    endpoint.respond = lambda *_: answer
    requests = len(endpoint.requests)
    with pytest.raises(FetchFailed, match=why):
        get(endpoint.url, authority)
    assert len(endpoint.requests) == requests + 1, "nothing is asked for elsewhere, or again"


def test_an_answer_that_never_comes_or_ends_early_is_given_up(endpoint, authority):
    endpoint.respond = lambda *_: (200, {"Content-Length": "10"}, b"x")
    with pytest.raises(FetchFailed, match="not a whole answer of HTTP"):
        get(endpoint.url, authority)
    given_up = threading.Event()

    def never(*_: object) -> Any:
        given_up.wait(60)
        return 200, {}, b""

    endpoint.respond = never
    with pytest.raises(FetchFailed, match=r"no whole answer within 0.2 s"):
        get(endpoint.url, authority, timeout_s=0.2)
    given_up.set()


def test_who_is_not_trusted_is_not_asked(endpoint, authority, tmp_path):
    requests = len(endpoint.requests)
    with pytest.raises(FetchFailed, match="certificate is not trusted"):
        get(endpoint.url, Authority(tmp_path, "other"))
    with pytest.raises(FetchFailed, match=r"certificate is not trusted.*by a name"):
        get(endpoint.url.replace("localhost", "127.0.0.1"), authority)
    assert len(endpoint.requests) == requests


def test_nobody_is_there(authority):
    with pytest.raises(FetchFailed, match=r"[Rr]efused|failed"):
        get(f"https://localhost:{free_port()}/", authority)
    with pytest.raises(FetchFailed):
        get("https://no-such-host.invalid/", authority)
