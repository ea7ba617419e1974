"""Groups and transactions over HTTP show no topic, group or id that may not be described."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kept.client.admin.groups import encode_assignment
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.admin.peer_http import PeerHttp
from kept.node.admin.views import consumer_lag, transactions_view
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.http import peer_requests
from kept.node.http.messages import HttpRequest
from kept.node.internode.controller_rpc import PeerHttpReply, PeerHttpRequest
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.session import Session, node_session
from kept.storage.types import TopicPartition

TOPIC, GROUP, ID = AclResourceType.TOPIC, AclResourceType.GROUP, AclResourceType.TRANSACTIONAL_ID
SECRET = "payroll"


def who_sees(
    *resources: tuple[AclResourceType, str], may: Sequence[AclOperation] = (AclOperation.DESCRIBE,)
) -> Session:
    """User:ada, who may describe these; * is whatever there is of a type."""
    rules = [
        AclBinding(
            kind,
            name,
            PatternType.LITERAL,
            "User:ada",
            "*",
            operation,
            AclPermission.ALLOW,
        )
        for kind, name in resources
        for operation in may
    ]
    index = AclIndex().with_changes(rules, [])
    authorizer = StandardAuthorizer(lambda: index, ["User:admin"])
    return Session("User:ada", "10.0.0.1", "PLAINTEXT", authorizer=authorizer)


def ask(lone: Any, session: Session, path: str, **query: str) -> Any:
    async def collect() -> bytes:
        request = HttpRequest("GET", f"/api/v1/{path}", query, session=session)
        response = await lone.node.parts.http._started().routes.respond(request)
        assert response.status == 200, response.value
        return b"".join([piece async for piece in response.chunks])

    return json.loads(lone.run(collect()))


def commit(lone: Any, group: str, **offsets: int) -> None:
    topics = [
        {
            "name": topic,
            "partitions": [
                {
                    "partition_index": 0,
                    "committed_offset": offset,
                    "committed_leader_epoch": -1,
                    "committed_metadata": "",
                }
            ],
        }
        for topic, offset in offsets.items()
    ]
    lone.ask(8, 9, group_id=group, generation_id_or_member_epoch=-1, member_id="", topics=topics)


def join(lone: Any, group: str, *partitions: TopicPartition) -> None:
    """A member that is assigned these."""
    about = {"group_id": group, "protocol_type": "consumer"}
    joined = lone.ask(
        11,
        3,
        **about,
        session_timeout=30_000,
        rebalance_timeout=30_000,
        member_id="",
        protocols=[{"name": "range", "metadata": b""}],
    )
    assert joined.error_code == 0
    assignment = {"member_id": joined.member_id, "assignment": encode_assignment(partitions)}
    synced = lone.ask(
        14,
        3,
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id=None,
        assignments=[assignment],
    )
    assert synced.error_code == 0


@pytest.fixture
def guarded(lone_node) -> Any:
    lone = lone_node(
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users="User:admin",
        group_initial_rebalance_delay_ms="0",
    )
    for topic in ("t", SECRET):
        lone.create(topic)
    lone.http("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for kind in (0, 1):  # the logs of both coordinators
        lone.ask(10, 4, coordinator_keys=["g"], key_type=kind)
    return lone


def test_a_group_shows_topics_that_may_be_described(guarded):
    tps = [TopicPartition("t", 0), TopicPartition(SECRET, 0)]
    join(guarded, "g", *tps)
    commit(guarded, "other", t=0, **{SECRET: 0})
    for group in ("g", "other"):
        some = ask(guarded, who_sees((GROUP, "*"), (TOPIC, "t")), f"groups/{group}")
        assert [row["topic"] for row in some["partitions"]] == ["t"], group
        assert SECRET not in json.dumps(some)
        none = ask(guarded, who_sees((GROUP, "*")), f"groups/{group}")
        assert none["partitions"] == []
        assert len(none["members"]) == len(some["members"]) == (group == "g")
        whole = ask(guarded, who_sees((GROUP, "*"), (TOPIC, "*")), f"groups/{group}")
        assert [row["topic"] for row in whole["partitions"]] == [SECRET, "t"]
        unknown = [seen["partitions_unknown"] for seen in (none, some, whole)]
        assert unknown == ([0, 1, 2] if group == "g" else [0, 0, 0]), "sums are of what is shown"
    listed = ask(guarded, who_sees((GROUP, "*"), (TOPIC, "t")), "groups")["groups"]
    assert {one["group"]: one["topics"] for one in listed} == {"g": ["t"], "other": ["t"]}
    of_topic = ask(guarded, who_sees((GROUP, "other"), (TOPIC, "t")), "topics/t/groups")
    assert [one["group"] for one in of_topic["groups"]] == ["other"]


def test_a_group_behind_many_others_is_found(guarded, monkeypatch):
    """The limit counts those that may be described; so does the number of those left out."""
    monkeypatch.setattr(consumer_lag, "MAX_GROUPS", 2)
    for group in ("a", "b", "c", "zz"):
        commit(guarded, group, t=0)
    for path in ("groups", "topics/t/groups"):
        found = ask(guarded, who_sees((GROUP, "zz"), (TOPIC, "t")), path)
        assert [one["group"] for one in found["groups"]] == ["zz"], path
        assert found["left_out"] == 0, path
    whole = ask(guarded, who_sees((GROUP, "*"), (TOPIC, "t")), "groups")
    assert len(whole["groups"]) == whole["left_out"] == 2


def test_another_node_is_not_asked_for_what_is_not_shown(guarded, monkeypatch):
    """It would answer this node, which may see everything."""

    async def answer(*_: Any, **__: Any) -> PeerHttpReply:
        return PeerHttpReply(200, b'{"groups":[],"partitions":[{"topic":"payroll"}]}')

    monkeypatch.setattr(PeerHttp, "request", answer)
    guarded.node.parts.http._started().routes.alone = False
    commit(guarded, "g", t=0, **{SECRET: 0})
    session = who_sees((GROUP, "*"), (TOPIC, "t"))
    for path in ("groups", "groups/g", "topics/t/groups"):
        assert SECRET not in json.dumps(ask(guarded, session, path, node="7")), path
    assert SECRET in json.dumps(ask(guarded, node_session("PLAINTEXT"), "groups/g", node="7"))


def test_a_transaction_shows_topics_that_may_be_described(guarded, monkeypatch):
    monkeypatch.setattr(transactions_view, "MAX_IDS", 1)
    for name in ("a", "b", "zz"):
        begun = guarded.ask(22, 2, transactional_id=name, transaction_timeout=60_000)
        assert begun.error_code == 0
    added = guarded.ask(
        24,
        0,
        v3_and_below_transactional_id="zz",
        v3_and_below_producer_id=begun.producer_id,
        v3_and_below_producer_epoch=begun.producer_epoch,
        v3_and_below_topics=[{"name": topic, "partitions": [0]} for topic in ("t", SECRET)],
    )
    results = [
        p for topic in added.results_by_topic_v3_and_below for p in topic.results_by_partition
    ]
    assert [int(one.partition_error_code) for one in results] == [0, 0]
    session = who_sees((ID, "zz"), (TOPIC, "t"))
    listed = ask(guarded, session, "transactions")
    assert [one["transactional_id"] for one in listed["transactions"]] == ["zz"]
    assert listed["left_out"] == 0
    shown = ask(guarded, session, "transactions/zz")
    assert [one["topic"] for one in shown["partitions"]] == ["t"]
    everything = ask(guarded, who_sees((ID, "zz"), (TOPIC, "*")), "transactions/zz")
    assert [one["topic"] for one in everything["partitions"]] == [SECRET, "t"]


@pytest.mark.parametrize("query", [{}, {"node": "7"}], ids=["here", "of another node"])
def test_a_topic_shows_its_settings_to_who_may_describe_them(guarded, monkeypatch, query):
    async def answer(
        _: PeerHttp, _node: int, method: str, path: str, *, query: Any, body: Any
    ) -> PeerHttpReply:
        asked.append(path)
        request = PeerHttpRequest(method, path, json.dumps(query), json.dumps(body))
        return await peer_requests.respond(routes, request)

    asked: list[str] = []
    routes = guarded.node.parts.http._started().routes
    routes.alone = False
    monkeypatch.setattr(PeerHttp, "request", answer)
    described = ask(guarded, who_sees((TOPIC, "t")), "topics/t", **query)
    both = (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
    whole = ask(guarded, who_sees((TOPIC, "t"), may=both), "topics/t", **query)
    hidden = {"config", "broker_defaults"}
    assert hidden <= whole.keys()
    assert described == {name: whole[name] for name in whole if name not in hidden}
    assert described["partitions"]
    assert len(asked) == 2 * len(query)
