"""Handlers are built from what their constructors name."""

from __future__ import annotations

import inspect
from collections.abc import Generator

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka import api
from kept.node.kafka.request_handlers import Collaborators
from kept.node.security.session import node_session


@pytest.mark.parametrize("served", [one for one in api.APIS if one.handler], ids=lambda a: a.name)
def test_a_handler_names_collaborators_that_there_are(served):
    cls = api.handler_class(served)
    for name, parameter in inspect.signature(cls).parameters.items():
        assert parameter.annotation == Collaborators.__annotations__[name], name
    assert callable(getattr(cls, served.name))


MANY = [f"name-{number}" for number in range(100)]


@pytest.mark.parametrize(
    ("key", "version", "values"),
    [
        (16, 5, {"states_filter": MANY, "types_filter": ()}),
        (16, 5, {"states_filter": (), "types_filter": MANY}),
        (66, 2, {"state_filters": MANY, "producer_id_filters": (), "duration_filter": -1}),
    ],
)
def test_each_name_of_a_filter_is_a_step(lone, key, version, values):
    """Each may be of 32 KiB: at a stretch they held the loop for 30 ms."""
    cls = protocol.message_type(key, version, EntityType.request)
    context = api.RequestContext(key, version, "test", node_session("PLAINTEXT"))
    request = protocol.build(cls, values)
    answer = lone.node.parts.handlers.handle(context, memoryview(b""), request)
    assert isinstance(answer, Generator)
    assert sum(1 for _ in answer) >= len(MANY)
