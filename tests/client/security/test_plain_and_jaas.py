"""SASL PLAIN and JAAS entries. Anchors: PlainSaslServerTest, JaasContextTest of Kafka 4.3."""

from __future__ import annotations

import pytest

from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE, JaasEntry, parse_jaas
from kept.client.security.plain import PlainClient, PlainLogin, parse_plain
from kept.storage.errors import ConfigurationError, SaslAuthenticationFailed


@pytest.mark.parametrize("message", [b"\0ada\0secret", b"ada\0ada\0secret"])
def test_a_message_says_who_and_by_which_password(message: bytes) -> None:
    assert parse_plain(message) == PlainLogin("ada", "secret")
    assert "secret" not in repr(parse_plain(message))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"ada\0secret",
        b"\0ada\0secret\0more",
        b"\0ada\0sec\0ret",
        b"\0ada\0",
        b"\0\0secret",
        b"bob\0ada\0secret",
        b"\0" + b"a" * 256 + b"\0secret",
        b"\0ada\0" + b"s" * 256,
        b"\0ada\0\xff\xfe",
    ],
)
def test_a_message_that_is_refused(message: bytes) -> None:
    with pytest.raises(SaslAuthenticationFailed):
        parse_plain(message)


def test_our_client_sends_one_message_and_takes_an_empty_answer() -> None:
    client = PlainClient("ada", "secret")
    message = client.step(None)
    assert message == b"\0ada\0secret"
    assert client.step(b"") is None
    assert client.done
    with pytest.raises(SaslAuthenticationFailed):
        PlainClient("ada", "secret").step(b"more")


@pytest.mark.parametrize(
    ("user", "password"), [("", "s"), ("a", ""), ("a\0b", "s"), ("a", "s" * 256)]
)
def test_what_our_client_cannot_send(user: str, password: str) -> None:
    with pytest.raises(SaslAuthenticationFailed):
        PlainClient(user, password)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            f'{PLAIN_MODULE} required username="ada" password="s=;\'x";',
            {"username": "ada", "password": "s=;'x"},
        ),
        (f"{PLAIN_MODULE} Required user_ada='s' ;", {"user_ada": "s"}),
        (f'{PLAIN_MODULE} required "user_a b"="c";\n', {"user_a b": "c"}),
        (
            f'{PLAIN_MODULE} required a="x\\"y\\\\z\\t" b=word; // said',
            {"a": 'x"y\\z\t', "b": "word"},
        ),
        (f"/* one */ {PLAIN_MODULE} required;", {}),
        (f'{PLAIN_MODULE} required empty="" ;', {"empty": ""}),
    ],
)
def test_an_entry_that_java_reads(text: str, options: dict[str, str]) -> None:
    entry = parse_jaas(text)
    assert entry == JaasEntry(PLAIN_MODULE, options)
    assert "ada" not in repr(entry)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must begin with"),
        (f"{PLAIN_MODULE};", "must begin with"),
        (f"{PLAIN_MODULE} required", "ends with ;"),
        (f"{PLAIN_MODULE} always;", "required"),
        ('com.sun.security.auth.module.Krb5LoginModule required a="hush";', "is not one of"),
        (f"{PLAIN_MODULE} required; {SCRAM_MODULE} required;", "one entry"),
        (f'{PLAIN_MODULE} required a="hush" a="hush";', "twice"),
        (f"{PLAIN_MODULE} required password;", "has no value"),
        (f"{PLAIN_MODULE} required password=;", "option 1 has no value"),
        (f"{PLAIN_MODULE} required password=top hush;", "option 2 has no value.*in quotes"),
        (f'{PLAIN_MODULE} required ="hush";', "name="),
        (f'{PLAIN_MODULE} required password="hush;', "begins nothing"),
        (f'{PLAIN_MODULE} required password="\\150ush";', "digits"),
        (f"{PLAIN_MODULE} required password=hush!;", "begins nothing"),
    ],
)
def test_an_entry_that_is_refused_without_showing_a_value(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as refused:
        parse_jaas(text)
    assert "hush" not in str(refused.value)
