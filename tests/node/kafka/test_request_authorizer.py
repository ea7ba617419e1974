"""What a handler sees of a request by somebody with few rights, and what becomes of its answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.cluster.security.acls import ANONYMOUS, AclOperation, AclResourceType
from kept.node.internode.controller_rpc import ForwardRequest
from kept.node.kafka import api, request_authorizer
from kept.node.security.session import DenyAll, Session
from kept.steps import run_to_end
from kept.storage.errors import InvariantViolation, UnsupportedVersion
from tests.support.given import Given
from tests.support.request_values import topic_values

LIST_OFFSETS, LIST_GROUPS, CREATE_TOPICS = 2, 16, 19


class Only(DenyAll):
    """Allows operations on topics of some names, and notes who asked."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.askers: list[tuple[str, str, str]] = []

    def allows(self, session: Session, *question: Any, **_: Any) -> bool:  # type: ignore[override]
        self.askers.append((session.principal, session.host, session.mechanism))
        return question[1] == AclResourceType.TOPIC and question[2] in self.names


def asked_for(*topics: str) -> Any:
    partitions = [{"partition_index": 0, "timestamp": -1}]
    values = {"replica_id": -1, "topics": [{"name": n, "partitions": partitions} for n in topics]}
    return protocol.build(protocol.message_type(LIST_OFFSETS, 1, EntityType.request), values)


@pytest.mark.parametrize("later", [False, True])
def test_a_handler_sees_what_is_allowed_and_refusals_stand_where_they_were_asked_for(later):
    seen: list[str] = []

    def handler(_context: Any, request: Any) -> Any:
        seen.extend(topic.name for topic in request.topics)
        answers = [{"name": name, "partitions": ()} for name in reversed(seen)]
        answer = {"topics": answers}

        async def answered() -> Any:
            return answer

        return answered() if later else answer

    session = Session("User:ada", authorizer=Only("b", "d"))
    context = api.RequestContext(LIST_OFFSETS, 1, "c", session)
    served, image = api.served()[LIST_OFFSETS], Given(topics_by_id={})
    work: Any = request_authorizer.serve(
        served, context, asked_for("a", "b", "c", "d", "a", ""), handler, image
    )
    answer: Any = run_to_end(work)
    if later:
        answer = run_to_end(asyncio.run(answer))
    assert seen == ["b", "d"]
    named = [(t["name"], [p["error_code"] for p in t["partitions"]]) for t in answer["topics"]]
    assert named == [("a", [29]), ("a", [29]), ("b", []), ("c", [29]), ("d", []), ("", [29])]


@pytest.mark.parametrize("questions", [0, 1])
def test_an_answer_without_a_question_is_not_sent(questions):
    def handler(context: api.RequestContext, _request: Any) -> Any:
        for _ in range(questions):
            context.may(AclOperation.DESCRIBE, AclResourceType.GROUP, "g")
        return {"error_code": 0, "groups": ()}

    context = api.RequestContext(LIST_GROUPS, 0, "c", Session("User:ada", authorizer=Only()))
    nothing: Any = None
    work: Any = request_authorizer.serve(
        api.served()[LIST_GROUPS], context, nothing, handler, nothing
    )
    if questions:
        assert run_to_end(work)["groups"] == ()
    else:
        with pytest.raises(InvariantViolation, match="list_groups: answered without asking what U"):
            run_to_end(work)


async def test_the_controller_decides_by_whoever_made_a_request_that_was_sent_on(lone):
    handlers = lone.node.parts.handlers
    cls = protocol.message_type(CREATE_TOPICS, 7, EntityType.request)
    values = {"topics": [topic_values("t")], "timeout": 1000, "validate_only": True}
    body = protocol.encode(protocol.build(cls, values))
    only = handlers._authorizer = Only()
    for principal, by_node, asker, code in (
        ("User:ada", False, "User:ada", 29),
        ("", False, ANONYMOUS, 29),  # a node that does not know of principals
        ("User:ada", True, None, 0),
    ):
        request = ForwardRequest(
            CREATE_TOPICS, 7, body, "PLAINTEXT", "c", "10.0.0.1", (), principal, "PLAIN", by_node
        )
        only.askers.clear()
        reply = await handlers.serve_forwarded(request)
        response = protocol.message_type(CREATE_TOPICS, 7, EntityType.response)
        (created,) = protocol.decode(response, reply.body)[0].topics
        assert int(created.error_code) == code
        asked = {(asker, "10.0.0.1", "PLAIN")} if asker else set()
        assert set(only.askers) == asked


@pytest.mark.parametrize(
    ("key", "version"), [(0, 9), (1, 12), (3, 12), (18, 0), (19, 1), (19, 99), (19, -1), (999, 0)]
)
async def test_what_nodes_do_not_send_on_is_refused(lone, key, version):
    request = ForwardRequest(key, version, b"", "PLAINTEXT", by_node=True)
    with pytest.raises(UnsupportedVersion, match=rf"API {key} v{version} is not sent on"):
        await lone.node.parts.handlers.serve_forwarded(request)
