"""The users that a new cluster begins with: their grammar, and the records made of them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from functools import partial

import pytest

from kept.client.security.scram import password_matches, salted_password
from kept.cluster.metadata.records import FeatureRecord, ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from kept.node.config.bootstrap_scram import (
    founding_records,
    parse_bootstrap_scram,
)
from kept.node.config.node_config import NodeConfig
from kept.node.kafka.listener import Listener
from kept.node.metadata.preflight import check_first_users
from kept.node.node import Node
from kept.storage.errors import ConfigurationError
from tests.support.metadata_cluster import Cluster

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512


def encoded(data: bytes) -> str:
    return b64encode(data).decode()


@pytest.mark.parametrize(
    ("text", "users"),
    [
        ("", []),
        ("SCRAM-SHA-512=[name=admin,password=x]", [("admin", SHA_512, "x", 8192)]),
        (
            "SCRAM-SHA-256=[name=a,password=x,iterations=4096]; SCRAM-SHA-512=[name=a,password=y]",
            [("a", SHA_256, "x", 4096), ("a", SHA_512, "y", 8192)],
        ),
        (
            r'SCRAM-SHA-256=[name="a,b]",password="x\"\\;=[é"];',
            [("a,b]", SHA_256, 'x"\\;=[é', 8192)],
        ),
        ("SCRAM-SHA-256=[password=x=,name=a=b]", [("a=b", SHA_256, "x=", 8192)]),
    ],
)
def test_users_as_they_are_written(text, users) -> None:
    parsed = parse_bootstrap_scram(text)
    assert [(u.name, u.mechanism, u.password, u.iterations) for u in parsed] == users
    assert "x" not in repr(parsed)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("admin=hunter", "user 1 is not written as SCRAM-SHA-512="),
        ("SCRAM-SHA-512=[name=admin,password=hunter", "user 1 is not written as"),
        ("SCRAM-SHA-512=[name=a,password=hunter] SCRAM-SHA-512=[", "user 1 is not written as"),
        ("SCRAM-SHA-512=[name=a,password=hunter];hunter", "user 2 is not written as"),
        ("SCRAM-SHA-512=[name=a,password=hun]ter]", "user 1 is not written as"),
        ("PLAIN=[name=admin,password=hunter]", "PLAIN is not one of SCRAM-SHA-256, SCRAM-SHA-512"),
        ("SCRAM-SHA-512=[name=admin]", "'admin' needs exactly one of password-file="),
        ("SCRAM-SHA-512=[name=a,password=hunter,password-file=f]", "'a' needs exactly one of"),
        ("SCRAM-SHA-512=[name=admin,password=]", "'admin' needs exactly one of"),
        ("SCRAM-SHA-512=[password=hunter]", "Username must not be empty"),
        ("SCRAM-SHA-512=[name=a,name=b,password=hunter]", "name= is given twice"),
        ("SCRAM-SHA-512=[name=a,passwort=hunter]", "passwort= is not known; there are name,"),
        ("SCRAM-SHA-512=[name=a,password=hunter,iterations=1]", "'a': Too few iterations"),
        ("SCRAM-SHA-512=[name=a,password=hunter,iterations=x]", "'a': iterations= is not a number"),
        ("SCRAM-SHA-512=[name=a,password=hunter,iterations=9999999999]", "is not a number"),
        ("SCRAM-SHA-512=[name=a,password=hunter\0]", "'a': a password is a line of 1 to 255"),
        (f"SCRAM-SHA-512=[name=a,password={'hunter' * 50}]", "'a': a password is a line of 1 to"),
        ("SCRAM-SHA-512=[name=a,password=hunter,salt=?]", "salt= is not base64"),
        ("SCRAM-SHA-512=[name=a,password=hunter,salt=]", "'a': The salt must have 1 to"),
        ("SCRAM-SHA-512=[name=a,saltedpassword=AAAA]", "'a': saltedpassword= needs salt="),
        ("SCRAM-SHA-512=[name=a,password=hunter];" * 2, "given twice with one mechanism"),
    ],
)
def test_what_is_written_otherwise_is_refused_and_not_shown(text, why) -> None:
    with pytest.raises(ConfigurationError) as refused:
        NodeConfig.load(None, {"kept.bootstrap.scram": text}, {}, port=0, data_dir="x")
    assert why in str(refused.value) and "hunter" not in str(refused.value)


def records(text: str) -> list[ScramCredentialRecord]:
    feature, *users = founding_records(text)
    assert feature == FeatureRecord("kept.security", 1)
    return [user for user in users if isinstance(user, ScramCredentialRecord)]


def test_records_prove_the_passwords(tmp_path) -> None:
    for number, content in enumerate(("secret\n", "secret\r\n", "secret")):
        (tmp_path / str(number)).write_text(content)
        (record,) = records(f"SCRAM-SHA-512=[name=admin,password-file={tmp_path}/{number}]")
        assert (record.user, record.mechanism) == ("admin", SHA_512)
        assert password_matches("SCRAM-SHA-512", "secret", record.credential)
    assert record.credential.iterations == 8192
    (record,) = records(f"SCRAM-SHA-512=[name=a,password=x,salt={encoded(b'salt')}]")
    assert record.credential.salt == b"salt"
    assert founding_records("") == founding_records(None) == ()
    one, other = records("SCRAM-SHA-256=[name=a,password=x];SCRAM-SHA-256=[name=b,password=x]")
    assert one.credential.salt != other.credential.salt
    salted = encoded(salted_password("SCRAM-SHA-256", "x", b"salt", 4096))
    (record,) = records(
        f"SCRAM-SHA-256=[name=a,saltedpassword={salted},salt={encoded(b'salt')},iterations=4096]"
    )
    assert password_matches("SCRAM-SHA-256", "x", record.credential)


def test_a_file_may_hold_the_longest_password(tmp_path) -> None:
    (tmp_path / "password").write_bytes(b"x" * 255 + b"\r\n")
    (record,) = records(f"SCRAM-SHA-256=[name=a,password-file={tmp_path}/password]")
    assert password_matches("SCRAM-SHA-256", "x" * 255, record.credential)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"two\nlines", b"\xff", b"x" * 256, b"x" * 4097, b"x" * 255 + b"\r\ny", None],
)
def test_a_file_without_a_password_is_named(tmp_path, content) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"password-file={path}"):
        founding_records(f"SCRAM-SHA-512=[name=admin,password-file={path}]")


def started(directory, text: str) -> Node:
    """A node that was started, and stopped."""

    async def once() -> Node:
        given = {"kept.bootstrap.scram": text}
        node = Node(NodeConfig.load(None, given, {}, port=0, data_dir=str(directory)))
        await node.start()
        await node.stop()
        return node

    return asyncio.run(once())


def test_a_new_cluster_begins_with_its_users_and_a_restart_resets_nothing(tmp_path, capfd) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    text = f"SCRAM-SHA-512=[name=admin,password-file={password}]"
    image = started(tmp_path / "data", text).parts.metadata.image
    kept = image.credentials["admin", SHA_512]
    assert password_matches("SCRAM-SHA-512", "secret", kept)
    assert image.features["kept.security"] == 1
    said = capfd.readouterr().err
    assert "ignored" not in said and "has a password=" not in said
    password.unlink()  # a secret that is mounted at the first start only
    assert started(tmp_path / "data", text).parts.metadata.image.credentials == image.credentials
    assert "kept.bootstrap.scram is ignored" in capfd.readouterr().err
    started(tmp_path / "data", "SCRAM-SHA-512=[name=eve,password=x]")
    said = capfd.readouterr().err
    assert "kept.bootstrap.scram has a password=" in said


def test_nobody_is_accepted_before_the_first_user_is_there(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, start = [], Listener.start

    async def noted(listener: Listener) -> None:
        began.append(set(listener.context.metadata.image.credentials))
        await start(listener)

    monkeypatch.setattr(Listener, "start", noted)
    for _ in range(2):  # a new cluster, and one that exists
        started(tmp_path / "data", "SCRAM-SHA-512=[name=admin,password=x]")
    assert began == [{("admin", SHA_512)}] * 2


def test_the_check_reads_passwords_where_a_cluster_may_begin(tmp_path) -> None:
    text = f"SCRAM-SHA-512=[name=admin,password-file={tmp_path}/none]"
    given = ({"kept.bootstrap.scram": text}, {})
    config = NodeConfig.load(None, *given, port=0, data_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="none: No such file"):
        check_first_users(config)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "metadata.wal").touch()
    check_first_users(config)


def test_no_node_begins_without_the_password_that_it_was_given_a_file_for(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        started(tmp_path / "data", f"SCRAM-SHA-512=[name=a,password-file={tmp_path}/none]")
    (tmp_path / "none").write_text("x")
    again = started(tmp_path / "data", f"SCRAM-SHA-512=[name=a,password-file={tmp_path}/none]")
    assert again.parts.metadata.image.credentials.keys() == {("a", SHA_512)}


def test_voters_that_were_given_different_users_agree_on_those_of_one() -> None:
    """And there is no moment with a cluster and without its first user, also after a restart of
    those that were given others.
    """
    given = {
        node: partial(
            founding_records,
            f"SCRAM-SHA-256=[name=admin,password=word-{node},iterations=4096];"
            f"SCRAM-SHA-256=[name=of-{node},password=x,iterations=4096]",
        )
        for node in range(3)
    }
    cluster = Cluster(3)

    def start(*nodes: int) -> None:
        for node in nodes:
            cluster.start(node, found_with=given[node])

    def tick(count: int) -> None:
        for _ in range(count):
            cluster.tick()
            for member in cluster.members.values():
                assert bool(member.image.cluster_id) == bool(member.image.credentials)

    start(0, 1, 2)
    assert cluster.leader()
    tick(10)
    images = [member.image for member in cluster.members.values()]
    credentials = dict(images[0].credentials.items())
    assert all(dict(image.credentials.items()) == credentials for image in images)
    ((_, whose),) = [name.split("-") for name, _ in credentials if name != "admin"]
    assert credentials.keys() == {("admin", SHA_256), (f"of-{whose}", SHA_256)}
    for node in range(3):
        matches = password_matches("SCRAM-SHA-256", f"word-{node}", credentials["admin", SHA_256])
        assert matches == (str(node) == whose)
    others = [node for node in range(3) if str(node) != whose]
    cluster.members.clear()
    start(*others)
    assert cluster.leader().node_id in others
    tick(10)
    for member in cluster.members.values():
        assert not member.founding
        assert dict(member.image.credentials.items()) == credentials
