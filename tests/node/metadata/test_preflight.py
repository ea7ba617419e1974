"""``kept serve --check``: addresses that this machine does not have, names that nobody knows."""

import errno
import os
import socket
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from kept.node.config.local_cluster import NODE_PORT_OFFSET
from kept.node.config.node_config import NodeConfig
from kept.node.metadata import preflight
from kept.node.metadata.preflight import (
    audit_warnings,
    check,
    check_addresses,
    check_directories,
    check_owners,
    check_tls,
    check_tokens,
)
from kept.node.security.listener_tls import ListenerTls
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import ConfigurationError, DirectoryRefused
from kept.testing.ports import free_port
from tests.support.certificates import DAY, Authority
from tests.support.token_issuer import Issuer


def config(**settings) -> NodeConfig:
    given = {name.replace("_", "."): text for name, text in settings.items()}
    return NodeConfig.load(overrides=given, environ={})


def refusal(**settings) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_addresses(config(**settings))
    return str(caught.value)


THREE = "0@127.0.0.1:10092,1@h:1,2@h:2"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"listeners": "PLAINTEXT://127.0.0.1:9092"},
        {"listeners": "PLAINTEXT://:9092", "advertised_listeners": "PLAINTEXT://localhost:1"},
        {"node_id": "0", "controller_quorum_voters": THREE},
    ],
)
def test_right(settings):
    check_addresses(config(**settings))


def test_a_port_in_use_is_right_the_node_may_be_running():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        check_addresses(config(listeners=f"PLAINTEXT://127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"listeners": "PLAINTEXT://192.0.2.7:9092"},
            "192.0.2.7 is no address of this machine; listen on localhost",
        ),
        (
            {"listeners": "PLAINTEXT://nowhere.invalid:9092"},
            "listeners: PLAINTEXT://nowhere.invalid:9092: nowhere.invalid is not a known host",
        ),
        (
            {"advertised_listeners": "PLAINTEXT://nowhere.invalid:9092"},
            "advertised.listeners: PLAINTEXT://nowhere.invalid:9092: nowhere.invalid is not a",
        ),
        (
            {"node_id": "0", "controller_quorum_voters": "0@nowhere.invalid:10092,1@h:1"},
            "NODE://nowhere.invalid:10092: nowhere.invalid is not a known host",
        ),
        (
            {
                "node_id": "0",
                "controller_quorum_voters": THREE,
                "listeners": "PLAINTEXT://localhost:9092,NODE://192.0.2.7:10092",
            },
            "NODE://192.0.2.7:10092: 192.0.2.7 is no address of this machine",
        ),
    ],
)
def test_wrong(settings, words):
    assert words in refusal(**settings)


def test_directories(tmp_path, monkeypatch):
    check_directories(config(log_dirs=f"{tmp_path}/a,{tmp_path}/b/c"))
    assert not list(tmp_path.iterdir()), "nothing is made"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=f"log.dirs: .*: {tmp_path}/file is not a direc"):
        check_directories(config(log_dirs=f"{tmp_path}/a,{tmp_path}/file/log"))
    monkeypatch.setattr(os, "access", lambda path, _: path != str(tmp_path))
    wrong = config(metadata_log_dir=f"{tmp_path}/m", log_dirs="/elsewhere")
    with pytest.raises(
        ConfigurationError, match=f"metadata.log.dir: .*may not write in {tmp_path}"
    ):
        check_directories(wrong)


