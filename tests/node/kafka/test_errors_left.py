"""Errors of a request's entries go with its answer.

An error whose traceback holds the frame that holds the error is freed by the garbage collector
alone, which looks rarely: a Produce of 100 kB to partitions that are not there left 210 MB.
"""

from __future__ import annotations

import asyncio
import gc

import pytest

from kept.node.kafka import api
from kept.storage.errors import KeptError
from tests.node.conftest import Lone
from tests.node.largest_requests import Filler, exchange, from_outside, shapes

ENTRIES = 200
FEW = 20
"""Errors that one request may leave for the collector, of so many entries."""
PARTITIONS = 50


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with asyncio.Runner() as runner:
        settings = {"kept_request_max_entries": str(ENTRIES)}
        lone = Lone(runner, str(tmp_path_factory.mktemp("errors")), **settings)
        lone.create("many", PARTITIONS)
        lone.ask(10, 4, key_type=0, coordinator_keys=["g"])
        yield lone
        gc.unfreeze()
        lone.stop()


@pytest.mark.parametrize("served", api.APIS, ids=lambda one: one.name)
def test_no_request_leaves_errors_of_its_entries(node, served) -> None:
    topics = [("many", node.node.parts.metadata.image.topics["many"].topic_id)]
    filler = Filler(topics, PARTITIONS, ENTRIES)
    left = {}
    for shape in shapes(lambda one: one.max_version):
        if shape.api is served:
            frame = filler.frame(shape)
            gc.collect()
            gc.freeze()
            gc.disable()
            try:
                node.run(from_outside(asyncio.wait_for(exchange(node.port, frame), 300)))
                errors = [one for one in gc.get_objects() if isinstance(one, KeptError)]
            finally:
                gc.enable()
            if len(errors) > FEW:
                left[str(shape)] = len(errors), repr(errors[0])[:80]
            del errors
    assert not left
