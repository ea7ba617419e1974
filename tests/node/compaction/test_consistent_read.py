"""Reading a log in another process while compaction replaces its files."""

from __future__ import annotations

import asyncio

import pytest

from kept.node.compaction import consistent_read as module
from kept.node.compaction.consistent_read import ConcurrentlyModified, read_consistently, read_once
from kept.storage.errors import DamagedData
from kept.storage.types import TopicPartition
from tests.support.given import Given


def replica():
    return Given(
        compaction__applied="0.1",
        manifests__busy=False,
        partition__log__truncations=0,
        partition__topic_partition=TopicPartition("t", 0),
    )


def reader(*does):
    """What reading comes to, one time after the other; callables happen meanwhile."""
    left = list(does)

    async def read():
        await asyncio.sleep(0)
        one = left.pop(0)
        if isinstance(one, Exception):
            raise one
        if callable(one):
            one()
            raise DamagedData("/log", 0, -1, "the last batch is cut off")
        return one

    return read


def ends_up(hosted, read, how=read_once):
    return asyncio.run(how(hosted, read))


def test_what_was_read_at_rest_counts():
    assert ends_up(replica(), reader("found")) == "found"
    with pytest.raises(DamagedData):
        ends_up(replica(), reader(DamagedData("/log", 0, -1, "rot")))


@pytest.mark.parametrize("what", ["generation", "cut", "placing"])
def test_what_was_read_meanwhile_does_not_count(what):
    hosted = replica()

    def happens():
        if what == "generation":
            hosted.compaction.applied = "0.2"
        elif what == "cut":
            hosted.partition.log.truncations += 1
        else:
            hosted.manifests.busy = True

    with pytest.raises(ConcurrentlyModified, match=r"^t:0: it is being compacted"):
        ends_up(hosted, reader(happens))


def test_it_is_read_again(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0)
    hosted = replica()

    def moves():
        hosted.partition.log.truncations += 1

    assert ends_up(hosted, reader(moves, moves, "found"), read_consistently) == "found"
    with pytest.raises(ConcurrentlyModified):
        ends_up(hosted, reader(*[moves] * module.TRIES), read_consistently)
    hosted.manifests.busy = True
    with pytest.raises(ConcurrentlyModified):
        ends_up(hosted, reader(), read_consistently)
