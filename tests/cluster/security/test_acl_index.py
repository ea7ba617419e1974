"""The index of bindings is equal to a look at each of them, in whatever way it came about."""

from __future__ import annotations

from collections import Counter
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.security.acl_index import AclIndex, Decision, canonical_host
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.addresses import network_of

TOPIC, GROUP = AclResourceType.TOPIC, AclResourceType.GROUP
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALLOW, DENY = AclPermission.ALLOW, AclPermission.DENY
OPERATIONS = tuple(operation for operation in AclOperation if operation > AclOperation.ANY)
IMPLYING = {
    AclOperation.DESCRIBE: (
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.DELETE,
        AclOperation.ALTER,
    ),
    AclOperation.DESCRIBE_CONFIGS: (AclOperation.ALTER_CONFIGS,),
}

names = st.text("ab*", min_size=0, max_size=4)
principals = st.sampled_from(("User:ada", "User:bob", "User:*", "Group:ada", "User:"))
hosts = st.sampled_from(("*", "10.0.0.1", "::ffff:10.0.0.1", "::1", "0:0:0:0:0:0:0:1", "example"))
bindings = st.builds(
    AclBinding,
    resource_type=st.sampled_from((TOPIC, GROUP)),
    name=names,
    pattern=st.sampled_from((LITERAL, PREFIXED)),
    principal=principals,
    host=hosts,
    operation=st.sampled_from(OPERATIONS),
    permission=st.sampled_from((ALLOW, DENY)),
)
questions = st.tuples(
    st.sampled_from(("User:ada", "User:bob", "User:*")),
    st.sampled_from(("10.0.0.1", "::ffff:a00:1", "::1", "10.0.0.2")),
    st.sampled_from(OPERATIONS),
    st.sampled_from((TOPIC, GROUP)),
    names,
)


def _names_it(binding, resource_type, name) -> bool:
    if binding.resource_type is not resource_type:
        return False
    if binding.pattern is PREFIXED:
        return name.startswith(binding.name)
    return binding.name in (name, "*")


def _is_from(binding, principal, host) -> bool:
    if binding.principal not in (principal, "User:*"):
        return False
    if binding.host in ("*", host):
        return True
    try:
        ours, theirs = ip_address(binding.host), ip_address(host)
    except ValueError:
        return False
    return (getattr(ours, "ipv4_mapped", None) or ours) == (
        getattr(theirs, "ipv4_mapped", None) or theirs
    )


def _naive(all_bindings, question) -> set:
    """All decisions that a scan of the bindings allows: the binding may be any that fits."""
    principal, host, operation, resource_type, name = question
    naming = [each for each in all_bindings if _names_it(each, resource_type, name)]
    fitting = [each for each in naming if _is_from(each, principal, host)]
    denies = [
        each
        for each in fitting
        if each.permission is DENY and each.operation in (operation, AclOperation.ALL)
    ]
    if denies:
        return {Decision(allowed=False, binding=each) for each in denies}
    implying = (operation, AclOperation.ALL, *IMPLYING.get(operation, ()))
    allows = [each for each in fitting if each.permission is ALLOW and each.operation in implying]
    if allows:
        return {Decision(allowed=True, binding=each) for each in allows}
    return {Decision(allowed=False if naming else None)}


def _naive_any(all_bindings, principal, host, operation, resource_type) -> bool:
    fitting = [
        each
        for each in all_bindings
        if each.resource_type is resource_type
        and _is_from(each, principal, host)
        and each.operation in (operation, AclOperation.ALL)
    ]

    def covers(deny, allow) -> bool:
        if deny.pattern is PREFIXED:
            return allow.name.startswith(deny.name)
        if deny.name == "*":
            return True
        return allow.pattern is LITERAL and allow.name == deny.name

    denies = [each for each in fitting if each.permission is DENY]
    wildcards = [
        each
        for each in fitting
        if each.permission is ALLOW and each.pattern is LITERAL and each.name == "*"
    ]
    if wildcards:
        return not any(each.pattern is LITERAL and each.name == "*" for each in denies)
    return any(
        each.permission is ALLOW and not any(covers(deny, each) for deny in denies)
        for each in fitting
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.lists(bindings, max_size=8), st.lists(bindings, max_size=4))),
    st.lists(questions, min_size=1, max_size=8),
)
def test_it_decides_as_a_scan_of_all_bindings_does(changes, asked) -> None:
    index, model = AclIndex(), Counter()
    for added, removed in changes:
        before, size = index, len(index)
        index = index.with_changes(added, removed)
        model -= Counter(removed)
        model += Counter(added)
        assert len(before) == size, "an index never changes"
    whole = AclIndex().with_changes(model.elements())
    assert index == whole and len(index) == len(model)
    assert all(each in index for each in model)
    assert not any(each in index for _, removed in changes for each in set(removed) - set(model))
    if model:
        assert index != whole.with_changes(removed=[*model][:1])
    for question in asked:
        assert index.decide(*question) == whole.decide(*question)
        assert index.decide(*question) in _naive(model, question)
        assert index.allows_any(*question[:4]) == _naive_any(model, *question[:4])
        assert index.has_wildcard(question[3]) == any(
            (each.resource_type, each.pattern, each.name) == (question[3], LITERAL, "*")
            for each in model
        )
    emptied = index.with_changes(removed=model.elements())
    assert emptied == AclIndex() and len(emptied) == 0 and not emptied._principals
    assert not emptied._literals and not emptied._prefixes


def _binding(name="ab", pattern=LITERAL, principal="User:ada", host="*", permission=ALLOW):
    return AclBinding(TOPIC, name, pattern, principal, host, AclOperation.READ, permission)


SPECIFIC = (
    _binding(host="10.0.0.1"),
    _binding(),
    _binding(name="ab", pattern=PREFIXED),
    _binding(name="a", pattern=PREFIXED),
    _binding(name="*"),
    _binding(principal="User:*", host="10.0.0.1"),
    _binding(principal="User:*", name="*"),
)


@pytest.mark.parametrize("first", range(len(SPECIFIC)))
def test_the_most_specific_of_several_is_named(first) -> None:
    index = AclIndex().with_changes(SPECIFIC[first:])
    decision = index.decide("User:ada", "10.0.0.1", AclOperation.READ, TOPIC, "ab")
    assert decision == Decision(allowed=True, binding=SPECIFIC[first])
    deny = _binding(name="", pattern=PREFIXED, principal="User:*", permission=DENY)
    assert index.with_changes((deny,)).decide(
        "User:ada", "10.0.0.1", AclOperation.READ, TOPIC, "ab"
    ) == Decision(allowed=False, binding=deny)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("0:0:0:0:0:0:0:1", "::1"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("010.0.0.1", "010.0.0.1"),
        ("*", "*"),
        ("example.org", "example.org"),
    ],
)
def test_addresses_have_one_spelling(written, meant) -> None:
    assert canonical_host(written) == meant


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:DB8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
        ("a:b", "a:b"),
    ],
)
def test_an_address_of_ipv6_counts_in_its_network(host, network) -> None:
    assert network_of(host) == network
