"""Every API and every HTTP route refuses whoever has no right to it: a new one needs a row here.

What a stranger is answered about a topic, group or transactional id that exists is, but for its
name, what he is answered about one that does not.
"""

from __future__ import annotations

import random
import re
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import AsyncMock

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    CLUSTER_NAME,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.grpc.call_authorizer import METHODS, CallAuthorizer
from kept.node.grpc.callers import Callers
from kept.node.http import route_table
from kept.node.http.messages import HttpRequest
from kept.node.http.route_access import refusal
from kept.node.kafka import api
from kept.node.security.access import AuthorizedByHandler, PermitAll
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.session import ALLOW_ALL, Session
from kept.storage.errors import InvariantViolation
from tests.support.given import Given
from tests.support.made_requests import about_each, made
from tests.support.strangers import STRANGERS, stranger

TOPIC, GROUP, CLUSTER, ID = 29, 30, 31, 53
NOTHING, OPEN = "nothing is shown", "open"
BYTES = "asked where bytes come in"
EXPECTED: dict[str, Any] = {
    "produce": BYTES,
    "fetch": BYTES,
    "list_offsets": TOPIC,
    "metadata": TOPIC,
    "offset_commit": GROUP,
    "offset_fetch": GROUP,
    "find_coordinator": GROUP,
    "join_group": GROUP,
    "heartbeat": GROUP,
    "leave_group": GROUP,
    "sync_group": GROUP,
    "describe_groups": GROUP,
    "list_groups": NOTHING,
    "sasl_handshake": OPEN,
    "api_versions": OPEN,
    "create_topics": TOPIC,
    "delete_topics": TOPIC,
    "delete_records": TOPIC,
    "init_producer_id": ID,
    "offset_for_leader_epoch": TOPIC,
    "add_partitions_to_txn": {ID, CLUSTER},
    "add_offsets_to_txn": ID,
    "end_txn": ID,
    "write_txn_markers": CLUSTER,
    "txn_offset_commit": ID,
    "describe_acls": CLUSTER,
    "create_acls": CLUSTER,
    "delete_acls": CLUSTER,
    "describe_configs": TOPIC,
    "alter_configs": TOPIC,
    "describe_log_dirs": CLUSTER,
    "sasl_authenticate": OPEN,
    "create_partitions": TOPIC,
    "delete_groups": GROUP,
    "elect_leaders": CLUSTER,
    "incremental_alter_configs": TOPIC,
    "alter_partition_reassignments": CLUSTER,
    "list_partition_reassignments": CLUSTER,
    "offset_delete": GROUP,
    "describe_client_quotas": CLUSTER,
    "alter_client_quotas": CLUSTER,
    "describe_user_scram_credentials": CLUSTER,
    "alter_user_scram_credentials": CLUSTER,
    "describe_quorum": CLUSTER,
    "describe_cluster": OPEN,
    "describe_producers": TOPIC,
    "unregister_broker": CLUSTER,
    "describe_transactions": ID,
    "list_transactions": NOTHING,
    "describe_topic_partitions": TOPIC,
    "add_raft_voter": CLUSTER,
    "remove_raft_voter": CLUSTER,
}
"""By API: the code that stands in every part of the answer, or what else becomes of it."""

EXISTS, ABSENT, OTHER, MINE = "veiled", "absent", "nobody", "myself"
"""All but the first are absent."""
LISTED = {66: {"state_filters": (), "producer_id_filters": ()}}
"""A request for all that there is."""


def codes(message: Any) -> set[int]:
    """Each error code in a response."""
    if isinstance(message, tuple):
        return {code for part in message for code in codes(part)}
    names = getattr(message, "__dataclass_fields__", {})
    found = {code for name in names for code in codes(getattr(message, name))}
    here = {"error_code", "partition_error_code"} & set(names)
    return found | {int(getattr(message, name)) for name in here}


