"""Whose each connection of gRPC's unix socket is, who makes a call, and who has a place: without
gRPC, which is loaded later.

Where anybody logs in (:func:`kept.node.config.security_checks.is_secured`), whoever has not takes
no place from those who have. When ``kept.grpc.max.connections`` are taken one more takes that of
the connection without a login that has had no call for longest, then of one with calls. Only where
fewer than a quarter have no login, one with a login and without a call goes before them: whoever
comes has to have time to log in. A certificate is a login. Where all have a login and a call, the
newest of a user with more than a quarter goes, so that nobody holds them all; so it is with calls.

Where nobody logs in, networks have shares (:mod:`kept.node.runtime.connection_slots`): a connection
without a call gives way, then one with a call; while connections without a call hold a quarter of
the places at most, one with a call goes before those that are within their network's share, since
whoever comes has to have time to make his first.

Calls are counted likewise (``kept.grpc.max.requests``): one whose caller has not logged in, or
whose request has not come, or whose response is not taken for :data:`TAKE_S`, gives way to a new
one. A login that is being checked does not while such calls hold half of the places at most; the
newest do beyond, so that those before come to an end. A response that is not taken ends with its
connection only, which is left alone while others' calls would end with it: where anybody logs in,
those of who has; elsewhere, all whose response is still to come or has just come. Where nobody
logs in, networks have shares of calls as of connections, and the newest call of the network that
has most is ended even so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kept.cluster.security.acls import ANONYMOUS
from kept.node.config.security_checks import is_secured
from kept.node.runtime.connection_slots import MIN_SHARES, ConnectionSlots

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.listener import HandedOver
    from kept.node.security.session import Session

T = TypeVar("T")

CALLER: Final[ContextVar[Session | None]] = ContextVar("caller", default=None)
"""Who makes the call that is served, where it says so itself. gRPC hands its interceptors' findings
to nobody."""
STRANGERS_SHARE: Final = 4
"""A connection of so many may be one without a login, whatever those with one hold."""
CHECKED_SHARE: Final = 2
"""A call of so many may be one whose login is being checked, against new ones."""
TAKE_S: Final = 1.0
"""How long a response may be on its way until it counts as not taken, in seconds."""

_IDLE_STRANGER, _STRANGER, _IDLE, _BUSY = range(4)
"""Ranks of connections."""
_UNTAKEN, _WAITING, _ANONYMOUS, _RETURNED, _CHECKED, _SERVED = range(6)
"""Ranks of calls; ``_RETURNED``: a stranger's, and its response may not be taken yet."""


class Evicted(Exception):
    """A call's place was given to another."""


class Caller:
    """A client's connection, and how many calls it has."""

    __slots__ = ("calls", "connection", "has_login", "host", "name", "user")

    def __init__(self, connection: HandedOver, name: str) -> None:
        self.connection = connection
        self.name = name
        """What its end is bound to in the socket's directory."""
        self.calls = 0
        self.user = connection.session.principal
        """By its certificate, or its last login."""
        self.has_login = self.user != ANONYMOUS
        self.host = connection.session.host


