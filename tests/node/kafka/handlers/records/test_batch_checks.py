"""How much is drawn for batches that inflate in a thread, and that all of it is given back."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from typing import Any

import pytest

from kept.node.kafka.handlers.records import batch_checks
from kept.node.kafka.handlers.records.batch_checks import BatchChecks, inflated
from kept.storage.errors import CorruptMessage, InflatesBeyondLimit
from kept.storage.types import Codec
from tests.support.given import Given

MIB = 1 << 20
LIMIT = 100 * MIB


class Site:
    """A node whose pool is this thread, and whose memory is granted when the test says so."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self.given: list[int] = []
        self.grants: list[Any] | None = None
        self.resources: Any = Given(
            config__current__inflated_max_bytes=LIMIT,
            inflating__draw=self.draw,
            inflating__release=self.given.append,
            runtime__in_thread=self.in_thread,
        )

    def draw(self, size: int, granted: Any) -> None:
        self.drawn.append(size)
        if self.grants is None:
            granted()
        else:
            self.grants.append(granted)

    def in_thread(self, work: Any, *given: Any) -> asyncio.Future[Any]:
        done = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work(*given))
        except Exception as error:  # noqa: BLE001
            done.set_exception(error)
        return done


def refusal(told: int | None) -> InflatesBeyondLimit:
    error = InflatesBeyondLimit("too large")
    error.told_bytes = told
    return error


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """The bounds that each batch was checked within; a batch is ``(bytes, whether it says so)``."""
    seen: list[int] = []

    def check(batch: Any, rules: int, now_ms: int) -> str:
        size, says = batch
        seen.append(rules)
        if size < 0:
            raise CorruptMessage("torn")
        if size > rules:
            raise refusal(size if says else None)
        return f"checked {size} at {now_ms}"

    monkeypatch.setattr(batch_checks, "check", check)
    return seen


def job(size: int, says: bool = False, codec: Codec | None = None) -> Any:
    rules = Given(within=lambda bound: bound, max_inflated_bytes=LIMIT, codec=codec)
    return ((size, says), Given(rules=rules))


def checked(site: Site, jobs: list[Any], done_before: list[Any], needed: int = 0) -> Any:
    async def go() -> Any:
        site.resources.runtime.loop = asyncio.get_running_loop()
        over = asyncio.get_running_loop().create_future()
        checks = BatchChecks(site.resources, jobs, 7, done_before, needed)
        checks.start(lambda outcomes, error: over.set_result((outcomes, error)))
        return await asyncio.wait_for(over, 60)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("size", "says", "needed", "draws"),
    [
        (5 * MIB, False, 0, [8]),
        (8 * MIB, False, 0, [8]),
        (8 * MIB + 1, False, 0, [8, 64]),
        (9 * MIB, True, 0, [8, 9]),
        (70 * MIB, True, 0, [8, 70]),
        (70 * MIB, False, 0, [8, 64, 100]),
        (70 * MIB, True, 70 * MIB, [70]),
        (90 * MIB, True, 300 * MIB, [100]),
        (LIMIT, False, 0, [8, 64, 100]),
    ],
)
@pytest.mark.parametrize(("codec", "copies"), [(None, 1), (Codec.NONE, 4), (Codec.ZSTD, 4)])
def test_so_much_is_drawn_for_a_batch(sizes, *, size, says, needed, draws, codec, copies) -> None:
    """What it inflates to, and what it takes to compress that anew where the topic wants that."""
    site = Site()
    outcomes, error = checked(site, [job(size, says, codec)], [], needed)
    assert (outcomes, error) == ([f"checked {size} at 7"], None)
    assert sizes == [draw * MIB for draw in draws]
    assert site.drawn == site.given == [copies * draw * MIB for draw in draws]


