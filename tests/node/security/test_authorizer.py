"""Decisions of the authorizer: the cases of Kafka 4.3's StandardAuthorizerTest, by their names."""

from __future__ import annotations

import pytest

from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.security.authorizer import AccessEvent, Rule, Ruling, StandardAuthorizer
from kept.node.security.session import Session

OP = AclOperation
TOPIC, GROUP, CLUSTER = AclResourceType.TOPIC, AclResourceType.GROUP, AclResourceType.CLUSTER


def binding(text: str) -> AclBinding:
    """``ALLOW User:bob READ TOPIC foo``; a name that ends with ``...`` is a prefix."""
    permission, principal, operation, resource_type, name, *host = text.split()
    return AclBinding(
        AclResourceType[resource_type],
        name.removesuffix("..."),
        PatternType.PREFIXED if name.endswith("...") else PatternType.LITERAL,
        principal,
        host[0] if host else "*",
        AclOperation[operation],
        AclPermission[permission],
    )


class Heard:
    """An auditor that keeps what it is told."""

    def __init__(self, *, records_allowed: bool = False) -> None:
        self.records_allowed = records_allowed
        self.events: list[AccessEvent] = []

    def decided(self, event: AccessEvent) -> None:
        self.events.append(event)


def authorizer(bindings=(), *, auditor=None, allow_if_no_acl=False) -> StandardAuthorizer:
    index = AclIndex().with_changes(binding(text) for text in bindings)
    return StandardAuthorizer(
        lambda: index, ("User:superman",), auditor, allow_if_no_acl=allow_if_no_acl
    )


def session(principal="User:bob", host="127.0.0.1", **others) -> Session:
    return Session(principal, host, "OUT", "PLAIN", **others)


PREFIX_ACLS = (
    "ALLOW User:bob READ TOPIC foo...",
    "DENY User:bob READ TOPIC foobar",
    "ALLOW User:alice WRITE TOPIC foo",
)
HOST_ACLS = (
    "DENY User:alice READ TOPIC foo 127.0.0.1",
    "ALLOW User:alice READ TOPIC * 127.0.0.1",
    "DENY User:alice READ TOPIC * 10.0.0.1",
)
ALLOW_BOB = "ALLOW User:bob {} TOPIC foo"

