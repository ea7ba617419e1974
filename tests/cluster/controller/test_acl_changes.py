"""What is created, deleted and described, as Kafka's AclControlManager decides it."""

from __future__ import annotations

from uuid import UUID

import pytest
from msgspec.structs import asdict, replace

from kept.cluster.controller import acl_changes
from kept.cluster.controller.acl_changes import (
    AclFilter,
    check_filter,
    create_acls,
    delete_acls,
    describe_acls,
    enum_member,
)
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.steps import run_to_end
from kept.storage.errors import InvalidRequest

FOO = AclBinding(
    AclResourceType.TOPIC,
    "foo",
    PatternType.LITERAL,
    "User:ada",
    "*",
    AclOperation.READ,
    AclPermission.ALLOW,
)
PREFIX_FO = replace(FOO, name="fo", pattern=PatternType.PREFIXED)
PREFIX_FOO = replace(FOO, pattern=PatternType.PREFIXED)
WILDCARD = replace(FOO, name="*")
BAR = replace(FOO, name="bar", principal="User:bob", host="10.0.0.1")
GROUP = replace(FOO, resource_type=AclResourceType.GROUP, operation=AclOperation.ALL)
DENIED = replace(FOO, permission=AclPermission.DENY)
ALL = (FOO, PREFIX_FO, PREFIX_FOO, WILDCARD, BAR, GROUP, DENIED)
ACLS = {UUID(int=number): binding for number, binding in enumerate(ALL)}


def created_by(index, bindings) -> acl_changes.AclCreations:
    return run_to_end(create_acls(index, bindings))


def deleted_by(acls, filters) -> acl_changes.AclDeletions:
    return run_to_end(delete_acls(acls, filters))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resource_type": AclResourceType.UNKNOWN}, "UNKNOWN is no resource type"),
        ({"resource_type": AclResourceType.ANY}, "ANY is no resource type"),
        ({"pattern": PatternType.UNKNOWN}, "UNKNOWN is no pattern type"),
        ({"pattern": PatternType.ANY}, "ANY is no pattern type"),
        ({"pattern": PatternType.MATCH}, "MATCH is no pattern type"),
        ({"operation": AclOperation.UNKNOWN}, "UNKNOWN is no operation"),
        ({"operation": AclOperation.ANY}, "ANY is no operation"),
        ({"permission": AclPermission.UNKNOWN}, "UNKNOWN is no permission"),
        ({"permission": AclPermission.ANY}, "ANY is no permission"),
        ({"name": ""}, "resource is empty"),
        ({"resource_type": AclResourceType.CLUSTER}, "kafka-cluster, not foo"),
        ({"principal": "ada"}, "principal 'ada' has no type"),
        ({"principal": ""}, "principal '' has no type"),
    ],
)
def test_what_cannot_be_created(changes, message) -> None:
    created = created_by(AclIndex(), (replace(FOO, **changes), BAR))
    assert message in str(created.results[0])
    assert created.results[1] is None and created.added == (BAR,), "the others are created"


def test_what_is_there_is_created_without_a_change() -> None:
    created = created_by(AclIndex().with_changes((FOO,)), (FOO, BAR, BAR))
    assert created.results == (None, None, None) and created.added == (BAR,)
    host_by_name = replace(FOO, host="example.org", principal="Group:", name="x")
    assert created_by(AclIndex(), (host_by_name,)).added == (host_by_name,), "as Kafka"


def test_requests_have_a_limit(monkeypatch) -> None:
    monkeypatch.setattr(acl_changes, "MAX_CHANGES", 3)
    with pytest.raises(InvalidRequest, match="4 bindings; a request creates at most 3"):
        created_by(AclIndex(), (FOO,) * 4)
    assert len(deleted_by(ACLS, (AclFilter(pattern=PatternType.PREFIXED),)).removed) == 2
    monkeypatch.setattr(acl_changes, "MAX_SCANS", 1)
    with pytest.raises(InvalidRequest, match=r"2 filters that leave a part open; .* at most 1"):
        deleted_by(ACLS, (AclFilter(**asdict(FOO)), AclFilter(), AclFilter()))
    monkeypatch.setattr(acl_changes, "MAX_SCANS", 9)
    with pytest.raises(InvalidRequest, match="more than 3 bindings"):
        deleted_by(ACLS, (AclFilter(principal="User:bob"), AclFilter(name="foo")))
    monkeypatch.setattr(acl_changes, "MAX_MATCHES", 5)
    with pytest.raises(InvalidRequest, match="more than 5 bindings, which is what an answer names"):
        deleted_by(ACLS, (AclFilter(pattern=PatternType.PREFIXED),) * 3)


