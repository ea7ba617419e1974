"""Admin requests while no controller is elected: clients hear it, over a connection that stays."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka import api
from kept.node.kafka.api import RequestContext
from kept.node.kafka.error_responses import refusal, unanswered
from kept.node.kafka.forwarding_manager import ForwardingManager
from kept.node.runtime.runtime import Runtime
from kept.node.security.session import node_session
from kept.steps import run_to_end
from kept.storage.disk import Disk
from kept.storage.errors import NetworkException, NotController, RequestTimedOut
from tests.support.request_values import topic_values

TOPIC = topic_values("t")
RESOURCE = {"resource_type": 2, "resource_name": "t", "configs": ()}
FILTER = {
    "resource_type_filter": 2,
    "resource_name_filter": "t",
    "pattern_type_filter": 3,
    "principal_filter": None,
    "host_filter": None,
    "operation": 3,
    "permission_type": 3,
}
REQUESTS: dict[int, dict[str, Any]] = {
    19: {"topics": [TOPIC], "timeout": 1000, "validate_only": False},
    20: {
        "topics": [{"name": "t", "topic_id": uuid.UUID(int=7)}],
        "topic_names": ["t"],
        "timeout": 1000,
    },
    29: FILTER,
    30: {
        "creations": [
            {
                "resource_type": 2,
                "resource_name": "t",
                "resource_pattern_type": 3,
                "principal": "User:ada",
                "host": "*",
                "operation": 3,
                "permission_type": 3,
            }
        ]
    },
    31: {"filters": [FILTER]},
    33: {"resources": [RESOURCE], "validate_only": False},
    37: {
        "topics": [{"name": "t", "count": 2, "assignments": None}],
        "timeout": 1000,
        "validate_only": False,
    },
    43: {
        "election_type": 0,
        "topic_partitions": [{"topic": "t", "partitions": [0, 1]}],
        "timeout": 1000,
    },
    44: {"resources": [RESOURCE], "validate_only": False},
    45: {"topics": (), "timeout": 1000},
    46: {"topics": None, "timeout": 1000},
    50: {"users": [{"name": "ada"}]},
    49: {
        "entries": [
            {
                "entity": [{"entity_type": "user", "entity_name": None}],
                "ops": [{"key": "request_percentage", "value": 1.0, "remove": False}],
            }
        ],
        "validate_only": False,
    },
    51: {
        "deletions": [{"name": "ada", "mechanism": 1}],
        "upsertions": [
            {
                "name": "bob",
                "mechanism": 1,
                "iterations": 4096,
                "salt": b"s",
                "salted_password": b"p",
            }
        ],
    },
    55: {"topics": [{"topic_name": "t", "partitions": [{"partition_index": 0}]}]},
    64: {"broker_id": 1},
    80: {
        "cluster_id": None,
        "voter_id": 1,
        "voter_directory_id": None,
        "listeners": (),
        "timeout": 1000,
    },
    81: {"cluster_id": None, "voter_id": 1, "voter_directory_id": None},
}
CASES = [
    (key, version)
    for key in sorted(api.FORWARDED)
    for version in range(api.served()[key].min_version, api.served()[key].max_version + 1)
]


def errors(value: Any) -> list[tuple[int, str | None]]:
    """Each error code in a response, with the message beside it."""
    if isinstance(value, tuple):
        return [one for part in value for one in errors(part)]
    fields = getattr(value, "__dataclass_fields__", {})
    found = [one for name in fields for one in errors(getattr(value, name))]
    if "error_code" in fields:
        found.append((int(value.error_code), getattr(value, "error_message", None)))
    return found


@pytest.mark.parametrize(("key", "version"), CASES)
def test_every_part_of_the_request_is_told_that_it_timed_out(key, version):
    cls = protocol.message_type(key, version, EntityType.request)
    request = protocol.build(cls, REQUESTS[key])
    failed = unanswered(NotController("no controller is elected"))
    values = run_to_end(refusal(key, version, request, failed))
    frame = protocol.encode_response(key, version, 7, values)
    response = protocol.decode_response(key, version, frame[4:])[1]
    found = errors(response)
    assert found and {code for code, _ in found} == {7}
    said = {message for _, message in found if message is not None}
    assert said <= {"no controller has answered: no controller is elected"}


@pytest.mark.parametrize("error", [NotController, NetworkException, RequestTimedOut])
def test_what_nobody_answered_is_an_answer_and_no_broken_connection(error, monkeypatch):
    async def forward(*_: Any) -> bytes:
        raise error("nobody")

    async def respond() -> Any:
        nothing: Any = None
        manager = ForwardingManager(Runtime(Disk()), nothing, nothing, nothing)
        return await manager.respond(context, b"", request)

    monkeypatch.setattr(ForwardingManager, "forward", forward)
    cls = protocol.message_type(64, 0, EntityType.request)
    request = protocol.build(cls, REQUESTS[64])
    context = RequestContext(64, 0, None, node_session("P"))
    assert asyncio.run(respond())["error_code"] == 7
