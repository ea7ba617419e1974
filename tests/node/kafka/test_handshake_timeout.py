"""Connections that say nothing: when they are closed, and how many there may be."""

from __future__ import annotations

from typing import Any, cast

from kept.node.kafka.handshake_timeout import HandshakeTimeouts
from tests.support.timers import Timers


class Peer:
    def __init__(self) -> None:
        self.closed = 0

    def abort(self) -> None:
        self.closed += 1


def watched(limit: int = 100) -> tuple[Timers, HandshakeTimeouts]:
    loop = Timers()
    return loop, HandshakeTimeouts(cast("Any", loop), 10.0, limit)


def test_each_is_closed_once_when_its_time_is_over() -> None:
    loop, silent = watched()
    first, second = Peer(), Peer()
    silent.add(first)
    loop.advance(4)
    silent.add(second)
    loop.advance(5.5)
    assert (first.closed, second.closed) == (0, 0)
    loop.advance(1)
    assert (first.closed, second.closed, len(silent)) == (1, 0, 1)
    loop.advance(3)
    assert second.closed == 0
    loop.advance(1)
    assert (first.closed, second.closed, len(silent)) == (1, 1, 0)
    assert loop.waiting == 0, "a node without silent ones has no timer"
    silent.add(first)
    loop.advance(11)
    assert first.closed == 2


def test_whoever_speaks_is_left_alone() -> None:
    loop, silent = watched()
    speaks, later = Peer(), Peer()
    silent.add(speaks)
    silent.discard(speaks)
    silent.discard(speaks)
    loop.advance(1)
    silent.add(later)
    loop.advance(10)
    assert (speaks.closed, later.closed) == (0, 1)


def test_the_oldest_goes_where_there_are_too_many() -> None:
    loop, silent = watched(limit=2)
    peers = [Peer() for _ in range(4)]
    for peer in peers:
        silent.add(peer)
        loop.advance(1)
    assert [peer.closed for peer in peers] == [1, 1, 0, 0]


def test_nobody_is_closed_after_the_end() -> None:
    loop, silent = watched()
    silent.stop()
    peer = Peer()
    silent.add(peer)
    silent.stop()
    assert loop.waiting == 0
    loop.advance(100)
    assert peer.closed == 0
