"""Checks of passwords, which are slow on purpose: two at a time, in threads, fair to addresses.

Each costs a PBKDF2 of some milliseconds. :data:`MAX_WAITING` may wait, :data:`MAX_WAITING_PER_HOST`
of one address; beyond, a check is refused, or the newest of the address that has most waiting where
the new one has fewer. Addresses take turns, so that one that tries passwords by the thousand keeps
nobody else waiting. A pair that was right is remembered for
:data:`REMEMBER_S`, by a keyed hash, while the credential is the same.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kept.client.security.scram import HASHES, password_matches
from kept.node.security.stored_credentials import PasswordCredential, StoredCredentials

THREADS: Final = 2
MAX_WAITING: Final = 256
MAX_WAITING_PER_HOST: Final = 32
REMEMBER_S: Final = 60.0
MAX_REMEMBERED: Final = 4_096


class PasswordChecks:
    """Checks passwords in threads, two at a time, by turns of the addresses. Used on the node's
    loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, credentials: StoredCredentials) -> None:
        self._loop = loop
        self._credentials = credentials
        self._secret = secrets.token_bytes(32)
        self._threads: ThreadPoolExecutor | None = None
        self._running = 0
        self._waiting: dict[str, deque[asyncio.Future[bool]]] = {}
        """By address, in the order in which addresses have their turns; whether each got one."""
        self._count = 0
        self._right: dict[bytes, tuple[float, object]] = {}
        """Until when a pair counts as right, and for which credential."""

    @property
    def waiting(self) -> int:
        """How many checks wait for their turn."""
        return self._count

    async def matches(
        self, host: str, user: str, password: str, mechanisms: Collection[str] = tuple(HASHES)
    ) -> bool:
        """Whether ``password`` is the one that a credential of ``user``, of one of ``mechanisms``,
        was made from. False, too, when too many wait.
        """
        stored = self._credentials.for_password(user, mechanisms)
        pair = hmac.digest(self._secret, f"{user}\0{password}".encode(), "sha256")
        until, credential = self._right.get(pair, (0.0, None))
        if credential is stored.credential and self._loop.time() < until:
            return True
        if not await self._turn(host):
            return False
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
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="password")
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
        waiting = len(self._waiting.get(host, ()))
        if waiting >= MAX_WAITING_PER_HOST:
            return False
        if self._count >= MAX_WAITING and not self._make_room(waiting):
            return False
        turn: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.setdefault(host, deque()).append(turn)
        self._count += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._running -= 1
                self._wake_next()
            raise

    def _make_room(self, waiting: int) -> bool:
        """Refuse the newest of the address that has most waiting, for one of an address that has
        ``waiting``; False where it would have more then.
        """
        most = max(self._waiting.values(), key=len)
        if len(most) <= waiting + 1:
            return False
        turn = most.pop()
        self._count -= 1
        if not turn.done():
            turn.set_result(False)
        return True

    def _wake_next(self) -> None:
        while self._waiting and self._running < THREADS:
            host, own = next(iter(self._waiting.items()))
            del self._waiting[host]
            turn = own.popleft()
            self._count -= 1
            if own:
                self._waiting[host] = own
            if not turn.done():
                self._running += 1
                turn.set_result(True)

    def _remember(self, pair: bytes, credential: object) -> None:
        self._right.pop(pair, None)
        self._right[pair] = self._loop.time() + REMEMBER_S, credential
        if len(self._right) > MAX_REMEMBERED:
            del self._right[next(iter(self._right))]
