"""Admin requests that are sent on to the active controller, and tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kept.node.internode.controller_rpc import ForwardReply, ForwardRequest
from kept.node.kafka import forwarding_manager
from kept.node.kafka.api import RequestContext
from kept.node.kafka.forwarding_manager import ForwardingManager
from kept.node.runtime.runtime import Runtime
from kept.node.security.session import Session
from kept.storage.disk import Disk
from kept.storage.errors import NetworkException, NotController, RequestTimedOut
from tests.support.metadata import FollowedChanges, KnownMetadata
from tests.support.replicas import RecordedPeers

CONTEXT = RequestContext(19, 7, "c", Session(host="::1", listener="PLAINTEXT"))

SILENCE: Any = object()
"""The controller stands still; another one is elected."""


def forward(answers: list[Any], monkeypatch) -> tuple[bytes, list[ForwardRequest]]:
    """Forward one request; ``answers`` are what the tries bring."""
    monkeypatch.setattr(forwarding_manager, "RETRY_S", 0)
    asked: list[ForwardRequest] = []

    async def call(node_id: int, method: str, request: ForwardRequest, timeout_s: float) -> Any:
        asked.append(request)
        answer = answers.pop(0)
        if answer is SILENCE:
            metadata.leader_id = 2
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    metadata = KnownMetadata(leader_id=1)

    async def scene() -> bytes:
        known: Any = metadata
        peers: Any = RecordedPeers(call)
        changes: Any = FollowedChanges()
        manager = ForwardingManager(Runtime(Disk()), known, peers, changes)
        return await manager.forward(CONTEXT, b"body")

    return asyncio.run(scene()), asked


def test_each_try_has_its_own_id_and_names_those_before(monkeypatch):
    lost = [NetworkException("the connection broke"), NotController("not I")]
    body, asked = forward([*lost, ForwardReply(b"done")], monkeypatch)
    assert body == b"done"
    last = asked[-1].tries
    assert len(set(last)) == 3
    assert [request.tries for request in asked] == [last[:1], last[:2], last]


def test_what_the_controller_took_too_long_for_is_not_tried_again(monkeypatch):
    with pytest.raises(RequestTimedOut):
        forward([RequestTimedOut("no answer within 15 s")], monkeypatch)


def test_a_controller_that_stands_still_is_not_waited_for_once_another_one_leads(monkeypatch):
    body, asked = forward([SILENCE, ForwardReply(b"done")], monkeypatch)
    assert body == b"done"
    assert asked[1].tries[:1] == asked[0].tries
