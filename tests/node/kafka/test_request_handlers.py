"""Handlers are built from what their constructors name."""

from __future__ import annotations

import inspect

import pytest

from kept.node.kafka import api
from kept.node.kafka.request_handlers import Collaborators


@pytest.mark.parametrize("served", [one for one in api.APIS if one.handler], ids=lambda a: a.name)
def test_a_handler_names_collaborators_that_there_are(served):
    cls = api.handler_class(served)
    for name, parameter in inspect.signature(cls).parameters.items():
        assert parameter.annotation == Collaborators.__annotations__[name], name
    assert callable(getattr(cls, served.name))