def test_batches_keep_their_order_and_each_has_its_own_outcome(sizes) -> None:
    site, refused = Site(), CorruptMessage("of the request")
    jobs = [job(1), job(2), refused, job(9 * MIB), job(-1), job(LIMIT + 1), job(3)]
    outcomes, error = checked(site, jobs, ["before"])
    assert error is None
    assert outcomes[:4] == ["before", "checked 2 at 7", refused, f"checked {9 * MIB} at 7"]
    assert isinstance(outcomes[4], CorruptMessage) and isinstance(outcomes[5], InflatesBeyondLimit)
    assert outcomes[6:] == ["checked 3 at 7"]
    assert sum(site.drawn) == sum(site.given)


def test_an_error_of_ours_is_told_and_gives_back(monkeypatch) -> None:
    def check(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(batch_checks, "check", check)
    site = Site()
    outcomes, error = checked(site, [job(1)], [])
    assert outcomes == [] and isinstance(error, ZeroDivisionError)
    assert site.drawn == site.given == [8 * MIB]


def reads(needs: int, says: bool, seen: list[int], inflate_limit: int) -> list[str]:
    seen.append(inflate_limit // MIB)
    if needs > inflate_limit:
        raise refusal(needs if says else None)
    return ["record"]


@pytest.mark.parametrize(
    ("needs", "says", "limit", "bounds"),
    [
        (5, False, 100, [8]),
        (9, True, 100, [8, 9]),
        (70, False, 100, [8, 64, 100]),
        (70, True, 100, [8, 70]),
        (100, False, 100, [8, 64, 100]),
        (3, False, 4, [4]),
        (101, False, 100, [8, 64, 100]),
        (5, False, 4, [4]),
    ],
)
def test_a_reader_has_more_where_that_was_too_little(*, needs, says, limit, bounds) -> None:
    site, seen = Site(), []

    async def go() -> Any:
        site.resources.runtime.loop = asyncio.get_running_loop()
        read = partial(reads, needs * MIB, says, seen)
        return await inflated(
            site.resources.runtime, site.resources.inflating, read, limit=limit * MIB
        )

    if needs > limit:
        with pytest.raises(InflatesBeyondLimit):
            asyncio.run(go())
    else:
        assert asyncio.run(go()) == ["record"]
    assert seen == bounds
    assert site.drawn == site.given == [2 * bound * MIB for bound in bounds]


@pytest.mark.parametrize("when", ["waiting", "granted"])
def test_who_is_cancelled_while_he_waits_gives_back_what_he_gets(when) -> None:
    site, seen = Site(), []
    site.grants = []

    async def go() -> None:
        site.resources.runtime.loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(
            inflated(
                site.resources.runtime,
                site.resources.inflating,
                partial(reads, 1, False, seen),
                limit=LIMIT,
            )
        )
        await asyncio.sleep(0)
        (grant,) = site.grants
        if when == "granted":
            grant()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert site.given == ([16 * MIB] if when == "granted" else [])
        if when == "waiting":
            grant()
        assert site.given == site.drawn == [16 * MIB] and seen == []

    asyncio.run(go())


@pytest.mark.parametrize("fails", [True, False])
def test_a_thread_whose_reader_is_gone_gives_back_when_it_is_done(fails) -> None:
    site = Site()

    async def go() -> None:
        loop = site.resources.runtime.loop = asyncio.get_running_loop()
        threads = [loop.create_future()]
        site.resources.runtime.in_thread = lambda work: threads[0]
        said: list[Any] = []
        loop.set_exception_handler(lambda _, context: said.append(context))
        work = asyncio.ensure_future(
            inflated(site.resources.runtime, site.resources.inflating, list, limit=LIMIT)
        )
        while not site.drawn:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert site.given == []
        if fails:
            threads[0].set_exception(ZeroDivisionError())
        else:
            threads[0].set_result([])
        await asyncio.sleep(0)
        assert site.given == site.drawn == [16 * MIB]
        work = threads.clear()
        gc.collect()
        assert said == [], "nobody is told of an error that nobody waits for"

    asyncio.run(go())