CASES = [
    # Bindings, whether what no binding names is allowed, question; allowed, and by what.
    ("testFindResultPrincipalMatch", [ALLOW_BOB.format("READ")], "bob READ TOPIC foo", 0),
    ("testFindResultPrincipalMatch", [ALLOW_BOB.format("READ")], "alice READ TOPIC foo", None),
    ("testFindResultOperationMatch", [ALLOW_BOB.format("READ")], "bob WRITE TOPIC foo", None),
    *[
        (f"testFindResultHostMatch {host}", [f"ALLOW User:bob READ TOPIC foo {host}"], asked, rule)
        for host, asked, rule in (
            ("127.0.0.1", "bob READ TOPIC foo", 0),
            ("*", "bob READ TOPIC foo", 0),
            ("192.168.1.1", "bob READ TOPIC foo", None),
        )
    ],
    *[
        (f"testDenyPrincipalMatch and implied: {given}", [ALLOW_BOB.format(given)], asked, rule)
        for given, asked, rule in (
            ("ALL", "bob DESCRIBE TOPIC foo", 0),
            ("READ", "bob DESCRIBE TOPIC foo", 0),
            ("WRITE", "bob DESCRIBE TOPIC foo", 0),
            ("DELETE", "bob DESCRIBE TOPIC foo", 0),
            ("ALTER", "bob DESCRIBE TOPIC foo", 0),
            ("DESCRIBE", "bob DESCRIBE TOPIC foo", 0),
            ("CREATE", "bob DESCRIBE TOPIC foo", None),
            ("ALTER_CONFIGS", "bob DESCRIBE TOPIC foo", None),
            ("ALTER_CONFIGS", "bob DESCRIBE_CONFIGS TOPIC foo", 0),
            ("ALTER", "bob DESCRIBE_CONFIGS TOPIC foo", None),
            ("DESCRIBE", "bob READ TOPIC foo", None),
            ("ALL", "bob ALTER_CONFIGS TOPIC foo", 0),
        )
    ],
    *[
        (
            f"testDenyImpliesNothing {denied}",
            ["ALLOW User:bob ALL TOPIC foo", f"DENY User:bob {denied} TOPIC foo"],
            asked,
            rule,
        )
        for denied, asked, rule in (
            ("READ", "bob DESCRIBE TOPIC foo", 0),
            ("WRITE", "bob DESCRIBE TOPIC foo", 0),
            ("ALTER_CONFIGS", "bob DESCRIBE_CONFIGS TOPIC foo", 0),
            ("DESCRIBE", "bob DESCRIBE TOPIC foo", 1),
            ("DESCRIBE", "bob READ TOPIC foo", 0),
            ("ALL", "bob READ TOPIC foo", 1),
        )
    ],
    ("testAuthorizationPriorToCompleteInitialLoad", [], "superman READ TOPIC foo", Rule.SUPER_USER),
    ("testTopicAclWithOperationAll", ["ALLOW User:* ALL TOPIC foo"], "bob WRITE TOPIC foo", 0),
    ("testTopicAclWithOperationAll", ["ALLOW User:* ALL TOPIC foo"], "bob WRITE TOPIC bar", None),
    ("testTopicAclWithOperationAll", ["ALLOW User:* ALL TOPIC foo"], "bob WRITE GROUP foo", None),
    ("testHostAddressAclValidation", HOST_ACLS, "alice READ TOPIC foo", 0),
    ("testHostAddressAclValidation", HOST_ACLS, "alice READ TOPIC bar", 1),
    ("testPrefixAcls", PREFIX_ACLS, "bob READ TOPIC foobar", 1),
    ("testPrefixAcls", PREFIX_ACLS, "bob READ TOPIC foobaz", 0),
    ("testPrefixAcls", PREFIX_ACLS, "bob READ TOPIC fo", None),
    ("testPrefixAcls", PREFIX_ACLS, "alice WRITE TOPIC foobar", None),
    (
        "testDenyPrecedenceWithOperationAll",
        ["ALLOW User:alice ALL TOPIC foo", ("DENY User:* DESCRIBE TOPIC foo")],
        "alice DESCRIBE TOPIC foo",
        1,
    ),
    (
        "testDenyPrecedenceWithOperationAll",
        ["ALLOW User:alice ALL TOPIC foo", ("DENY User:* DESCRIBE TOPIC foo")],
        "alice READ TOPIC foo",
        0,
    ),
    (
        "a DENY prefix over an ALLOW literal",
        ["ALLOW User:bob READ TOPIC ab", "DENY User:bob READ TOPIC a..."],
        "bob READ TOPIC ab",
        1,
    ),
    (
        "a DENY literal under an ALLOW prefix",
        ["ALLOW User:bob READ TOPIC a...", "DENY User:bob READ TOPIC ab"],
        "bob READ TOPIC ab",
        1,
    ),
    ("a prefix is no literal", ["ALLOW User:bob READ TOPIC a..."], "bob READ TOPIC b", None),
    ("a literal is no prefix", ["ALLOW User:bob READ TOPIC a"], "bob READ TOPIC ab", None),
    ("a star as a prefix is one", ["ALLOW User:bob READ TOPIC *..."], "bob READ TOPIC ab", None),
    ("a star as a prefix is one", ["ALLOW User:bob READ GROUP *..."], "bob READ GROUP *ab", 0),
    ("a group called *", ["ALLOW User:bob READ GROUP *"], "bob READ GROUP *", 0),
    ("names have a case", ["ALLOW User:bob READ TOPIC Foo"], "bob READ TOPIC foo", None),
    ("users have a case", ["ALLOW User:Bob READ TOPIC foo"], "bob READ TOPIC foo", None),
    ("types have a case", ["ALLOW user:bob READ TOPIC foo"], "bob READ TOPIC foo", None),
    (
        "types other than User match nobody",
        ["ALLOW Group:* READ TOPIC foo"],
        "bob READ TOPIC foo",
        None,
    ),
]


