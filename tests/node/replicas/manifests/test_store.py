"""The slow work on one replica's manifests: what is begun anew, what ends it, and in which order.

Building, placing and the disk are made up; who is called with what is written down.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any, Final

import pytest

from kept.compaction.cleaner.cleaner_run import Result
from kept.compaction.manifest.apply import CompactionState
from kept.node.replicas.manifests import store
from kept.node.replicas.manifests.errors import ManifestUnreadable, PassFailed, Withdrawn
from kept.node.replicas.manifests.store import ComputingPass, ManifestFiles, PassOutputs
from kept.node.replicas.manifests.workers import ManifestWork, or_vanished
from kept.replication.manifests_events import ManifestRef
from kept.storage.directory import Checkpoint
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
    NotLeaderOrFollower,
)
from kept.storage.types import Generation
from tests.support.given import Given
from tests.support.replicas import live_config, local_replica, manifest_context

REF: Final = ManifestRef(Generation(1, 5), 100)
OTHER: Final = ManifestRef(Generation(1, 6), 120)
BASE: Final = Result(Generation(3, 0), 0, 100, *[0] * 9, {})
EIO: Final = MachineError("/d", "read", OSError(5, "EIO"))


class Site:
    """A replica whose log has segments from 0 and from 200 on, and was cut three times."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.hosted = local_replica()
        self.partition, self.directory = self.hosted.partition, self.hosted.directory
        self.log = self.partition.log
        self.log.segments.create(200, 4096, 0)
        self.log.durability.truncations = 3
        self.first = self.log.segments[0]
        self.partition.applied_end = 50
        self.partition.raise_high_watermark = (  # type: ignore[method-assign]
            lambda offset: self.calls.append(("committed", offset))
        )
        self.context = manifest_context(
            self.calls,
            disk="disk",
            kept_compaction_check_keys="11",
            log_cleaner_threads="4",
            log_cleaner_io_max_bytes_per_second="1000",
        )
        self.files = ManifestFiles(self.context, self.hosted)

    def pass_outputs(self, **changes: Any) -> PassOutputs:
        given: dict[str, Any] = {"ref": REF, "truncations": 3, "begins_at": 0, **changes}
        given.setdefault("based_on", OTHER.generation)
        return PassOutputs(result="made", outcome=None, **given)  # type: ignore[arg-type]


@pytest.fixture
def site() -> Site:
    return Site()


# Manifests.


def test_a_body_is_what_came_or_what_is_on_disk(site, monkeypatch) -> None:
    monkeypatch.setattr(store.manifest_store, "read_manifest", lambda *given: given)
    site.files.bodies[REF] = "came"
    assert site.files.read_manifest(None) is None
    assert site.files.read_manifest(REF) == site.files.require_manifest(REF) == "came"
    assert site.files.read_manifest(OTHER) == ("/d/t-0", "disk", (1, 6))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError("gone"), ManifestUnreadable),
        (DamagedData("/d", 0, -1, "torn"), ManifestUnreadable),
        (EIO, MachineError),
    ],
)
def test_a_manifest_that_cannot_be_read_is_told_from_a_disk(site, monkeypatch, error, told) -> None:
    def body(*_: Any) -> None:
        raise error

    monkeypatch.setattr(store.manifest_store, "read_manifest", body)
    with pytest.raises(told):
        site.files.require_manifest(REF)
    with pytest.raises(told):
        asyncio.run(site.files.encoded(REF))


def test_what_is_stored_or_lost_is_not_kept_in_memory(site, monkeypatch) -> None:
    for name in ("store", "mark_lost", "clear_applied", "clear_complete"):

        def call(*given: Any, name: str = name, **more: Any) -> None:
            site.calls.append((name, *given, *more.values()))

        monkeypatch.setattr(store.manifest_store, name, call)
    site.files.bodies = {REF: "told", OTHER: "newest"}
    asyncio.run(site.files.store(OTHER, REF, complete=True))
    assert site.calls == [("store", "/d/t-0", "disk", "newest", "told", True)]
    assert site.files.bodies == {}
    site.files.bodies = {REF: "told"}
    site.files.mark_lost()
    assert site.calls[1:] == [("mark_lost", "/d/t-0", "disk")] and site.files.bodies == {}
    site.files.clear_applied()
    assert site.calls[2:] == [("clear_applied", "/d/t-0", "disk")]
    site.files.clear_complete()
    assert site.calls[3:] == [("clear_complete", "/d/t-0", "disk")]


