"""The metadata log of a lone voter on the loop: who waits, what is acted on, and a sick disk."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

import pytest

from kept.cluster.metadata.records import ConfigRecord, RemoveTopicRecord
from kept.cluster.metadata.replica_history import FILE
from kept.cluster.metadata.snapshot import encode_snapshot
from kept.cluster.metadata.wal import WAL_NAME
from kept.cluster.raft.messages import InstallSnapshot, TimeoutNow
from kept.cluster.raft.ready import RaftSettings
from kept.node.metadata import metadata_log
from kept.node.metadata.metadata_log import ACT_TOGETHER, MetadataLog
from kept.node.runtime.counters import Counters
from kept.storage.errors import (
    InvariantViolation,
    MachineError,
    NotController,
    ResourceExhausted,
)
from tests.support.given import Given
from tests.support.simulated_disk import SimulatedDisk

DIR = "/meta"


def setting(value: str) -> list[ConfigRecord]:
    return [ConfigRecord(4, "", "k", value)]


class One:
    """A lone voter; ``failures`` are the reasons for which it would end its node."""

    def __init__(self, **more: Any) -> None:
        self.disk = SimulatedDisk(seed=1)
        self.log = MetadataLog(asyncio.get_running_loop(), Counters())
        self.failures: list[str] = []
        self.log.on_failure = self.failures.append
        self.log.open(
            DIR,
            self.disk,
            node_id=0,
            directory_id=UUID(int=1),
            voters=(),
            observer=False,
            settings=RaftSettings(),
            **more,
        )

    @property
    def value(self) -> str | None:
        return self.log.image.config(4, "").get("k")


def play(scene: Callable[[One], Coroutine[Any, Any, None]], **more: Any) -> One:
    async def whole() -> One:
        one = One(**more)
        try:
            async with asyncio.timeout(60):
                await scene(one)
        finally:
            await one.log.close()
        return one

    return asyncio.run(whole())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_who_waits_is_woken_in_order_and_not_before() -> None:
    async def scene(one: One) -> None:
        log = one.log
        now = log.image.index
        woken: list[tuple[str, int]] = []

        async def wait(what: str, ahead: int) -> None:
            await getattr(log, what)(now + ahead)
            woken.append((what, ahead))

        async def act(image: Any, _: Any) -> None:
            await gates[image.index - now]

        gates = {n: asyncio.get_running_loop().create_future() for n in (1, 2)}
        log.begin()
        log.act(act)
        ahead = [("applied", 2), ("acted", 2), ("applied", 1), ("acted", 1), ("applied", 1)]
        waiting = [asyncio.ensure_future(wait(*each)) for each in ahead]
        await log.applied(now)
        await log.acted(now)
        await turns()
        assert not woken
        assert await log.propose(setting("1")) == now + 1
        await turns()
        assert woken == [("applied", 1), ("applied", 1)] and log.acted_index == now
        assert await log.propose(setting("2")) == now + 2
        await turns()
        assert woken[2:] == [("applied", 2)] and log.acted_index == now
        gates[1].set_result(None)
        await turns()
        assert woken[3:] == [("acted", 1)] and log.acted_index == now + 1
        gates[2].set_result(None)
        await asyncio.gather(*waiting)
        assert woken[4:] == [("acted", 2)] and log.acted_index == now + 2

    play(scene)


def test_before_anybody_acts_nobody_waits_for_it() -> None:
    async def scene(one: One) -> None:
        index = await one.log.propose(setting("1"))
        await one.log.acted(index + 7)
        assert one.log.acted_index < index
        assert one.log.begin() is one.log.image and one.log.acted_index == index
        acted: list[int] = []

        async def act(image: Any, _: Any) -> None:
            acted.append(image.index)

        one.log.act(act)
        later = await one.log.propose(setting("2"))
        await one.log.acted(later)
        assert acted == [later], "what was there at the beginning is not acted on"

    play(scene)


def test_many_entries_leave_the_loop_to_others_and_a_bug_stops_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scene(one: One) -> None:
        count, seen = ACT_TOGETHER + 2, 0
        acted: list[int] = []

        async def act(image: Any, _: Any) -> None:
            acted.append(image.index)
            if len(acted) == 3:
                raise KeyError("a bug of ours")

        first = one.log.begin().index + 1
        for number in range(count):
            last = await one.log.propose(setting(str(number)))
        one.log.act(act)
        while len(acted) < count:
            await asyncio.sleep(0)
            if len(acted) == ACT_TOGETHER:
                seen += 1
        await one.log.acted(last)
        assert acted == list(range(first, last + 1)) and seen
        assert capsys.readouterr().err.count("acting on the metadata failed") == 1

    play(scene)


def test_what_is_proposed_before_the_loop_serves_is_durable() -> None:
    async def scene(one: One) -> None:
        index = one.log.propose_now(setting("now"))
        assert one.log.image.index == index and one.value == "now"
        again = MetadataLog(asyncio.get_running_loop(), Counters())
        again.open(
            DIR,
            one.disk.after_power_loss(3),
            node_id=0,
            directory_id=UUID(int=1),
            voters=(),
            observer=False,
            settings=RaftSettings(),
        )
        assert again.image.config(4, "")["k"] == "now"
        await again.close()

    play(scene)


def test_a_close_ends_all_that_wait_and_takes_no_event_after() -> None:
    async def scene(one: One) -> None:
        log = one.log
        log.act(lambda *_: asyncio.sleep(0))
        index = log.image.index
        await log.propose(setting("1"))
        waiting = [
            asyncio.ensure_future(each) for each in (log.applied(index + 9), log.acted(index + 9))
        ]
        await turns()
        moved: list[str] = []
        await log.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
        log.raft_node = Given(
            receive=lambda _: moved.append("receive"), peer_down=lambda _: moved.append("down")
        )
        log.receive(TimeoutNow(term=1, sender=1, to=0))
        log.peer_down(1)
        assert not moved

    play(scene)


def test_a_barrier_of_a_leader_says_what_a_reader_must_have_seen() -> None:
    async def scene(one: One) -> None:
        index = await one.log.propose(setting("1"))
        assert await one.log.read_barrier() == index

    play(scene)


def test_what_contradicts_the_image_is_not_waited_for() -> None:
    async def scene(one: One) -> None:
        with pytest.raises(InvariantViolation):
            await one.log.propose([RemoveTopicRecord(UUID(int=5))])
        assert not one.log._proposed and not one.failures
        await one.log.propose(setting("1"))
        assert not one.log._proposed, "nobody is remembered whose decision holds"

    play(scene)


def test_without_a_descriptor_it_tries_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is to be written is whole, and no disk has failed."""
    monkeypatch.setattr(metadata_log, "EXHAUSTED_RETRY_S", 0.01)

    async def scene(one: One) -> None:
        real, tries = one.log.raft_node.work, 0

        def work() -> Any:
            found = real()
            if found is not None:
                run = found.run

                def exhausted() -> None:
                    nonlocal tries
                    tries += 1
                    if tries < 3:
                        raise ResourceExhausted(
                            f"{DIR}/{WAL_NAME}", "open", OSError(errno.EMFILE, "Too many")
                        )
                    run()

                found.run = exhausted
            return found

        monkeypatch.setattr(one.log.raft_node, "work", work)
        await one.log.propose(setting("1"))
        assert (tries, one.value, one.failures) == (3, "1", [])
        assert capsys.readouterr().err.count("waits for open files or memory") == 2

    play(scene)


