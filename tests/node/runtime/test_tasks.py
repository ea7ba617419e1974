"""Owners of tasks, and the batcher: one call at a time, nothing lost, nothing twice."""

import asyncio

import pytest

from kept.node.runtime.tasks import Batcher, PeriodicTask, TaskOwner, gather_or_cancel
from kept.storage.errors import KeptError


def test_what_was_spawned_ends_with_its_owner():
    async def main():
        owner = TaskOwner(asyncio.get_running_loop())
        task = owner.spawn(asyncio.sleep(3600))
        await owner.close()
        assert task.cancelled()
        assert await owner.spawn(asyncio.sleep(0, "again")) == "again", "an owner can go on"

    asyncio.run(main())


def test_what_is_finished_also_waits_for_what_was_spawned_meanwhile():
    async def main():
        owner, ended = TaskOwner(asyncio.get_running_loop()), []

        async def work(left):
            await asyncio.sleep(0)
            if left:
                owner.spawn(work(left - 1))
            ended.append(left)

        owner.spawn(work(2))
        await owner.finish()
        assert ended == [2, 1, 0]
        for_ever = owner.spawn(asyncio.Event().wait())
        await owner.finish(0.001)
        assert not for_ever.done(), "only waited for, and not for ever"
        await owner.close()

    asyncio.run(main())


@pytest.mark.parametrize("awaited", [False, True])
def test_an_error_is_logged_unless_it_is_somebodys(awaited, capsys):
    async def fail():
        raise RuntimeError("of ours")

    async def main():
        owner = TaskOwner(asyncio.get_running_loop())
        await asyncio.wait([owner.spawn(fail(), awaited=awaited)])
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ("task failed" in capsys.readouterr().err) is not awaited


def test_the_first_error_ends_the_others_before_it_is_raised():
    async def main():
        events = []

        async def wait():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                events.append("ended")

        async def fail():
            await asyncio.sleep(0)
            raise KeptError("of one")

        async def value(number):
            return number

        assert await gather_or_cancel(map(value, (1, 2))) == [1, 2]
        with pytest.raises(KeptError, match="of one"):
            await gather_or_cancel([wait(), fail(), wait()])
        assert events == ["ended", "ended"]
        waiting = asyncio.create_task(gather_or_cancel([wait()]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the inner task has begun
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert events == ["ended"] * 3

    asyncio.run(main())


def test_one_call_at_a_time_takes_all_that_came_before_it():
    async def main():
        calls, gate = [], asyncio.Event()

        async def send(keys):
            calls.append(keys)
            await gate.wait()
            return ()

        batcher = Batcher(asyncio.get_running_loop(), send, max_batch=2, backoff_s=60.0)
        for key in (1, 2, 1, 3):
            batcher.add(key)
        while not calls:
            await asyncio.sleep(0)
        assert calls == [[1, 2]]
        batcher.add(1)
        gate.set()
        while not batcher.idle:
            await asyncio.sleep(0)
        assert calls == [[1, 2], [3, 1]]
        batcher.add(4)
        while not batcher.idle:
            await asyncio.sleep(0)
        assert calls[2:] == [[4]]

    asyncio.run(main())


def test_what_is_not_done_is_sent_again_with_what_came_meanwhile():
    async def main():
        calls, left = [], [["a"], ["a"], []]

        async def send(keys):
            calls.append(sorted(keys))
            if len(calls) == 3:
                raise RuntimeError("of ours: all are sent again")
            return left.pop(0)

        batcher = Batcher(asyncio.get_running_loop(), send, max_batch=9, backoff_s=0.001)
        batcher.add("a")
        await asyncio.sleep(0)
        batcher.add("b")
        while not batcher.idle:
            await asyncio.sleep(0.001)
        assert calls == [["a", "b"], ["a"], ["a"], ["a"]]

    asyncio.run(main())


def test_it_backs_off_after_each_call_that_left_something(monkeypatch):
    async def main():
        waits, sleep = [], asyncio.sleep
        answers = [["a"], ["a"], ["a"], [], ["a"], []]

        async def record(seconds):
            if seconds:
                waits.append(seconds)
            await sleep(0)

        async def send(_keys):
            return answers.pop(0)

        monkeypatch.setattr(asyncio, "sleep", record)
        monkeypatch.setattr("kept.node.runtime.tasks.uniform", lambda low, high: (low + high) / 2)
        batcher = Batcher(asyncio.get_running_loop(), send, max_batch=9, backoff_s=2.0)
        for _ in range(2):
            batcher.add("a")
            while not batcher.idle:
                await sleep(0)
        assert waits == [2.0] * 4

    asyncio.run(main())


def test_a_closed_batcher_sends_nothing_more():
    async def main():
        calls = []

        async def send(keys):
            calls.append(keys)
            return keys

        batcher = Batcher(asyncio.get_running_loop(), send, max_batch=9, backoff_s=0.001)
        batcher.add("a")
        while not calls:
            await asyncio.sleep(0)
        await batcher.close()
        before = len(calls)
        await asyncio.sleep(0.01)
        assert len(calls) == before

    asyncio.run(main())


def test_a_periodic_task_goes_on_after_an_error_and_ends_when_it_is_stopped(capsys):
    async def main():
        done, waits = [], []
        enough = asyncio.Event()

        async def work():
            done.append(1)
            if len(done) == 1:
                raise RuntimeError("a test")
            enough.set()
            await asyncio.sleep(3600)

        def wait_s():
            waits.append(len(done))
            return 0.0

        loop = asyncio.get_running_loop()
        periodic = PeriodicTask(loop, work, wait_s, failure="no sample was taken")
        await periodic.stop()
        periodic.start()
        await asyncio.wait_for(enough.wait(), 60)
        before = len(asyncio.all_tasks())
        await periodic.stop()
        assert waits == [1], "it waits after each time, and no longer than that"
        assert len(asyncio.all_tasks()) == before - 1

    asyncio.run(main())
    assert 'event="no sample was taken"' in capsys.readouterr().err
