"""Checks of passwords take turns, are bounded, and failures of an address slow it down alone."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kept.cluster.controller.scram_changes import MAX_ITERATIONS
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.node.security import password_checks
from kept.node.security.failed_logins import MAX_DELAY_MS, MAX_NETWORKS, REMEMBER_MS, FailedLogins
from kept.node.security.password_checks import (
    MAX_WAITING,
    MAX_WAITING_PER_HOST,
    NICENESS,
    REMEMBER_S,
    THREADS,
    PasswordChecks,
    TooManyLogins,
)
from kept.node.security.stored_credentials import StoredCredentials
from tests.support.credentials import credential, image_of
from tests.support.loops import run, turns, until

SHA_512 = ScramMechanism.SCRAM_SHA_512
Users = dict[tuple[str, ScramMechanism], ScramCredential]


class Held:
    """Checks that end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun: list[tuple[str, asyncio.Future[bool]]] = []
        self.users: Users = {("ada", SHA_512): credential("right", "SCRAM-SHA-512")}
        self.checks = PasswordChecks(self.loop, StoredCredentials(lambda: image_of(self.users)))
        monkeypatch.setattr(self.loop, "run_in_executor", self._begin)

    def _begin(self, _: Any, function: Any, mechanism: str, password: str, *__: Any) -> Any:
        assert function is password_checks.password_matches
        future = self.loop.create_future()
        self.begun.append((password, future))
        return future

    async def stop(self, tasks: Sequence[asyncio.Task[bool]]) -> None:
        """End what is still under way."""
        for task in tasks:
            task.cancel()
        while self.begun:
            await self.end(self.begun[0][0])
            await turns()
        await until(lambda: all(task.done() for task in tasks))
        assert self.checks.waiting == 0

    def start(self, host: str, password: str) -> asyncio.Task[bool]:
        return self.loop.create_task(self.checks.matches(host, "ada", password))

    async def end(self, password: str, *, right: bool = False) -> None:
        await until(lambda: password in [name for name, _ in self.begun])
        entry = next(entry for entry in self.begun if entry[0] == password)
        self.begun.remove(entry)
        entry[1].set_result(right)


@run
async def test_a_password_that_was_right_is_remembered_until_it_changes() -> None:
    users: Users = {("ada", SHA_512): credential("right", "SCRAM-SHA-512")}
    checks = PasswordChecks(asyncio.get_running_loop(), StoredCredentials(lambda: image_of(users)))
    try:
        assert await checks.matches("h", "ada", "right")
        assert not await checks.matches("h", "ada", "wrong")
        assert not await checks.matches("h", "bob", "right")
        checks.close()  # from here on only what is remembered is answered
        assert await checks.matches("h", "ada", "right")
        users[("ada", SHA_512)] = credential("other", "SCRAM-SHA-512")
        with pytest.raises(RuntimeError, match="shutdown"):
            await checks.matches("h", "ada", "right")
    finally:
        checks.close()


async def _remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    held, now = Held(monkeypatch), 0.0
    monkeypatch.setattr(held.loop, "time", lambda: now)
    for began in (0.0, REMEMBER_S):
        now = began
        first = held.start("h", "right")
        await turns()
        assert [password for password, _ in held.begun] == ["right"]
        await held.end("right", right=True)
        assert await first
        now = began + REMEMBER_S - 0.001
        assert await held.start("h", "right") and not held.begun


def test_a_password_that_was_right_is_remembered_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A right one that was looked up does not count for longer."""
    run(_remembered)(monkeypatch)


async def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    for _ in range(2):
        login = held.loop.create_task(held.checks.matches("h", "nobody", "fits"))
        await held.end("fits", right=True)
        assert not await login


def test_no_password_is_that_of_a_user_who_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that fits what is compared with it so that it takes as long."""
    run(_unknown)(monkeypatch)


