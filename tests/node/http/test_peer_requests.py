"""Requests to ``/api/v1/`` that come from another node, which may be wrong in any way."""

from __future__ import annotations

import pytest

from kept.node.internode.controller_rpc import PeerHttpRequest
from kept.storage.errors import CorruptMessage


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("", "{}"),
        ("{}", "x"),
        ("[]", "{}"),
        ("{}", "7"),
        ('{"a": "\\ud800"}', "{}"),
        ("{}", "[" * 9000),
    ],
)
async def test_what_is_no_json_object_is_refused(lone, query, body):
    request = PeerHttpRequest("GET", "/api/v1/topics", query, body)
    with pytest.raises(CorruptMessage, match="not a request of another node"):
        await lone.node.parts.http.respond_to_node(request)


async def test_what_is_right_is_answered(lone):
    request = PeerHttpRequest("GET", "/api/v1/topics", "{}", "{}")
    assert (await lone.node.parts.http.respond_to_node(request)).status == 200
