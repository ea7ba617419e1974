"""Secrets that are planted in a node and in its clients are found nowhere that others look."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from kept.cli.run import run
from kept.client.client import Client
from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.security import Security
from kept.node.config.local_security import NODE, LocalSecurity
from kept.storage.errors import KeptError
from kept.testing import Cluster
from tests.support.token_issuer import Issuer

pytestmark = pytest.mark.slow

PLANTED = [
    "planted-plain-password",
    "planted-key-password",
    "planted-scram-password",
    "planted-wrong-password",
    "planted-token",
    "planted-bearer-token",
    "planted-cookie",
]
"""And what is in the private keys, once they are made."""
PLAIN, KEY, SCRAM, WRONG, TOKEN, BEARER, COOKIE = PLANTED
PAGES = (
    "metrics",
    "healthz",
    "readyz",
    "",
    "api/v1/cluster",
    "api/v1/quorum",
    "api/v1/cleaner",
    "api/v1/topics",
    "api/v1/groups",
)


ISSUER = Issuer()
TOKENS: list[str] = []
"""Payloads and signatures of tokens that were shown to a node."""


@pytest.fixture(scope="module", params=["SASL_SSL", "SSL"])
def planted(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with all of them, which logs whatever it can."""
    folder = tmp_path_factory.mktemp("planted")
    security = LocalSecurity(str(folder / "security"), request.param)
    Path(security.directory, "admin.password").write_text(SCRAM)
    encrypt(Path(security.certificates.path(NODE)))
    environ = {
        "KEPT_PLAIN_SASL_JAAS_CONFIG": f'{PLAIN_MODULE} required user_eve="{PLAIN}";',
        "KEPT_SSL_KEY_PASSWORD": KEY,
    }
    if request.param == "SASL_SSL":
        environ["KEPT_SASL_OAUTHBEARER_JWKS_ENDPOINT_URL"] = ISSUER.write(folder / "keys.json")
        mechanisms = {"sasl_enabled_mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER"}
    else:
        mechanisms = {}
    with Cluster(
        directory=folder,
        security=request.param,
        environ=environ,
        kept_log_level="debug",
        **mechanisms,
    ) as cluster:
        yield cluster


def encrypt(path: Path) -> None:
    """A key store's key, by the password that is planted."""
    pem = path.read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    PLANTED.extend(pem.decode().partition("PRIVATE KEY-----\n")[2].splitlines()[:2])
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(KEY.encode()),
        )
        + pem[pem.index(b"-----BEGIN CERTIFICATE-----") :]
    )


def assert_nothing_leaked(text: str, where: str) -> None:
    for secret in PLANTED:
        assert secret not in text, f"{secret} in {where}"
    for token in TOKENS:
        assert token not in text, f"a token in {where}"


def test_a_node_shows_none_of_them(planted):
    topic = planted.create_topic()
    with planted.client() as client:
        client.topic_configs([topic])
        entries = client.broker_configs("0")
        assert_nothing_leaked(str(entries), "DescribeConfigs")
        hidden = {entry.name for entry in entries if entry.sensitive and entry.value is None}
        assert {
            "ssl.key.password",
            "ssl.keystore.key",
            "plain.sasl.jaas.config",
            "kept.bootstrap.scram",
        } <= hidden
        with pytest.raises(KeptError) as caught:
            client.alter_broker("0", {"ssl.key.password": WRONG})
        assert_nothing_leaked("".join(traceback.format_exception(caught.value)), "a refusal")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert_nothing_leaked(process.read_bytes().decode(errors="replace"), str(process))
        except OSError:  # it has ended
            continue
    for path in Path(planted.data_dir()).rglob("*"):
        if path.is_file():
            assert_nothing_leaked(path.read_bytes().decode("latin-1"), str(path))
    assert_nothing_leaked(planted.log(), "the log")