def test_who_proposes_hears_of_a_disk_that_fails() -> None:
    async def scene(one: One) -> None:
        one.disk.fail("write", WAL_NAME)
        with pytest.raises(MachineError):
            await one.log.propose(setting("1"))
        assert one.failures and "metadata.wal" in one.failures[0] and one.value is None

    play(scene)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_was_applied_is_remembered_a_while_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """A full disk is no reason to end for that; one that fails is."""
    monkeypatch.setattr(metadata_log, "REMEMBER_S", 0.01)

    async def scene(one: One) -> None:
        path = f"{DIR}/{FILE}"
        await one.log.propose(setting("1"))
        while not one.disk.exists(path):
            await asyncio.sleep(0.002)
        whole = one.disk.read(path)
        assert one.log.raft_node.remember_applied() is None
        one.disk.fail("write", FILE, code)
        await one.log.propose(setting("2"))
        said = ""
        while not one.failures and "is not remembered" not in said:
            await asyncio.sleep(0.002)
            said += capsys.readouterr().err
        assert bool(one.failures) == (code == errno.EIO)
        if code == errno.ENOSPC:
            await one.log.propose(setting("3"))
            while one.disk.read(path) == whole:
                await asyncio.sleep(0.002)

    play(scene)


def test_a_close_remembers_what_was_applied() -> None:
    async def scene(one: One) -> None:
        await one.log.propose(setting("1"))
        assert not one.disk.exists(f"{DIR}/{FILE}")

    assert play(scene).disk.exists(f"{DIR}/{FILE}")