# Applying.


def test_work_that_is_not_wanted_goes_no_further(site) -> None:
    work = ManifestWork()
    site.files.check(work)
    site.directory.offline = "broken"
    with pytest.raises(KafkaStorageError, match="broken"):
        site.files.check(work)
    work.cancel()
    with pytest.raises(Withdrawn):
        site.files.check(work)


def brought(site: Site, outputs: PassOutputs | None, *, work: ManifestWork | None = None) -> Any:
    return asyncio.run(site.files.apply(work or ManifestWork(), REF, outputs))


def building(site: Site, monkeypatch: Any, *outcomes: Any) -> None:
    """What each build gives; ``moved``: retention takes the oldest segment meanwhile."""
    left = list(outcomes)

    async def build(_: ManifestFiles, __: ManifestWork, ref: ManifestRef) -> Any:
        site.calls.append(("build", ref))
        outcome, moved = left.pop(0)
        site.first.base_offset += moved
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, OTHER.generation

    monkeypatch.setattr(ManifestFiles, "_build", build)


def placing(site: Site, monkeypatch: Any, *outcomes: Any, based_on: Any = OTHER) -> None:
    """The same for each placing, of outputs that were begun when ``based_on`` was applied."""
    left = list(outcomes) or [("state", 0)]

    async def place(node: Any, hosted: Any, result: Any, before: Any, check: Any) -> Any:
        assert site.files.placing
        assert before == (based_on and based_on.generation)
        site.calls.append(("place", result))
        outcome, moved = left.pop(0)
        site.first.base_offset += moved
        if isinstance(outcome, Exception):
            raise outcome
        check()
        return outcome

    async def conclude(node: Any, hosted: Any, published: Any) -> Any:
        assert site.files.placing
        return published

    monkeypatch.setattr(store.install, "place", place)
    monkeypatch.setattr(store.install, "conclude", conclude)


def test_what_a_pass_made_is_placed_as_it_is(site, monkeypatch) -> None:
    building(site, monkeypatch)
    placing(site, monkeypatch)
    assert brought(site, site.pass_outputs()) == "state"
    assert site.calls == [("place", "made")] and not site.files.placing


@pytest.mark.parametrize("change", [{"ref": OTHER}, {"truncations": 2}, {"begins_at": 1}, None])
def test_what_does_not_fit_is_built(site, monkeypatch, change) -> None:
    building(site, monkeypatch, ("built", 0))
    placing(site, monkeypatch)
    assert brought(site, None if change is None else site.pass_outputs(**change)) == "state"
    assert site.calls == [("build", REF), ("place", "built")]


@pytest.mark.parametrize(
    ("outcomes", "builds", "error"),
    [
        ([("one", 10), ("two", 0)], 2, None),
        ([(NotLeaderOrFollower("x"), 10), ("two", 0)], 2, None),
        ([(OSError(2, "gone"), 10), ("two", 0)], 2, None),
        ([(NotLeaderOrFollower("x"), 0)], 1, NotLeaderOrFollower),
        ([(EIO, 10)], 1, MachineError),
        ([(ValueError("a bug"), 10)], 1, ValueError),
    ],
)
def test_a_build_begins_anew_only_where_retention_took_the_oldest(
    site, monkeypatch, *, outcomes, builds, error
) -> None:
    building(site, monkeypatch, *outcomes)
    placing(site, monkeypatch)
    if error is None:
        assert brought(site, None) == "state"
        assert site.calls[-1] == ("place", "two")
    else:
        with pytest.raises(error):
            brought(site, None)
        assert ("place", "two") not in site.calls
    assert site.calls.count(("build", REF)) == builds


