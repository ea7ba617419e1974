"""Where a client's token comes from, and when it is got anew."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kept.client.security import access_tokens as module
from kept.client.security.access_tokens import (
    AccessTokens,
    FetchedToken,
    NoAccessToken,
    access_tokens,
)
from kept.storage.errors import ConfigurationError
from kept.testing.ports import free_port
from tests.support.certificates import Authority
from tests.support.token_issuer import CLIENT, SECRET, Endpoint, Issuer, served

CREDENTIALS = CLIENT, SECRET


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with served(Endpoint(Issuer(), life_s=100)) as endpoint:
        yield endpoint


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [time.time()]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def got(tokens: AccessTokens) -> str:
    tokens.refresh()
    return tokens.current()


def refusal(tokens: AccessTokens) -> str:
    with pytest.raises(NoAccessToken) as refused:
        got(tokens)
    assert SECRET not in str(refused.value)
    return str(refused.value)


def test_by_the_clients_credentials(endpoint):
    token = got(access_tokens(endpoint.url, CREDENTIALS, "kafka other"))
    assert token.count(".") == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, {}, b'{"error": "invalid_client"}'), "status 401 \\('invalid_client'\\)"),
        ((302, {"Location": "http://localhost:1/"}, b""), "status 302"),
        ((500, {}, b"<html>"), "status 500$"),
        ((200, {}, b"<html>"), "no access_token"),
        ((200, {}, b"[]"), "no access_token"),
        ((200, {}, b'{"access_token": 7}'), "no access_token"),
        ((200, {}, b'{"access_token": "a b"}'), "no Bearer token"),
        ((200, {}, b'{"access_token": "' + b"A" * 20_000 + b'"}'), "a token of 20000 bytes"),
    ],
)
def test_an_answer_that_is_no_token(answer, why):
    endpoint = Endpoint(Issuer())
    endpoint.respond = lambda *_: answer
    with served(endpoint) as endpoint, pytest.raises(NoAccessToken, match=why) as refused:
        got(access_tokens(endpoint.url, CREDENTIALS, ""))
    assert f"sasl.oauthbearer.token.endpoint.url={endpoint.url}" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_over_https_by_whom_is_trusted(tmp_path):
    authority = Authority(tmp_path)
    with served(Endpoint(Issuer()), authority.issue("issuer", "localhost")) as endpoint:
        assert got(access_tokens(endpoint.url, CREDENTIALS, "s", authorities=authority.ca_pem))
        assert "certificate verify failed" in refusal(access_tokens(endpoint.url, CREDENTIALS, "s"))


def test_nobody_is_there():
    url = f"http://localhost:{free_port()}/"
    assert "refused" in refusal(access_tokens(url, CREDENTIALS, "")).lower()


def test_an_address_without_use_here_does_not_hide_that_another_one_refused(monkeypatch):
    """In a container ``localhost`` is ``::1``, too, where there is no IPv6."""
    nobody = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", free_port()))
    no_family = (socket.AF_INET + 97, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [nobody, no_family])
    assert "refused" in refusal(access_tokens("http://localhost:9/", CREDENTIALS, "")).lower()


def test_credentials_may_be_encoded_before_they_go_into_basic():
    endpoint, seen = Endpoint(Issuer()), []

    def respond(method: str, headers: Any, body: bytes) -> Any:
        seen.append(headers["Authorization"])
        return 200, {}, b'{"access_token": "t"}'

    endpoint.respond = respond  # type: ignore[method-assign]
    with served(endpoint):
        got(access_tokens(endpoint.url, ("a:b", "c d"), "", urlencoded=True))
    assert seen == ["Basic YSUzQWI6Yytk"]


def test_a_file_is_read_anew(tmp_path, clock):
    path = tmp_path / "token file"
    path.write_text("\n first.token \n")
    tokens = access_tokens(path.as_uri(), None, "")
    assert got(tokens) == "first.token"
    path.write_text("second.token")
    clock[0] += 9
    assert got(tokens) == "first.token"
    clock[0] += 2
    assert got(tokens) == "second.token"
    path.unlink()
    clock[0] += 11
    assert got(tokens) == "second.token", "as long as it lasts, which nobody knows"
    assert "No such file" in refusal(access_tokens(path.as_uri(), None, ""))
    path.write_text("two words")
    assert "no Bearer token" in refusal(access_tokens(path.as_uri(), None, ""))


def test_a_token_is_got_anew_after_four_fifths_of_its_life(clock):
    asked: list[float] = []
    fails = [False]

    def fetch() -> FetchedToken:
        asked.append(clock[0])
        if fails[0]:
            raise NoAccessToken("nobody is there")
        return FetchedToken(f"t{len(asked)}", 100.0)

    tokens = AccessTokens(fetch)
    assert got(tokens) == "t1"
    clock[0] += 79
    assert got(tokens) == "t1"
    clock[0] += 2
    assert got(tokens) == "t2" and len(asked) == 2
    fails[0] = True
    clock[0] += 81
    assert got(tokens) == "t2" and len(asked) == 3
    assert got(tokens) == "t2" and len(asked) == 3, "not at once again"
    clock[0] += 18
    assert got(tokens) == "t2" and len(asked) == 4
    clock[0] += 2
    with pytest.raises(NoAccessToken, match="nobody is there"):
        got(tokens)
    fails[0] = False
    clock[0] += 2
    assert got(tokens) == "t6"


def test_the_life_of_a_token_is_read_from_it(tmp_path, clock):
    path = tmp_path / "token"
    issuer = Issuer()
    path.write_text(issuer.token(life_s=5))
    assert module.read_token(str(path)).life_s == pytest.approx(5, abs=2)
    for odd in ("opaque", "a.b.c", "e30.e30.e30", "e30.W10.c", issuer.token(exp="x")):
        path.write_text(odd)
        assert module.read_token(str(path)).life_s is None
    assert "opaque" not in repr(FetchedToken("opaque", 1.0))


@pytest.mark.parametrize(
    ("url", "client", "why"),
    [
        ("http://idp.example.com/t", CREDENTIALS, "https:// or file:/// is wanted"),
        ("https://me:secret@idp/t", CREDENTIALS, "https://HOST/PATH or file"),
        ("token.jwt", CREDENTIALS, "https://HOST/PATH or file"),
        ("file://idp/t", CREDENTIALS, "https:// or file:///"),
        ("https://idp.example.com/t", None, "client.credentials.client.secret"),
    ],
)
def test_addresses_that_are_refused(url, client, why):
    with pytest.raises(ConfigurationError, match=why) as refused:
        access_tokens(url, client, "")
    assert "secret@" not in str(refused.value)
