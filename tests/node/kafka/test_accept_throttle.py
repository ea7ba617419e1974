"""Sockets that come faster than they may: their order, their turns, and how many wait."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kept.cluster.security.client_quotas import CONNECTION_CREATION_RATE, IP, entity
from kept.node.kafka.accept_throttle import AcceptThrottle, is_closed_by_peer
from kept.node.runtime.counters import Counters
from kept.node.security.connection_rates import UNLIMITED, ConnectionRates
from tests.support.given import Given
from tests.support.timers import Timers

HERE, OTHER = "10.0.0.1", "10.0.0.2"


class Peer:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.is_closed = self.fails = False

    def serve(self) -> None:
        if self.fails:
            raise RuntimeError("a test")
        self._log.append(f"{self._name} served")

    def abort(self) -> None:
        self._log.append(f"{self._name} closed")


class Site:
    """One listener, as far as its throttle knows it."""

    def __init__(
        self,
        rate: int = UNLIMITED,
        own_rate: int = UNLIMITED,
        quotas: dict[str, float] | None = None,
        *,
        between_nodes: bool = False,
        backlog: int = 50,
    ) -> None:
        self.peers: list[Peer] = []
        self.loop = Timers()
        self.rates = ConnectionRates()
        self.rates.replace(
            {
                entity({IP: host}): {CONNECTION_CREATION_RATE: of}
                for host, of in (quotas or {}).items()
            }
        )
        self.counters = Counters()
        self.complaints: list[str] = []
        self.log: list[str] = []
        self.files = 100
        context = Given(
            runtime__loop=self.loop,
            config__current__max_connection_creation_rate=rate,
            config__current__socket_listen_backlog_size=backlog,
            config__current__own_connection_creation_rate=lambda _: own_rate,
            connection_rates=self.rates,
            counters=self.counters,
            open_files__nearly_out=lambda fd: fd >= self.files,
        )
        listener: Any = Given(
            context=context,
            name="OUT",
            between_nodes=between_nodes,
            log_refusal=lambda _, setting, waiting: self.complaints.append(setting),
        )
        self.throttle = AcceptThrottle(listener)

    def accept(self, count: int = 1, host: str = HERE, fd: int = 1) -> int:
        """So many sockets come; how many are served at once."""
        self.peers = [Peer(self.log, f"{host}/{number}") for number in range(count)]
        return sum(self.throttle.admit(peer, host, fd) for peer in self.peers)


@pytest.mark.parametrize("of_all", [True, False])
def test_more_than_the_rate_wait_in_their_order(of_all: bool) -> None:
    site = Site(rate=10) if of_all else Site(own_rate=10)
    assert site.accept(105) == 100
    assert site.log == [] and len(site.throttle) == 5
    site.loop.advance(0.25)
    assert site.log == [f"{HERE}/100 served", f"{HERE}/101 served"]
    assert site.accept() == 0, "it comes behind those that wait"
    site.loop.advance(12)
    assert [line.rpartition("/")[2] for line in site.log[2:]] == [
        f"{n} served" for n in (102, 103, 104, 0)
    ]
    assert not len(site.throttle) and site.accept() == 1
    assert site.counters.throttled_seconds["connection"] == pytest.approx(0.6, abs=0.1)


def test_an_address_over_its_quota_is_closed_later_and_holds_up_nobody() -> None:
    site = Site(quotas={HERE: 5})
    assert site.accept(52) == 50
    assert site.accept(60, OTHER) == 60
    site.loop.advance(0.1)
    assert site.log == []
    site.loop.advance(0.11)
    assert site.log == [f"{HERE}/50 closed", f"{HERE}/51 closed"]
    assert site.accept() == 1 and site.accept() == 0
    assert site.counters.throttled_seconds["connection"] == pytest.approx(0.6, abs=0.3)


@pytest.mark.parametrize("end", ["its time is over", "its peer closes it", "all are closed"])
def test_one_that_was_refused_is_forgotten_when_it_is_closed(end: str) -> None:
    site = Site(quotas={HERE: 5})
    assert site.accept(51) == 50 and len(site.throttle) == 1
    if end == "its peer closes it":
        site.throttle.discard(site.peers[50])
    elif end == "all are closed":
        site.throttle.close()
    site.loop.advance(10)
    assert site.log == ([] if end == "its peer closes it" else [f"{HERE}/50 closed"])
    assert not len(site.throttle) and not site.loop.waiting


def test_a_closed_one_has_no_turn_when_its_own_comes() -> None:
    site = Site(rate=10)
    assert site.accept(103) == 100
    site.peers[100].is_closed = site.peers[101].is_closed = True
    site.loop.advance(0.11)
    assert site.log == [f"{HERE}/100 closed", f"{HERE}/101 closed", f"{HERE}/102 served"]
    assert not len(site.throttle)


def test_so_many_wait_and_no_more() -> None:
    site = Site(rate=1, quotas={OTHER: 1}, backlog=20)
    assert site.accept(10 + 21) == 10
    assert site.log == [f"{HERE}/30 closed"]
    assert site.complaints == ["max.connection.creation.rate"]
    site.throttle.close()
    assert len(site.log) == 21 and not len(site.throttle)
    site.loop.advance(1000)
    assert len(site.log) == 21 and site.accept() == 1
    site.throttle.close()  # nobody waits
    few = Site(quotas={HERE: 1})
    assert few.accept(12, fd=few.files) == 10
    assert few.log == [f"{HERE}/10 closed", f"{HERE}/11 closed"], "descriptors are for others"
    assert few.complaints == ["connection_creation_rate"] * 2


@pytest.mark.parametrize("is_told", [True, False], ids=["plain", "tls"])
def test_closed_sockets_use_no_turn_and_no_place(is_told: bool) -> None:
    """Whether the loop tells of the end, or the socket is looked at when its turn comes."""
    site = Site(rate=1, backlog=20)
    assert site.accept(10 + 20) == 10
    for peer in site.peers[10:-1]:
        peer.is_closed = True
        if is_told:
            site.throttle.discard(peer)
    site.log.clear()
    assert site.accept(5, OTHER) == 0 and site.complaints == []
    assert len(site.throttle) == 6
    assert len(site.log) == (0 if is_told else 19), "the others are closed here, too"
    site.loop.advance(1.01)
    assert [line for line in site.log if "served" in line] == [f"{HERE}/29 served"]
    site.loop.advance(1)
    assert site.log[-1] == f"{OTHER}/0 served"
    assert len(site.throttle) == 4


def test_a_peer_that_closed_is_seen_behind_bytes_that_nobody_has_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        assert not is_closed_by_peer(ours.fileno())
        theirs.shutdown(socket.SHUT_WR)
        assert is_closed_by_peer(ours.fileno())


def test_one_that_fails_holds_up_nobody() -> None:
    site = Site(rate=10)
    assert site.accept(103) == 100
    site.peers[100].fails = True
    site.loop.advance(1)
    assert site.log == [f"{HERE}/100 closed", f"{HERE}/101 served", f"{HERE}/102 served"]


def test_nodes_are_held_back_by_a_rate_of_their_listener_alone() -> None:
    site = Site(rate=1, quotas={HERE: 1}, between_nodes=True)
    assert site.accept(100) == 100
    assert Site(own_rate=1, between_nodes=True).accept(100) == 10
    assert Site(rate=1, quotas={HERE: 1}).accept(100, host="") == 100, "this node itself"
