"""What a client is given to be secured, and what is said of what it cannot use."""

from __future__ import annotations

import pickle
import traceback

import pytest

from kept.client.security.access_tokens import NoAccessToken
from kept.client.security.jaas import OAUTH_MODULE, PLAIN_MODULE, SCRAM_MODULE
from kept.client.security.security import PLAINTEXT, Security
from kept.storage.errors import ConfigurationError

SECRET = "do-not-show-me"
JAAS = f'{SCRAM_MODULE} required username="ada" password="{SECRET}";'
SCRAM = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.jaas.config": JAAS,
}
SSL = {"security.protocol": "SSL"}
TOKEN_URL = "sasl.oauthbearer.token.endpoint.url"
OAUTH = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "OAUTHBEARER",
    TOKEN_URL: "https://idp.test/token",
    "sasl.oauthbearer.client.credentials.client.id": "svc",
    "sasl.oauthbearer.client.credentials.client.secret": SECRET,
}
UNSIGNED = f'{OAUTH_MODULE} required unsecuredLoginStringClaim_sub="ada";'


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"security.protocol": "TLS"}, "security.protocol is TLS, which is none of PLAINTEXT, SSL"),
        (SSL | {"security.protocl": "S"}, "security.protocl is no .* did you mean security."),
        ({"sasl.mechanism": "PLAIN"}, "sasl.mechanism is given, and security.protocol is not"),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism is GSSAPI, Kafka's default, which is"),
        (SCRAM | {"sasl.mechanism": "SCRAM-SHA-1"}, "sasl.mechanism is SCRAM-SHA-1 which is none"),
        (SCRAM | {"sasl.mechanism": "PLAIN"}, f"names .*Scram.*: for PLAIN .*{PLAIN_MODULE}"),
        ({**SCRAM, "sasl.jaas.config": JAAS[:-1]}, "sasl.jaas.config: it must be one entry"),
        ({**SCRAM, "sasl.jaas.config": f"{SCRAM_MODULE} required;"}, 'lacks username="…"'),
        (
            {**SCRAM, "sasl.jaas.config": JAAS.replace(";", " tokenauth=true;")},
            "has the option tokenauth: a client gives",
        ),
        (
            {n: v for n, v in SCRAM.items() if n != "sasl.jaas.config"},
            "sasl.jaas.config is missing, which SCRAM-SHA-512 needs: .*ScramLoginModule required",
        ),
        (SCRAM | {"sasl.kerberos.service.name": "kafka"}, "for a mechanism that is not here"),
        (SCRAM | {"sasl.login.callback.handler.class": "a.B"}, "names a class of Java"),
        (SSL | {"ssl.engine.factory.class": "a.B"}, "ssl.engine.factory.class"),
        ({n: v for n, v in OAUTH.items() if n != TOKEN_URL}, f"{TOKEN_URL} is missing"),
        (OAUTH | {TOKEN_URL: "http://idp.test/"}, "https:// or file:/// is wanted"),
        (OAUTH | {"sasl.oauthbearer.client.credentials.client.id": ""}, "needs .*client.id and"),
        (OAUTH | {"sasl.jaas.config": JAAS}, f"for OAUTHBEARER it is {OAUTH_MODULE}"),
        (OAUTH | {"sasl.jaas.config": UNSIGNED}, "tokens without a signature are not made"),
        (OAUTH | {"sasl.oauthbearer.config": "principal=ada"}, "without a signature are not made"),
        (OAUTH | {"sasl.oauthbearer.method": "default"}, "without a signature are not made"),
        (OAUTH | {"sasl.oauthbearer.extensions": "a=b"}, "sasl.oauthbearer.extensions is no"),
        (OAUTH | {"sasl.login.callback.handler.class": "a.B"}, "names a class of Java"),
        (SCRAM | {TOKEN_URL: "https://idp.test/"}, "is for OAUTHBEARER, and sasl.mechanism is not"),
        (SSL | {"ssl.truststore.location": "/nowhere/ca.pem"}, "ssl.truststore.location=/nowhere"),
        (SSL | {"ssl.truststore.type": "JKS", "ssl.truststore.location": "t.jks"}, "keytool -list"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_would_be_right(properties, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        Security(properties)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_other_properties_of_a_clients_file_and_those_that_tune_java_are_passed_over():
    more = {"bootstrap.servers": "a:1", "client.id": "c", "sasl.login.retry.backoff.ms": "5"}
    assert Security(SCRAM | more).user == "ada"


def test_a_truststore_is_not_read_where_there_is_no_tls():
    assert Security(SCRAM | {"ssl.truststore.location": "/nowhere/ca.pem"}).context() is None


def test_it_is_a_value_that_shows_nothing():
    security = Security(SCRAM)
    assert repr(security) == "<Security SASL_PLAINTEXT SCRAM-SHA-512>"
    assert repr(Security()) == "<Security PLAINTEXT>"
    again = pickle.loads(pickle.dumps(security))
    assert again == security and hash(again) == hash(security)
    assert security != Security(SCRAM | {"sasl.jaas.config": JAAS.replace("ada", "bob")})
    assert security != PLAINTEXT
    assert security.principal == "User:ada"
    assert PLAINTEXT.principal == "User:ANONYMOUS"


@pytest.mark.parametrize(
    ("changes", "host", "sent"),
    [
        ({}, "10.0.0.1", False),
        ({}, "kafka.example.com", False),
        ({}, "127.0.0.2", True),
        ({}, "localhost", True),
        ({"security.protocol": "SASL_SSL"}, "kafka.example.com", True),
        (
            {
                "sasl.mechanism": "PLAIN",
                "sasl.jaas.config": JAAS.replace(SCRAM_MODULE, PLAIN_MODULE),
            },
            "kafka.example.com",
            True,
        ),
    ],
)
def test_http_sends_no_password_in_the_clear_that_sasl_does_not_send(changes, host, sent):
    login = Security(SCRAM | changes).http_login(host)
    assert login == (("ada", SECRET) if sent else None)
    assert PLAINTEXT.http_login(host) is None


JAVAS = {
    "sasl.login.callback.handler.class": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
    ),
    "sasl.jaas.config": f"{OAUTH_MODULE} required;",
    "sasl.oauthbearer.scope": "kafka",
    "sasl.oauthbearer.header.urlencode": "true",
}


def test_what_says_where_tokens_come_from():
    security = Security(OAUTH | JAVAS)
    assert repr(security) == "<Security SASL_PLAINTEXT OAUTHBEARER>"
    assert (security.user, security.principal, security.who) == ("", "", "the access token")
    assert security.has_secrets and pickle.loads(pickle.dumps(security)) == security
    elsewhere = OAUTH | {"sasl.oauthbearer.client.credentials.client.secret": "${env:HOME}"}
    assert not Security(elsewhere).has_secrets
    in_jaas = {name: OAUTH[name] for name in (*list(OAUTH)[:2], TOKEN_URL)}
    in_jaas["sasl.jaas.config"] = (
        f'{OAUTH_MODULE} required clientId="svc" clientSecret="{SECRET}" scope="s";'
    )
    assert Security(in_jaas).has_secrets
    librdkafkas = {name: OAUTH[name] for name in (*list(OAUTH)[:2], TOKEN_URL)}
    librdkafkas |= {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "svc",
        "sasl.oauthbearer.client.secret": SECRET,
    }
    assert Security(librdkafkas).has_secrets


def test_a_token_of_a_file_is_what_an_exchange_sends(tmp_path):
    path = tmp_path / "token"
    security = Security({**dict(list(OAUTH.items())[:2]), TOKEN_URL: path.as_uri()})
    assert not security.has_secrets
    security.refresh()
    with pytest.raises(NoAccessToken, match="No such file"):
        security.exchange()
    path.write_text("a.b.c")
    security = Security(security.properties)
    assert security.http_authorization("kafka.example.com") == "Bearer a.b.c"
    exchange = security.exchange()
    assert exchange is not None
    assert exchange.step(None) == b"n,,\x01auth=Bearer a.b.c\x01\x01"
    assert security.http_login("localhost") is None


def test_http_says_who_asks_as_sasl_does():
    assert Security(SCRAM).http_authorization("10.0.0.1") is None
    assert Security(SCRAM).http_authorization("localhost") == "Basic YWRhOmRvLW5vdC1zaG93LW1l"
    assert PLAINTEXT.http_authorization("localhost") is None
