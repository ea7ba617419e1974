"""Settings of security that contradict each other, or leave a way around."""

from __future__ import annotations

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.node.config.checks import STANDARD_AUTHORIZER, parse_super_users
from kept.node.config.node_config import NodeConfig
from kept.node.config.security_checks import is_secured, security_warnings
from kept.storage.errors import ConfigurationError

AUTHORIZER = {"authorizer.class.name": STANDARD_AUTHORIZER}
ADMIN = {**AUTHORIZER, "super.users": "User:admin"}
OPEN_NODE = {
    "listeners": "PLAINTEXT://127.0.0.1:9092,NODE://:10092",
    "advertised.listeners": "NODE://node-0:10092",
}


def load(**settings: str) -> NodeConfig:
    return NodeConfig.load(overrides=settings, environ={})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (AUTHORIZER, "super.users names nobody: no one could create the first ACL"),
        ({"super.users": "User:admin"}, "super.users is set without authorizer.class.name"),
        ({**AUTHORIZER, "super.users": "admin"}, "'admin' has no type: write principals as User:"),
        ({**AUTHORIZER, "super.users": "User:"}, "'User:' has no type: write principals as User:"),
        ({**ADMIN, **OPEN_NODE}, "listener NODE://:10092 between nodes is PLAINTEXT"),
        ({"authorizer.class.name": "kafka.security.AclAuthorizer"}, "kept runs no Java classes"),
        ({"kept.audit.path": " "}, "for configuration kept.audit.path: must not be empty"),
    ],
)
def test_refused(settings, message) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        ADMIN,
        {**AUTHORIZER, "allow.everyone.if.no.acl.found": "true"},
        {**ADMIN, "listeners": "PLAINTEXT://127.0.0.1:9092,NODE://127.0.0.1:10092"},
        {**ADMIN, **OPEN_NODE, "kept.node.network.trusted": "true"},
    ],
)
def test_right(settings) -> None:
    assert not security_warnings(load(**settings))


USERS = f'{PLAIN_MODULE} required user_ada="hush";'
MIXED = {
    "listener.security.protocol.map": "LOGIN:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "plain.sasl.jaas.config": USERS,
    "advertised.listeners": "PLAINTEXT://a:9092,LOGIN://a:9093",
}
INSIDE, OUTSIDE = "PLAINTEXT://127.0.0.1:9092", "PLAINTEXT://:9092"
LOGIN = "LOGIN://127.0.0.1:9093"
WAY_AROUND = "is PLAINTEXT and reached from other machines, beside LOGIN"
NO_LIMITS = "clients log in on LOGIN, but authorizer.class.name is not set"
LOGIN_BY_TLS = {
    **MIXED,
    **ADMIN,
    "listener.security.protocol.map": "LOGIN:SASL_SSL",
    "listeners": f"{INSIDE},{LOGIN}",
    "ssl.client.auth": "required",
}
ITS_OWN = "listener.name.login.ssl.client.auth"
NO_EFFECT = f"required does not count for listener LOGIN, where SASL says who comes: set {ITS_OWN}"
ALGORITHM = "ssl.endpoint.identification.algorithm"
NODE_BY_TLS = {
    "listeners": f"{INSIDE},NODE://127.0.0.1:10092",
    "listener.security.protocol.map": "NODE:SSL",
}
NO_NAMES = f"{ALGORITHM} is empty for listener NODE: whoever has a certificate"


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        ({**MIXED, **ADMIN, "listeners": f"{INSIDE},{LOGIN}"}, []),
        ({**MIXED, **ADMIN, "listeners": f"{OUTSIDE},{LOGIN}"}, [WAY_AROUND]),
        ({**MIXED, "listeners": f"{INSIDE},{LOGIN}"}, [NO_LIMITS]),
        ({**MIXED, "listeners": f"{OUTSIDE},{LOGIN}"}, [WAY_AROUND, NO_LIMITS]),
        ({"listeners": OUTSIDE, "advertised.listeners": "PLAINTEXT://a:9092"}, []),
        (LOGIN_BY_TLS, [NO_EFFECT]),
        ({**LOGIN_BY_TLS, ITS_OWN: "required"}, []),
        ({**LOGIN_BY_TLS, ITS_OWN: "none"}, []),
        (NODE_BY_TLS, []),
        ({**NODE_BY_TLS, ALGORITHM: ""}, [NO_NAMES]),
        ({**NODE_BY_TLS, ALGORITHM: "", f"listener.name.node.{ALGORITHM}": "https"}, []),
        ({**NODE_BY_TLS, f"listener.name.node.{ALGORITHM}": ""}, [NO_NAMES]),
        ({"listeners": INSIDE, ALGORITHM: ""}, []),
    ],
)
def test_warned_of(settings, warnings) -> None:
    told = security_warnings(load(**settings))
    assert len(told) == len(warnings)
    assert all(part in text for part, text in zip(warnings, told, strict=True))


@pytest.mark.parametrize(
    ("settings", "secured"),
    [({}, False), (ADMIN, True), ({**MIXED, "listeners": f"{INSIDE},{LOGIN}"}, True)],
)
def test_secured_is_where_somebody_logs_in_or_something_decides(settings, secured) -> None:
    assert is_secured(load(**settings)) is secured


def test_blanks_around_values_are_none_of_theirs() -> None:
    """AuthorizerTest's testAclConfigWithWhitespace: a file of properties keeps them at the end."""
    given = {**ADMIN, "allow.everyone.if.no.acl.found": "true"}
    config = load(**{name: f" {text} " for name, text in given.items()})
    assert config.authorizer_class_name == STANDARD_AUTHORIZER
    assert config.allow_everyone_if_no_acl_found is True
    assert parse_super_users(config.super_users) == {"User:admin"}


def test_super_users_are_apart_by_semicolons_as_names_of_certificates_have_commas() -> None:
    parsed = parse_super_users("User:admin; User:CN=a,OU=b ;;User:a:b")
    assert parsed == {"User:admin", "User:CN=a,OU=b", "User:a:b"}
