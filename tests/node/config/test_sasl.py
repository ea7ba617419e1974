"""What settings of SASL are refused, and what is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from kept.client.security.jaas import OAUTH_MODULE, PLAIN_MODULE, SCRAM_MODULE
from kept.node.config.node_config import NodeConfig
from kept.node.config.sasl import sasl_settings, sasl_warnings
from kept.storage.errors import ConfigurationError

SASL = "SASL_PLAINTEXT://localhost:9092"
JWKS = "sasl__oauthbearer__jwks__endpoint__url"
OAUTH = {"sasl__enabled__mechanisms": "OAUTHBEARER", JWKS: "https://issuer.test/keys"}
USERS = f'{PLAIN_MODULE} required username="me" password="hush" user_ada="hush";'


def load(listeners: str = SASL, **settings: str) -> NodeConfig:
    given = {"listeners": listeners, **settings}
    return NodeConfig.load(None, {n.replace("__", "."): v for n, v in given.items()}, {})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "listener SASL_PLAINTEXT is a SASL listener without mechanisms"),
        ({"sasl__enabled__mechanisms": "GSSAPI"}, "GSSAPI (Kerberos), Kafka's default, is not"),
        ({"sasl__enabled__mechanisms": "SCRAM-SHA-1"}, "SCRAM-SHA-1 is not served; there are PL"),
        ({"sasl__enabled__mechanisms": "PLAIN"}, "enables PLAIN, but names no users"),
        (
            {"sasl__enabled__mechanisms": "PLAIN", "plain__sasl__jaas__config": "x"},
            "plain.sasl.jaas.config: it must begin with a login module",
        ),
        (
            {
                "sasl__enabled__mechanisms": "PLAIN",
                "plain__sasl__jaas__config": f"{SCRAM_MODULE} required;",
            },
            "is not PLAIN's login module",
        ),
        (
            {
                "sasl__enabled__mechanisms": "PLAIN",
                "plain__sasl__jaas__config": f'{PLAIN_MODULE} required user_="hush";',
            },
            "user and password of 'user_' must have 1 to 255 bytes",
        ),
        ({"sasl__enabled__mechanisms": "OAUTHBEARER"}, "set sasl.oauthbearer.jwks.endpoint.url to"),
        (OAUTH | {JWKS: "http://localhost/keys"}, "=http://localhost/keys: https://HOST/PATH or"),
        (OAUTH | {JWKS: "ftp://a/keys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "keys.json"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "file:keys.json"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "file://host/keys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "https:///keys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "https://a/k eys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "https://a/k\u00e9ys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "https://a/k\x7fys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "https://a:0/keys"}, "https://HOST/PATH or file:///PATH is wanted"),
        (OAUTH | {JWKS: "https://a:x/keys"}, "jwks.endpoint.url: no URL"),
        (OAUTH | {JWKS: "https://me:hush@a/keys"}, "no user and no password belong in"),
        (OAUTH | {JWKS: "https://me@a/keys"}, "no user and no password belong in"),
        (
            OAUTH | {JWKS: "file:///keys", "kept__sasl__oauthbearer__truststore__location": "ca"},
            "truststore.location says whose certificates to trust, and",
        ),
        (
            OAUTH | {"sasl__oauthbearer__jwks__endpoint__retry__backoff__ms": "20000"},
            "retry.backoff.ms (20000) is above",
        ),
        (OAUTH | {"sasl__oauthbearer__sub__claim__name": ""}, "must not be empty"),
        (OAUTH | {"sasl__oauthbearer__expected__issuer": ""}, "must not be empty"),
        (OAUTH | {"sasl__oauthbearer__clock__skew__seconds": "-1"}, "at least 0"),
        (
            OAUTH | {"oauthbearer__sasl__server__callback__handler__class": "a.B"},
            "access tokens are always checked by their signature",
        ),
        (OAUTH | {"sasl__oauthbearer__token__endpoint__url": "x"}, "for who gets a token"),
        (
            {"kept__sasl__plain__users": "ldap", "sasl__enabled__mechanisms": "PLAIN"},
            "String must be one of: jaas, scram",
        ),
        (
            {
                "listeners": "PLAINTEXT://localhost:9092,NODE://localhost:9093",
                "listener__security__protocol__map": "NODE:SASL_PLAINTEXT",
            },
            "NODE carries the traffic between nodes",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(**settings)
    assert why in str(refused.value)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "password", "is_taken"),
    [
        ("user_a", "h", True),
        ("user_" + "a" * 255, "h" * 255, True),
        ("user_" + "a" * 256, "h", False),
        ("user_a", "h" * 256, False),
        ("user_a", "", False),
        ("user_a\0", "h", False),
        ("user_a", "h\0", False),
    ],
)
def test_users_of_plain_have_names_and_passwords_that_its_message_can_hold(
    option: str, password: str, *, is_taken: bool
) -> None:
    text = f'{PLAIN_MODULE} required "{option}"="{password}";'
    given = {"sasl__enabled__mechanisms": "PLAIN", "plain__sasl__jaas__config": text}
    if is_taken:
        found = sasl_settings(load(**given), "SASL_PLAINTEXT").plain_users
        assert found == {option.removeprefix("user_"): password}
        return
    with pytest.raises(ConfigurationError, match="must have 1 to 255 bytes and no NUL"):
        load(**given)


@pytest.mark.parametrize("url", ["https://a:1/keys", "https://a/keys", "file://localhost/keys"])
def test_where_keys_may_be(url: str) -> None:
    backoffs = {
        f"sasl__oauthbearer__jwks__endpoint__retry__backoff__{name}": "700"
        for name in ("ms", "max__ms")
    }
    tokens = sasl_settings(load(**OAUTH | {JWKS: url} | backoffs), "SASL_PLAINTEXT").tokens
    assert tokens is not None and tokens.jwks_url == url
    assert tokens.retry_backoff_ms == tokens.retry_backoff_max_ms, "as long each time"


def test_where_no_login_by_sasl_is_asked_for_http_takes_the_users_of_plain() -> None:
    config = load(
        "PLAINTEXT://localhost:9092",
        plain__sasl__jaas__config=USERS,
        kept__sasl__plain__users="scram",
    )
    settings = sasl_settings(config, "PLAINTEXT")
    assert (settings.plain_users, settings.stored_passwords) == ({"ada": "hush"}, True)


def test_each_listener_has_mechanisms_and_users_of_its_own() -> None:
    config = load(
        f"A://localhost:1,B://localhost:2,{SASL}",
        listener__security__protocol__map="A:SASL_PLAINTEXT,B:SASL_PLAINTEXT",
        sasl__enabled__mechanisms="SCRAM-SHA-512",
        **{
            "listener.name.a.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.a.plain.sasl.jaas.config": USERS,
            "listener.name.a.connections.max.reauth.ms": "1000",
            "listener.name.b.sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN",
            "listener.name.b.kept.sasl.plain.users": "scram",
            "listener.name.b.scram-sha-256.sasl.jaas.config": f"{SCRAM_MODULE} required;",
        },
    )
    found: list[Any] = []
    for name in ("A", "B", "SASL_PLAINTEXT"):
        settings = sasl_settings(config, name)
        assert "hush" not in repr(settings) + repr(config)
        found.append((settings.mechanisms, settings.plain_users, settings.stored_passwords))
        assert settings.max_reauth_ms == (1000 if name == "A" else 0)
    assert found == [
        (("PLAIN",), {"ada": "hush"}, False),
        (("SCRAM-SHA-256", "PLAIN"), {}, True),
        (("SCRAM-SHA-512",), {}, False),
    ]


@pytest.mark.parametrize("mechanisms", ["OAUTHBEARER", "SCRAM-SHA-512", "PLAIN", "GSSAPI"])
@pytest.mark.parametrize("listener", ["PLAINTEXT://localhost:1", "SSL://localhost:1"])
def test_mechanisms_are_for_listeners_of_sasl(listener: str, mechanisms: str) -> None:
    """GSSAPI is Kafka's default: where nobody logs in by SASL it may stay."""
    name = listener.partition(":")[0]
    config = load(listener, sasl__enabled__mechanisms=mechanisms, plain__sasl__jaas__config=USERS)
    settings = sasl_settings(config, name)
    assert (settings.mechanisms, settings.tokens) == ((), None)
    assert settings.plain_users == {"ada": "hush"}
    assert settings.http_schemes == ("Basic",)
    stored = load(listener, sasl__enabled__mechanisms=mechanisms, kept__sasl__plain__users="scram")
    assert sasl_settings(stored, name).http_schemes == ("Basic",)
    nobody = load(listener, sasl__enabled__mechanisms=mechanisms)
    assert sasl_settings(nobody, name).http_schemes == ()


