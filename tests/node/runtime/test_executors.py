"""Flushes of one directory: grouped, one at a time for each log, never again after a failure."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from kept.node.runtime import executors
from kept.node.runtime.counters import Counters
from kept.node.runtime.executors import FlushPool
from kept.storage.errors import MachineError

COUNTERS = Counters()


class Log:
    """Gives tickets for what is written; a ticket runs until the test lets it end."""

    directory = "/d/t-0"

    def __init__(self):
        self.written = 0
        self.durable = 0
        self.running = 0
        self.runs = 0
        self.most = 0
        self.may_end = threading.Event()
        self.error = None

    def flush_ticket(self):
        return Ticket(self, self.written) if self.written > self.durable else None


class Ticket:
    def __init__(self, log, end):
        self.log, self.end = log, end

    def run(self):
        log = self.log
        log.running += 1
        log.runs += 1
        log.most = max(log.most, log.running)
        assert log.may_end.wait(60)
        log.running -= 1
        if log.error is not None:
            raise log.error

    def done(self):
        self.log.durable = max(self.log.durable, self.end)


@pytest.fixture
def on_pool():
    """``on_pool(job, threads)``: runs ``await job(pool, failures)`` on a loop."""

    def run(job, threads=2):
        async def main():
            failures = []
            loop = asyncio.get_running_loop()
            pool = FlushPool(loop, threads, "t", failures.append, COUNTERS)
            try:
                return await asyncio.wait_for(job(pool, failures), 60)
            finally:
                pool.close()

        return asyncio.run(main())

    return run


def test_nothing_to_flush_calls_back_at_once(on_pool):
    async def job(pool, failures):
        heard = []
        pool.flush(Log(), heard.append)
        assert heard == [None] and pool.idle and not failures

    on_pool(job)


def test_requests_during_a_flush_share_the_next_one(on_pool):
    async def job(pool, failures):
        log, heard = Log(), []
        log.written = 1
        pool.flush(log, lambda error: heard.append(("first", log.durable, error)))
        for number in range(2, 6):
            log.written = number
            pool.flush(log, lambda error, n=number: heard.append((n, log.durable, error)))
        assert not heard and not pool.idle
        log.may_end.set()
        await pool.drain()
        # Each is told only when what it wrote is durable; the four of them by one flush.
        assert heard == [("first", 1, None), *((n, 5, None) for n in range(2, 6))]
        assert (log.runs, log.most) == (2, 1)

    on_pool(job)


def test_logs_are_flushed_side_by_side(on_pool):
    async def job(pool, failures):
        logs = [Log() for _ in range(2)]
        for log in logs:
            log.written = 1
            pool.flush(log)
        while not all(log.running for log in logs):
            await asyncio.sleep(0.001)
        for log in logs:
            log.may_end.set()
        await pool.drain()
        assert [log.durable for log in logs] == [1, 1]

    on_pool(job)


def test_a_failure_reaches_everybody_who_waits_and_is_not_tried_again(on_pool):
    async def job(pool, failures):
        log, heard = Log(), []
        log.written, log.error = 3, MachineError("/d/f", "fsync", OSError(5, "EIO"))
        pool.flush(log, heard.append)
        log.written = 4
        pool.flush(log, heard.append)
        pool.flush(log)
        log.may_end.set()
        await pool.drain()
        assert heard == [log.error, log.error]
        assert failures == [log.error]
        assert (log.runs, log.durable) == (1, 0)

    on_pool(job)


def test_a_bug_in_a_flush_is_reported_not_swallowed(on_pool):
    async def job(pool, failures):
        log, heard, reported = Log(), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: reported.append(c))
        log.written, log.error = 1, ZeroDivisionError()
        pool.flush(log, heard.append)
        log.may_end.set()
        await pool.drain()
        assert heard == [log.error] and not failures
        assert reported[0]["exception"] is log.error

    on_pool(job)


def test_other_calls_run_in_its_threads(on_pool):
    async def job(pool, failures):
        name = await pool.run(lambda suffix: threading.current_thread().name + suffix, "!")
        assert name.startswith("fsync-t") and name.endswith("!")
        with pytest.raises(MachineError):
            await pool.run(failing)

    def failing():
        raise MachineError("/d", "unlink", OSError(5, "EIO"))

    on_pool(job)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_flush_that_does_not_return_is_named_and_when_it_did(on_pool, monkeypatch, capfd, hangs):
    if hangs:
        monkeypatch.setattr(executors, "HANGS_S", 0.005)

    async def job(pool, _failures):
        log, heard, told = Log(), [], ""
        log.written = 1
        pool.flush(log, heard.append)
        while hangs and told.count("seconds=") < 3:
            await asyncio.sleep(0.001)
            told += capfd.readouterr().err
        assert COUNTERS.hung_writes == hangs
        log.may_end.set()
        while not heard:
            await asyncio.sleep(0.001)
        return told + capfd.readouterr().err

    monkeypatch.setattr(executors, "round", lambda seconds: seconds, raising=False)
    told = on_pool(job)
    assert re.findall(r"seconds=([\d.]+)", told)[:3] == (["0.005", "0.01", "0.02"] if hangs else [])
    assert told.count("path=/d/t-0") == told.count("seconds=") + hangs
    assert told.count("a disk hangs no more") == hangs
    assert COUNTERS.hung_writes == 0