@pytest.fixture
def guarded(lone_node) -> Any:
    lone = lone_node(authorizer_class_name=STANDARD_AUTHORIZER, super_users="User:admin")
    lone.create(EXISTS)
    committed = [
        {
            "partition_index": 0,
            "committed_offset": 0,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
    ]
    for key, version, values in (
        (10, 4, {"coordinator_keys": [EXISTS], "key_type": 0}),
        (
            8,
            9,
            {
                "group_id": EXISTS,
                "member_id": "",
                "generation_id_or_member_epoch": -1,
                "topics": [{"name": EXISTS, "partitions": committed}],
            },
        ),
        (10, 4, {"coordinator_keys": [EXISTS], "key_type": 1}),
        (22, 5, {"transactional_id": EXISTS, "transaction_timeout": 60_000}),
    ):
        assert codes(lone.ask(key, version, **values)) == {0}
    for key, listed in ((16, "groups"), (66, "transaction_states")):
        assert getattr(lone.ask(key, 0, **LISTED.get(key, {})), listed), "it is there to be seen"
    return lone


def test_what_has_no_access_entry_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of both tables are made while their modules are imported; ``access`` has no default.
    Those of gRPC are looked at when its server is made.
    """
    row, handler = partial(api.Api, ApiKey.METADATA, 0, 13, "MetadataHandler", 9), AsyncMock()
    assert row((AuthorizedByHandler(),)).access
    with pytest.raises(TypeError, match="access"):
        row()
    import_module("kept.node.http.routes")
    monkeypatch.setattr(route_table, "ROUTES", {})
    untyped: Any = route_table
    with pytest.raises(TypeError, match="access"):
        untyped.route("GET", "/api/v1/forgotten")
    with pytest.raises(TypeError, match="access"):
        untyped.Route(handler)
    assert not route_table.ROUTES
    route_table.route("GET", "/api/v1/remembered", access=PermitAll())(handler)
    assert route_table.ROUTES["/api/v1/remembered"]["GET"].access == PermitAll()
    live: Any = Given()
    CallAuthorizer(Callers(live), live)
    monkeypatch.delitem(METHODS, "/broker.Broker/Produce")
    with pytest.raises(InvariantViolation, match="Produce: nothing says who"):
        CallAuthorizer(Callers(live), live)


def test_no_access_entry_is_empty() -> None:
    """It would ask nothing."""
    import_module("kept.node.http.routes")
    assert [served.name for served in api.APIS if not served.access] == []
    assert [row for row in every_route() if not route_table.ROUTES[row[1]][row[0]].access] == []


EVERYBODY = [
    pytest.param(name, marks=() if name == "nobody" else pytest.mark.slow) for name in STRANGERS
]


def refused(lone: Any, served: api.Api, version: int, session: Session, *names: str) -> bytes:
    """The answer to a request about what ``names`` name; it refuses all of it."""
    key = served.key
    cls = protocol.message_type(key, version, EntityType.request)
    given = made(cls, names[0])
    if len(names) > 1:
        given = about_each(given, names[0], names)
    given.update({"key_type": 0} if "key_type" in given else LISTED.get(key, {}))
    if key == 16:
        given = dict.fromkeys(given, ())
    request = protocol.build(cls, given)
    context = api.RequestContext(key, version, "c", session)
    values = lone.run(lone.node.parts.handlers.complete(context, request))
    return protocol.encode_response(key, version, 7, values)


@pytest.mark.parametrize("who", EVERYBODY)
def test_every_api_refuses_strangers_and_tells_them_nothing(guarded, who):
    session = stranger(who)
    for served in api.APIS:
        expected = EXPECTED[served.name]
        if expected in (OPEN, BYTES):
            continue
        for version in range(max(served.min_version, served.refused_below), served.max_version + 1):
            about = f"{served.name} v{version} for {who}"
            known, unknown = (
                refused(guarded, served, version, session, name) for name in (EXISTS, ABSENT)
            )
            assert known.replace(EXISTS.encode(), ABSENT.encode()) == unknown, about
            response = protocol.decode_response(served.key, version, known[4:])[1]
            if expected == NOTHING:
                assert codes(response) <= {0}, about
                assert EXISTS.encode() not in known, about
            else:
                allowed = expected if isinstance(expected, set) else {expected}
                parts = codes(tuple(getattr(response, f.name) for f in fields(response)))
                assert parts <= allowed, about
                assert codes(response) - {0} <= allowed and codes(response) != {0}, about


def mine(kind: AclResourceType) -> AclBinding:
    named = kind, MINE, PatternType.LITERAL
    return AclBinding(*named, "User:ada", "*", AclOperation.ALL, AclPermission.ALLOW)


def test_answers_about_several_are_in_no_order_that_tells_what_is_there(
    guarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whoever may do everything with one, which is not there, and asks about two others. Answers
    to DeleteTopics are shuffled, as in Kafka: it is looked at what is shuffled.
    """
    index = AclIndex().with_changes(
        [mine(kind) for kind in KINDS if kind != AclResourceType.CLUSTER]
    )
    authorizer = StandardAuthorizer(partial(same, index), [])
    session = Session("User:ada", "10.0.0.1", "PLAINTEXT", authorizer=authorizer)
    monkeypatch.setattr(random, "shuffle", lambda answers: answers.sort(key=str))
    told = 0
    for served in api.APIS:
        if EXPECTED[served.name] in (OPEN, BYTES) or served.name in ("create_topics", "join_group"):
            continue  # what may be created is
        for version in range(max(served.min_version, served.refused_below), served.max_version + 1):
            for names in ((EXISTS, MINE, ABSENT), (ABSENT, MINE, EXISTS)):
                absent = [name.replace(EXISTS, OTHER) for name in names]
                known, unknown = (
                    refused(guarded, served, version, session, *several)
                    for several in (names, absent)
                )
                about = f"{served.name} v{version}: {names}"
                assert known.replace(EXISTS.encode(), OTHER.encode()) == unknown, about
                told += all(name.encode() in unknown for name in absent)
    assert told > 100, "all are named in their answers"


@pytest.mark.slow
def test_who_may_do_everything_is_not_refused(guarded):
    """The codes above come from rights, not from what is asked."""
    for served in api.APIS:
        if EXPECTED[served.name] in (OPEN, BYTES, NOTHING) or served.key in api.FORWARDED:
            continue
        session = Session("User:admin", "10.0.0.1", "PLAINTEXT", authorizer=ALLOW_ALL)
        if served.name in ("join_group", "sync_group", "find_coordinator", "add_partitions_to_txn"):
            continue  # wait for others, or make topics
        try:
            frame = refused(guarded, served, served.max_version, session, EXISTS)
        except Exception:  # noqa: BLE001 - it was let through, and is no sensible request
            continue
        response = protocol.decode_response(served.key, served.max_version, frame[4:])[1]
        assert not codes(response) & {TOPIC, GROUP, ID}, served.name


DENIED, EMPTY = "denied", "shows nothing"
ROUTES: dict[tuple[str, str], str] = {
    ("GET", "/"): "known",
    ("GET", "/console/{file}"): "known",
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): DENIED,
    ("GET", "/api/v1/cluster"): DENIED,
    ("GET", "/api/v1/quorum"): DENIED,
    ("GET", "/api/v1/topics"): EMPTY,
    ("GET", "/api/v1/topics/{topic}"): DENIED,
    ("GET", "/api/v1/groups"): EMPTY,
    ("GET", "/api/v1/groups/{group}"): DENIED,
    ("GET", "/api/v1/transactions"): EMPTY,
    ("GET", "/api/v1/transactions/{transactional_id}"): DENIED,
    ("GET", "/api/v1/records"): DENIED,
    ("GET", "/api/v1/records/key"): DENIED,
    ("GET", "/api/v1/cleaner"): DENIED,
    ("GET", "/api/v1/compaction"): EMPTY,
    ("GET", "/api/v1/compaction/passes"): DENIED,
    ("GET", "/api/v1/compaction/history"): DENIED,
    ("GET", "/api/v1/compaction/explain"): DENIED,
    ("GET", "/api/v1/compaction/why-missing"): DENIED,
    ("GET", "/api/v1/compaction/lost"): DENIED,
    ("GET", "/api/v1/compaction/replica"): DENIED,
    ("GET", "/api/v1/compaction/digests"): DENIED,
    ("GET", "/api/v1/events"): DENIED,
    ("GET", "/api/v1/pulse"): DENIED,
    ("POST", "/api/v1/partitions/elect"): DENIED,
    ("POST", "/api/v1/compaction/now"): DENIED,
    ("POST", "/api/v1/compaction/retry"): DENIED,
    ("POST", "/api/v1/voters/add"): DENIED,
    ("POST", "/api/v1/voters/remove"): DENIED,
    ("GET", "/api/v1/topics/{topic}/groups"): DENIED,
    ("GET", "/api/v1/topics/{topic}/config"): DENIED,
    ("GET", "/api/v1/search"): DENIED,
    ("GET", "/api/v1/tail"): DENIED,
    ("GET", "/api/v1/history/throughput"): DENIED,
    ("GET", "/api/v1/history/lag"): DENIED,
    ("GET", "/api/v1/brokers/{broker}/config"): DENIED,
    ("POST", "/api/v1/topics/create"): DENIED,
    ("POST", "/api/v1/topics/alter"): DENIED,
    ("POST", "/api/v1/topics/delete"): DENIED,
    ("POST", "/api/v1/produce"): DENIED,
    ("POST", "/api/v1/groups/reset-offsets"): DENIED,
    ("POST", "/api/v1/brokers/config"): DENIED,
}
"""By route: what a stranger gets."""


