"""What was taken from a client is gone at once: on connections that are open, and from fetches that
wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.cluster.metadata.records import AclRecord, RemoveAclRecord
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.http.route_access import CHECK_S
from kept.storage.records import build_batch
from tests.support.grpc_calls import basic
from tests.support.raw_client import RawClient

PRODUCE, FETCH, CREATE = 0, 1, 19
BATCH = build_batch([(1, None, b"v", ())])
READ, WRITE = (
    AclRecord(
        UUID(int=number),
        AclBinding(
            AclResourceType.TOPIC, "t", PatternType.LITERAL, "User:ada", "*", operation,
            AclPermission.ALLOW,
        ),
    )
    for number, operation in ((1, AclOperation.READ), (2, AclOperation.WRITE))
)  # fmt: skip


async def produced(client: RawClient) -> int:
    topics = [{"name": "t", "partition_data": [{"index": 0, "records": BATCH}]}]
    answer = await client.ask(
        PRODUCE, 9, transactional_id=None, acks=1, timeout=1000, topic_data=topics
    )
    return int(answer.responses[0].partition_responses[0].error_code)


async def fetched(client: RawClient, offset: int, max_wait: int = 0) -> int:
    partition = {
        "partition": 0, "current_leader_epoch": -1, "fetch_offset": offset,
        "last_fetched_epoch": -1, "log_start_offset": -1, "partition_max_bytes": 1000,
    }  # fmt: skip
    answer = await client.ask(
        FETCH, 12, replica_id=-1, max_wait=max_wait, min_bytes=1, max_bytes=1000,
        isolation_level=0, session_id=0, session_epoch=-1, forgotten_topics_data=[], rack_id="",
        cluster_id=None, topics=[{"topic": "t", "partitions": [partition]}],
    )  # fmt: skip
    return int(answer.responses[0].partitions[0].error_code)


def test_what_is_taken_is_gone_at_once(lone_node: Callable[..., Any]) -> None:
    node = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil" user_admin="x";',
        authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        super_users="User:admin",
    )
    metadata = node.node.parts.metadata

    async def talk() -> None:
        admin = await RawClient.connect(node.port, "admin", "x")
        new = {"name": "t", "num_partitions": 1, "replication_factor": 1, "assignments": ()}
        topics = [{**new, "configs": ()}]
        await admin.ask(CREATE, 7, topics=topics, timeout=9000, validate_only=False)
        ada = await RawClient.connect(node.port, "ada", "pencil")
        waiting = await RawClient.connect(node.port, "ada", "pencil")
        assert (await produced(ada), await fetched(ada, 0)) == (29, 29)
        await metadata.propose([READ, WRITE])
        assert (await produced(ada), await produced(ada), await fetched(ada, 0)) == (0, 0, 0)
        parked = asyncio.ensure_future(fetched(waiting, 2, max_wait=600_000))
        other = await RawClient.connect(node.port, "ada", "pencil")
        assert await fetched(other, 0) == 0 and not parked.done()
        await metadata.propose([RemoveAclRecord(READ.acl_id), RemoveAclRecord(WRITE.acl_id)])
        assert await parked == 29
        assert (await produced(ada), await fetched(ada, 0)) == (29, 29)
        for client in (admin, ada, waiting, other):
            client.close()

    node.run(asyncio.wait_for(talk(), 60))


CLUSTER = AclRecord(
    UUID(int=3),
    AclBinding(
        AclResourceType.CLUSTER, "kafka-cluster", PatternType.LITERAL, "User:ada", "*",
        AclOperation.DESCRIBE, AclPermission.ALLOW,
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "right"), [("/api/v1/tail?topic=t", READ), ("/api/v1/events", CLUSTER)]
)
def test_a_stream_of_events_ends_with_the_right_to_it(
    lone_node: Callable[..., Any], path: str, right: AclRecord
) -> None:
    node = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil";',
        authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        super_users="User:admin",
        kept_http_idle_ms="600000",
    )
    node.create("t")
    metadata = node.node.parts.metadata
    request = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {basic('ada', 'pencil')}\r\n\r\n"
    )

    async def watch() -> None:
        await metadata.propose([right])
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(request.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"\r\n\r\n")
        await metadata.propose([RemoveAclRecord(right.acl_id)])
        await reader.readuntil(b"0\r\n\r\n")  # the last chunk
        writer.close()

    node.run(asyncio.wait_for(watch(), 20 * CHECK_S))