def test_http_shows_none_of_them(planted):
    context = planted.security().context()
    for page in PAGES:
        request = urllib.request.Request(f"{planted.url()}/{page}")
        if login := planted.security().http_login("localhost"):
            token = base64.b64encode(":".join(login).encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        try:
            with urllib.request.urlopen(request, context=context) as answer:
                assert_nothing_leaked(answer.read().decode(), page)
        except urllib.error.HTTPError as refused:
            with refused:
                assert_nothing_leaked(refused.read().decode(), page)


def test_what_a_client_of_http_says_is_shown_to_nobody(planted):
    """Tokens, cookies and passwords, also of requests that are refused."""
    context = planted.security().context()
    basic = base64.b64encode(f"eve:{WRONG}".encode()).decode()
    swapped = base64.b64encode(f"{WRONG}:eve".encode()).decode()
    for authorization in (f"Bearer {BEARER}", f"Basic {basic}", f"Basic {swapped}", BEARER):
        for page, body in (("api/v1/topics", None), ("none", None), ("api/v1/produce", b"{")):
            request = urllib.request.Request(f"{planted.url()}/{page}", data=body)
            request.add_header("Authorization", authorization)
            request.add_header("Cookie", f"session={COOKIE}")
            request.add_header("X-Kept", "1")
            try:
                with urllib.request.urlopen(request, context=context) as answer:
                    said = str(answer.headers) + answer.read().decode()
            except urllib.error.HTTPError as refused:
                with refused:
                    said = str(refused.headers) + refused.read().decode()
            assert_nothing_leaked(said, f"the answer to {page}")
            for secret in (basic, swapped):
                assert secret not in said and secret not in planted.log()
    assert_nothing_leaked(planted.log(), "the log and the audit log")


def test_the_metadata_log_is_dumped_without_keys_of_users(planted, capfdbinary):
    (path,) = Path(planted.data_dir(), "meta").glob("metadata.wal")
    assert run(["log", "dump", str(path)]) == 0
    dumped = capfdbinary.readouterr().out.decode()
    assert_nothing_leaked(dumped, "kept log dump")
    if planted.client_properties()["security.protocol"] == "SASL_SSL":
        assert "admin" in dumped and "[hidden]" in dumped


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_wrong_password_is_shown_by_neither_side(planted, mechanism, tmp_path):
    properties = planted.client_properties(mechanism=mechanism)
    if "sasl.jaas.config" not in properties:
        properties["ssl.key.password"] = WRONG  # the key is not encrypted: nobody asks for it
        assert_nothing_leaked(repr(Security(properties)), "repr")
        return
    properties["sasl.jaas.config"] = properties["sasl.jaas.config"].replace(SCRAM, WRONG)
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    security = Security(properties)
    with Client(planted.bootstrap, security=security) as client:
        with pytest.raises(KeptError, match="not believed") as caught:
            client.metadata()
        shown = [repr(security), repr(client.core.__dict__), repr(caught.value)]
    assert_nothing_leaked("".join([*shown, *traceback.format_exception(caught.value)]), "an error")
    command = [
        sys.executable,
        "-m",
        "kept",
        "topic",
        "list",
        "--bootstrap",
        planted.bootstrap,
        "--command-config",
        str(file),
    ]
    for environ in ({}, {"KEPT_TRACEBACK": "1"}):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **environ}
        )
        assert done.returncode == 1 and "not believed" in done.stderr
        assert_nothing_leaked(done.stdout + done.stderr, "a command")
    assert_nothing_leaked(planted.log(), "the log")


@pytest.mark.parametrize("wrong", [False, True])
def test_an_access_token_is_shown_by_neither_side(planted, wrong, tmp_path):
    properties = planted.client_properties()
    if "sasl.jaas.config" not in properties:
        return
    del properties["sasl.jaas.config"]
    token = ISSUER.token("admin", secret=TOKEN, life_s=-300 if wrong else 300)
    TOKENS.extend(token.split(".")[1:])
    file = tmp_path / "token"
    file.write_text(token)
    properties |= {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": file.as_uri(),
    }
    security = Security(properties)
    shown = [repr(security), repr(security.__reduce__()[0])]
    with Client(planted.bootstrap, security=security) as client:
        if wrong:
            with pytest.raises(KeptError, match="not believed") as caught:
                client.metadata()
            shown += [repr(caught.value), *traceback.format_exception(caught.value)]
        else:
            client.metadata()
        shown.append(repr(client.core.__dict__))
    assert_nothing_leaked("".join(shown), "a client")
    request = urllib.request.Request(f"{planted.url()}/api/v1/cluster")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, context=security.context()) as answer:
            assert not wrong
            assert_nothing_leaked(answer.read().decode(), "an answer")
    except urllib.error.HTTPError as refused:
        with refused:
            assert wrong and refused.status == 401
            assert_nothing_leaked(refused.read().decode() + str(refused.headers), "a refusal")
    assert_nothing_leaked(planted.log(), "the log")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plain.sasl.jaas.config", f'{PLAIN_MODULE} required user_eve="{WRONG}"'),
        ("kept.bootstrap.scram", f"SCRAM-SHA-1=[name=admin,password={WRONG}]"),
        ("kept.bootstrap.scram", f"SCRAM-SHA-512=[name=admin,passwort={WRONG}]"),
        ("listener.name.plaintext.ssl.key.password.x", WRONG),
    ],
)
def test_a_setting_that_is_refused_does_not_show_it(name, value, tmp_path, capfdbinary):
    file = tmp_path / "kept.yaml"
    file.write_text(
        f"{name}: '{value}'\nlisteners: SASL_PLAINTEXT://localhost:1\n"
        "sasl.enabled.mechanisms: PLAIN\n"
    )
    assert run(["serve", "--check", "--config", str(file)]) == 1
    out, err = capfdbinary.readouterr()
    assert_nothing_leaked((out + err).decode(), "kept serve --check")
    assert err