def test_tls_is_checked_for_each_listener_as_a_start_would(tmp_path):
    authority = Authority(tmp_path)
    keys, locked = authority.issue("node"), authority.issue("locked", password="opens")
    own = "listener.name.inside."
    given = {
        "listeners": "SSL://localhost:9092,INSIDE://localhost:9093,NODE://localhost:9094",
        "listener.security.protocol.map": "INSIDE:SASL_SSL,NODE:SSL",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "ssl.keystore.location": keys,
        "ssl.truststore.location": authority.ca,
    }
    assert check_tls(NodeConfig(given)) == []
    wrongs = [
        ({"ssl.truststore.location": ""}, "listener NODE: ssl.client.auth=required needs"),
        ({"ssl.keystore.location": "/none"}, "listener SSL: ssl.keystore.location=/none: No such"),
        ({own + "ssl.keystore.location": locked}, "listener INSIDE: .*ssl.key.password is not set"),
        ({own + "ssl.principal.mapping.rules": "X"}, "listener INSIDE: ssl.principal.mapping"),
    ]
    for change, message in wrongs:
        with pytest.raises(ConfigurationError, match=message):
            check_tls(NodeConfig(given | change))
    # On SASL_SSL the setting of all listeners asks nobody for a certificate.
    asked = NodeConfig(given | {"ssl.client.auth": "required"})
    assert [asked.tls_client_auth(one) for one in asked.listeners] == ["required", "none"]
    asked = NodeConfig(given | {own + "ssl.client.auth": "required"})
    assert [asked.tls_client_auth(one) for one in asked.listeners] == ["none", "required"]
    # Nor does any setting let a node come without one.
    for auth in ("none", "requested"):
        never = {"ssl.client.auth": auth, "listener.name.node.ssl.client.auth": auth}
        asked = NodeConfig(given | never)
        assert asked.node_listener and asked.tls_client_auth(asked.node_listener) == "required"


@pytest.mark.parametrize(
    ("validity", "said"),
    [
        ({"not_before": -2 * DAY, "not_after": -DAY}, "the certificate has expired"),
        ({"not_before": DAY}, "the certificate is not valid yet"),
    ],
)
def test_a_certificate_that_no_client_believes_is_warned_of(tmp_path, validity, said):
    """A start does not end with it: a new one is taken without another."""
    keys = Authority(tmp_path).issue("node", "localhost", **validity)
    given = {"listeners": "SSL://localhost:9092", "ssl.keystore.location": keys}
    (warning,) = check_tls(NodeConfig(given))
    assert warning.startswith(f"listener SSL: ssl.keystore.location={keys}: {said}")
    tls = {"listeners": f"SSL://127.0.0.1:{free_port()}", "ssl.keystore.location": keys}
    given = whole(tmp_path, 0).given | tls
    assert check(NodeConfig.load(overrides=given, environ={})) == [warning]


def test_an_audit_log_that_cannot_be_written_is_warned_of(tmp_path, monkeypatch):
    def warned(path: Path) -> list[str]:
        return check(whole(tmp_path, free_port(), kept_audit_path=str(path)))

    assert warned(tmp_path / "audit.log") == []
    assert audit_warnings(config()) == []
    assert "this is a directory: lines of the audit log will be lost" in warned(tmp_path)[0]
    assert f"{tmp_path}/none is no directory" in warned(tmp_path / "none" / "audit.log")[0]
    monkeypatch.setattr(os, "access", lambda *_: False)
    unwritable = config(kept_audit_path=str(tmp_path / "audit.log"))
    assert "this user may not write there" in audit_warnings(unwritable)[0]


@pytest.mark.parametrize("newest", ["TLSv1.2", "TLSv1.3"])
@pytest.mark.parametrize(
    ("made", "shown_by", "why"),
    [
        ({}, "", ""),
        ({"usage": ()}, "", ""),
        ({"of": "other"}, "server", "unable to get local issuer certificate"),
        ({"not_after": -DAY, "not_before": -2 * DAY}, "server", "certificate has expired"),
        ({"usage": (ExtendedKeyUsageOID.SERVER_AUTH,)}, "client", "unsuitable certificate purpose"),
        ({"usage": (ExtendedKeyUsageOID.CLIENT_AUTH,)}, "server", "unsuitable certificate purpose"),
    ],
)
def test_a_node_learns_at_its_start_that_others_would_not_believe_it(
    tmp_path, made, shown_by, why, newest
):
    """Of certificates that are shown by clients alone, or to them, nobody asks that."""
    made = dict(made)
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    keys = (other if made.pop("of", "") else authority).issue("node", "localhost", **made)
    given = {
        "listeners": "SSL://localhost:9092,NODE://localhost:9094",
        "listener.security.protocol.map": "NODE:SSL",
        "ssl.keystore.location": keys,
        "ssl.truststore.location": authority.ca,
        "ssl.protocol": newest,
    }
    config = NodeConfig(given)
    (of_clients,) = config.listeners
    ListenerTls(config, of_clients)
    for start in (check_tls, lambda it: ListenerTls(it, it.node_listener, between_nodes=True)):
        if not why:
            start(config)
            continue
        with pytest.raises(ConfigurationError) as refused:
            start(config)
        said = str(refused.value)
        assert said.startswith(f"listener NODE: ssl.keystore.location={keys}: the certificate that")
        assert f"a {shown_by} shows" in said and why in said
        assert f"ssl.truststore.location={authority.ca}" in said