@pytest.mark.parametrize(
    ("bindings", "asked", "expected"),
    [pytest.param(*case, id=f"{name} {number}") for number, (name, *case) in enumerate(CASES)],
)
def test_decisions(bindings, asked, expected) -> None:
    user, operation, resource_type, name = asked.split()
    question = (OP[operation], AclResourceType[resource_type], name)
    who = session(f"User:{user}")
    ruling = authorizer(bindings).rule(who, *question)
    if isinstance(expected, int):
        decided_by = binding(bindings[expected])
        allowed = decided_by.permission is AclPermission.ALLOW
        assert ruling == Ruling(allowed, Rule.BINDING, decided_by)
    elif expected is Rule.SUPER_USER:
        assert ruling == Ruling(allowed=True, rule=expected)
    else:
        assert not ruling.allowed and ruling.binding is None
    lenient = authorizer(bindings, allow_if_no_acl=True).rule(who, *question)
    assert lenient == (
        Ruling(allowed=True, rule=Rule.NO_BINDING) if ruling.rule is Rule.NO_BINDING else ruling
    )


IMPLIES = {
    **dict.fromkeys((OP.READ, OP.WRITE, OP.DELETE, OP.ALTER), (OP.DESCRIBE,)),
    OP.ALTER_CONFIGS: (OP.DESCRIBE_CONFIGS,),
    OP.ALL: tuple(OP),
}


@pytest.mark.parametrize("given", list(OP)[2:])
def test_what_an_operation_implies(given) -> None:
    """AuthorizerTest's testAclInheritance: each operation by each, allowed and denied."""
    allows = authorizer([f"ALLOW User:bob {given.name} CLUSTER kafka-cluster"])
    denies = authorizer(
        ["ALLOW User:bob ALL CLUSTER kafka-cluster", f"DENY User:* {given.name} CLUSTER *"]
    )
    for asked in list(OP)[3:]:
        question = session(), asked, CLUSTER, "kafka-cluster"
        assert allows.allows(*question) is (asked is given or asked in IMPLIES.get(given, ()))
        assert denies.allows(*question) is (asked is not given and given is not OP.ALL)


@pytest.mark.parametrize("name", ["superman", "Superman", "superman2", "super", ""])
def test_super_users_are_named_letter_by_letter(name) -> None:
    decides, is_one = authorizer(["DENY User:* ALL TOPIC foo"]), name == "superman"
    who = session(f"User:{name}")
    assert decides.allows(who, OP.READ, TOPIC, "foo") is is_one
    assert decides.allows_any(who, OP.READ, TOPIC) is is_one


def test_hosts_are_addresses() -> None:
    """Kafka compares text: there a binding for ``::1`` never fits."""
    decides = authorizer(["DENY User:bob READ TOPIC foo ::1", "ALLOW User:* READ TOPIC foo"])
    for host, allowed in (
        ("::1", False),
        ("0:0:0:0:0:0:0:1", False),
        ("127.0.0.1", True),
        ("::2", True),
    ):
        assert decides.allows(session(host=host), OP.READ, TOPIC, "foo") is allowed


def test_what_no_binding_names() -> None:
    """testAllowEveryoneIfNoAclFoundConfigEnabled and its twin: one binding of anybody closes it."""
    lenient = authorizer(["ALLOW User:alice READ TOPIC foo"], allow_if_no_acl=True)
    assert lenient.allows(session(), OP.READ, TOPIC, "bar")
    assert lenient.allows_any(session(), OP.WRITE, TOPIC)
    assert not lenient.allows(session(), OP.READ, TOPIC, "foo")
    closed = authorizer(["ALLOW User:alice READ TOPIC *"], allow_if_no_acl=True)
    assert not closed.allows(session(), OP.READ, TOPIC, "bar")
    assert not closed.allows_any(session(), OP.WRITE, TOPIC)
    strict = authorizer(["ALLOW User:alice READ TOPIC foo"])
    assert not strict.allows(session(), OP.READ, TOPIC, "bar")


