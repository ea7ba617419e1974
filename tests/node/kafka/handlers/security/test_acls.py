"""DescribeAcls, CreateAcls and DeleteAcls: answers as Apache Kafka 4.3 gave them."""

from __future__ import annotations

import pytest

from kept.cluster.metadata.records import FeatureRecord
from tests.support.decisions import propose

STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
READ, WRITE, ANY = 3, 4, 1
FOO = {
    "resource_type": 2,
    "resource_name": "foo",
    "resource_pattern_type": 3,
    "principal": "User:ada",
    "host": "*",
    "operation": READ,
    "permission_type": 3,
}
ALL = {
    "resource_type_filter": ANY,
    "resource_name_filter": None,
    "pattern_type_filter": ANY,
    "principal_filter": None,
    "host_filter": None,
    "operation": ANY,
    "permission_type": ANY,
}


@pytest.fixture
def guarded(lone_node):
    """A node with an authorizer."""
    return lone_node(authorizer_class_name=STANDARD, super_users="User:ANONYMOUS")


def create(lone, *bindings, version=3):
    answer = lone.ask(30, version, creations=bindings)
    return [(int(r.error_code), r.error_message) for r in answer.results]


def delete(lone, *filters, version=3):
    answer = lone.ask(31, version, filters=filters)
    return [
        (int(r.error_code), [(m.resource_name, m.operation) for m in r.matching_acls])
        for r in answer.filter_results
    ]


def describe(lone, version=3, **wanted):
    answer = lone.ask(29, version, **{**ALL, **wanted})
    return int(answer.error_code), [
        (r.resource_name, r.pattern_type, sorted((a.principal, a.operation) for a in r.acls))
        for r in answer.resources
    ]


@pytest.mark.parametrize("version", range(1, 4))
def test_bindings_are_created_once_described_and_deleted(guarded, version):
    write = {**FOO, "operation": WRITE}
    assert create(guarded, FOO, FOO, write, version=version) == [(0, "")] * 3
    image = guarded.node.parts.metadata.image
    assert len(image.acls) == 2
    assert create(guarded, FOO, version=version) == [(0, "")]
    assert guarded.node.parts.metadata.image is image, "nothing is written where nothing changes"
    ada = [("User:ada", READ), ("User:ada", WRITE)]
    assert describe(guarded, version) == (0, [("foo", 3, ada)])
    assert delete(guarded, {**ALL, "operation": READ}, ALL, version=version) == [
        (0, [("foo", READ)]),
        (0, [("foo", READ), ("foo", WRITE)]),
    ]
    assert describe(guarded, version) == (0, [])
    assert delete(guarded, ALL, version=version) == [(0, [])]


def test_what_is_wrong_is_refused_by_itself(guarded):
    results = create(guarded, {**FOO, "resource_name": ""}, FOO, {**FOO, "operation": 99})
    assert [code for code, _ in results] == [42, 0, 42]
    assert len(guarded.node.parts.metadata.image.acls) == 1
    assert delete(guarded, {**ALL, "permission_type": 0}, ALL) == [(42, []), (0, [("foo", READ)])]
    assert describe(guarded, operation=99) == (42, [])
    assert (
        create(guarded, *[FOO] * 10_001)
        == [(42, "10001 bindings; a request creates at most 10000")] * 10_001
    )


def test_nothing_is_written_while_a_node_could_not_read_it(guarded):
    guarded.run(propose(guarded.node, [FeatureRecord("kept.security", 0)]))
    ((code, message),) = create(guarded, FOO)
    assert code == 35 and "kept.security 1" in message
    assert delete(guarded, ALL, ALL) == [(35, [])] * 2
    assert describe(guarded) == (0, [])


def test_without_an_authorizer_there_are_no_bindings(lone):
    assert create(lone, FOO, FOO) == [(54, "No Authorizer is configured.")] * 2
    assert delete(lone, ALL, ALL) == [(54, [])] * 2
    answer = lone.ask(29, 3, **ALL)
    assert (int(answer.error_code), answer.resources) == (54, ())
    assert answer.error_message == "No Authorizer is configured on the broker"
