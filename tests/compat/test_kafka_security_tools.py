"""Apache Kafka's own tools give and take rights and passwords on three nodes, whose active
controller is killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient

from kept.client.admin import cluster as operations
from kept.testing import Cluster
from tests.tools.kafka_dist import tool

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(600)]

ACLS = "org.apache.kafka.tools.AclCommand"
CONFIGS = "kafka.admin.ConfigCommand"
STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3, authorizer_class_name=STANDARD, super_users="User:ANONYMOUS") as cluster:
        yield cluster


def at(cluster: Cluster, node: int) -> tuple[str, str]:
    return "--bootstrap-server", f"localhost:{cluster.port(node)}"


def kill_controller(cluster: Cluster) -> int:
    """Kill the active controller; a node that lives."""
    with cluster.client() as client:
        victim = client.run(operations.describe_cluster()).controller_id
    cluster.kill(victim)
    return (victim + 1) % 3


def revive(cluster: Cluster) -> None:
    for node in range(3):
        if not cluster.running(node):
            cluster.start(node)
    cluster.await_ready()


def listed(cluster: Cluster, node: int, *of: str) -> set[str]:
    lines = tool(ACLS, *at(cluster, node), "--list", *of).splitlines()
    return {line.strip() for line in lines if "principal=" in line}


def test_rights_are_given_and_taken_over_the_death_of_a_controller(three):
    orders = ("--topic", "orders")
    tool(ACLS, *at(three, 0), "--add", "--allow-principal", "User:ada", "--producer", *orders)
    survivor = kill_controller(three)
    more = ("--allow-principal", "User:bob", "--operation", "Read")
    pattern = ("--topic", "or", "--resource-pattern-type", "prefixed")
    added = tool(ACLS, *at(three, survivor), "--add", *more, *pattern)
    assert "Adding ACLs for resource" in added
    ada = "(principal=User:ada, host=*, operation={}, permissionType=ALLOW)"
    bob = "(principal=User:bob, host=*, operation=READ, permissionType=ALLOW)"
    given = {ada.format(operation) for operation in ("WRITE", "DESCRIBE", "CREATE")}
    assert listed(three, survivor) == {*given, bob}
    revive(three)
    for node in range(3):
        assert listed(three, node) == {*given, bob}
        assert listed(three, node, *orders) == given
    survivor = kill_controller(three)
    removed = ("--remove", "--force", "--allow-principal", "User:ada", "--producer", *orders)
    tool(ACLS, *at(three, survivor), *removed)
    assert listed(three, survivor) == {bob}
    revive(three)
    assert [listed(three, node) for node in range(3)] == [{bob}] * 3


def users(cluster: Cluster, node: int) -> dict[str, tuple[str, int]]:
    """Everybody's only mechanism and its iterations."""
    admin = AdminClient({"bootstrap.servers": at(cluster, node)[1]})
    found = {}
    for user, known in admin.describe_user_scram_credentials().result(30).items():
        (info,) = known.scram_credential_infos
        found[user] = (info.mechanism.name, info.iterations)
    return found


def test_passwords_are_set_and_deleted_over_the_death_of_a_controller(three):
    def alter(node: int, user: str, *change: str) -> str:
        entity = ("--entity-type", "users", "--entity-name", user)
        return tool(CONFIGS, *at(three, node), "--alter", *entity, *change)

    said = alter(0, "ada", "--add-config", "SCRAM-SHA-512=[iterations=8192,password=one]")
    assert "Completed updating config for user ada." in said
    survivor = kill_controller(three)
    alter(survivor, "ada", "--add-config", "SCRAM-SHA-512=[password=two]")
    alter(survivor, "bob", "--add-config", "SCRAM-SHA-256=[password=three]")
    revive(three)
    for node in range(3):
        assert users(three, node) == {
            "ada": ("SCRAM_SHA_512", 4096),
            "bob": ("SCRAM_SHA_256", 4096),
        }
    survivor = kill_controller(three)
    alter(survivor, "bob", "--delete-config", "SCRAM-SHA-256")
    revive(three)
    for node in range(3):
        assert users(three, node) == {"ada": ("SCRAM_SHA_512", 4096)}
