"""Segments are put into place: what is taken back when that fails, and what is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kept.node.replicas.manifests import install
from kept.storage.checkpoints import read_offsets
from kept.storage.directory import LogDirectory
from kept.storage.errors import (
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    ResourceExhausted,
)
from kept.storage.types import LogConfig
from tests.support.given import Given
from tests.support.logs import NOW, TOPIC_ID, TP, append, batch, create_log
from tests.support.simulated_disk import SimulatedDisk

EIO = MachineError("/d", "rename", OSError(5, "EIO"))
FULL = ResourceExhausted("/d", "open", OSError(24, "EMFILE"))
MOVED = NotLeaderOrFollower("it was cut meanwhile")


class Swap:
    """A swap of three groups, of which a step fails."""

    def __init__(
        self, fails: str = "", error: Exception = MOVED, offline: str = "", times: int = 99
    ) -> None:
        self.done: list[str] = []
        self.reported: list[Exception] = []
        self._fails, self._error, self._offline = fails, error, offline
        self._times = times
        self._left = 3
        self.directory = Given(offline=None, pool=Given(run=self._run))

    async def _run(self, function: Any, *given: Any) -> Any:
        return function(*given)

    def _step(self, what: str) -> None:
        if what == self._fails and self._times:
            self._times -= 1
            raise self._error
        self.done.append(what)

    def prepare(self) -> None:
        self._step("prepare")

    def place_next(self, _: int) -> bool:
        self._left -= 1
        self._step(f"place {3 - self._left}")
        if self._offline == f"place {3 - self._left}":
            self.directory.offline = "the disk failed"
        return self._left > 0

    def finish(self) -> None:
        self._step("finish")

    def end(self) -> None:
        self.done.append("end")

    def _fail(self, where: Any, error: Exception) -> None:
        assert where is self.directory
        self.reported.append(error)
        if self._offline == "finish":
            self.directory.offline = "the disk failed"

    def run(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        monkeypatch.setattr(install.applying, "begin", lambda *_: self)
        monkeypatch.setattr(install.applying, "withdraw", lambda *_: self.done.append("withdraw"))
        monkeypatch.setattr(install, "RETRY_S", 0)
        context: Any = Given(runtime=Given(now_ms=lambda: 7, disk=None), failures__fail=self._fail)
        hosted: Any = Given(directory=self.directory, partition__log=Given(directory="/t-0"))
        installable: Any = None
        asyncio.run(install._swap(context, hosted, installable, lambda: self._step("check")))
        return self.done


def test_all_groups_are_placed_in_order(monkeypatch) -> None:
    assert Swap().run(monkeypatch) == [
        "check",
        "prepare",
        "check",
        "place 1",
        "place 2",
        "place 3",
        "finish",
        "end",
    ]


@pytest.mark.parametrize("fails", ["check", "prepare", "place 1"])
@pytest.mark.parametrize(
    ("error", "withdrawn"), [(MOVED, True), (FULL, True), (EIO, False), (KeyError("x"), True)]
)
def test_it_is_withdrawn_before_the_first_is_placed_unless_the_disk_failed(
    monkeypatch, fails, error, withdrawn
) -> None:
    swap = Swap(fails, error)
    with pytest.raises(type(error)):
        swap.run(monkeypatch)
    assert ("withdraw" in swap.done) is withdrawn
    assert "finish" not in swap.done


@pytest.mark.parametrize("error", [MOVED, EIO])
def test_it_is_not_withdrawn_once_something_is_in_place(monkeypatch, error) -> None:
    swap = Swap("place 2", error)
    with pytest.raises(KeptError):
        swap.run(monkeypatch)
    assert swap.done == ["check", "prepare", "check", "place 1", "end"]


def test_nothing_more_is_placed_in_a_directory_that_failed(monkeypatch) -> None:
    swap = Swap(offline="place 1")
    with pytest.raises(KafkaStorageError, match="the disk failed"):
        swap.run(monkeypatch)
    assert swap.done == ["check", "prepare", "check", "place 1", "end"]


def test_what_is_in_place_is_made_durable_as_soon_as_there_is_a_descriptor(monkeypatch) -> None:
    swap = Swap("finish", FULL, times=2)
    assert swap.run(monkeypatch)[-3:] == ["place 3", "finish", "end"]
    assert swap.reported == [FULL, FULL]


@pytest.mark.parametrize(("error", "offline"), [(EIO, ""), (FULL, "finish"), (FULL, "")])
def test_it_is_not_finished_where_the_disk_failed(monkeypatch, error, offline) -> None:
    swap = Swap("finish", error, offline)
    with pytest.raises(KeptError):
        swap.run(monkeypatch)
    assert swap.done[-2:] == ["place 3", "end"]
    assert len(swap.reported) == (0 if error is EIO else 1 if offline else install.FINISH_TRIES - 1)


@pytest.mark.parametrize("cuts", [True, False])
def test_a_cut_before_the_recovery_point_is_durable_has_it_looked_up_again(cuts) -> None:
    """No start finds the one of before the cut, not even one after a kill just then. Nor is one
    that was lowered for a cut that did not come taken for durable.
    """
    disk, stated = SimulatedDisk(), []
    directory = LogDirectory.open(
        "/d", disk, cluster_id="c", node_id=1, new_directory_id=TOPIC_ID, now_ms=0
    )
    log = create_log(directory, TP, TOPIC_ID, LogConfig())
    for _ in range(6):
        append(log, batch(10))
    log.roll(NOW)

    async def run(state: Any, *given: Any) -> bool:
        if not stated and not cuts:
            directory.lower_checkpoints(TP, 35, 35)
        elif not stated:
            log.truncate_to(35)
            append(log, batch(10), leader_epoch=1)
            log.roll(NOW)
        stated.append(state(*given))
        found = read_offsets(disk.after_kill(), "/d/recovery-point-offset-checkpoint")
        assert found[TP] <= (log.recovery_point if stated[-1] else 35)
        return stated[-1]

    async def flushed(_: int) -> None:
        log.flush()

    hosted: Any = Given(
        directory=Given(directory=directory, pool=Given(run=run)),
        partition=Given(log=log, high_watermark=40),
        flushed=flushed,
    )
    asyncio.run(install._make_durable(hosted, 40, lambda: None))
    assert stated == [False, True]
    assert directory.recovery_points == {TP: log.recovery_point} == {TP: 40 if cuts else 60}
