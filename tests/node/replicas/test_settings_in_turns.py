"""Settings of very many partitions come into force in turns: others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kept.node.runtime.time_slices import ITEMS_PER_SLICE

PARTITIONS = 5 * ITEMS_PER_SLICE


@pytest.mark.parametrize("of", ["topic", "broker"])
def test_settings_of_many_partitions_take_turns(lone, monkeypatch, of) -> None:
    lone.create("t", PARTITIONS)
    settings, replicas = lone.node.parts.replicas.settings, lone.node.parts.table.replicas
    turn, applied = 0, Counter()
    apply = settings.apply

    def noted(hosted, config):
        applied[turn] += 1
        apply(hosted, config)

    async def altered():
        nonlocal turn
        while len(replicas) < PARTITIONS:
            await asyncio.sleep(0)
        monkeypatch.setattr(settings, "apply", noted)
        name, key = ("t", "segment.bytes") if of == "topic" else ("", "log.segment.bytes")
        config = {"name": key, "config_operation": 0, "value": "77777"}
        asked = {"resource_type": 2 if of == "topic" else 4, "resource_name": name}
        resources = [{**asked, "configs": [config]}]
        request = lone.request(44, 1, resources=resources, validate_only=False)
        changing = asyncio.ensure_future(request)
        while not changing.done() or applied.total() < PARTITIONS:
            turn += 1
            await asyncio.sleep(0)
        return await changing

    (answer,) = lone.run(asyncio.wait_for(altered(), 60)).responses
    assert answer.error_code.name == "none"
    assert max(applied.values()) <= ITEMS_PER_SLICE
    assert {hosted.partition.log.config.segment_bytes for hosted in replicas.values()} == {77777}