@pytest.mark.parametrize("error", [None, NotLeaderOrFollower("x")])
def test_retention_waits_for_a_build_that_begins_anew(site, monkeypatch, error) -> None:
    """Else one that takes longer than from one segment to the next would never end."""
    held: list[bool] = []
    log_ = site.files._hosted.partition.log

    async def build(*_: Any) -> Any:
        held.append(log_.holds_segments)
        site.first.base_offset += 10 * (len(held) == 1)
        if error is not None and len(held) == 2:
            raise error
        return "built", OTHER.generation

    log_.holds_segments = False
    monkeypatch.setattr(ManifestFiles, "_build", build)
    placing(site, monkeypatch)
    if error is None:
        assert brought(site, None) == "state"
    else:
        with pytest.raises(NotLeaderOrFollower):
            brought(site, None)
    assert held == [False, True] and not log_.holds_segments


def test_a_build_that_is_withdrawn_does_not_begin_anew(site, monkeypatch) -> None:
    work = ManifestWork()

    async def build(*_: Any) -> None:
        site.calls.append("build")
        site.first.base_offset += 10
        work.cancel()
        raise NotLeaderOrFollower("x")

    monkeypatch.setattr(ManifestFiles, "_build", build)
    with pytest.raises(Withdrawn):
        brought(site, None, work=work)
    assert site.calls == ["build"]
    with pytest.raises(Withdrawn):
        brought(site, site.pass_outputs(begins_at=10), work=work)
    assert site.calls == ["build"]


def test_who_is_cancelled_as_its_turn_comes_leaves_it_to_others() -> None:
    async def main() -> None:
        turn = asyncio.Lock()
        await turn.acquire()
        waits = asyncio.create_task(ManifestWork().acquire(turn))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turn.release()
        while not turn.locked():
            await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not turn.locked()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("outcomes", "error"),
    [
        ([(InvariantViolation("x"), 10), ("state", 0)], None),
        ([(InvariantViolation("x"), 0)], InvariantViolation),
        ([(NotLeaderOrFollower("x"), 10)], NotLeaderOrFollower),
    ],
)
def test_a_placing_begins_anew_only_where_retention_took_the_oldest(
    site, monkeypatch, outcomes, error
) -> None:
    building(site, monkeypatch, ("one", 0), ("two", 0))
    placing(site, monkeypatch, *outcomes)
    if error is None:
        assert brought(site, None) == "state"
    else:
        with pytest.raises(error):
            brought(site, None)
    assert [call for call in site.calls if call[0] == "place"] == [
        ("place", result) for result in ("one", "two")[: len(outcomes)]
    ]
    assert not site.files.placing