FILTERS = (
    (AclFilter(), ALL),
    (AclFilter(resource_type=AclResourceType.GROUP), (GROUP,)),
    (AclFilter(name="foo"), (FOO, PREFIX_FOO, GROUP, DENIED)),
    (AclFilter(name="foo", pattern=PatternType.LITERAL), (FOO, GROUP, DENIED)),
    (AclFilter(name="foo", pattern=PatternType.PREFIXED), (PREFIX_FOO,)),
    (
        AclFilter(name="foo", pattern=PatternType.MATCH),
        (FOO, PREFIX_FO, PREFIX_FOO, WILDCARD, GROUP, DENIED),
    ),
    (AclFilter(name="foz", pattern=PatternType.MATCH), (PREFIX_FO, WILDCARD)),
    (AclFilter(name="*", pattern=PatternType.MATCH), (WILDCARD,)),
    (AclFilter(name="*"), (WILDCARD,)),
    (AclFilter(pattern=PatternType.MATCH), ALL),
    (AclFilter(pattern=PatternType.PREFIXED), (PREFIX_FO, PREFIX_FOO)),
    (AclFilter(principal="User:bob"), (BAR,)),
    (AclFilter(principal="User:*"), ()),
    (AclFilter(host="10.0.0.1"), (BAR,)),
    (AclFilter(host="*", name="bar"), ()),
    (AclFilter(operation=AclOperation.ALL), (GROUP,)),
    (AclFilter(operation=AclOperation.WRITE), ()),
    (AclFilter(permission=AclPermission.DENY), (DENIED,)),
    (AclFilter(**asdict(FOO)), (FOO,)),
    (AclFilter(**asdict(replace(FOO, name="none"))), ()),
)


@pytest.mark.parametrize(("wanted", "expected"), FILTERS)
def test_filters(wanted, expected) -> None:
    expected = tuple(sorted(expected))
    deleted = deleted_by(ACLS, (wanted,))
    assert deleted.results == (expected,)
    assert {ACLS[each] for each in deleted.removed} == set(expected)
    described = run_to_end(describe_acls(ACLS.values(), wanted))
    assert tuple(sorted(each for group in described.values() for each in group)) == expected
    for key, group in described.items():
        assert {(each.resource_type, each.name, each.pattern) for each in group} == {key}


@pytest.mark.parametrize(
    ("field", "everybody", "one"), [("principal", "User:*", "User:ada"), ("host", "*", "10.0.0.1")]
)
def test_a_filter_takes_names_by_their_letters(field, everybody, one) -> None:
    """AuthorizerTest's testGetAclsPrincipal: who asks about one is not told of what is for all."""
    for_all, for_one = (replace(FOO, **{field: text}) for text in (everybody, one))
    for wanted, found in ((everybody, for_all), (one, for_one)):
        described = run_to_end(describe_acls((for_all, for_one), AclFilter(**{field: wanted})))
        assert [each for group in described.values() for each in group] == [found]


@pytest.mark.parametrize("wanted", [AclFilter(**asdict(FOO)), AclFilter(principal="User:ada")])
def test_a_binding_goes_under_each_of_its_ids(wanted) -> None:
    """A log of Kafka may hold it twice: a right that is taken back must be gone."""
    deleted = deleted_by({UUID(int=1): FOO, UUID(int=2): FOO}, (wanted,))
    assert deleted.results == ((FOO,),)
    assert set(deleted.removed) == {UUID(int=1), UUID(int=2)}


def test_two_filters_may_find_the_same() -> None:
    deleted = deleted_by(ACLS, (AclFilter(principal="User:bob"), AclFilter(name="bar")))
    assert deleted.results == ((BAR,), (BAR,)) and len(deleted.removed) == 1


@pytest.mark.parametrize(
    "wanted",
    [
        AclFilter(resource_type=AclResourceType.UNKNOWN),
        AclFilter(pattern=enum_member(PatternType, 77)),
        AclFilter(operation=enum_member(AclOperation, -1)),
        AclFilter(permission=enum_member(AclPermission, 0)),
    ],
)
def test_filters_that_are_not_known(wanted) -> None:
    with pytest.raises(InvalidRequest, match="of a filter is not known"):
        check_filter(wanted)
    deleted = deleted_by(ACLS, (wanted, AclFilter(principal="User:bob")))
    assert isinstance(deleted.results[0], InvalidRequest) and deleted.results[1] == (BAR,)
    assert deleted.results[0].__traceback__ is None, "it would hold the frame that holds it"


def test_a_binding_that_is_refused_holds_no_frame() -> None:
    refused, made = created_by(AclIndex(), (replace(FOO, name=""), FOO)).results
    assert isinstance(refused, InvalidRequest) and refused.__traceback__ is None and made is None
