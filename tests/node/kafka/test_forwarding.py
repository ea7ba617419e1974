"""Admin requests that are sent on to the active controller, and tried again."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kept.node import cluster_link
from kept.node.cluster_link import ClusterLink
from kept.node.internode.controller_rpc import ForwardReply, ForwardRequest
from kept.storage.errors import NetworkException, NotController, RequestTimedOut

CONTEXT: Any = SimpleNamespace(listener_name="PLAINTEXT", client_id="c", client_host="::1")

SILENCE: Any = object()
"""The controller stands still; another one is elected."""


def forward(answers: list[Any], monkeypatch) -> tuple[bytes, list[ForwardRequest]]:
    """Forward one request; ``answers`` are what the tries bring."""
    monkeypatch.setattr(cluster_link, "RETRY_S", 0)
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

    async def acted(index: int) -> None:
        pass

    metadata = SimpleNamespace(leader_id=1, acted=acted)

    async def scene() -> bytes:
        changes = SimpleNamespace(done_up_to=acted)
        replica_manager = SimpleNamespace(changes=changes)
        node = SimpleNamespace(
            loop=asyncio.get_running_loop(), metadata=metadata, replica_manager=replica_manager
        )
        me: Any = SimpleNamespace(_node=node, peers=SimpleNamespace(call=call))
        me._call_controller = partial(ClusterLink._call_controller, me)
        me._while_it_leads = partial(ClusterLink._while_it_leads, me)
        return await ClusterLink.forward(me, CONTEXT, 19, 7, b"body")

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