def test_a_pass_that_computes_is_ended_first(site) -> None:
    async def go() -> None:
        work = ManifestWork()
        ended = asyncio.get_running_loop().create_future()
        site.files.computing = ComputingPass(work, ended)
        waiting = asyncio.ensure_future(site.files.cancel_pass())
        await asyncio.sleep(0)
        assert work.cancelled and not waiting.done()
        site.files.computing = None
        ended.set_result(None)
        await asyncio.wait_for(waiting, 60)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("size", "threads", "where"),
    [(2 << 20, 4, "thread"), ((2 << 20) + 1, 4, "worker"), (1 << 30, 0, "worker")],
)
@pytest.mark.parametrize("fails", [False, True])
def test_small_logs_are_built_from_in_a_thread(
    site, monkeypatch, *, size, threads, where, fails
) -> None:
    work = ManifestWork()
    work.uncompiled = ("kernel",)
    site.context.config.current = live_config(
        kept_compaction_check_keys="11",
        log_cleaner_threads=str(threads),
        log_cleaner_io_max_bytes_per_second="1000",
    ).current
    monkeypatch.setattr(
        site.context.kernels, "worker_lacks", lambda names: site.calls.append(("lacks", names))
    )

    def ran(*given: Any) -> str:
        site.calls.append(given)
        if fails:
            raise NotLeaderOrFollower("x")
        return "result"

    async def run(*given: Any) -> str:
        return ran("worker", *given)

    monkeypatch.setattr(store, "discard", lambda *given: site.calls.append(("discard", *given)))
    monkeypatch.setattr(store.applying, "read_mark", lambda *_: OTHER.generation)
    monkeypatch.setattr(ManifestFiles, "require_manifest", lambda _, ref: ("manifest", ref))
    monkeypatch.setattr(store, "replace", lambda job, **more: (job, more["check_keys"]))
    monkeypatch.setattr(store.follow, "job_for", lambda *given: ("job", *given[1:]))
    monkeypatch.setattr(store.follow_worker, "source_bytes", lambda _: size)
    monkeypatch.setattr(store.follow_worker, "run_here", lambda *given: ran("thread", *given))
    monkeypatch.setattr(store.follow_worker, "encode", lambda *given: given)
    monkeypatch.setattr(work, "run", run)
    site.hosted.compaction = CompactionState(REF.generation)  # the mark is ahead
    job = (("job", ("manifest", REF), None, 7), 11)
    expected: list[Any] = [("discard", "/d/t-0", "disk")]
    if where == "thread":
        expected += [("thread", job, OTHER.generation, "disk")]
    else:
        expected += [
            ("worker", store.follow_worker.COMMAND, (job, OTHER.generation, 1000 / (threads or 1)))
        ]
        expected += [("lacks", ("kernel",))]
    if fails:
        with pytest.raises(PassFailed if where == "thread" else NotLeaderOrFollower, match="x"):
            asyncio.run(site.files._build(work, REF))
    else:
        assert asyncio.run(site.files._build(work, REF)) == ("result", OTHER.generation)
    assert site.calls == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MachineError("/d/t-0/x", "read", OSError(errno.EIO, "I/O error")), MachineError),
        (MachineError("/d/t-0/x", "write", OSError(errno.ENOSPC, "No space")), PassFailed),
        (FileNotFoundError(errno.ENOENT, "No such file", "/d/t-0/x"), PassFailed),
        (FileNotFoundError(errno.ENOENT, "No such file", f"/d/t-0/{0:020}.log"), MachineError),
        (InvariantViolation("a bug"), InvariantViolation),
        (ValueError("a bug"), ValueError),
    ],
)
@pytest.mark.parametrize("cancelled", [False, True])
def test_what_a_build_in_a_thread_meets_is_what_a_worker_would(
    site, monkeypatch, *, error, expected, cancelled
) -> None:
    """A device that fails and a segment that vanished take the directory offline; no room for the
    outputs does not, nor anything once the work is cancelled: the log may be deleted by then.
    """

    def run_here(*_: Any) -> None:
        raise error

    monkeypatch.setattr(site.context.runtime, "disk", Given(exists=lambda _: False))
    log_ = Given(segments=[Given(path=lambda kind: f"/d/t-0/{0:020}{kind}")])
    monkeypatch.setattr(store.follow_worker, "run_here", run_here)
    work = ManifestWork()
    if cancelled:
        work.cancel()
        expected = PassFailed if expected is MachineError else expected
    building = site.files._build_here(work, None, None)
    with pytest.raises(expected) as raised:
        asyncio.run(or_vanished(site.context.runtime, log_, work, building))
    if expected is PassFailed:
        assert "/d/" in str(raised.value) and "/d/" not in raised.value.client_message


def test_clients_are_not_told_what_a_worker_s_error_says() -> None:
    assert PassFailed("/d/t-0/x: torn", "DamagedData").client_message == (
        "the pass failed (DamagedData); the node's log has the details"
    )
    assert PassFailed("/d/t-0/x: torn", "x", client_message="t-0: torn").client_message == (
        "t-0: torn"
    )


# A base generation.