@pytest.mark.parametrize(
    ("bindings", "allowed"),
    [
        # AuthorizerTest's testAuthorizeByResourceType…, by what follows.
        ([], False),
        (["ALLOW User:bob WRITE TOPIC foo"], True),
        (["ALLOW User:bob ALL TOPIC foo"], True),  # WithAllOperationAce
        (["ALLOW User:* WRITE TOPIC foo"], True),
        (["ALLOW User:bob READ TOPIC foo"], False),
        (["ALLOW User:bob WRITE GROUP foo"], False),  # IsolationUnrelatedDenyWontDominateAllow
        (["ALLOW User:bob WRITE TOPIC foo 10.0.0.1"], False),  # WithAllHostAce
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:bob WRITE TOPIC foo"], False),
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:* WRITE TOPIC foo"], False),
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:* ALL TOPIC f..."], False),
        (["ALLOW User:bob WRITE TOPIC foo...", "DENY User:bob WRITE TOPIC foo..."], False),
        (["ALLOW User:bob WRITE TOPIC foo...", "DENY User:bob WRITE TOPIC foo"], True),
        (["ALLOW User:bob WRITE TOPIC f...", "DENY User:bob WRITE TOPIC foo..."], True),
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:bob WRITE TOPIC *"], False),
        (["ALLOW User:bob WRITE TOPIC *", "DENY User:bob WRITE TOPIC foo..."], True),
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:bob WRITE TOPIC bar"], True),
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:alice WRITE TOPIC foo"], True),
        (["ALLOW User:bob WRITE TOPIC foo", "DENY User:bob WRITE TOPIC foo 10.0.0.1"], True),
    ],
)
def test_on_any_resource_of_a_type(bindings, allowed) -> None:
    decides = authorizer(bindings)
    assert decides.allows_any(session(), OP.WRITE, TOPIC) is allowed
    assert decides.allows_any(session("User:superman"), OP.WRITE, TOPIC)


def test_nodes_of_the_cluster_may_do_everything() -> None:
    decides = authorizer(["DENY User:* ALL CLUSTER kafka-cluster"])
    node = session("User:ANONYMOUS", is_node=True)
    question = (OP.CLUSTER_ACTION, CLUSTER, "kafka-cluster")
    assert decides.rule(node, *question) == Ruling(allowed=True, rule=Rule.NODE)
    assert decides.allows_any(node, OP.WRITE, TOPIC)
    assert not decides.allows(session("User:ANONYMOUS"), *question)


def test_a_session_that_was_given_no_authorizer_may_do_nothing() -> None:
    """A bug of ours must not open a door."""
    who = Session("User:bob", "127.0.0.1")
    assert not who.is_unrestricted
    assert not who.may(OP.READ, TOPIC, "foo") and not who.may_any(OP.READ, TOPIC)
    assert who.operations(TOPIC, "foo") == 0
    assert "foo" not in who.writable and "foo" not in who.readable


def test_the_auditor_is_told() -> None:
    """testDenyAuditLogging, testAllowAuditLogging, and what filters ask."""
    bindings = ["ALLOW User:bob READ TOPIC foo", "DENY User:bob WRITE TOPIC foo"]
    heard, everything = Heard(), Heard(records_allowed=True)
    for auditor in (heard, everything):
        decides = authorizer(bindings, auditor=auditor)
        assert decides.allows(session(), OP.READ, TOPIC, "foo")
        assert not decides.allows(session(), OP.WRITE, TOPIC, "foo", api="produce")
        assert not decides.allows(session(), OP.WRITE, TOPIC, "bar", audited=False)
    denied = everything.events[1]
    assert heard.events == [denied] and len(everything.events) == 2
    assert denied == AccessEvent(
        *("User:bob", "127.0.0.1", "OUT", "PLAIN", "produce", OP.WRITE, TOPIC, "foo"),
        Ruling(allowed=False, rule=Rule.BINDING, binding=binding(bindings[1])),
    )
    assert everything.events[0].ruling.allowed