@pytest.mark.parametrize(
    ("mechanisms", "schemes"),
    [
        ("OAUTHBEARER", ("Bearer",)),
        ("SCRAM-SHA-256", ("Basic",)),
        ("PLAIN", ("Basic",)),
        ("SCRAM-SHA-512,OAUTHBEARER", ("Basic", "Bearer")),
    ],
)
def test_http_takes_what_the_mechanisms_of_its_listener_take(
    mechanisms: str, schemes: tuple[str, ...]
) -> None:
    given = {**OAUTH, "sasl__enabled__mechanisms": mechanisms, "plain__sasl__jaas__config": USERS}
    assert sasl_settings(load(**given), "SASL_PLAINTEXT").http_schemes == schemes


def test_users_that_cannot_be_read_are_refused_on_any_listener() -> None:
    with pytest.raises(ConfigurationError, match="it must begin with a login module"):
        load("PLAINTEXT://localhost:1", plain__sasl__jaas__config="x")


@pytest.mark.parametrize(
    ("listener", "mechanisms", "warned"),
    [
        (SASL, "PLAIN", False),
        ("SASL_PLAINTEXT://10.0.0.1:9092", "SCRAM-SHA-256", False),
        ("SASL_PLAINTEXT://10.0.0.1:9092", "SCRAM-SHA-256,PLAIN", True),
        ("PLAINTEXT://10.0.0.1:9092", "PLAIN", False),
    ],
)
def test_passwords_in_the_clear_are_warned_of(
    listener: str, mechanisms: str, *, warned: bool
) -> None:
    config = load(listener, sasl__enabled__mechanisms=mechanisms, kept__sasl__plain__users="scram")
    assert ["whoever is on the wire" in text for text in sasl_warnings(config)] == [True] * warned