@pytest.mark.parametrize("unwanted_at", [0, 1, 2, 3, 4])
def test_a_base_is_committed_before_it_is_placed_and_ends_when_it_is_not_wanted(
    site, monkeypatch, unwanted_at
) -> None:
    """``unwanted_at``: the how-maniest check finds another leader; 0: none does."""
    checks = 0

    def wanted() -> bool:
        nonlocal checks
        checks += 1
        return checks != unwanted_at

    async def run(_: ManifestWork, *given: Any) -> Any:
        site.calls.append(("compute", *given))
        return BASE

    for name in ("mark_lost", "store_base"):
        monkeypatch.setattr(
            store.manifest_store, name, lambda *given, name=name: site.calls.append((name, *given))
        )
    monkeypatch.setattr(store, "base_job", lambda log, identity, **more: ("job", identity, more))
    monkeypatch.setattr(store.jobs, "encode", lambda job: job)
    monkeypatch.setattr(store, "pass_limits", lambda *_: "limits")
    monkeypatch.setattr(ManifestWork, "run", run)
    state = CompactionState(REF.generation)
    placing(site, monkeypatch, (state, 0), based_on=None)
    site.hosted.compaction = "state"
    mark_lost = ("mark_lost", "/d/t-0", "disk")
    compute = ("compute", store.COMMAND, ("job", (3, 0), {"now_ms": 7, "limits": "limits"}))
    store_base = ("store_base", "/d/t-0", "disk", REF.generation)
    if not unwanted_at:
        assert asyncio.run(site.files.create_base(ManifestWork(), (3, 0), wanted)) is state
        names = [call[0] for call in site.calls]
        assert names == ["mark_lost", "compute", "committed", "place", "store_base"]
        assert (site.calls[0], site.calls[1], site.calls[-1]) == (mark_lost, compute, store_base)
        assert site.calls[2] == ("committed", 100)
        assert (site.hosted.compaction, site.partition.applied_end) == (None, 0)
        return
    with pytest.raises(Withdrawn):
        asyncio.run(site.files.create_base(ManifestWork(), (3, 0), wanted))
    done = [[], [mark_lost], [mark_lost, compute], [mark_lost, compute, ("committed", 100)]][
        unwanted_at - 1
    ]
    assert site.calls == done
    assert (site.hosted.compaction is None) is bool(done)


@pytest.mark.parametrize("met", ["a worker's", "a placing's", "another's"])
def test_a_base_whose_oldest_segments_retention_took_is_made_anew(site, monkeypatch, met) -> None:
    """Retention goes on all the time, a segment for each file call: it waits for the second try."""
    held: list[bool] = []
    state = CompactionState(REF.generation)

    def retention() -> bool:
        """Whether the segments that the work began with are gone."""
        held.append(site.log.holds_segments)
        if held[-1] or met == "another's":
            return False
        site.first.base_offset += 10
        return True

    async def place(*_: Any) -> CompactionState:
        site.calls.append("place")
        if met != "a worker's" and (retention() or met == "another's"):
            raise InvariantViolation("segments are gone")
        return state

    async def run(*_: Any) -> Any:
        site.calls.append("compute")
        if met == "a worker's" and retention():
            raise PassFailed("gone", "FileNotFoundError", missing="/d/t-0/0.log")
        return BASE

    site.log.holds_segments = False
    monkeypatch.setattr(site.context.runtime, "disk", Given(exists=lambda _: False))
    monkeypatch.setattr(store.manifest_store, "mark_lost", lambda *_: None)
    monkeypatch.setattr(
        store.manifest_store, "store_base", lambda *_: site.calls.append("store_base")
    )
    monkeypatch.setattr(store, "discard", lambda *_: site.calls.append("discard"))
    monkeypatch.setattr(store, "base_job", lambda *_, **__: "job")
    monkeypatch.setattr(store.jobs, "encode", lambda job: job)
    monkeypatch.setattr(store, "pass_limits", lambda *_: "limits")
    monkeypatch.setattr(ManifestWork, "run", run)
    monkeypatch.setattr(site.files, "_place", place)
    making = site.files.create_base(ManifestWork(), BASE.generation, lambda: True)
    if met == "another's":
        with pytest.raises(InvariantViolation, match="are gone"):
            asyncio.run(making)
    else:
        assert asyncio.run(making) is state
        assert held == [False, True]
        calls = [call for call in site.calls if isinstance(call, str)]
        first = ["compute"] if met == "a worker's" else ["compute", "place"]
        assert calls == [*first, "discard", "compute", "place", "store_base"]
    assert not site.log.holds_segments


def test_a_checkpoint_is_of_the_logs_of_its_directory(site) -> None:
    written: list[Any] = []
    site.directory.directory = Given(
        version=4, write_checkpoints=lambda *given: written.append(given)
    )
    here, plain, other = (local_replica() for _ in range(3))
    here.directory = plain.directory = site.directory
    here.compaction, other.compaction = CompactionState(clean_to=40), CompactionState(clean_to=50)
    site.context.table.replicas.update({"here": here, "plain": plain, "other": other})
    asyncio.run(site.files.checkpoint_cleaned())
    assert written == [(Checkpoint.CLEANER, {"here": 40}, 4)]
