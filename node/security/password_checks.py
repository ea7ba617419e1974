"""Checks of passwords, which are slow on purpose: two at a time, in threads of low priority, by
turns.

Each costs a PBKDF2 of some milliseconds. :data:`MAX_WAITING` may wait, :data:`MAX_WAITING_PER_HOST`
of one address; beyond, a check is not made (:class:`TooManyLogins`), or the newest of whoever has
most waiting where the new one has fewer. Networks (an IPv4 address, a /64 of IPv6) take turns, and
in one its addresses do, so that who tries passwords by the thousand keeps nobody else waiting. A
pair that was right is remembered for :data:`REMEMBER_S`, by a keyed hash, while the credential is
the same.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Final

from kept.client.security.scram import HASHES, password_matches
from kept.cluster.security.addresses import network_of
from kept.node.security.stored_credentials import PasswordCredential, StoredCredentials
from kept.storage.errors import RetriableError

THREADS: Final = 2
NICENESS: Final = 10
"""Of these threads: the node's own has ten times their share of a processor that both want."""
MAX_WAITING: Final = 256
MAX_WAITING_PER_HOST: Final = 32
REMEMBER_S: Final = 60.0
MAX_REMEMBERED: Final = 4_096


class TooManyLogins(RetriableError):
    """A password is not checked, since too many others wait: neither right nor wrong."""


class PasswordChecks:
    """Checks passwords in threads, two at a time, by turns. Used on the node's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, credentials: StoredCredentials) -> None:
        self._loop = loop
        self._credentials = credentials
        self._threads: ThreadPoolExecutor | None = None
        self._running = 0
        self._waiting: dict[str, dict[str, deque[asyncio.Future[bool]]]] = {}
        """By network and address, in the order of their turns; whether each got one."""
        self._count = 0
        self._right: dict[bytes, tuple[float, object]] = {}
        """Until when a pair counts as right, and for which credential."""

    @cached_property
    def _secret(self) -> bytes:
        """What remembered pairs are hashed with."""
        from secrets import token_bytes

        return token_bytes(32)

    @property
    def waiting(self) -> int:
        """How many checks wait for their turn."""
        return self._count

    async def matches(
        self, host: str, user: str, password: str, mechanisms: Collection[str] = tuple(HASHES)
    ) -> bool:
        """Whether ``password`` is the one that a credential of ``user``, of one of ``mechanisms``,
        was made from. Raises TooManyLogins.
        """
        from hmac import digest

        stored = self._credentials.for_password(user, mechanisms)
        pair = digest(self._secret, f"{user}\0{password}".encode(), "sha256")
        until, credential = self._right.get(pair, (0.0, None))
        if credential is stored.credential and self._loop.time() < until:
            return True
        if not await self._turn(host):
            raise TooManyLogins("too many passwords wait to be checked; try again")
        right = await self._run(stored, password)
        if right:
            self._remember(pair, stored.credential)
        return right

    def close(self) -> None:
        """Wait for what runs; nothing is checked after that."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    async def _run(self, stored: PasswordCredential, password: str) -> bool:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                THREADS, thread_name_prefix="password", initializer=_give_way
            )
        check = self._loop.run_in_executor(
            self._threads, password_matches, stored.mechanism, password, stored.credential
        )
        check.add_done_callback(self._ran)
        return await asyncio.shield(check) and stored.exists

    def _ran(self, check: asyncio.Future[bool]) -> None:  # noqa: ARG002
        """A thread is free again, also where nobody waits for the result any more."""
        self._running -= 1
        self._wake_next()

    async def _turn(self, host: str) -> bool:
        """Wait for a thread; False when too many wait already."""
        if self._running < THREADS and not self._count:
            self._running += 1
            return True
        network = network_of(host)
        own = self._waiting.get(network, {})
        if len(own.get(host, ())) >= MAX_WAITING_PER_HOST:
            return False
        if self._count >= MAX_WAITING and not self._make_room(own, host):
            return False
        turn: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.setdefault(network, {}).setdefault(host, deque()).append(turn)
        self._count += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._running -= 1
                self._wake_next()
            raise

    def _make_room(self, own: dict[str, deque[asyncio.Future[bool]]], host: str) -> bool:
        """Refuse the newest of the network that has most waiting, of the address that has most
        there, for one of ``host``, whose network has ``own``; False where that would have more
        then. Nobody's turn comes later by that.
        """
        most = max(reversed(self._waiting.values()), key=_count)
        if _count(most) <= _count(own) + 1:
            most = own
        greedy = max(reversed(most), key=lambda address: len(most[address]), default="")
        if most is own and len(own.get(greedy, ())) <= len(own.get(host, ())) + 1:
            return False
        turn = most[greedy].pop()
        if not most[greedy]:
            del most[greedy]
        self._count -= 1
        if not turn.done():
            turn.set_result(False)
        return True

    def _wake_next(self) -> None:
        while self._waiting and self._running < THREADS:
            network, hosts = next(iter(self._waiting.items()))
            host, turns = next(iter(hosts.items()))
            turn = turns.popleft()
            self._count -= 1
            del self._waiting[network], hosts[host]
            if turns:
                hosts[host] = turns
            if hosts:
                self._waiting[network] = hosts
            if not turn.done():
                self._running += 1
                turn.set_result(True)

    def _remember(self, pair: bytes, credential: object) -> None:
        self._right.pop(pair, None)
        self._right[pair] = self._loop.time() + REMEMBER_S, credential
        if len(self._right) > MAX_REMEMBERED:
            del self._right[next(iter(self._right))]


def _give_way() -> None:
    """Lower the priority of this thread, so that the node's own goes before it where both want a
    processor; one that has to give its processor up while it holds the interpreter's lock still
    keeps the node's waiting. Where that is not permitted it stays as it is.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness))


def _count(hosts: dict[str, deque[asyncio.Future[bool]]]) -> int:
    return sum(map(len, hosts.values()))
