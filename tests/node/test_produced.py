"""One Produce request between its append and its answer."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from kept.node.handlers import produce
from kept.node.reply import Reply


class Asker:
    """A connection that notes what it is told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.node = types.SimpleNamespace(loop=loop, now_ms=lambda: 0, in_pool=self._in_pool)
        self.node.write_dirty = lambda _: None
        self.peer = "asker"
        self.unwritten: list[Any] = []
        self.happened: list[str] = []
        self.job: asyncio.Future[Any] = loop.create_future()

    def _in_pool(self, *_: Any) -> asyncio.Future[Any]:
        return self.job

    def expect(self) -> Reply:
        return Reply()

    def complete(self, reply: Reply, segments: list[Any]) -> None:
        reply.segments = segments
        self.happened.append("answered")

    def block(self) -> None:
        self.happened.append("blocked")

    def unblock(self) -> None:
        self.happened.append("unblocked")

    def abort(self) -> None:
        self.happened.append("aborted")


@pytest.fixture
def asker():
    loop = asyncio.new_event_loop()
    yield Asker(loop)
    loop.close()


def synced(flushes: list[Any], *, durable: bool) -> Any:
    def flush(_end_offset: int, callback: Any) -> None:
        if durable:
            callback(None)
        else:
            flushes.append(callback)

    return types.SimpleNamespace(sync=True, partition=None, flush=flush)


@pytest.mark.parametrize("durable", [(True, False), (False, True), (True, True)])
def test_an_answer_waits_for_the_flush_of_every_partition(asker, durable):
    flushes: list[Any] = []
    request = produce.Produced(asker, 9, 1, acks=1, timeout_ms=10_000)
    request.topic(b"t")
    info = types.SimpleNamespace(
        base_offset=0, last_offset=0, log_append_time=-1, log_start_offset=0
    )
    for index, one in enumerate(durable):
        request.appended(synced(flushes, durable=one), index, info)
    request.written({})
    assert (asker.happened == []) == bool(flushes)
    for callback in flushes:
        callback(None)
    assert asker.happened == ["answered"]


def test_a_check_that_fails_as_it_must_not_ends_the_connection(asker, capfd):
    request = types.SimpleNamespace(topics=[])
    answer = produce.Produced(asker, 9, 1, acks=1, timeout_ms=10_000)
    produce._check_in_thread(asker, answer, request, memoryview(b""), 9)
    asker.job.set_exception(MemoryError("no room to inflate"))
    asker.node.loop.call_soon(asker.node.loop.stop)
    asker.node.loop.run_forever()
    assert asker.happened == ["blocked", "aborted"]
