"""Work that ends with the right to it."""

from __future__ import annotations

import asyncio

import pytest

from kept.node.security import revocation
from kept.node.security.revocation import Revoked, run_while_allowed


def test_work_that_is_allowed_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "CHECK_S", 0.001)

    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(run_while_allowed(work(), lambda: True)) == "done"


def test_what_is_done_is_given_whatever_is_allowed_by_then() -> None:
    async def work() -> str:
        return "done"

    assert asyncio.run(run_while_allowed(work(), lambda: False)) == "done"


def test_work_is_cancelled_with_the_right_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "CHECK_S", 0.001)
    ended: list[type[BaseException]] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(type(error))
            raise

    async def go() -> None:
        with pytest.raises(Revoked):
            await run_while_allowed(work(), lambda: False)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(go(), 20))
    assert ended == [asyncio.CancelledError]


def test_work_ends_with_whoever_waits_for_it() -> None:
    async def go() -> bool:
        begun, never = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await never.wait()

        waits = asyncio.ensure_future(run_while_allowed(work(), lambda: True))
        await begun.wait()
        (running,) = asyncio.all_tasks() - {asyncio.current_task(), waits}
        waits.cancel()
        await asyncio.wait({waits, running}, timeout=20)
        return running.cancelled()

    assert asyncio.run(go())


def test_an_error_of_the_work_is_whoevers_it_is_done_for() -> None:
    async def work() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(run_while_allowed(work(), lambda: True))
