"""What settings of SASL are refused, and what is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.node.config.node_config import NodeConfig
from kept.node.config.sasl import sasl_settings, sasl_warnings
from kept.storage.errors import ConfigurationError

SASL = "SASL_PLAINTEXT://localhost:9092"
USERS = f'{PLAIN_MODULE} required username="me" password="hush" user_ada="hush";'


def load(listeners: str = SASL, **settings: str) -> NodeConfig:
    given = {"listeners": listeners, **settings}
    return NodeConfig.load(None, {n.replace("__", "."): v for n, v in given.items()}, {})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "listener SASL_PLAINTEXT is a SASL listener without mechanisms"),
        ({"sasl__enabled__mechanisms": "GSSAPI"}, "GSSAPI (Kerberos), Kafka's default, is not"),
        ({"sasl__enabled__mechanisms": "SCRAM-SHA-1"}, "SCRAM-SHA-1 is not served; there are PL"),
        ({"sasl__enabled__mechanisms": "PLAIN"}, "enables PLAIN, but names no users"),
        (
            {"sasl__enabled__mechanisms": "PLAIN", "plain__sasl__jaas__config": "x"},
            "sasl.jaas.config: it must begin with a login module",
        ),
        (
            {
                "sasl__enabled__mechanisms": "PLAIN",
                "plain__sasl__jaas__config": f"{SCRAM_MODULE} required;",
            },
            "is not PLAIN's login module",
        ),
        (
            {
                "sasl__enabled__mechanisms": "PLAIN",
                "plain__sasl__jaas__config": f'{PLAIN_MODULE} required user_="hush";',
            },
            "user and password of 'user_' must have 1 to 255 bytes",
        ),
        (
            {"kept__sasl__plain__users": "ldap", "sasl__enabled__mechanisms": "PLAIN"},
            "String must be one of: jaas, scram",
        ),
        (
            {
                "listeners": "PLAINTEXT://localhost:9092,NODE://localhost:9093",
                "listener__security__protocol__map": "NODE:SASL_PLAINTEXT",
            },
            "NODE carries the traffic between nodes",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(**settings)
    assert why in str(refused.value)
    assert "hush" not in str(refused.value)


def test_each_listener_has_mechanisms_and_users_of_its_own() -> None:
    config = load(
        f"A://localhost:1,B://localhost:2,{SASL}",
        listener__security__protocol__map="A:SASL_PLAINTEXT,B:SASL_PLAINTEXT",
        sasl__enabled__mechanisms="SCRAM-SHA-512",
        **{
            "listener.name.a.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.a.plain.sasl.jaas.config": USERS,
            "listener.name.a.connections.max.reauth.ms": "1000",
            "listener.name.b.sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN",
            "listener.name.b.kept.sasl.plain.users": "scram",
            "listener.name.b.scram-sha-256.sasl.jaas.config": f"{SCRAM_MODULE} required;",
        },
    )
    found: list[Any] = []
    for name in ("A", "B", "SASL_PLAINTEXT"):
        settings = sasl_settings(config.of_listener(name))
        assert "hush" not in repr(settings) + repr(config)
        found.append((settings.mechanisms, settings.plain_users, settings.stored_passwords))
        assert settings.max_reauth_ms == (1000 if name == "A" else 0)
    assert found == [
        (("PLAIN",), {"ada": "hush"}, False),
        (("SCRAM-SHA-256", "PLAIN"), {}, True),
        (("SCRAM-SHA-512",), {}, False),
    ]


@pytest.mark.parametrize(
    ("listener", "mechanisms", "warned"),
    [
        (SASL, "PLAIN", False),
        ("SASL_PLAINTEXT://10.0.0.1:9092", "SCRAM-SHA-256", False),
        ("SASL_PLAINTEXT://10.0.0.1:9092", "SCRAM-SHA-256,PLAIN", True),
        ("PLAINTEXT://10.0.0.1:9092", "PLAIN", False),
    ],
)
def test_passwords_in_the_clear_are_warned_of(
    listener: str, mechanisms: str, *, warned: bool
) -> None:
    config = load(listener, sasl__enabled__mechanisms=mechanisms, kept__sasl__plain__users="scram")
    assert ["whoever is on the wire" in text for text in sasl_warnings(config)] == [True] * warned