def every_route() -> list[tuple[str, str]]:
    return [(method, path) for path, methods in route_table.ROUTES.items() for method in methods]


@pytest.mark.parametrize("who", EVERYBODY)
def test_every_route_refuses_strangers_and_tells_them_nothing(lone_node, who):
    lone = lone_node(authorizer_class_name=STANDARD_AUTHORIZER, super_users="User:admin")
    lone.create(EXISTS, cleanup_policy="compact")
    lone.http("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    served, session = lone.node.parts.http._started().routes, stranger(who)
    denied = 401 if session.principal == "User:ANONYMOUS" else 403

    def respond(method: str, path: str, topic: str) -> tuple[int, Any]:
        parameters = {"topic": topic, "group": topic, "partition": 0}
        query = {name: str(value) for name, value in parameters.items()}
        if ROUTES[method, path] == EMPTY:
            query = {}
        named = path.replace("{file}", "page.html").replace("{broker}", "0")
        named = re.sub("{.*}", topic, named)
        request = HttpRequest(method, named, query, parameters, session=session)
        response = lone.run(served.respond(request))
        return response.status, (response.value, response.text)

    for method, path in every_route():
        expected = ROUTES[method, path]
        status, known = respond(method, path, EXISTS)
        about = f"{method} {path} for {who}"
        if expected == DENIED or (expected == "known" and denied == 401):
            assert status == denied, about
            other = respond(method, path, ABSENT)
            assert str(known).replace(EXISTS, ABSENT) == str(other[1]), about
        else:
            assert status == 200, about
            assert EXISTS not in str(known), about


RIGHTS: dict[str, set[str]] = {
    "DESCRIBE CLUSTER": {"cluster", "quorum", "cleaner", "compaction/passes"},
    "DESCRIBE TOPIC": {
        "topics/{topic}",
        "topics/{topic}/groups",
        "history/throughput",
        "compaction",
        "events",
        "compaction/history",
        "compaction/explain",
        "compaction/lost",
        "compaction/replica",
        "pulse",
    },
    "DESCRIBE GROUP": {"history/lag", "groups/{group}"},
    "DESCRIBE TRANSACTIONAL_ID": {"transactions/{transactional_id}"},
    "DESCRIBE_CONFIGS TOPIC": {"topics/{topic}/config"},
    "DESCRIBE_CONFIGS CLUSTER": {"brokers/{broker}/config"},
    "READ TOPIC": {
        "records",
        "records/key",
        "search",
        "tail",
        "compaction/why-missing",
        "compaction/digests",
    },
    "READ TOPIC, READ GROUP": {"groups/reset-offsets"},
    "WRITE TOPIC": {"produce"},
    "DELETE TOPIC": {"topics/delete"},
    "ALTER TOPIC": {"compaction/now", "compaction/retry"},
    "ALTER_CONFIGS TOPIC": {"topics/alter"},
    "ALTER_CONFIGS CLUSTER": {"brokers/config"},
    "ALTER CLUSTER": {"partitions/elect", "voters/add", "voters/remove"},
    "": {"topics", "groups", "transactions", "topics/create"},
}
"""Routes below ``/api/v1/`` by the rights of which none may be missing. Lists are filtered; either
of two rights lets somebody create a topic."""
KINDS = {
    AclResourceType.TOPIC: "*",
    AclResourceType.GROUP: "*",
    AclResourceType.CLUSTER: CLUSTER_NAME,
    AclResourceType.TRANSACTIONAL_ID: "*",
}


def refused_without(method: str, path: str, **more: str) -> str:
    """The rights whose denial beside an ALLOW of everything refuses a route."""

    def rule(kind: AclResourceType, operation: AclOperation, permission: AclPermission) -> Any:
        named = kind, KINDS[kind], PatternType.LITERAL
        return AclBinding(*named, "User:ada", "*", operation, permission)

    everything = [rule(kind, AclOperation.ALL, AclPermission.ALLOW) for kind in KINDS]
    parameters = {"topic": "t", "group": "g", "partition": "0", **more}
    needed = []
    for kind in KINDS:
        for operation in list(AclOperation)[3:]:
            index = AclIndex().with_changes(
                [*everything, rule(kind, operation, AclPermission.DENY)]
            )
            session = Session("User:ada", authorizer=StandardAuthorizer(partial(same, index), []))
            request = HttpRequest(method, path, parameters, parameters, session=session)
            request.named = "named"
            access = route_table.ROUTES[path][method].access_to(request)
            if refusal(session, access, request, audited=False) is not None:
                needed.append(f"{operation.name} {kind.name}")
    return ", ".join(needed)


def same(index: AclIndex) -> AclIndex:
    return index


def test_each_route_asks_for_its_rights() -> None:
    import_module("kept.node.http.routes")
    found: dict[str, set[str]] = {}
    for method, path in every_route():
        if path.startswith(route_table.API):
            rights = refused_without(method, path)
            found.setdefault(rights, set()).add(path.removeprefix(route_table.API))
    assert found == RIGHTS
    assert refused_without("GET", "/metrics") == "DESCRIBE CLUSTER"
    explain, alter = f"{route_table.API}compaction/explain", f"{route_table.API}topics/alter"
    assert refused_without("GET", explain, key="k") == "READ TOPIC"
    assert refused_without("POST", alter, partitions="3") == "ALTER TOPIC"


@pytest.mark.parametrize("who", EVERYBODY)
def test_a_list_of_one_topic_does_not_tell_whether_it_is_there(lone_node, who):
    """One that is compacted, one that is not, and none."""
    lone = lone_node(authorizer_class_name=STANDARD_AUTHORIZER, super_users="User:admin")
    lone.create("compacted", cleanup_policy="compact")
    lone.create("retained")
    lone.http("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    served, session = lone.node.parts.http._started().routes, stranger(who)
    told = set()
    for topic in ("compacted", "retained", ABSENT):
        request = HttpRequest("GET", "/api/v1/compaction", {"topic": topic}, session=session)
        response = lone.run(served.respond(request))
        told.add((response.status, str(response.value).replace(topic, "T")))
    assert len(told) == 1 and min(told)[0] in (401, 403), told