def test_keys_of_tokens_are_checked_for_each_listener(tmp_path):
    right, wrong = Issuer().write(tmp_path / "keys"), (tmp_path / "none").as_uri()
    url = "sasl.oauthbearer.jwks.endpoint.url"
    given = {
        "listeners": "A://localhost:9092,B://localhost:9093",
        "listener.security.protocol.map": "A:SASL_PLAINTEXT,B:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        url: right,
    }
    check_tokens(NodeConfig(given))
    check_tokens(NodeConfig(given | {url: "https://localhost:1/keys"}))
    with pytest.raises(ConfigurationError, match=f"listener B: {url}={wrong}: No such file"):
        check_tokens(NodeConfig(given | {f"listener.name.b.{url}": wrong}))
    trust = {url: "https://localhost:1/", "kept.sasl.oauthbearer.truststore.location": "/none"}
    with pytest.raises(ConfigurationError, match=r"listener A: kept.sasl.*=/none: No such file"):
        check_tokens(NodeConfig(given | trust))


def whole(tmp_path, port: int, **more) -> NodeConfig:
    meta = tmp_path / "meta"
    meta.mkdir(exist_ok=True)
    return config(
        listeners=f"PLAINTEXT://127.0.0.1:{port}",
        log_dirs=str(tmp_path / "log"),
        metadata_log_dir=str(meta),
        **more,
    )


def test_a_port_that_another_program_has_is_refused(tmp_path):
    port = free_port()
    assert check(whole(tmp_path, port)) == []
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ConfigurationError, match=f"{port} is in use, and not by this node"):
            check(whole(tmp_path, port))
        lock = Disk().lock(str(tmp_path / "meta" / layout.LOCK))
        (warning,) = check(whole(tmp_path, port))
        lock.release()
    assert f"{port} is in use, it seems by this node" in warning


@pytest.mark.parametrize(
    "name",
    ["check_directories", "check_owners", "check_first_users", "check_tls", "check_tokens"],
)
def test_each_check_is_made(tmp_path, monkeypatch, name):
    def refuse(*_):
        raise ConfigurationError(name)

    monkeypatch.setattr(preflight, name, refuse)
    given = whole(tmp_path, free_port())
    with pytest.raises(ConfigurationError, match=name):
        check(given)
    if name == "check_owners":
        assert check(given, adopting=True) == []


@pytest.mark.parametrize("place", ["log", "meta"])
def test_a_directory_of_apache_kafka_is_refused(tmp_path, place):
    given = whole(tmp_path, free_port())
    directory = tmp_path / place
    directory.mkdir(exist_ok=True)
    (directory / "meta.properties").write_text("version=1\nnode.id=0\ncluster.id=abc\n")
    with pytest.raises(DirectoryRefused, match="Kafka"):
        check_owners(given, Disk())


def test_logs_without_an_owner_are_refused(tmp_path):
    (tmp_path / "log" / "orders-0").mkdir(parents=True)
    with pytest.raises(DirectoryRefused, match="holds logs but no meta"):
        check_owners(whole(tmp_path, free_port()), Disk())


@pytest.mark.parametrize(("others", "alone"), [(None, True), ("", True), (",1@h:1", False)])
def test_whose_the_directories_are_is_asked_as_a_start_does(tmp_path, monkeypatch, others, alone):
    asked, more = [], {}
    port = free_port(above=[NODE_PORT_OFFSET])
    if others is not None:
        voters = f"0@127.0.0.1:{port + NODE_PORT_OFFSET}{others}"
        more = {"node_id": "0", "controller_quorum_voters": voters}
    monkeypatch.setattr(
        preflight.directory_ids, "refuse_foreign", lambda *_, **how: asked.append(how)
    )
    check_owners(whole(tmp_path, port, **more), Disk())
    assert asked == [{"node_id": 0, "alone": alone}]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "this user may not bind that port; take one above 1023"),
        (errno.EADDRNOTAVAIL, "127.0.0.1 is no address of this machine"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_why_an_address_cannot_be_listened_on(tmp_path, code, words):
    (listener,) = config(listeners="PLAINTEXT://127.0.0.1:80").listeners
    assert words in preflight._refused(listener, OSError(code, os.strerror(code)))
