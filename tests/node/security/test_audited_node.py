"""What a node writes into its audit log: refused logins, denied requests, and changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from kept.client.security.jaas import PLAIN_MODULE
from kept.node.kafka.api import RequestContext
from kept.node.kafka.audited_changes import recorded
from kept.node.proto import broker_pb2
from kept.node.security.session import ALLOW_ALL, Session, node_session
from tests.support.given import Given
from tests.support.grpc_calls import basic, call
from tests.support.loops import until
from tests.support.raw_client import RawClient
from tests.support.request_values import topic_values

CREATE, ELECT = 19, 43


def test_logins_denials_and_changes(lone_node: Any, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    node = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil" user_admin="x";',
        connection_failed_authentication_delay_ms="0",
        authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        super_users="User:admin",
        kept_audit_path=str(path),
    )

    async def talk() -> None:
        for user in ("ada", "hunter2"):
            client = await RawClient.connect(node.port)
            assert await client.log_in(user, "wrong") == 58
            client.close()
        for user, password, codes in (("ada", "pencil", [29, 29]), ("admin", "x", [0, 17])):
            client = await RawClient.connect(node.port)
            assert await client.log_in(user, password) == 0
            topics = [topic_values("t"), topic_values("no/name")]
            answer = await client.ask(CREATE, 7, topics=topics, timeout=9000, validate_only=False)
            assert [int(topic.error_code) for topic in answer.topics] == codes
            topics = [topic_values("u")]
            await client.ask(CREATE, 7, topics=topics, timeout=9, validate_only=True)
            client.close()
        made = broker_pb2.CreateTopicRequest(topic="by-grpc", partitions=1)
        await call(node.port, "CreateTopic", made, basic("admin", "x"))
        await until(lambda: path.exists() and path.read_text().count("\n") >= 7)

    node.run(asyncio.wait_for(talk(), 60))
    assert "hunter2" not in path.read_text(), "people type passwords there"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["principal"], line["event"]) for line in lines] == [
        ("User:ada", "login"),
        (None, "login"),
        ("User:ada", "access"),
        ("User:ada", "access"),
        ("User:ada", "access"),
        ("User:admin", "change"),
        ("User:admin", "change"),
    ]
    assert [line["resource"] for line in lines[2:5]] == ["t", "no/name", "u"]
    assert (lines[2]["operation"], lines[2]["api"]) == ("CREATE", "create_topics")
    assert lines[2]["outcome"] == "denied" and lines[2]["host"] == "127.0.0.1"
    assert lines[5]["api"] == "create_topics" and lines[5]["names"] == ["t"]
    assert (lines[6]["api"], lines[6]["names"]) == ("create_topics", ["by-grpc"])
    assert lines[6]["listener"] == "SASL_PLAINTEXT" and lines[6]["host"] == "127.0.0.1"


def test_elections_are_changes_where_they_took_place_and_nodes_own_requests_are_nobodys() -> None:
    parts = [{"partition_id": 0, "error_code": 0}, {"partition_id": 1, "error_code": 84}]
    answer = {
        "error_code": 0,
        "replica_election_results": [{"topic": "t", "partition_result": parts}],
    }
    changes: list[tuple[str, str, list[str]]] = []
    audit: Any = Given(changed=lambda who, *what: changes.append((who.principal, *what)))
    for session in (Session("User:ada", authorizer=ALLOW_ALL), node_session("PLAINTEXT")):
        told: Any = recorded(audit, RequestContext(ELECT, 2, "c", session), Given(), answer)
        while hasattr(told, "send"):
            try:
                told.send(None)
            except StopIteration as done:
                told = done.value
        assert told == answer
    assert changes == [("User:ada", "elect_leaders", ["t-0"])]