async def _turns(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    flood = [held.start("bad", f"guess {number}") for number in range(MAX_WAITING_PER_HOST + 10)]
    await until(lambda: held.checks.waiting == MAX_WAITING_PER_HOST)
    refused = [task for task in flood if task.done()]
    assert len(refused) == 8
    assert all(isinstance(task.exception(), TooManyLogins) for task in refused)
    good = held.start("good", "right")
    await held.end("guess 0")
    await held.end("guess 1")
    await held.end("guess 2")
    await held.end("right", right=True)
    assert await good
    assert held.checks.waiting == MAX_WAITING_PER_HOST - 3
    for task in flood:
        task.cancel()
    while held.begun:
        await held.end(held.begun[0][0])
    await until(lambda: all(task.done() for task in flood))
    last = held.start("bad", "right")
    assert await last, "it is remembered"
    later = held.start("bad", "guess")
    await held.end("guess")
    assert not await later
    assert held.checks.waiting == 0


def test_an_address_that_floods_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run(_turns)(monkeypatch)


async def _ten_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    held, flood = Held(monkeypatch), list[asyncio.Task[bool]]()
    for number in range(20):
        flood += [held.start("bad", f"guess {len(flood) + more}") for more in range(500)]
        await turns()
        assert held.checks.waiting == MAX_WAITING_PER_HOST
        own, before = f"own {number}", 0
        good = held.start("good", own)
        await turns()
        while own not in [password for password, _ in held.begun]:
            await held.end(held.begun[0][0])
            before += 1
            await turns()
        assert before <= THREADS + 1, "those that run, and one whose turn it is"
        await held.end(own, right=True)
        assert await good
    refused = [task for task in flood if task.done() and task.exception() is not None]
    assert len(flood) == 10_000 and len(refused) > 9_900
    assert all(isinstance(task.exception(), TooManyLogins) for task in refused)
    await held.stop(flood)


def test_ten_thousand_wrong_passwords_come_before_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another address waits for a few checks, however many are wanted."""
    run(_ten_thousand)(monkeypatch)


MOST_S = 0.2


@pytest.mark.slow
def test_among_ten_thousand_wrong_passwords_a_right_one_waits_for_little_work() -> None:
    """For 200 ms of this process's time, its own included, where each costs the most that one may:
    that is what it waits for, however many processors there are.
    """
    ada = credential("right", "SCRAM-SHA-512", iterations=MAX_ITERATIONS)

    async def go() -> None:
        loop = asyncio.get_running_loop()
        stored = StoredCredentials(lambda: image_of({("ada", SHA_512): ada}))
        checks, flood = PasswordChecks(loop, stored), list[asyncio.Task[bool]]()
        taken = []
        for _ in range(20):
            first = len(flood)
            for number in range(first, first + 500):
                flood.append(loop.create_task(checks.matches("bad", "ada", f"guess {number}")))
            await turns(1)
            assert checks.waiting == MAX_WAITING_PER_HOST
            checks._right.clear()
            began = time.process_time()
            assert await checks.matches("good", "ada", "right")
            taken.append(time.process_time() - began)
        assert len(flood) == 10_000
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        checks.close()
        print(f"ms: {[round(1e3 * one) for one in sorted(taken)]}")
        assert max(taken) < MOST_S

    asyncio.run(asyncio.wait_for(go(), 100))


async def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    tasks = [held.start(f"h{number}", str(number)) for number in range(MAX_WAITING + 3)]
    await until(lambda: held.checks.waiting == MAX_WAITING)
    assert [task.done() for task in tasks[-1:]] == [True]
    for task in tasks:
        task.cancel()
    await until(lambda: all(task.done() for task in tasks))
    assert len(held.begun) == 2, "their threads are busy though nobody waits"
    while held.begun:
        await held.end(held.begun[0][0])
    await until(lambda: held.checks.waiting == 0)


def test_what_waits_is_bounded_also_when_clients_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    run(_bounded)(monkeypatch)


async def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    held, addresses = Held(monkeypatch), MAX_WAITING // MAX_WAITING_PER_HOST
    running = [held.start("first", f"running {number}") for number in range(2)]
    flood = [
        held.start(f"bad {number % addresses}", f"guess {number}") for number in range(MAX_WAITING)
    ]
    await until(lambda: held.checks.waiting == MAX_WAITING)
    good, also = held.start("good", "right"), held.start("good", "other")
    await turns()
    refused = [task for task in flood if task.done()]
    assert len(refused) == 2
    assert all(isinstance(task.exception(), TooManyLogins) for task in refused)
    assert refused == flood[-2:], "those that came last"
    assert held.checks.waiting == MAX_WAITING
    while not good.done():
        await turns()
        password, _ = held.begun[0]
        await held.end(password, right=password == "right")
        await turns()
    assert await good and len([task for task in flood if not task.done()]) > MAX_WAITING - 20
    for task in (*running, *flood, also):
        task.cancel()
    while held.begun:
        await held.end(held.begun[0][0])
        await turns()
    assert held.checks.waiting == 0


def test_addresses_that_flood_leave_room_for_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who gives way is who came last of the address that has most waiting."""
    run(_shared)(monkeypatch)


def network(number: int) -> str:
    """A /64, of which an address is the last part."""
    return f"2001:db8:0:{number:x}:"


async def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    running = [held.start("first", f"running {number}") for number in range(2)]
    flood = [
        held.start(f"{network(1)}:{number:x}", f"guess {number}") for number in range(MAX_WAITING)
    ]
    await until(lambda: held.checks.waiting == MAX_WAITING)
    beyond = held.start(f"{network(1)}:ffff", "beyond")
    await until(beyond.done)
    assert isinstance(beyond.exception(), TooManyLogins), "its network has most"
    good = [held.start(f"{network(2)}:1", f"good {number}") for number in range(2)]
    await turns()
    assert [task.done() for task in flood].index(True) == MAX_WAITING - 2, "who came last"
    assert held.checks.waiting == MAX_WAITING
    for number in range(2):
        await held.end(f"running {number}")
    await turns()
    assert [password for password, _ in held.begun] == ["guess 0", "good 0"], "networks take turns"
    await held.stop([*running, *flood, *good])


def test_all_addresses_of_a_network_of_ipv6_wait_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a /64 has as many addresses as he likes, each with one password."""
    run(_networks)(monkeypatch)


async def _neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    held, hosts = Held(monkeypatch), MAX_WAITING // MAX_WAITING_PER_HOST
    running = [held.start("first", f"running {number}") for number in range(2)]
    flood = [
        held.start(f"{network(1)}:{number % hosts + 1:x}", f"guess {number}")
        for number in range(MAX_WAITING)
    ]
    await until(lambda: held.checks.waiting == MAX_WAITING)
    good = held.start(f"{network(1)}:abcd", "good")
    await turns()
    assert sum(task.done() for task in flood) == 1 and not good.done()
    for number in range(2):
        await held.end(f"running {number}")
    await turns()
    while "good" not in [password for password, _ in held.begun]:
        await held.end(held.begun[0][0])
        await turns()
    assert sum(task.done() for task in flood) <= 2 * hosts
    await held.stop([*running, *flood, good])


def test_within_a_network_addresses_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    run(_neighbours)(monkeypatch)


@run
async def test_threads_that_check_give_way_to_the_others() -> None:
    users: Users = {("ada", SHA_512): credential("right", "SCRAM-SHA-512")}
    checks = PasswordChecks(asyncio.get_running_loop(), StoredCredentials(lambda: image_of(users)))
    try:
        assert await checks.matches("h", "ada", "right")
        niceness = {
            os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
            for thread in threading.enumerate()
            if thread.name.startswith("password")
        }
    finally:
        checks.close()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness == {min(19, own + NICENESS)}


def test_each_further_failure_of_an_address_waits_twice_as_long() -> None:
    failed = FailedLogins()
    now, delays = 1_000_000, []
    for _ in range(9):
        delays.append(failed.delay_ms("bad", 100, now))
        now += 1000
    assert delays == [100, 200, 400, 800, 1600, 3200, MAX_DELAY_MS, MAX_DELAY_MS, MAX_DELAY_MS]
    assert failed.delay_ms("good", 100, now) == 100
    assert failed.delay_ms("bad", 100, now + REMEMBER_MS + MAX_DELAY_MS) == 100
    assert failed.delay_ms("never", 0, now) == failed.delay_ms("never", 0, now) == 0


def test_so_many_addresses_are_remembered() -> None:
    failed = FailedLogins()
    for number in range(MAX_NETWORKS + 5):
        failed.delay_ms(str(number), 100, 0)
    assert len(failed) == MAX_NETWORKS
    assert failed.delay_ms("0", 100, 0) == 100
    assert failed.delay_ms(str(MAX_NETWORKS), 100, 0) == 200