def test_tokens_have_settings_of_their_listener() -> None:
    handler = "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"
    config = load(
        f"A://localhost:1,{SASL}",
        listener__security__protocol__map="A:SASL_PLAINTEXT",
        **OAUTH,
        sasl__oauthbearer__expected__audience="kafka,other",
        **{
            "listener.name.a.sasl.oauthbearer.jwks.endpoint.url": "file:///a%20b/keys",
            "listener.name.a.sasl.oauthbearer.expected.audience": "a",
            "listener.name.a.oauthbearer.sasl.server.callback.handler.class": handler,
            "listener.name.a.oauthbearer.sasl.jaas.config": f"{OAUTH_MODULE} required;",
        },
    )
    own, other = (sasl_settings(config, name).tokens for name in ("A", "SASL_PLAINTEXT"))
    assert own is not None and other is not None
    assert (own.jwks_path, own.audiences) == ("/a b/keys", ("a",))
    assert (other.jwks_path, other.jwks_url) == (None, "https://issuer.test/keys")
    assert (other.audiences, other.issuer, other.skew_s) == (("kafka", "other"), None, 30)
    assert (other.subject_claim, other.scope_claim) == ("sub", "scope")
    by_password = OAUTH | {"sasl__enabled__mechanisms": "SCRAM-SHA-256"}
    assert sasl_settings(load(**by_password), "SASL_PLAINTEXT").tokens is None


@pytest.mark.parametrize(
    ("audience", "issuer", "warned"),
    [("", "", "whatever audience"), ("kafka", "", "whatever issuer"), ("kafka", "i", "")],
)
def test_tokens_for_others_are_warned_of(audience: str, issuer: str, warned: str) -> None:
    given = {"sasl__oauthbearer__expected__audience": audience}
    if issuer:
        given["sasl__oauthbearer__expected__issuer"] = issuer
    warnings = sasl_warnings(load(**OAUTH, **given))
    assert [warned in one for one in warnings] == [True] * bool(warned)
    listener = "SASL_PLAINTEXT://10.0.0.1:9092"
    assert any("takes access tokens by" in one for one in sasl_warnings(load(listener, **OAUTH)))


@pytest.mark.parametrize("lacks", [{"jwt"}, {"cryptography"}, {"jwt", "cryptography"}])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, lacks: set[str]) -> None:
    monkeypatch.setattr(
        "kept.node.config.sasl.find_spec", lambda name: None if name in lacks else object()
    )
    with pytest.raises(ConfigurationError, match=r"pip install 'kept-log\[oauth\]'"):
        load(**OAUTH)
