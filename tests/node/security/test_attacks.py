"""What was taken from a client is gone at once: on connections that are open, and from fetches that
wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.client.security.scram import ScramClient, salted_password
from kept.cluster.metadata.records import AclRecord, RemoveAclRecord
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.http import route_access
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.support.given import Given
from tests.support.grpc_calls import basic
from tests.support.raw_client import RawClient
from tests.support.request_values import fetch_values, produce_values, topic_values
from tests.support.revocations import Checks

PRODUCE, FETCH, CREATE, FOR_LEADER_EPOCH = 0, 1, 19, 23
BATCH = build_batch([(1, None, b"v", ())])
READ, WRITE = (
    AclRecord(
        UUID(int=number),
        AclBinding(
            AclResourceType.TOPIC,
            "t",
            PatternType.LITERAL,
            "User:ada",
            "*",
            operation,
            AclPermission.ALLOW,
        ),
    )
    for number, operation in ((1, AclOperation.READ), (2, AclOperation.WRITE))
)


async def produced(client: RawClient) -> int:
    answer = await client.ask(PRODUCE, 9, **produce_values("t", BATCH))
    return int(answer.responses[0].partition_responses[0].error_code)


async def fetched(client: RawClient, offset: int, max_wait: int = 0) -> int:
    answer = await client.ask(FETCH, 12, **fetch_values("t", offset, max_wait=max_wait))
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
        topics = [topic_values("t")]
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
        assert (await produced(ada), await fetched(ada, 0)) == (29, 29)
        assert parked.done(), "requests that came later were answered before it"
        assert await parked == 29
        for client in (admin, ada, waiting, other):
            client.close()

    node.run(asyncio.wait_for(talk(), 60))


CLUSTER = AclRecord(
    UUID(int=3),
    AclBinding(
        AclResourceType.CLUSTER,
        "kafka-cluster",
        PatternType.LITERAL,
        "User:ada",
        "*",
        AclOperation.DESCRIBE,
        AclPermission.ALLOW,
    ),
)


DESCRIBE = AclRecord(
    UUID(int=4),
    AclBinding(
        AclResourceType.TOPIC,
        "t",
        PatternType.LITERAL,
        "User:ada",
        "*",
        AclOperation.DESCRIBE,
        AclPermission.ALLOW,
    ),
)


@pytest.fixture
def watched(lone_node: Callable[..., Any]) -> Any:
    """A node with a topic ``t`` and the user ada, who may nothing yet."""
    node = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil";',
        authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        super_users="User:admin",
        kept_http_idle_ms="600000",
    )
    node.create("t")
    return node


async def opened(node: Any, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of ada's, whose head was read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    login = basic("ada", "pencil")
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {login}\r\n\r\n".encode()
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def told(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next event."""
    event = await reader.readuntil(b"data: ") and await reader.readuntil(b"\n\n")
    found: dict[str, Any] = json.loads(event)
    return found


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/api/v1/tail?topic=t", READ),
        ("/api/v1/events", CLUSTER),
        ("/api/v1/events?topic=t&partition=0", DESCRIBE),
    ],
)
def test_a_stream_of_events_ends_with_the_right_to_it(
    watched: Any, path: str, right: AclRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first question after that."""
    metadata, checks = watched.node.parts.metadata, Checks(monkeypatch, route_access)

    async def watch() -> None:
        await metadata.propose([right])
        reader, writer = await opened(watched, path)
        await metadata.propose([RemoveAclRecord(right.acl_id)])
        checks.taken()
        await reader.readuntil(b"0\r\n\r\n")  # the last chunk
        assert checks.since <= 1
        writer.close()

    watched.run(asyncio.wait_for(watch(), 60))


TOTALS = {"records_in", "bytes_in", "bytes_out", "compactions"}


def test_who_may_not_describe_the_cluster_is_told_of_what_he_may(watched: Any) -> None:
    """Passes of topics that he may describe, and that the metadata moved; no totals."""
    metadata, running = watched.node.parts.metadata, watched.node.parts.cleaner.started.running
    running[TopicPartition("t", 0)] = Given(progress=0.5)
    running[TopicPartition("secret", 0)] = Given(progress=0.1)

    async def watch() -> None:
        reader, writer = await opened(watched, "/api/v1/events")
        first = await told(reader)
        assert first["running"] == [] and not TOTALS & first.keys()
        await metadata.propose([DESCRIBE])
        while not (event := await told(reader))["running"]:
            pass
        assert event["image"] > first["image"] and not TOTALS & event.keys()
        assert event["running"] == [{"topic": "t", "partition": 0, "progress": 0.5}]
        await metadata.propose([CLUSTER])
        while not (event := await told(reader)).keys() >= TOTALS:
            pass
        assert [run["topic"] for run in event["running"]] == ["t", "secret"]
        writer.close()

    try:
        watched.run(asyncio.wait_for(watch(), 60))
    finally:
        running.clear()


def test_who_calls_himself_a_replica_learns_no_more_of_where_epochs_end(watched: Any) -> None:
    metadata = watched.node.parts.metadata

    async def ends(client: RawClient, version: int, replica_id: int, topic: str) -> Any:
        asked = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}
        answer = await client.ask(
            FOR_LEADER_EPOCH,
            version,
            replica_id=replica_id,
            topics=[{"topic": topic, "partitions": [asked]}],
        )
        part = answer.topics[0].partitions[0]
        return int(part.error_code), part.leader_epoch, part.end_offset

    async def ask() -> None:
        client = await RawClient.connect(watched.port, "ada", "pencil")
        replicas = [(version, replica) for version in (3, 4) for replica in (0, 1, 2**31 - 1)]
        for version, replica in replicas:
            for topic in ("t", "absent"):
                assert await ends(client, version, replica, topic) == (29, -1, -1)
        await metadata.propose([DESCRIBE, WRITE])
        assert await produced(client) == 0
        as_a_consumer = await ends(client, 4, -1, "t")
        assert as_a_consumer == (0, 0, 1)
        for version, replica in replicas:
            assert await ends(client, version, replica, "t") == as_a_consumer
            assert await ends(client, version, replica, "absent") == (29, -1, -1)
        client.close()

    watched.run(asyncio.wait_for(ask(), 60))


def test_who_may_create_nothing_learns_no_names(watched: Any) -> None:
    """Taken, one that would collide with a taken one, legal and illegal: all are answered alike."""
    watched.create("a.b")

    async def ask() -> None:
        client = await RawClient.connect(watched.port, "ada", "pencil")
        answers = set()
        for name in ("t", "a.b", "a_b", "free", "a b"):
            topics = [topic_values(name)]
            for validate_only in (False, True):
                answer = await client.ask(
                    CREATE, 7, topics=topics, timeout=9000, validate_only=validate_only
                )
                (result,) = answer.topics
                answers.add((int(result.error_code), result.error_message, result.topic_id))
        assert len(answers) == 1 and next(iter(answers))[0] == 29
        client.close()

    watched.run(asyncio.wait_for(ask(), 60))


FROM_ELSEWHERE = [
    ("GET", "Sec-Fetch-Site: cross-site\r\n"),
    ("GET", "Sec-Fetch-Site: same-site\r\n"),
    ("POST", ""),
    ("POST", "Content-Type: application/x-www-form-urlencoded\r\n"),
    ("POST", "X-Kept: 1\r\nSec-Fetch-Site: cross-site\r\n"),
    ("POST", "X-Kept: 1\r\nOrigin: http://evil.example\r\n"),
    ("POST", "X-Kept: 1\r\nOrigin: null\r\n"),
]


@pytest.mark.parametrize(("method", "more"), FROM_ELSEWHERE)
def test_a_browser_that_remembers_a_password_serves_no_other_site(
    watched: Any, method: str, more: str
) -> None:
    watched.run(watched.node.parts.metadata.propose([WRITE, DESCRIBE]))
    login = f"Authorization: {basic('ada', 'pencil')}\r\n"
    for host in ("localhost", "rebound.evil.example"):
        body = '{"topic": "t", "partition": 0, "value": "forged"}' if method == "POST" else ""
        path = "/api/v1/produce" if body else "/api/v1/topics"
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{login}"
        status, _, said = watched.http(f"{head}{more}Content-Length: {len(body)}\r\n\r\n{body}")
        assert status == 400, said
        if host != "localhost":
            status, _, said = watched.http(f"{head}X-Kept: 1\r\nContent-Length: 0\r\n\r\n")
            assert status == 400 and b"kept.http.hosts" in said
    assert watched.node.parts.table.by_name[b"t"].partitions[0].partition.log.log_end_offset == 0


def test_no_connection_becomes_a_websocket(watched: Any) -> None:
    upgrade = (
        "GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    status, headers, _ = watched.http(upgrade)
    assert status == 200 and "upgrade" not in headers and "sec-websocket-accept" not in headers


def test_who_lost_the_administrators_password_gets_in_by_the_nodes_file_alone(
    lone_node: Callable[..., Any], tmp_path: Path
) -> None:
    """A first user of other words changes nothing; a user of PLAIN administers if he is a super
    user, and is gone with the setting.
    """

    def start(scram: str, supers: str = "User:admin", plain: str = 'user_eve="y"') -> Any:
        return lone_node(
            listeners="SASL_PLAINTEXT://127.0.0.1:0",
            log_dirs=str(tmp_path / "log"),
            metadata_log_dir=str(tmp_path / "meta"),
            sasl_enabled_mechanisms="PLAIN,SCRAM-SHA-512",
            kept_bootstrap_scram=f"SCRAM-SHA-512=[name=admin,password={scram}]",
            authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            super_users=supers,
            plain_sasl_jaas_config=f"{PLAIN_MODULE} required {plain};",
        )

    async def admin_is_in(node: Any, password: str) -> bool:
        async with await RawClient.connect(node.port) as client:
            scram = ScramClient("SCRAM-SHA-512", "admin", password)
            answer = await client.login(scram, "SCRAM-SHA-512")
            return bool(answer.error_code.name == "none")

    async def changed(node: Any, password: str) -> list[int]:
        """The codes of a change of the administrator's password by ``rescue``."""
        async with await RawClient.connect(node.port) as client:
            if await client.log_in("rescue", "x"):
                return []
            upsertion = {
                "name": "admin",
                "mechanism": 2,
                "iterations": 4096,
                "salt": b"salt",
                "salted_password": salted_password("SCRAM-SHA-512", password, b"salt", 4096),
            }
            answer = await client.ask(51, 0, deletions=[], upsertions=[upsertion])
            return [int(result.error_code) for result in answer.results]

    def stopped(node: Any, *talks: Any) -> list[Any]:
        found = [node.run(asyncio.wait_for(talk, 60)) for talk in talks]
        node.stop()
        return found

    node = start("lost")
    assert stopped(node, admin_is_in(node, "lost"), changed(node, "new")) == [True, []]
    node = start("other")
    assert stopped(node, admin_is_in(node, "other"), admin_is_in(node, "lost")) == [False, True]
    node = start("other", plain='user_rescue="x"')
    assert stopped(node, changed(node, "new"), admin_is_in(node, "lost")) == [[31], True]
    node = start("other", "User:admin;User:rescue", 'user_rescue="x"')
    assert stopped(node, changed(node, "new")) == [[0]]
    node = start("other")
    talks = changed(node, "newer"), *(admin_is_in(node, word) for word in ("lost", "other", "new"))
    assert stopped(node, *talks) == [[], False, False, True]
