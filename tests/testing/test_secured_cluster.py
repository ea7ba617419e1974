"""``Cluster(security=...)``: users, their files, and what ACLs allow them."""

from __future__ import annotations

import os
import re

import pytest

from kept.cli.run import run
from kept.client.client import OutRecord
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.client.security.security import Security
from kept.storage.errors import ConfigurationError
from kept.testing import Cluster


@pytest.fixture(scope="module")
def secured():
    with Cluster(security="SASL_PLAINTEXT") as cluster:
        yield cluster


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_users_log_in_and_one_of_them_may_do_everything(secured, mechanism):
    topic = secured.create_topic()
    config = secured.command_config("admin", mechanism)
    assert os.stat(config).st_mode & 0o777 == 0o600
    with secured.client(user="admin", mechanism=mechanism) as admin:
        admin.produce(topic, [OutRecord(b"k", b"v")])
    with (
        secured.client(user="bob", mechanism=mechanism) as bob,
        pytest.raises(NotAuthorized, match=f"User:bob lacks Describe on topic {topic}"),
    ):
        bob.produce(topic, [OutRecord(b"k", b"v")])


def test_a_user_may_do_what_an_administrator_was_told_to_allow(secured, capfdbinary):
    topic = secured.create_topic()
    config = secured.command_config("admin")
    assert os.stat(config).st_mode & 0o777 == 0o600
    allowed = []
    with secured.client(user="ada", mechanism="PLAIN") as ada:
        while True:
            try:
                ada.topic(topic)
                ada.topic_configs([topic])
                break
            except NotAuthorized as error:
                (rule,) = re.findall(r"kept (acl add User:ada .*)\)", str(error))
            allowed.append(rule.split(" ", 3)[3])
            where = ("--bootstrap", secured.bootstrap, "--command-config", config)
            assert run([*rule.split(), *where]) == 0
    assert allowed == [f"describe topic:{topic}", f"describe-configs topic:{topic}"]
    with secured.client(user="bob") as bob, pytest.raises(NotAuthorized, match="User:bob lacks De"):
        bob.produce(topic, [OutRecord(b"k", b"v")])
    assert not capfdbinary.readouterr().err


def test_each_refusal_of_a_command_names_the_right_that_is_lacking(secured, capfd, tmp_path):
    """What is about a partition, and told with a group or a transactional id, names its topic."""
    topic = f"{secured.create_topic()}-1"
    where = ("--bootstrap", secured.bootstrap, "--command-config")
    as_admin, as_bob = (
        (*where, secured.command_config(user, "PLAIN")) for user in ("admin", "bob")
    )
    (tmp_path / "value").write_text("v")
    assert run(["topic", "create", topic, *as_admin]) == 0
    assert run(["group", "reset-offsets", "g", "--topic", topic, "--to", "0", *as_admin]) == 0
    given = {
        "produce": [topic, "--transactional-id", "bank", "--file", str(tmp_path / "value")],
        "topic": ["delete-records", topic, "--before", "1"],
        "group": ["delete-offsets", "g", topic],
    }
    capfd.readouterr()
    allowed: dict[str, list[str]] = {name: [] for name in given}
    for name, arguments in given.items():
        while run([name, *arguments, *as_bob]):
            (rule,) = re.findall(r"kept (acl add User:bob .*?)\)", capfd.readouterr().err)
            assert rule.split(" ", 3)[3] not in allowed[name], "it was allowed, and did not help"
            allowed[name].append(rule.split(" ", 3)[3])
            assert run([*rule.split(), *as_admin]) == 0
    assert allowed["produce"][-1] == f"write topic:{topic}"
    assert allowed["topic"][-1] == f"delete topic:{topic}"
    assert allowed["group"][-1] == f"read topic:{topic}"


def test_commands_say_who_may_not_do_what(secured, capfdbinary):
    topic = secured.create_topic()
    where = ("--bootstrap", secured.bootstrap, "--command-config", secured.command_config("bob"))
    assert run(["topic", "describe", topic, *where]) == 1
    assert f"(User:bob lacks Describe on topic {topic};".encode() in capfdbinary.readouterr().err


def test_http_asks_for_the_same_login(secured):
    endpoint = Endpoint(secured.host(), secured.port())
    assert JsonApi(endpoint, security=secured.security()).get("cluster")["ready"]
    with pytest.raises(HttpFailed, match="User:bob may not describe cluster"):
        JsonApi(endpoint, security=secured.security("bob")).get("cluster")
    properties = secured.client_properties("bob")
    properties["sasl.jaas.config"] = properties["sasl.jaas.config"].replace('";', 'x";')
    with pytest.raises(HttpFailed, match="GET /api/v1/cluster: bob was not believed") as caught:
        JsonApi(endpoint, security=Security(properties)).get("cluster")
    assert caught.value.status == 401
    with pytest.raises(HttpFailed, match="a login is needed"):
        JsonApi(endpoint).get("cluster")


def test_other_protocols_are_refused_and_what_is_of_security_is_not_there_without_it():
    with pytest.raises(ConfigurationError, match="security='TLS' is none of SSL, SASL_PLAINTEXT"):
        Cluster(security="TLS")
    plain = Cluster()
    for lacking in (lambda: plain.command_config("ada"), lambda: plain.ca_path):
        with pytest.raises(ConfigurationError, match=r"Cluster\(security=...\)"):
            lacking()
    plain.close()
