"""ACLs, SCRAM credentials and client quotas that the real Apache Kafka 4.3.0 wrote, some of them
changed and taken back, are in force in kept afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from kept.client.client import Client
from kept.client.security.jaas import SCRAM_MODULE
from kept.client.security.security import Security
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.storage.disk import Disk
from kept.storage.errors import KeptError
from kept.testing.ports import free_port
from tests.node.kafka_import.fixtures import serving

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(300)]

STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
LITERAL, PREFIXED = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
SHA_256 = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
SHA_512 = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)


def binding(name: str, pattern: Any, user: str, operation: Any, permission: Any) -> AclBinding:
    return AclBinding(ResourceType.TOPIC, name, pattern, user, "*", operation, permission)


def secure(admin: AdminClient) -> None:
    """Everything, some of it twice, and some of it taken back."""
    bindings = [
        binding("orders", LITERAL, "User:ada", AclOperation.READ, AclPermissionType.ALLOW),
        binding("or", PREFIXED, "User:bob", AclOperation.ALL, AclPermissionType.DENY),
        binding("gone", LITERAL, "User:ada", AclOperation.WRITE, AclPermissionType.ALLOW),
    ]
    for made in admin.create_acls(bindings).values():
        made.result(30)
    gone = AclBindingFilter(
        ResourceType.ANY,
        "gone",
        ResourcePatternType.ANY,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    for deleted in admin.delete_acls([gone]).values():
        assert len(deleted.result(30)) == 1
    for alteration in (
        UserScramCredentialUpsertion("ada", SHA_512, b"wrong"),
        UserScramCredentialUpsertion("ada", SHA_512, b"secret"),
        UserScramCredentialUpsertion("ada", SHA_256, b"secret"),
        UserScramCredentialUpsertion("bob", SHA_256, b"secret"),
        UserScramCredentialDeletion("bob", ScramMechanism.SCRAM_SHA_256),
    ):
        for altered in admin.alter_user_scram_credentials([alteration]).values():
            altered.result(30)


def bindings_of(admin: AdminClient) -> set[str]:
    everything = AclBindingFilter(
        ResourceType.ANY,
        None,
        ResourcePatternType.ANY,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    return {str(found) for found in admin.describe_acls(everything).result(30)}


def users_of(admin: AdminClient) -> dict[str, list[tuple[str, int]]]:
    described = admin.describe_user_scram_credentials().result(30)
    return {
        user: sorted(
            (info.mechanism.name, info.iterations) for info in known.scram_credential_infos
        )
        for user, known in described.items()
    }


def login(port: int, user: str, password: str, mechanism: str) -> None:
    properties = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{SCRAM_MODULE} required username="{user}" password="{password}";',
    }
    with Client(f"127.0.0.1:{port}", security=Security(properties), timeout_ms=10_000) as client:
        client.metadata()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_secured_kafka_secures_kept(
    kafka_dist: Any, tmp_path: Path, checkpoints: bool
) -> None:
    more = {"metadata_log_max_record_bytes_between_snapshots": 500} if checkpoints else {}
    broker = kafka_dist.Broker(
        tmp_path,
        free_port(above=[1]),
        authorizer_class_name=STANDARD,
        super_users="User:ANONYMOUS",
        **more,
    )
    quota = ("--add-config", "producer_byte_rate=1048576,request_percentage=12.5")
    with broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        secure(admin)
        for change in (quota, ("--delete-config", "request_percentage")):
            kafka_dist.run(
                "kafka.admin.ConfigCommand",
                "--bootstrap-server",
                broker.bootstrap,
                "--alter",
                "--entity-type",
                "users",
                "--entity-name",
                "ada",
                "--entity-type",
                "clients",
                "--entity-default",
                *change,
            )
        before = bindings_of(admin), users_of(admin)
    assert len(before[0]) == 2 and before[1].keys() == {"ada"}
    assert bool([*(broker.data / "__cluster_metadata-0").glob("*-*.checkpoint")]) is checkpoints
    port, sasl = free_port(), free_port()
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{sasl}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{sasl}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,LOGIN:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "authorizer.class.name": STANDARD,
        "super.users": "User:ANONYMOUS",
    }
    with serving([broker.data], [settings], [port]):
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        assert (bindings_of(admin), users_of(admin)) == before
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            login(sasl, "ada", "secret", mechanism)
        for user, password in (("ada", "wrong"), ("bob", "secret")):
            with pytest.raises(KeptError):
                login(sasl, user, password, "SCRAM-SHA-512")
    node = MetadataNode.open(
        f"{broker.data}-meta", Disk(), node_id=0, directory_id=UUID(int=1), random=lambda _: 0
    )
    entity = (("client-id", None), ("user", "ada"))
    assert node.image.quotas == {entity: {"producer_byte_rate": 1048576.0}}