class Call:
    """One call that has a place, and the work that is done for it."""

    __slots__ = ("caller", "has_ended", "has_login", "is_evicted", "taking", "user", "work")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.user = caller.connection.session.principal
        self.has_login = self.user != ANONYMOUS
        """By its connection's certificate, or its own metadata. What another call of the connection
        told says nothing of this one: a proxy may send those of many."""
        self.is_evicted = False
        self.has_ended = False
        self.work: asyncio.Task[Any] | None = None
        self.taking: asyncio.TimerHandle | None = None
        """Runs while its response may be on its way."""

    @property
    def host(self) -> str:
        """The address that it comes from."""
        return self.caller.host

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of ``work``. Raises Evicted when the place was given to another meanwhile."""
        self.work = task = asyncio.ensure_future(work)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_evicted:
                raise Evicted from None
            raise
        finally:
            task.cancel()
            self.work = None

    def evict(self) -> None:
        """End it: what is done, or the connection of who does not take the response."""
        self.is_evicted = True
        if self.work is None:
            self.caller.connection.transport.abort()
        else:
            self.work.cancel()


class Callers:
    """By the name that a connection is bound to in the socket's directory."""

    def __init__(self, config: LiveConfig) -> None:
        self._config = config
        self._numbers = itertools.count()
        self._by_name: dict[str, Caller] = {}
        self._connections: ConnectionSlots[Caller] = ConnectionSlots(4)
        self._calls: ConnectionSlots[Call] = ConnectionSlots(6)

    def enter(self, connection: HandedOver) -> Caller | None:
        """A client connects; None: there is no place."""
        limit = self._config.current.grpc_max_connections
        while len(self._connections) >= limit:
            other = self._leaving(connection.session.host, limit)
            if other is None:
                return None
            self.leave(other)
            other.connection.transport.abort()
        caller = Caller(connection, f"c-{next(self._numbers)}")
        self._by_name[caller.name] = caller
        self._rank(caller)
        return caller

    def _leaving(self, host: str, limit: int) -> Caller | None:
        """Whose place is taken for one more connection, from ``host``."""
        places = self._connections
        if not is_secured(self._config.current):
            idle, others = (_IDLE_STRANGER,), (_STRANGER, _IDLE, _BUSY)
            return places.pop_beyond_share(host, limit, idle, others, kept_idle=limit // MIN_SHARES)
        strangers = places.of_rank(_IDLE_STRANGER) + places.of_rank(_STRANGER)
        if strangers < limit // STRANGERS_SHARE:
            other = places.pop_first((_IDLE, _IDLE_STRANGER, _STRANGER))
        else:
            other = places.pop_first((_IDLE_STRANGER, _STRANGER, _IDLE))
        return other or places.pop_of_greediest(limit, _BUSY, lambda one: one.user)

    def _rank(self, caller: Caller) -> None:
        """It has more calls or fewer, or has logged in."""
        if caller.name not in self._by_name:
            return
        ranks = (_IDLE_STRANGER, _STRANGER), (_IDLE, _BUSY)
        self._connections.put(caller, ranks[caller.has_login][caller.calls > 0])

    def leave(self, caller: Caller) -> None:
        """Its connection is closed; again is no fault."""
        self._by_name.pop(caller.name, None)
        self._connections.discard(caller)

    def begin(self, caller: Caller) -> Call | None:
        """A call begins; None: there is no place."""
        limit = self._config.current.grpc_max_requests
        while len(self._calls) >= limit:
            other = self._call_to_evict(caller.host, limit)
            if other is None:
                return None
            other.evict()
        call = Call(caller)
        self._calls.put(call, _WAITING)
        caller.calls += 1
        self._rank(caller)
        return call

    def _call_to_evict(self, host: str, limit: int) -> Call | None:
        """Whose place is taken for one more call, from ``host``."""
        calls, spared = self._calls, set[Caller]()

        def is_evictable(call: Call) -> bool:
            return call.work is not None or call.caller not in spared

        if not is_secured(self._config.current):
            spared.update(call.caller for call in calls.members(_UNTAKEN + 1))
            idle, others = (_UNTAKEN, _WAITING), (_ANONYMOUS, _RETURNED, _CHECKED, _SERVED)
            return calls.pop_beyond_share(
                host, limit, idle, others, kept_idle=limit // MIN_SHARES, is_evictable=is_evictable
            )
        spared.update(call.caller for call in calls.members() if call.has_login)
        other = calls.pop_first((_UNTAKEN, _WAITING, _ANONYMOUS, _RETURNED), is_evictable)
        if other is None and calls.of_rank(_CHECKED) > limit // CHECKED_SHARE:
            other = calls.pop_last(_CHECKED)
        if other is None:
            users: dict[Caller, set[str]] = {}
            for call in calls.members():
                users.setdefault(call.caller, set()).add(call.user)
            other = calls.pop_of_greediest(
                limit,
                _SERVED,
                lambda call: call.user,
                lambda call: call.work is not None or len(users[call.caller]) == 1,
            )
        return other

    def check(self, call: Call) -> None:
        """Its login is being checked."""
        self._put(call, _CHECKED)

    def refused(self, call: Call) -> None:
        """Its login was not believed, which it hears later."""
        self._put(call, _WAITING)

    def logged_in(self, call: Call, session: Session) -> None:
        """It is known who makes a call; its request may not have come yet."""
        if session.principal != ANONYMOUS:
            call.has_login = call.caller.has_login = True
            call.user = call.caller.user = session.principal
            self._put(call, _SERVED)
            self._rank(call.caller)

    def serve(self, call: Call) -> None:
        """Its request has come, and is served."""
        is_stranger = not call.has_login and is_secured(self._config.current)
        self._put(call, _ANONYMOUS if is_stranger else _SERVED)

    def served(self, call: Call) -> None:
        """It is served; its response may not be taken yet."""
        if not (call.has_login or call.has_ended or call.is_evicted):
            self._put(call, _RETURNED)
            loop = asyncio.get_running_loop()
            call.taking = loop.call_later(TAKE_S, self._put, call, _UNTAKEN)

    def _put(self, call: Call, rank: int) -> None:
        if not call.is_evicted and not call.has_ended:
            self._calls.put(call, rank)

    def end(self, call: Call) -> None:
        """It has ended, maybe while what is done for it has yet to."""
        call.has_ended = True
        if call.taking is not None:
            call.taking.cancel()
        self._calls.discard(call)
        call.caller.calls -= 1
        self._rank(call.caller)

    def session(self, peer: str) -> Session | None:
        """Who makes the call that is served, which came by the connection ``peer``."""
        session = CALLER.get()
        if session is not None:
            return session
        caller = self.of(peer)
        return None if caller is None else caller.connection.session

    def of(self, peer: str) -> Caller | None:
        """The client whose connection gRPC calls ``peer`` (``unix:/tmp/kept-peers-x/c-7``)."""
        return self._by_name.get(peer.rpartition("/")[2])
