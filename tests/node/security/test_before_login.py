"""Every API in every version, and every route, on a listener that asks for a login: without one,
and with one that is over.
"""

from __future__ import annotations

import asyncio
import base64
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.security.jaas import PLAIN_MODULE
from kept.node.http import route_table
from kept.node.kafka import api
from tests.support.made_requests import made
from tests.support.raw_client import RawClient
from tests.support.token_issuer import AUDIENCE, ISSUER, Issuer

HANDSHAKE = 17
OPEN = {"/healthz", "/readyz"}


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def asking(lone_node: Any, issuer: Issuer, tmp_path: Path) -> Any:
    """A node with no authorizer: nothing but its listener keeps anybody out."""
    lone = lone_node(
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        sasl_enabled_mechanisms="PLAIN,OAUTHBEARER",
        plain_sasl_jaas_config=f'{PLAIN_MODULE} required user_ada="pencil";',
        sasl_oauthbearer_jwks_endpoint_url=issuer.write(tmp_path / "keys.json"),
        sasl_oauthbearer_expected_audience=AUDIENCE,
        sasl_oauthbearer_expected_issuer=ISSUER,
        connection_failed_authentication_delay_ms="0",
        kept_silent_ms="600000",
    )
    lone.run(_with_topic(lone))
    return lone


async def _with_topic(lone: Any) -> None:
    async with await RawClient.connect(lone.port, "ada", "pencil") as client:
        topic = {"name": "t", "num_partitions": 1, "replication_factor": -1}
        topic |= {"assignments": [], "configs": []}
        await client.ask(19, 7, topics=[topic], timeout=9000, validate_only=False)


@pytest.mark.parametrize("behind", ["", "a handshake"])
def test_every_api_before_a_login_is_closed_unanswered(
    asking: Any, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    monkeypatch.setattr("kept.node.kafka.listener.Connection", lambda *_: reached.append("one"))

    async def go() -> int:
        asked = 0
        for served in api.APIS:
            if served.key in api.BEFORE_LOGIN:
                continue
            for version in range(
                max(served.min_version, served.refused_below), served.max_version + 1
            ):
                cls = protocol.message_type(served.key, version, EntityType.request)
                frame = protocol.encode_request(served.key, version, 7, "x", made(cls, "t"))
                async with await RawClient.connect(asking.port) as client:
                    if behind:
                        await client.ask(HANDSHAKE, 1, mechanism="PLAIN")
                    client.writer.write(frame)
                    assert await client.ends(), f"{served.name} v{version} was answered"
                asked += 1
        return asked

    asked = asking.run(asyncio.wait_for(go(), 100))
    assert asked > 200 and not reached
    topic = asking.node.parts.table.by_name[b"t"]
    assert topic.partitions[0].partition.log.log_end_offset == 0


def every_route() -> list[tuple[str, str]]:
    import_module("kept.node.http.routes")
    return [(method, path) for path, methods in route_table.ROUTES.items() for method in methods]


def test_every_route_wants_a_login_that_is_not_over(asking: Any, issuer: Issuer) -> None:
    """The node has no authorizer, so whoever is believed is served, and nobody else is."""
    wrong = base64.b64encode(b"ada:wrong").decode()
    logins = {
        "no login": "",
        "a wrong password": f"Basic {wrong}",
        "a token that is over": f"Bearer {issuer.token('ada', life_s=-300)}",
    }

    def status(method: str, path: str, login: str) -> int:
        named = re.sub("{.*?}", "t", path.replace("{file}", "page.html").replace("{broker}", "0"))
        head = f"Authorization: {login}\r\n" if login else ""
        more = "X-Kept: 1\r\nContent-Length: 2\r\n" if method == "POST" else ""
        body = "{}" if method == "POST" else ""
        said: int = asking.http(
            f"{method} {named} HTTP/1.1\r\nHost: localhost\r\n{head}{more}\r\n{body}"
        )[0]
        return said

    for method, path in every_route():
        for what, login in logins.items():
            expected = 200 if path in OPEN else 401
            assert status(method, path, login) == expected, f"{method} {path} with {what}"
    assert status("GET", "/api/v1/topics", f"Bearer {issuer.token('ada')}") == 200
