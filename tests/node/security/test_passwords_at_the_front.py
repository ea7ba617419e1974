"""HTTP and gRPC of a node with an authorizer: who logs in with a password, and what he may do."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.grpc import call_authorizer
from kept.node.proto import broker_pb2
from tests.support.grpc_calls import basic, call, calling
from tests.support.revocations import Checks

# isort: split
import grpc
import grpc.aio

SCRAM_SHA_512 = 2
READ, WRITE, DESCRIBE, ALLOW, DENY = 3, 4, 8, 3, 2
LITERAL, TOPIC = 3, 2


@pytest.fixture
def guarded(lone_node) -> Any:
    lone = lone_node(
        authorizer_class_name=STANDARD_AUTHORIZER,
        super_users="User:admin",
        kept_sasl_plain_users="scram",
    )
    lone.create("t")
    lone.create("secret")
    upsertions = [
        {
            "name": user,
            "mechanism": SCRAM_SHA_512,
            "iterations": 4096,
            "salt": b"salt",
            "salted_password": hashlib.pbkdf2_hmac(
                "sha512", f"{user}-word".encode(), b"salt", 4096
            ),
        }
        for user, word in (("admin", b"admin-word"), ("ada", b"ada-word"))
    ]
    (done, also) = lone.ask(51, 0, deletions=(), upsertions=upsertions).results
    assert (done.error_code, also.error_code) == (0, 0)
    return lone


def binding(operation: int, permission: int) -> dict[str, Any]:
    return {
        "resource_type": TOPIC,
        "resource_name": "t",
        "resource_pattern_type": LITERAL,
        "principal": "User:ada",
        "host": "*",
        "operation": operation,
        "permission_type": permission,
    }


def allow(lone: Any, operation: int) -> None:
    (result,) = lone.ask(30, 3, creations=[binding(operation, ALLOW)]).results
    assert result.error_code == 0


def get(lone: Any, path: str, login: str = "") -> tuple[int, dict[str, str], bytes]:
    header = f"Authorization: {login}\r\n" if login else ""
    answer: tuple[int, dict[str, str], bytes] = lone.http(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n"
    )
    return answer


def test_http_asks_for_a_password_and_shows_what_its_user_may_see(guarded):
    status, headers, _ = get(guarded, "/api/v1/cluster")
    assert status == 401 and headers["www-authenticate"].startswith('Basic realm="kept"')
    for wrong in (basic("ada", "ada"), basic("nobody", "x"), "Basic !", "Bearer x"):
        assert get(guarded, "/api/v1/cluster", wrong)[0] == 401
    admin, ada = basic("admin", "admin-word"), basic("ada", "ada-word")
    assert get(guarded, "/api/v1/cluster", admin)[0] == 200
    status, _, body = get(guarded, "/api/v1/cluster", ada)
    assert status == 403 and b"User:ada may not describe cluster" in body
    assert b"an administrator allows it by: kept acl add User:ada describe cluster" in body
    assert json.loads(get(guarded, "/api/v1/topics", ada)[2])["topics"] == []
    allow(guarded, READ)
    shown = json.loads(get(guarded, "/api/v1/topics", ada)[2])["topics"]
    assert [topic["name"] for topic in shown] == ["t"]
    assert get(guarded, "/api/v1/records?topic=t&partition=0", ada)[0] == 200
    assert get(guarded, "/api/v1/records?topic=secret&partition=0", ada)[0] == 403


def test_grpc_asks_who_calls_and_ends_a_stream_with_the_right_to_it(guarded, monkeypatch):
    """By the first question after that."""
    ada, checks = basic("ada", "ada-word"), Checks(monkeypatch, call_authorizer)
    produce = broker_pb2.ProduceRequest(topic="t", payload=b"v")
    consume = broker_pb2.ConsumeRequest(topic="t", partition=0, follow=True)
    status = grpc.StatusCode
    run = guarded.run
    assert run(call(guarded.port, "Produce", produce)) is status.UNAUTHENTICATED
    assert run(call(guarded.port, "Produce", produce, basic("ada", "x"))) is status.UNAUTHENTICATED
    assert run(call(guarded.port, "Produce", produce, ada)) is status.PERMISSION_DENIED
    create = broker_pb2.CreateTopicRequest(topic="mine")
    assert run(call(guarded.port, "CreateTopic", create, ada)) is status.PERMISSION_DENIED
    assert (
        run(call(guarded.port, "CreateTopic", create, basic("admin", "admin-word"))).topic == "mine"
    )
    allow(guarded, WRITE)
    assert run(call(guarded.port, "Produce", produce, ada)).offset == 0
    allow(guarded, READ)

    async def read_until_denied() -> Any:
        async with calling(guarded.port, "Consume", consume, ada) as stream:
            assert (await stream.read()).payload == b"v"
            await guarded.request(30, 3, creations=[binding(READ, DENY)])
            checks.taken()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert checks.since <= 1
            return ended.value.code()

    assert run(read_until_denied()) is status.PERMISSION_DENIED
