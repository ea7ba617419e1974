"""The keys of an issuer over time: rotation, outages, and tokens that name keys nobody has."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from kept.node.config.sasl import TokenSettings
from kept.node.runtime.runtime import Runtime
from kept.node.security.oauth import key_source
from kept.node.security.oauth.key_source import KeySource, read_key_file
from kept.storage.disk import Disk
from kept.storage.errors import ConfigurationError, SaslAuthenticationFailed
from tests.support.certificates import Authority
from tests.support.loops import DEADLINE_S, until
from tests.support.token_issuer import AUDIENCE, ISSUER, Endpoint, Issuer, served

SETTINGS = TokenSettings(
    jwks_url="",
    truststore_path=None,
    refresh_ms=3_600_000,
    retry_backoff_ms=10,
    retry_backoff_max_ms=40,
    audiences=(AUDIENCE,),
    issuer=ISSUER,
    skew_s=0,
    subject_claim="sub",
    scope_claim="scope",
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def endpoint(authority: Authority) -> Iterator[Endpoint]:
    with served(Endpoint(Issuer()), authority.issue("issuer", "localhost")) as endpoint:
        yield endpoint


class Started:
    """A source that fetches, for the time of a test."""

    def __init__(self, settings: TokenSettings) -> None:
        self.settings = settings

    async def __aenter__(self) -> KeySource:
        self.runtime = Runtime(Disk())
        self.source = KeySource(self.runtime, self.settings)
        self.source.start()
        return self.source

    async def __aexit__(self, *_: object) -> None:
        self.source.stop()
        await asyncio.sleep(0)
        self.runtime.close()


def fetching(endpoint: Endpoint, authority: Authority, **settings: Any) -> Started:
    given = {"jwks_url": endpoint.url, "truststore_path": authority.ca, **settings}
    return Started(replace(SETTINGS, **given))


def finish(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))


async def refusal(source: KeySource, token: str) -> str:
    with pytest.raises(SaslAuthenticationFailed) as refused:
        await source.verify(token)
    return str(refused.value)


def test_the_first_token_waits_for_the_keys(endpoint, authority):
    async def go() -> None:
        async with fetching(endpoint, authority) as source:
            assert (await source.verify(endpoint.issuer.token("ada"))).user == "ada"
            assert not source.failed and source.age_s < 60
            assert endpoint.requests == ["GET"]

    finish(go())


def test_a_new_key_is_fetched_when_a_token_names_it(endpoint, authority):
    async def go() -> None:
        async with fetching(endpoint, authority) as source:
            await source.verify(endpoint.issuer.token())
            endpoint.issuer.add_key("k2")
            both = [source.verify(endpoint.issuer.token(key_id="k2")) for _ in range(5)]
            assert [one.user for one in await asyncio.gather(*both)] == ["ada"] * 5
            assert endpoint.requests == ["GET"] * 2, "one fetch for all who wait"

    finish(go())


def test_unknown_keys_cause_a_fetch_now_and_then(endpoint, authority, monkeypatch):
    async def go() -> None:
        stranger = Issuer(*(f"x{number}" for number in range(50)))
        async with fetching(endpoint, authority) as source:
            await source.verify(endpoint.issuer.token())
            for number in range(50):
                token = stranger.token(key_id=f"x{number}")
                assert f"'x{number}' is not in" in await refusal(source, token)
            assert endpoint.requests == ["GET"] * 2
            assert (await source.verify(endpoint.issuer.token())).user == "ada"
            monkeypatch.setattr(key_source, "UNKNOWN_KEY_INTERVAL_S", 0.0)
            endpoint.issuer.add_key("k2")
            assert (await source.verify(endpoint.issuer.token(key_id="k2"))).user == "ada"

    finish(go())


def test_an_outage_leaves_the_keys_of_before(endpoint, authority, capfd):
    async def go() -> None:
        good = endpoint.respond
        async with fetching(endpoint, authority, refresh_ms=20) as source:
            await source.verify(endpoint.issuer.token())
            for answer in (
                (503, {}, b""),
                (200, {}, b"<html>"),
                (200, {}, b'{"keys": []}'),
                (302, {"Location": endpoint.url}, b""),
            ):
                endpoint.respond = lambda *_, answer=answer: answer
                await until(lambda: source.failed)
                seen = len(endpoint.requests)
                await until(lambda seen=seen: len(endpoint.requests) > seen + 1)
                assert (await source.verify(endpoint.issuer.token())).user == "ada"
                endpoint.respond = good
                await until(lambda: not source.failed)

    finish(go())
    told = capfd.readouterr().err
    assert told.count('event="keys of tokens not fetched"') == 4, "once for each outage"
    assert "status 503" in told and "not JSON" in told and "status 302" in told


def test_an_error_of_any_kind_is_told_of_and_is_not_the_last_fetch(
    endpoint, authority, monkeypatch, capfd
):
    def breaks(_: bytes) -> Any:
        raise LookupError("planted")

    async def go() -> None:
        good = key_source.parse_keys
        monkeypatch.setattr(key_source, "parse_keys", breaks)
        async with fetching(endpoint, authority) as source:
            assert "there are no keys yet" in await refusal(source, endpoint.issuer.token())
            assert source.failed
            monkeypatch.setattr(key_source, "parse_keys", good)
            await until(lambda: not source.failed)
            assert (await source.verify(endpoint.issuer.token())).user == "ada"

    finish(go())
    told = capfd.readouterr().err
    assert told.count('event="keys of tokens not fetched"') == 1 and "planted" in told


def test_nobody_is_believed_before_there_are_keys(endpoint, authority):
    async def go() -> None:
        good, waits = endpoint.respond, threading.Event()

        def slow(*given: Any) -> Any:
            waits.wait(30)
            return 503, {}, b""

        endpoint.respond = slow
        async with fetching(endpoint, authority) as source:
            check = asyncio.ensure_future(refusal(source, endpoint.issuer.token()))
            await until(lambda: endpoint.requests)
            assert not check.done(), "it waits for the fetch under way"
            waits.set()
            assert "there are no keys yet" in await check
            assert source.failed and source.age_s == float("inf")
            endpoint.respond = good
            await until(lambda: not source.failed)
            assert (await source.verify(endpoint.issuer.token())).user == "ada"

    finish(go())


def test_a_key_that_is_gone_is_believed_no_more(endpoint, authority):
    async def go() -> None:
        async with fetching(endpoint, authority, refresh_ms=20) as source:
            old = endpoint.issuer.token()
            await source.verify(old)
            endpoint.issuer.add_key("k2")
            del endpoint.issuer.keys["k1"]
            await until(lambda: not source.keys.has("k1"))
            assert "'k1' is not in" in await refusal(source, old)

    finish(go())


def test_a_token_is_remembered_until_it_expires_or_keys_are_got_anew(
    endpoint, authority, monkeypatch
):
    checked: list[str] = []
    verify = key_source.verify
    monkeypatch.setattr(key_source, "MAX_REMEMBERED", 2)
    monkeypatch.setattr(
        key_source, "verify", lambda token, *rest: checked.append(token) or verify(token, *rest)
    )

    async def go() -> None:
        async with fetching(endpoint, authority) as source:
            first, second, third = (endpoint.issuer.token(user) for user in ("a", "b", "c"))
            for token in (first, first, second, second, first):
                await source.verify(token)
            assert checked == [first, second]
            await source.verify(third)
            await source.verify(first)
            assert checked == [first, second, third, first], "the oldest is forgotten"
            now = time.time()
            monkeypatch.setattr(key_source.time, "time", lambda: now + 400)
            await source.verify(first)
            assert checked[-1] is first and len(checked) == 5, "PyJWT has a clock of its own"
            monkeypatch.undo()
            await source._fetch()
            await source.verify(first)
            assert not source._believed.keys() - {hashlib.sha256(first.encode()).digest()}

    finish(go())


def test_a_token_that_expired_is_not_remembered(endpoint, authority):
    async def go() -> None:
        async with fetching(endpoint, authority) as source:
            token = endpoint.issuer.token(life_s=1)
            await source.verify(token)
            end = time.monotonic() + 30
            while time.monotonic() < end:
                try:
                    await source.verify(token)
                except SaslAuthenticationFailed as refused:
                    assert "expired" in str(refused)
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("believed after its end")

    finish(go())


def test_a_token_without_the_name_of_a_key(endpoint, authority):
    async def go() -> None:
        async with fetching(endpoint, authority, refresh_ms=20) as source:
            token = endpoint.issuer.token(headers={"kid": None})
            assert (await source.verify(token)).user == "ada"
            endpoint.issuer.add_key("k2")
            await until(lambda: source.keys.has("k2"))
            assert "several may fit" in await refusal(source, token)

    finish(go())


def test_keys_in_a_file_are_read_again(tmp_path):
    issuer = Issuer()
    url = issuer.write(tmp_path / "keys file.json")

    async def go() -> None:
        async with Started(replace(SETTINGS, jwks_url=url)) as source:
            assert (await source.verify(issuer.token())).user == "ada"
            issuer.add_key("k2")
            issuer.write(tmp_path / "keys file.json")
            assert (await source.verify(issuer.token(key_id="k2"))).user == "ada"

    finish(go())


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "html").write_text("<html>")
    (tmp_path / "private").write_text(json.dumps({"keys": [{"kty": "EC", "d": "AQ"}]}))
    (tmp_path / "type").write_text(json.dumps({"keys": [{"kty": "EC", "key_ops": 5}]}))
    for name, why in (
        ("none", "No such file"),
        ("html", "not JSON"),
        ("private", "it is private"),
        ("type", "its key_ops is no list"),
        ("", "Is a directory"),
    ):
        with pytest.raises(ConfigurationError, match=why) as refused:
            read_key_file(str(tmp_path / name))
        where = f"sasl.oauthbearer.jwks.endpoint.url=file://{tmp_path / name}"
        assert str(refused.value).startswith(where)


def test_a_pipe_keeps_no_start_waiting(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        read_key_file(str(tmp_path / "pipe"))


def test_a_trust_store_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(
        ConfigurationError, match=r"kept\.sasl\.oauthbearer\.truststore\.location=.*ca\.pem"
    ):
        key_source.trust_context(str(tmp_path / "ca.pem"))
