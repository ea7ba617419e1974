"""The table of routes, lists of other nodes, and names that are nearly right."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.admin.peer_http import PeerHttp
from kept.node.admin.topic_lookup import nearest_name
from kept.node.admin.views.consumer_lag import GroupOfTopic, GroupsOfTopic, PartitionLag
from kept.node.http import json_results, route_table, routes
from kept.node.http.messages import HttpRequest, HttpResponse
from kept.node.http.route_access import DESCRIBABLE_TOPICS, shown
from kept.node.internode.controller_rpc import PeerHttpReply
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.session import Session
from kept.storage.types import Generation

TOPIC = AclResourceType.TOPIC
assert routes, "its import fills the table"


class Nested(Struct, frozen=True):
    """A result with anything in it."""

    name: object
    rows: list[object]


def session_of(prefix):
    """Of User:ada, who may describe topics whose names begin so."""
    describe, allow = AclOperation.DESCRIBE, AclPermission.ALLOW
    rule = AclBinding(TOPIC, prefix, PatternType.PREFIXED, "User:ada", "*", describe, allow)
    index = AclIndex().with_changes([rule], [])
    authorizer = StandardAuthorizer(lambda: index, [])
    return Session("User:ada", "10.0.0.1", "PLAINTEXT", authorizer=authorizer)


@pytest.mark.parametrize(
    ("method", "path", "template", "name"),
    [
        ("GET", "/api/v1/topics", "/api/v1/topics", ""),
        ("GET", "/api/v1/topics/t", "/api/v1/topics/{topic}", "t"),
        ("GET", "/api/v1/topics/t/groups", "/api/v1/topics/{topic}/groups", "t"),
        ("GET", "/api/v1/topics/t/config", "/api/v1/topics/{topic}/config", "t"),
        ("GET", "/api/v1/topics/config", "/api/v1/topics/{topic}", "config"),
        ("GET", "/api/v1/topics/create", "/api/v1/topics/{topic}", "create"),
        ("POST", "/api/v1/topics/create", "/api/v1/topics/create", ""),
        ("GET", "/api/v1/topics/groups", "/api/v1/topics/{topic}", "groups"),
        ("GET", "/api/v1/groups/a/b/groups", "/api/v1/groups/{group}", "a/b/groups"),
        ("GET", "/api/v1/groups/reset-offsets", "/api/v1/groups/{group}", "reset-offsets"),
        ("GET", "/api/v1/brokers/1/config", "/api/v1/brokers/{broker}/config", "1"),
        ("GET", "/console/page.js", "/console/{file}", "page.js"),
    ],
)
def test_a_path_has_one_route(method, path, template, name):
    route, named = route_table.find(path)[method]
    assert route is route_table.ROUTES[template][method] and named == name


@pytest.mark.parametrize("path", ["/api/v1", "/api/v1/brokers", "/api/v1/topics//x?", "/x", "//"])
def test_what_is_no_path_has_none(path):
    assert not [one for one in route_table.find(path).values() if one[1] == ""]


def test_another_method_is_told_which_there_are(lone):
    head = "HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\nContent-Length: 0\r\n\r\n"
    status, headers, _ = lone.http(f"POST /api/v1/topics/t/groups {head}")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    status, headers, _ = lone.http(f"DELETE /api/v1/topics/create {head}")
    assert (status, headers["allow"]) == (405, "POST, GET, HEAD")


POSTS = [
    path
    for path, methods in route_table.ROUTES.items()
    if "POST" in methods and path.startswith("/api/")
]


@pytest.mark.parametrize("allowed", ["true", "false"])
def test_no_page_from_elsewhere_reaches_any_route_that_changes_something(lone_node, allowed):
    lone = lone_node(kept_console_actions=allowed)
    lone.create("t")
    body = json.dumps({"topic": "t", "group": "g", "partition": 0, "to": "latest", "node_id": 7})
    common = f"Host: localhost\r\nContent-Length: {len(body)}\r\n"
    kept = "X-Kept: 1\r\n"
    for path in POSTS:
        for headers, message in (
            ("", "a POST needs the header X-Kept"),
            ("Content-Type: text/plain\r\nOrigin: http://localhost\r\n", "needs the header"),
            (f"{kept}Origin: http://evil.example\r\n", "http://evil.example's pages"),
            (f"{kept}Origin: null\r\n", "null's pages are refused"),
            (f"{kept}Sec-Fetch-Site: cross-site\r\n", "other sites' pages are refused"),
            (f"{kept}Sec-Fetch-Site: same-site\r\n", "other sites' pages are refused"),
        ):
            request = f"POST {path} HTTP/1.1\r\n{common}{headers}\r\n{body}"
            status, _, answer = lone.http(request)
            assert status == 400 and message in answer.decode(), (path, headers)
        rebound = common.replace("localhost", "evil.example")
        status, _, answer = lone.http(f"POST {path} HTTP/1.1\r\n{rebound}{kept}\r\n{body}")
        assert status == 400 and "evil.example is not this node's" in answer.decode(), path
        if allowed == "false":
            own = f"{kept}Origin: http://localhost\r\nSec-Fetch-Site: same-origin\r\n"
            status, _, answer = lone.http(f"POST {path} HTTP/1.1\r\n{common}{own}\r\n{body}")
            assert status == 400 and "the console only reads" in answer.decode(), path
    assert "t" in lone.node.parts.metadata.image.topics


# Lists of other nodes.

texts = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ['"topics":[', '\\"topics\\":[', "]", ",", "ab]}", '{"name":"x"}']
)
answers = st.fixed_dictionaries(
    {
        "before": texts,
        "topics": st.lists(st.fixed_dictionaries({"name": texts, "more": st.lists(texts)})),
        "after": st.integers() | texts,
    }
)


async def collected(chunks):
    return b"".join([chunk async for chunk in chunks])


@given(answers)
def test_items_that_may_not_be_described_are_left_out(answer):
    session = session_of("a")

    async def filtered():
        body = b"".join([json_results.dumps(answer), b"\n"])

        async def pieces():
            for at in range(0, len(body), 7):
                yield body[at : at + 7]

        response = HttpResponse(chunks=pieces(), content_type="application/json")
        return await collected((await shown(DESCRIBABLE_TOPICS, session, response)).chunks)

    found = json.loads(asyncio.run(filtered()))
    topics = [one for one in answer["topics"] if one["name"].startswith("a")]
    assert found == {**answer, "topics": topics}


def test_a_list_of_another_node_is_filtered_where_it_came_in(lone, monkeypatch):
    lone.run(lone.node.parts.http._import())
    served = lone.node.parts.http._started().routes
    served.alone = False
    listed = [{"name": f"{'ab'[n % 2]}{n}", "padding": "x" * 100} for n in range(5000)]
    body = json_results.dumps({"topics": listed})

    async def answer(_self, node, method, path, **_):
        assert (node, method, path) == (7, "GET", "/api/v1/topics")
        return PeerHttpReply(200, body)

    monkeypatch.setattr(PeerHttp, "request", answer)

    async def ask(session):
        request = HttpRequest("GET", "/api/v1/topics", {"node": "7"}, session=session)
        return await collected((await served.respond(request)).chunks)

    found = json.loads(lone.run(ask(session_of("a"))))
    assert found["topics"] == listed[::2]
    assert json.loads(lone.run(ask(session_of("none"))))["topics"] == []
    whole = lone.run(ask(Session(authorizer=lone.node.parts.authorizer)))
    assert whole == body, "passed on as it came"


# Large results.

json_values = st.recursive(
    st.none() | st.integers() | texts | st.builds(Generation, st.integers(0, 9), st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=40)
        | st.dictionaries(texts, st.integers() | st.lists(st.integers(), max_size=40))
        | st.builds(Nested, inner, st.lists(inner))
    ),
    max_leaves=40,
)


@settings(max_examples=30)
@given(st.builds(Nested, json_values, st.lists(json_values, max_size=40)))
def test_pieces_are_the_json_of_the_whole(result):
    assert asyncio.run(collected(json_results.chunks(result))) == json_results.dumps(result) + b"\n"


def test_an_item_with_a_long_list_is_encoded_in_slices():
    """A group may have a thousand partitions of a topic; others have their turns meanwhile."""
    rows = [PartitionLag("t", number, 5, 7, 2, "member") for number in range(1000)]
    groups = [GroupOfTopic(f"g{n}", "Stable", 0, 1, 2000, 0, rows) for n in range(5)]
    result = GroupsOfTopic("t", groups, 0, [])
    body, turns = asyncio.run(collected_beside_others(json_results.chunks(result)))
    assert turns > 20  # it takes some 50 ms
    assert [len(one["partitions"]) for one in json.loads(body)["groups"]] == [1000] * 5


async def collected_beside_others(chunks):
    """The chunks, and how often others had their turn."""
    turns = itertools.count()

    async def others():
        while next(turns) >= 0:
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    body = await collected(chunks)
    task.cancel()
    return body, next(turns)


# Names that are nearly right.


def test_an_unknown_topic_is_answered_with_the_name_that_is_near(lone):
    for name in ("users", "orders", "orders-eu"):
        lone.create(name)
    for path in (
        "topics/usres",
        "topics/usres/groups",
        "search?topic=usres",
        "records?topic=usres&partition=0",
        "tail?topic=usres",
    ):
        head = f"GET /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        status, _, body = lone.http(head)
        assert status == 404, path
        assert (
            json.loads(body)["error"]["message"] == "there is no topic usres; did you mean users?"
        )
    for name, message in (
        ("zzz", "there is no topic zzz"),
        ("order", "there is no topic order; did you mean orders?"),
    ):
        head = f"GET /api/v1/topics/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert json.loads(lone.http(head)[2])["error"]["message"] == message
    head = f"GET /api/v1/topics/{'x' * 5000} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert lone.http(head)[0] == 404


def test_nobody_is_told_the_name_of_what_he_may_not_see(lone):
    lone.create("payroll")
    lone.create("paint")
    lone.run(lone.node.parts.http._import())
    served = lone.node.parts.http._started().routes

    def why(session):
        request = HttpRequest("GET", "/api/v1/topics/payrol", session=session)
        try:
            lone.run(served.respond(request))
        except Exception as error:  # noqa: BLE001 - whatever it says
            return str(error)
        raise AssertionError("there is no such topic")

    assert "did you mean payroll?" in why(session_of("pay"))
    exactly = session_of("payrol")  # payroll, too: the rule is about a prefix
    assert "did you mean payroll?" in why(exactly)
    describe, allow, literal = AclOperation.DESCRIBE, AclPermission.ALLOW, PatternType.LITERAL
    rule = AclBinding(TOPIC, "payrol", literal, "User:ada", "*", describe, allow)
    index = AclIndex().with_changes([rule], [])
    only = StandardAuthorizer(lambda: index, [])
    message = why(Session("User:ada", "10.0.0.1", "PLAINTEXT", authorizer=only))
    assert message == "there is no topic payrol"


def test_the_nearest_of_many_names_is_looked_for_in_slices(lone):
    names = [f"topic-{n:05}" for n in range(20_000)]
    assert lone.run(nearest_name("topic-00042x", names)) == "topic-00042"
    assert lone.run(nearest_name("entirely else", ["users", "orders"])) is None
    assert lone.run(nearest_name("", [])) is None