def test_a_snapshot_that_cannot_be_written_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And again where it was written in between."""

    async def scene(one: One) -> None:
        one.disk.fail("write", "snapshot-")
        said, number = "", 0
        while "snapshot of the metadata not written" not in said:
            number += 1
            await one.log.propose(setting(str(number) * 100))
            said += capsys.readouterr().err
        assert not one.failures
        for why, times in (("full", 1), ("full", 0), ("broken", 1), (None, 0), ("broken", 1)):
            one.log.raft_node.last_snapshot_error = why
            one.log._log_snapshot_error()
            assert capsys.readouterr().err.count("not written") == times, why

    play(scene, snapshot_after_bytes=400)


def test_a_snapshot_of_nonsense_replaces_nothing_and_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scene(one: One) -> None:
        log, taken = one.log, []
        await log.propose(setting("1"))
        log.raft_node.receive = taken.append
        nonsense = InstallSnapshot(
            sender=2, to=0, term=9, last_index=3, last_term=1, image_bytes=b"nonsense", voters=()
        )
        for _ in range(3):
            log.receive(nonsense)
        await asyncio.get_running_loop().run_in_executor(log._pool, int)
        await turns()
        assert not taken and one.value == "1" and not one.failures
        said = capsys.readouterr().err
        assert said.count("metadata message refused") == 1 and "peer=2" in said

    play(scene)


def test_a_snapshot_that_is_right_is_taken_once_it_was_read() -> None:
    async def scene(one: One) -> None:
        log, taken = one.log, []
        await log.propose(setting("1"))
        log.raft_node.receive = taken.append
        image = log.image
        whole = InstallSnapshot(
            sender=2,
            to=0,
            term=9,
            last_index=image.index,
            last_term=7,
            image_bytes=encode_snapshot(image, 7),
            voters=image.voters,
        )
        log.receive(whole)
        assert not taken, "it is read in the thread first"
        await asyncio.get_running_loop().run_in_executor(log._pool, int)
        await turns()
        assert taken == [whole] and not one.failures

    play(scene)


def test_it_is_told_that_the_image_moved_and_not_that_it_did_not() -> None:
    async def scene(one: One) -> None:
        moved: list[str | None] = []
        one.log.on_applied = lambda: moved.append(one.value)
        await one.log.read_barrier()
        assert not moved
        await one.log.propose(setting("1"))
        assert moved == ["1"]

    play(scene)


def test_a_refusal_names_the_leader_where_one_is_known() -> None:
    async def scene(one: One) -> None:
        for leader, told in ((None, -1), (0, 0), (2, 2)):
            future = asyncio.get_running_loop().create_future()
            one.log._proposed[5] = future
            one.log.raft_node = Given(leader_id=leader)
            one.log._refuse(5, "why")
            one.log._refuse(5, "again")
            one.log._refuse(6, "nobody waits for that")
            with pytest.raises(NotController, match="why") as refused:
                await future
            assert refused.value.leader_id == told
        del one.log._proposed[5]
        one.log.raft_node = Given(remember_applied=lambda: None)

    play(scene)
