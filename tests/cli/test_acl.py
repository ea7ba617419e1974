"""``kept acl`` against Apache Kafka and against a node of ours: the same words, the same ACLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.cli.conftest import Kept

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:admin",
}


@pytest.fixture
def kafka(kafka_dist: ModuleType, tmp_path: Path) -> Iterator[Kept]:
    with kafka_dist.Broker(tmp_path, free_port(above=[1]), **AUTHORIZER) as broker:
        yield Kept(broker.bootstrap)


@pytest.mark.java
@pytest.mark.slow
def test_apache_kafka(kafka: Kept) -> None:
    from_the_first_acl_to_none(kafka)


@pytest.mark.slow
def test_a_node_of_ours() -> None:
    with Cluster(**AUTHORIZER) as cluster:
        from_the_first_acl_to_none(Kept(cluster.bootstrap))


def from_the_first_acl_to_none(kept: Kept) -> None:
    assert kept("acl", "list", "--json").json == []
    assert kept("acl", "add", "User:ada", "read,describe-configs", "topic:orders").lines == [
        "added: allow User:ada read topic:orders",
        "added: allow User:ada describe-configs topic:orders",
    ]
    kept("acl", "add", "User:ada", "read", "topic:orders")
    kept("acl", "add", "User:eve", "all", "topic:ord", "--prefix", "--deny", "--host", "10.0.0.1")
    kept("acl", "add", "User:*", "describe", "cluster")
    rows = kept("acl", "list", "--json").json
    assert len(rows) == 4, "what is there is not created twice"
    assert {
        "permission": "deny",
        "principal": "User:eve",
        "operation": "all",
        "resource": "topic:ord",
        "pattern": "prefixed",
        "host": "10.0.0.1",
    } in rows
    decide = kept("acl", "list", "--resource", "topic:orders", "--json").json
    assert [row["principal"] for row in decide] == ["User:eve", "User:ada", "User:ada"]
    assert kept("acl", "list", "--resource", "topic:other", "--json").json == []
    assert kept("acl", "list", "--principal", "User:*").lines[1].split()[:4] == [
        "allow",
        "User:*",
        "describe",
        "cluster",
    ]
    what_is_checked(kept)
    said = kept("acl", "add", "User:bob", "--producer", "--topic", "t", "--transactional-id", "x")
    assert said.lines == [
        "added: allow User:bob write topic:t",
        "added: allow User:bob describe topic:t",
        "added: allow User:bob create topic:t",
        "added: allow User:bob write transactional-id:x",
        "added: allow User:bob describe transactional-id:x",
    ]
    said = kept("acl", "add", "User:bob", "--consumer", "--topic", "t", "--group", "g", "--prefix")
    assert said.lines == [
        "added: allow User:bob read topic:t (prefix)",
        "added: allow User:bob describe topic:t (prefix)",
        "added: allow User:bob read group:g (prefix)",
    ]

    assert kept("acl", "delete", "User:eve", "read", "topic:orders").lines == [
        "deleted: allow User:eve read topic:orders"
    ]
    again = kept("acl", "delete", "User:eve", "read", "topic:orders", status=1)
    assert "there is no such ACL of User:eve" in again.err
    for user in ("User:ada", "User:eve", "User:bob", "User:*"):
        kept("acl", "delete", user, "--all")
    assert kept("acl", "list", "--json").json == []


def what_is_checked(kept: Kept) -> None:
    def checks(*asked: str, status: int = 0) -> list[str]:
        ran = kept("acl", "check", *asked, status=status)
        if status:
            assert f"kept: {asked[0]} may not {asked[1]} {asked[2]} from " in ran.err
        return list(ran.lines)

    assert checks("User:ada", "read,describe", "topic:orders") == [
        "read: allowed: allow User:ada read topic:orders",
        "describe: allowed: allow User:ada read topic:orders",
    ]
    assert checks("User:ada", "write", "topic:orders", status=1) == [
        "write: denied: ACLs name it, but none allows this"
    ]
    kept("acl", "add", "User:eve", "read", "topic:orders")
    assert checks("User:eve", "read", "topic:orders", "--host", "10.0.0.1", status=1) == [
        "read: denied: deny User:eve all topic:ord (prefix) from 10.0.0.1"
    ]
    assert checks("User:eve", "read", "topic:orders", "--host", "10.0.0.2") == [
        "read: allowed: allow User:eve read topic:orders"
    ]
    assert checks("User:bob", "read", "topic:none", status=1) == [
        "read: denied: no ACL names it (allow.everyone.if.no.acl.found=false)"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "ada", "read", "topic:t"), "'ada' has no type: write User:ada"),
        (("add", "User:ada", "reed", "topic:t"), "'reed' is no operation: all, read, write,"),
        (("add", "User:ada", "read", "topics:t"), "'topics' is no type of resource: topic, group"),
        (("add", "User:ada", "read", "topic:"), "which topic? Write topic:NAME, or topic:* for"),
        (("add", "User:ada", "read"), "give OPERATIONS and RESOURCE, or --producer or --consumer"),
        (("add", "User:ada", "--producer"), "--producer and --consumer need --topic"),
        (("add", "User:ada", "--consumer", "--topic", "t"), "--consumer needs --group"),
        (("add", "User:ada", "read", "topic:t", "--host", "h"), "'h' is no address: names are not"),
        (("delete", "User:ada"), "give OPERATIONS and RESOURCE, or --all"),
        (("add", "User:ada", "read", "topic:t", "--topic", "u"), "--topic is of --producer and"),
        (("add", "User:ada", "read", "topic:t", "--group", "g"), "--group is of --consumer"),
        (("add", "User:ada", "--producer", "--topic", "t", "--group", "g"), "--group is of"),
        (
            ("add", "User:ada", "read", "topic:t", "--transactional-id", "x"),
            "--transactional-id is of --producer",
        ),
        (("delete", "User:ada", "read", "topic:t", "--all"), "give OPERATIONS and RESOURCE, or"),
        (("delete", "User:ada", "--all", "--deny"), "--all deletes every ACL of PRINCIPAL"),
        (("delete", "User:ada", "--all", "--prefix"), "--all deletes every ACL of PRINCIPAL"),
        (("delete", "User:ada", "--all", "--host", "10.0.0.1"), "--all deletes every ACL of"),
    ],
)
def test_wrong_usage(offline: Kept, arguments, message) -> None:
    ran = offline("acl", *arguments, status=2)
    assert message in ran.err


@pytest.mark.parametrize(
    "topic", [("*",), ("__consumer_offsets",), ("_", "--prefix"), ("__tr", "--prefix")]
)
def test_a_consumer_is_not_given_what_all_groups_commit(offline: Kept, topic) -> None:
    ran = offline(
        "acl", "add", "User:ada", "--consumer", "--group", "g", "--topic", *topic, status=1
    )
    assert "and who reads that reads what all groups commit" in ran.err
