"""When the shell of a replica's manifests tells its core, asks its leader, waits and gives up.

What the core would be told, and what is asked of the node, is written down.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from typing import Any, Final
from unittest.mock import Mock

import pytest

from kept.compaction.manifest.apply import CompactionState
from kept.node.replicas.manifests import replica as shell
from kept.node.replicas.manifests import retry
from kept.node.replicas.manifests.errors import ManifestUnreadable, PassFailed
from kept.node.replicas.manifests.replica import NEVER, ReplicaManifests
from kept.node.replicas.manifests.retry import RetrySchedule
from kept.node.replicas.manifests.store import ComputingPass, ManifestFiles, PassOutputs
from kept.node.replicas.manifests.workers import ManifestWork
from kept.node.runtime.tasks import TaskOwner
from kept.replication import manifests_events as ev
from kept.replication.follower_replica import FollowerReplica
from kept.replication.manifests import ManifestCore, ManifestRole
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition_core import PartitionCore
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
    NotLeaderOrFollower,
    ReplicaNotAvailable,
    ResourceExhausted,
)
from kept.storage.types import Generation, TopicPartition
from tests.support.given import Given
from tests.support.replicas import local_replica, manifest, manifest_context, record

TP: Final = TopicPartition("orders", 0)
OLDER: Final = ManifestRef(Generation(1, 5), 100)
NEWER: Final = ManifestRef(Generation(1, 6), 120)
APPLIES: Final = {"role": ManifestRole.LEADER, "applied": None}
"""A leader that has not applied what it holds, so that no pass may begin."""
NOBODY: Final[Any] = None
DAMAGED: Final = DamagedData("/t-0/0.log", 8, 3, "no header")
EIO: Final = MachineError("/d", "unlink", OSError(errno.EIO, "EIO"))
EXHAUSTED: Final = ResourceExhausted("/t-0/0.log", "open", OSError(errno.EMFILE, "too many"))
RESULT: Final[Any] = "result"


class WrittenRetrySchedule(RetrySchedule):
    """Writes down what failed."""

    calls: list[Any]

    def failed(self, what: str, generation: str, error: BaseException) -> None:
        self.calls.append(("failed", what, generation))

    def reset(self) -> None:
        self.calls.append("reset")

    def cancel(self) -> None:
        self.calls.append("no wait")


class Written(ReplicaManifests):
    """Writes down what its core is told, instead of telling it."""

    __slots__ = ("calls",)

    def step(self, event: Any) -> None:
        self.calls.append(event)


@pytest.fixture
def calls() -> list[Any]:
    """What happened, in order."""
    return []


@pytest.fixture
def replica(calls) -> Written:
    """A follower in epoch 3 that holds and applied OLDER, and whose log ends at 110."""
    manifests = ManifestCore(
        1,
        OLDER,
        OLDER,
        role=ManifestRole.FOLLOWER,
        leader_epoch=3,
        published=OLDER,
        has_offered=True,
        leader_published=OLDER,
        synced=True,
    )
    hosted = local_replica(end=110, manifests=manifests)
    hosted.compaction = CompactionState()
    hosted.partition.applied_end = 100
    hosted.partition.core.leading, hosted.partition.core.isr = True, (1,)
    found = Written(manifest_context(calls, record=record()), hosted)
    found.calls = calls
    found.retry_schedule = WrittenRetrySchedule(
        found._context.runtime, found._context.counters, TP, found.retry
    )
    found.retry_schedule.calls = calls
    return found


def change(of: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(of, name, value)


def move_end(replica: Written, end: int) -> None:
    replica._partition.log.truncate_fully_and_start_at(end)


def opened(replica: Written, **methods: Any) -> ManifestFiles:
    """Its files, with some of their methods made up."""
    replica._opened_files = files = ManifestFiles(replica._context, replica._hosted)
    change(files, **methods)
    return files


# Fetches.


@pytest.mark.parametrize(
    ("core", "agreed", "epoch", "expected"),
    [
        ({}, True, 3, []),
        ({"synced": False}, True, 3, [ev.DivergenceChecked(3, True), "pull"]),
        ({"synced": False, "held": None}, True, 3, [ev.DivergenceChecked(3, True)]),
        (
            {"synced": False, "held": None, "lost": True},
            True,
            3,
            [ev.DivergenceChecked(3, True), "pull"],
        ),
        ({}, False, 3, [ev.DivergenceChecked(3, False)]),
        ({"synced": False}, True, 2, []),
        ({"synced": False, "role": ManifestRole.LEADER}, True, 3, []),
    ],
)
def test_what_a_fetch_showed_is_told_once(replica, calls, *, core, agreed, epoch, expected) -> None:
    change(replica.core, **core)
    replica.fetched(epoch, agreed)
    assert calls == [one if not isinstance(one, str) else (one,) for one in expected]


@pytest.mark.parametrize(("end", "asks"), [(119, 0), (120, 1), (121, 1)])
def test_who_lacks_records_asks_once_they_have_come(replica, calls, *, end, asks) -> None:
    replica._awaited_end = 120
    move_end(replica, end)
    replica.fetched(3, True)
    replica.fetched(3, True)
    assert calls == [("pull",)] * asks
    assert replica._awaited_end == (NEVER if asks else 120)


# Pulls.


def request(end: int = 110, number: int = 1) -> ev.PullRequest:
    return ev.PullRequest(1, 9, 3, number, OLDER, OLDER, True, end, ())


@pytest.mark.parametrize(
    ("held", "published", "asked_end", "end", "awaited", "asks"),
    [
        (NEWER, None, 110, 110, 120, 0),
        (NEWER, None, 110, 120, NEVER, 1),
        (NEWER, None, 120, 120, NEVER, 0),
        (NEWER, NEWER, 110, 110, NEVER, 0),
        (OLDER, None, 90, 90, NEVER, 0),
        (None, None, 90, 90, NEVER, 0),
    ],
)
def test_an_answer_that_lacks_nothing_but_records_is_awaited(
    replica, calls, *, held, published, asked_end, end, awaited, asks
) -> None:
    replica.core.in_flight = asked = request(asked_end)
    move_end(replica, end)
    answer = ev.PullResponse(held, published, ())
    replica.receive_pull_response(asked, answer, {})
    assert calls == [ev.PullResponseReceived(asked, answer), *[("pull",)] * asks]
    assert replica._awaited_end == awaited


def test_an_answer_to_another_question_is_none(replica, *, calls) -> None:
    replica.core.in_flight = asked = request()
    files = opened(replica)
    replica.receive_pull_response(request(5), ev.PullResponse(NEWER, None, ()), {NEWER: "body"})
    assert calls == [] and files.bodies == {}
    replica.receive_pull_response(asked, ev.PullResponse(None, None, ()), {NEWER: "body"})
    assert len(calls) == 1 and files.bodies == {NEWER: "body"}


@pytest.mark.parametrize("why", ["", "closed", "no leader", "offline"])
def test_nothing_is_asked_without_a_leader_or_a_log(replica, *, why) -> None:
    replica._closed = why == "closed"
    replica._partition.leader_id = shell.NO_LEADER if why == "no leader" else 2
    replica._partition.offline = "broken" if why == "offline" else None
    asked = replica.start_pull()
    assert asked is None if why else (asked.log_end_offset, asked.broker_epoch) == (110, 9)


@pytest.mark.parametrize(("leads", "closed"), [(True, False), (False, False), (True, True)])
def test_only_the_leader_answers(replica, calls, *, leads, closed) -> None:
    replica._partition._leading, replica._closed = leads, closed
    if leads and not closed:
        assert replica.receive_pull(pull := request()) == ev.PullResponse(OLDER, OLDER, (OLDER,))
        assert calls == [ev.PullRequestReceived(pull)]
        replica._partition.core.isr = (3,)
        assert replica.receive_pull(request()).outside_isr
    else:
        with pytest.raises(NotLeaderOrFollower):
            replica.receive_pull(request())


def test_only_a_follower_of_a_cluster_asks(replica, *, calls) -> None:
    replica.schedule_pull()
    assert calls.pop() == ("pull",)
    for fields in ({"role": ManifestRole.LEADER}, {"role": ManifestRole.NONE}):
        change(replica.core, **fields)
        replica.schedule_pull()
    replica.core.role = ManifestRole.FOLLOWER
    replica._closed = True
    replica.schedule_pull()
    replica._announce()
    replica._closed = False
    replica._announce()
    assert calls == [("announce",)]


# Cuts.


@pytest.mark.parametrize("busy", ["", "storing", "work", "waiting work", "closed"])
def test_a_cut_waits_for_whoever_uses_the_files(replica, *, busy) -> None:
    replica.check_cut()
    work = ManifestWork()
    work.has_turn = busy == "work"
    if busy == "storing":
        replica.core.storing = object()
    elif busy in ("work", "waiting work"):
        replica._works.add(work)
    replica._closed = busy == "closed"
    if busy in ("", "waiting work"):
        replica.check_cut()
    else:
        with pytest.raises(ReplicaNotAvailable):
            replica.check_cut()
    assert work.cancelled is (busy in ("work", "waiting work"))


@pytest.mark.parametrize("effect", [ev.ApplyManifest(OLDER), ev.CreateBaseGeneration(3, None)])
def test_work_that_waits_for_other_logs_keeps_no_cut_and_no_end_waiting(
    replica, calls, *, effect
) -> None:
    """One build of another log may take minutes."""
    ended = [ev.ApplyAborted(OLDER)] if isinstance(effect, ev.ApplyManifest) else []

    async def go() -> None:
        replica._tasks = TaskOwner(asyncio.get_running_loop())
        files = opened(replica)
        async with replica._context.appliers:
            for cancel in (replica.check_cut, replica.abandon):
                replica.perform(effect)
                for _ in range(5):
                    await asyncio.sleep(0)
                (work,) = replica._works
                assert not work.has_turn and not calls
                cancel()
                async with asyncio.timeout(60):
                    await replica._tasks.finish()
                assert [call for call in calls if call != "reset"] == ended, "it has not failed"
                assert not replica._works and not files._turn.locked()
                calls.clear()
        assert not replica._context.appliers.locked()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (None, [("cut", 7), ("nudge",)]),
        (ReplicaNotAvailable("files"), []),
        (KafkaStorageError("offline"), [("failed", "log not cut", "1.5")]),
        (DAMAGED, [("failed", "log not cut", "1.5")]),
        (EXHAUSTED, [("failed", "log not cut", "1.5")]),
    ],
)
def test_a_log_is_cut_where_a_record_is_missing(
    replica, calls, monkeypatch, *, error, then
) -> None:
    def cut(_: Any, offset: int) -> None:
        if error is not None:
            raise error
        calls.append(("cut", offset))

    monkeypatch.setattr(FollowerReplica, "cut_to_fetch_again", cut)
    replica._closed = True
    replica.perform(ev.TruncateLog(7))
    assert calls == []
    replica._closed = False
    replica.perform(ev.TruncateLog(7))
    assert calls == then


def test_a_cut_that_fails_is_tried_after_longer_and_longer_waits(replica, monkeypatch) -> None:
    """Pulls come each second meanwhile: they are no reason to say it again, and each try that fails
    as the one before is no news.
    """
    tried: list[int] = []

    def cut(_: Any, offset: int) -> None:
        tried.append(offset)
        raise DAMAGED

    monkeypatch.setattr(FollowerReplica, "cut_to_fetch_again", cut)
    said: dict[str, list[int]] = {"error": [], "info": []}
    for level, failures in said.items():
        monkeypatch.setattr(
            retry.log, level, lambda _, said=failures, **fields: said.append(fields["failures"])
        )
    waits: list[float] = []
    loop = Given(call_later=lambda wait_s, _: waits.append(wait_s) or Given(cancel=lambda: None))
    runtime = Given(loop=loop, now_ms=lambda: 0)
    replica.retry_schedule = RetrySchedule(runtime, replica._context.counters, TP, replica.retry)
    for _ in range(12):
        for _ in range(3):
            replica.perform(ev.TruncateLog(7))
        replica.retry()  # when its time has come
    assert tried == [7] * 12 and said == {"error": [1], "info": list(range(2, 13))}
    assert waits[:4] == [1, 2, 4, 8] and waits[-1] == 300
    assert replica.retry_schedule.reason == DAMAGED.client_message


def test_a_log_is_cut_at_once_though_what_lacks_the_record_has_failed(replica, calls) -> None:
    replica.perform(ev.ReportMissing(OLDER, 7))
    assert calls == ["no wait", ("pull",)]


def test_what_the_leader_does_not_send_is_fetched_again_after_longer_and_longer_waits(
    replica, calls, capsys
) -> None:
    """Its leader lacks the record, too, and is alone: all would be fetched in a circle."""
    for epoch, ref, offset, cut_at_once in (
        (3, OLDER, 7, True),
        (3, OLDER, 7, False),
        (3, OLDER, 7, False),
        (3, OLDER, 9, True),
        (3, NEWER, 9, True),
        (4, NEWER, 9, True),
        (4, NEWER, 9, False),
    ):
        replica.core.leader_epoch = epoch
        calls.clear()
        replica.perform(ev.ReportMissing(ref, offset))
        assert calls == ["no wait"] * cut_at_once + [("pull",)]
        assert ("its leader does not send it" in replica.retry_schedule.reason) is not cut_at_once
        replica.retry_schedule.reason = ""
    assert capsys.readouterr().err.count("is missing here") == 4


def test_a_cut_that_meets_a_bug_is_no_damage(replica, monkeypatch) -> None:
    def cut(*_: Any) -> None:
        raise InvariantViolation("a leader never cuts its log")

    monkeypatch.setattr(FollowerReplica, "cut_to_fetch_again", cut)
    with pytest.raises(InvariantViolation):
        replica.perform(ev.TruncateLog(7))


# Roles.


@pytest.mark.parametrize(
    ("core", "begins"),
    [({}, False), ({"leader_epoch": 2}, True), ({"role": ManifestRole.LEADER}, True)],
)
@pytest.mark.parametrize("making_base", [True, False])
def test_another_epoch_or_role_throws_away_what_was_done_for_the_old_one(
    replica, calls, *, core, begins, making_base
) -> None:
    change(replica.core, making_base=making_base, **core)
    replica._awaited_end, replica.renew = 120, True
    pass_, building = ManifestWork(), ManifestWork()
    replica._works.add(building)
    opened(replica).computing = ComputingPass(pass_, ended=NOBODY)
    replica.follow(record())
    assert calls == [ev.StartedFollowing(3)]
    assert (replica._awaited_end, replica.renew) == ((NEVER, False) if begins else (120, True))
    assert pass_.cancelled is begins
    assert building.cancelled is (begins and making_base)
    replica.core.leader_epoch = 3
    replica.follow(record(isr=(2,)))
    assert calls[1:] == [ev.StartedFollowing(3)]


@pytest.mark.parametrize(
    ("core", "alone", "expected"),
    [
        ({}, False, ["announce"]),
        ({"held": None}, False, []),
        ({"held": None, "lost": True, "has_offered": False}, False, ["resign"]),
        ({"held": None, "lost": True, "has_offered": False}, True, []),
        ({"held": None, "lost": True, "has_offered": True}, False, []),
        ({"held": None, "lost": True, "has_offered": False, "making_base": True}, False, []),
    ],
)
def test_who_leads_and_cannot_read_what_it_held_resigns(
    replica, calls, *, monkeypatch, core, alone, expected
) -> None:
    change(replica.core, role=ManifestRole.LEADER, **core)
    event = ev.StartedLeading(3, False, alone)
    monkeypatch.setattr(shell, "started_leading", lambda *_: event)
    replica.lead(record((1,) if alone else (1, 2)))
    assert calls == [event, *[(name,) for name in expected]]


# What is unreadable, what failed.


@pytest.mark.parametrize(
    ("core", "isr", "more", "expected"),
    [
        ({}, (1, 2), {}, [ev.ManifestDamaged(OLDER), ("pull",)]),
        ({"role": ManifestRole.LEADER}, (1, 2), {}, [("renew",)]),
        (APPLIES, (1, 2), {"renew": True}, [("renew",)]),
        (APPLIES, (1, 2), {}, [ev.ManifestDamaged(OLDER, alone=True)]),
        (APPLIES, (1, 2), {"pending": (1, 2)}, [("resign",)]),
        (APPLIES, (1,), {"pending": (1, 2)}, [("failed", "manifest not applied", "1.5")]),
        (
            {"role": ManifestRole.LEADER, "held": NEWER, "applied": NEWER, "published": NEWER},
            (1, 2),
            {"pending": (1, 2)},
            [("resign",)],
        ),
        ({"held": NEWER, "leader_published": NEWER, "published": NEWER}, (1, 2), {}, []),
        ({}, (1, 2), {"closed": True}, []),
    ],
)
def test_a_manifest_that_cannot_be_read(replica, calls, *, core, isr, more, expected) -> None:
    change(replica.core, **core)
    replica.renew = more.get("renew", False)
    replica._closed = more.get("closed", False)
    replica._partition.core.pending_isr = more.get("pending")
    replica._context.metadata.image.record = record(isr)
    replica._unreadable(OLDER, ManifestUnreadable("torn"))
    assert calls == expected
    assert replica.renew is (("renew",) in calls)


@pytest.mark.parametrize(
    ("error", "waits", "expected"),
    [
        (MachineError("/d", "write", OSError(5, "EIO")), False, [("fail",)]),
        (MachineError("/d", "write", OSError(5, "EIO")), True, []),
        (ResourceExhausted("/d", "open", OSError(24, "EMFILE")), False, [("failed", "w", "1.5")]),
        (ValueError("a bug"), True, [("failed", "w", "1.5")]),
    ],
)
def test_a_failure_is_told_to_who_waits_and_tried_again(
    replica, calls, *, error, waits, expected
) -> None:
    async def go() -> None:
        outcome = asyncio.get_running_loop().create_future()
        if waits:
            replica._pass_outputs = PassOutputs(OLDER, RESULT, None, 0, 0, outcome)
        replica._failed("w", OLDER, error)
        assert outcome.done() is waits and replica._pass_outputs is None
        if waits:
            assert outcome.exception() is error

    asyncio.run(go())
    assert calls == expected
    replica._closed = True
    calls.clear()
    replica._failed("w", OLDER, ValueError("a bug"))
    assert calls == []


@pytest.mark.parametrize(
    ("core", "count", "expected"),
    [
        ({}, 0, []),
        ({}, 1, ["no wait", ev.RetryTriggered(), ("pull",)]),
        ({"role": ManifestRole.NONE}, 1, ["no wait"]),
        ({"making_base": True, "role": ManifestRole.LEADER}, 1, ["no wait", ("base", 3)]),
    ],
)
def test_what_failed_is_tried_again(replica, calls, *, monkeypatch, core, count, expected) -> None:
    change(replica.core, **core)
    replica.retry_schedule.count = count
    monkeypatch.setattr(
        Written, "_make_base", lambda _, effect, work: ("base", effect.leader_epoch)
    )
    replica._tasks = Given(spawn=calls.append)
    assert replica.retry() is bool(count)
    assert calls == expected
    if core.get("making_base"):
        calls.clear()
        assert replica.retry() and ("base", 3) not in calls, "it is being made"
    replica._closed = True
    assert not replica.retry()


@pytest.mark.parametrize("fails", [True, False])
def test_a_log_that_was_cut_is_not_complete_on_disk_either(replica, calls, *, fails) -> None:
    def clear_complete() -> None:
        calls.append(("cleared",))
        if fails:
            raise MachineError("/d", "write", OSError(5, "EIO"))

    opened(replica, clear_complete=clear_complete)
    replica.perform(ev.ClearComplete(NEWER))
    assert calls == [("cleared",), *[("fail",)] * fails]
    assert replica._hosted.compaction is not None, "what was applied still is"


@pytest.mark.parametrize("complete", [True, False])
def test_it_is_stored_with_whether_the_log_is_complete(replica, calls, *, complete) -> None:
    async def store(*given: Any, **more: Any) -> None:
        calls.append((*given, more))

    opened(replica, store=store)
    asyncio.run(replica._store(ev.StoreManifest(NEWER, OLDER, complete)))
    assert calls == [(NEWER, OLDER, {"complete": complete}), ev.ManifestStored(NEWER), ("pull",)]


@pytest.mark.parametrize("error", [None, EIO, EXHAUSTED])
def test_what_was_applied_is_forgotten_even_if_the_disk_cannot(replica, calls, error) -> None:
    """For want of a descriptor, too: nothing is appended while it says what was cut is applied."""
    replica._context.failures.on_failure = lambda _, why: calls.append(type(why))
    replica._forget_applied(Mock(side_effect=error))
    assert (replica._hosted.compaction, replica._partition.applied_end) == (None, 0)
    assert calls == [MachineError] * (error is not None)


# Passes.


@pytest.mark.parametrize(
    ("core", "reason", "why", "soon"),
    [
        ({"applied": OLDER}, "", None, False),
        ({}, "stopped", "stopped", True),
        ({"role": ManifestRole.FOLLOWER}, "", "this node does not lead the partition", False),
        ({"lost": True}, "", "what this replica held is damaged: another one is to lead", False),
        (
            {"making_base": True},
            "",
            "the base generation after an unclean election is being made",
            True,
        ),
        ({"applying": NEWER}, "", "generation 1.6 is being applied", True),
        ({}, "", "generation 1.5 is not published yet: it waits for this node", True),
        (
            {"storing": ev.StoreManifest(NEWER, None)},
            "",
            "generation 1.6 is not published yet: it waits for this node",
            True,
        ),
    ],
)
def test_why_no_pass_may_begin(replica, monkeypatch, *, core, reason, why, soon) -> None:
    change(replica.core, **{**APPLIES, **core})
    replica.retry_schedule.reason = reason
    assert (replica.pass_blocked_by, replica.pass_expected) == (why, soon)
    monkeypatch.setattr(PartitionCore, "unacknowledged_replicas", (2, 3))
    if why is not None and why.endswith("this node"):
        assert replica.pass_blocked_by == why.replace("this node", "2, 3")
        monkeypatch.setattr(PartitionCore, "lacks_members", True)
        monkeypatch.setattr(PartitionCore, "awaits_members", True)
        assert "another replica, ten minutes at most: the ISR (1,)" in str(replica.pass_blocked_by)


def test_no_pass_begins_while_members_may_come_back(replica, monkeypatch) -> None:
    change(replica.core, role=ManifestRole.LEADER)
    assert (replica.pass_blocked_by, replica.pass_expected) == (None, False)
    monkeypatch.setattr(PartitionCore, "lacks_members", True)
    assert str(replica.pass_blocked_by).startswith("it waits for another replica, ten minutes at")
    assert replica.pass_expected


@pytest.mark.parametrize(
    ("passed_ms", "pass_ms", "overdue", "applies", "gives"),
    [
        (59_999, 0, False, True, True),
        (60_000, 0, False, True, False),
        (79_999, 20_000, False, True, True),
        (80_000, 20_000, False, True, False),
        (4_999, 20_000, True, True, True),
        (5_000, 20_000, True, True, False),
        (0, 0, False, False, False),
    ],
)
def test_replicas_have_time_to_apply_but_not_for_ever(
    replica, *, monkeypatch, passed_ms, pass_ms, overdue, applies, gives
) -> None:
    monkeypatch.setattr(shell, "monotonic_ms", lambda: 1_000_000 + passed_ms)
    monkeypatch.setattr(shell, "others_apply", lambda _: applies)
    replica._published_ms, replica._pass_ms = 1_000_000, pass_ms
    config = replica._partition.config
    replica._partition.log.update_config(replace(config, max_compaction_lag_ms=5_000))
    assert replica.waits_for_appliers(overdue=overdue) is gives


def test_a_pass_begins_only_when_it_may(replica) -> None:
    replica.core.role = ManifestRole.LEADER
    for applied, closed in ((None, False), (OLDER, True)):
        replica.core.applied, replica._closed = applied, closed
        with pytest.raises(NotLeaderOrFollower):
            replica.begin_pass(ManifestWork())


@pytest.mark.parametrize("readable", [True, False])
def test_a_manifest_that_travels_is_read_or_the_error_is_told(replica, calls, readable) -> None:
    async def encoded(_: Any) -> bytes:
        if not readable:
            raise ManifestUnreadable("torn")
        return b"body"

    opened(replica, encoded=encoded)
    if readable:
        assert asyncio.run(replica.encoded(OLDER)) == b"body" and calls == []
        return
    with pytest.raises(ManifestUnreadable):
        asyncio.run(replica.encoded(OLDER))
    assert calls == [ev.ManifestDamaged(OLDER), ("pull",)]


@pytest.mark.parametrize(
    ("error", "missing", "bug"),
    [
        (PassFailed("torn", "LogsDiffer", 17), 17, False),
        (OSError(2, "gone"), None, False),
        (ValueError("a bug"), None, True),
        (InvariantViolation("a bug"), None, True),
    ],
)
def test_an_apply_that_fails_is_told_once(replica, calls, capsys, *, error, missing, bug) -> None:
    async def apply(*_: Any) -> None:
        raise error

    opened(replica, apply=apply)
    replica._works.add(work := ManifestWork())
    asyncio.run(replica._apply(OLDER, work))
    assert calls == [("failed", "manifest not applied", "1.5"), ev.ApplyAborted(OLDER, missing)]
    assert not replica._works
    assert ("Traceback" in capsys.readouterr().err) is bug


@pytest.mark.parametrize(("isr", "expected"), [((1, 2), [("resign",)]), ((1,), [])])
def test_a_leader_that_lacks_a_survivor_has_another_member_lead(
    replica, calls, *, isr, expected
) -> None:
    """Who fetches it again then. Alone it is tried on, and the status says what is missing."""

    async def apply(*_: Any) -> None:
        raise PassFailed("torn", "LogsDiffer", 17)

    change(replica.core, **APPLIES)
    replica._context.metadata.image.record = record(isr)
    opened(replica, apply=apply)
    replica._works.add(work := ManifestWork())
    asyncio.run(replica._apply(OLDER, work))
    failed = ("failed", "manifest not applied", "1.5")
    assert calls == [failed, ev.ApplyAborted(OLDER, 17), *expected]
    told = "offset 17 survives in generation 1.5" in replica.retry_schedule.reason
    assert told is (not expected)


def test_a_lone_leader_that_lacks_a_survivor_says_once_what_to_do(replica, capsys) -> None:
    """It tries every five minutes in the end: that is no news."""

    async def apply(*_: Any) -> None:
        raise PassFailed("torn", "LogsDiffer", 17)

    change(replica.core, **APPLIES)
    replica._context.metadata.image.record = record((1,))
    opened(replica, apply=apply)
    loop = Given(call_later=lambda *_: Given(cancel=lambda: None))
    runtime: Any = Given(loop=loop, now_ms=lambda: 0)
    schedule = RetrySchedule(runtime, replica._context.counters, TP, replica.retry)
    replica.retry_schedule = schedule
    for tries in range(1, 13):
        replica._works.add(work := ManifestWork())
        asyncio.run(replica._apply(OLDER, work))
        assert schedule.count == tries and schedule.retry_at_ms is not None
        assert "offset 17 survives" in schedule.reason and retry.REMEDY in schedule.reason
    said = capsys.readouterr().err
    (warning,) = [line for line in said.splitlines() if "level=warning" in line]
    assert "topic=orders partition=0 offset=17 generation=1.5" in warning
    assert retry.REMEDY in warning
    assert said.count("level=error") == 1 and said.count("failures=12") == 1
    schedule.reset()
    assert schedule.reason == ""


@pytest.mark.parametrize(
    ("error", "cancelled", "fails"),
    [
        (NotLeaderOrFollower("x"), True, False),
        (NotLeaderOrFollower("x"), False, True),
        (InvariantViolation("x"), True, False),
        (MachineError("/d", "write", OSError(5, "EIO")), True, True),
    ],
)
def test_what_was_withdrawn_has_not_failed_unless_a_disk_has(
    replica, calls, capsys, *, error, cancelled, fails
) -> None:
    work = ManifestWork()
    if cancelled:
        work.cancel()
    replica._stopped(work, "w", OLDER, error)
    assert bool(calls) is fails
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("closed", [False, True])
def test_a_pass_whose_log_was_deleted_meanwhile_has_not_failed(replica, calls, closed) -> None:
    async def read_pass_manifest(result: Any) -> Any:
        raise FileNotFoundError("manifest-3-1.tmp")

    opened(replica, read_pass_manifest=read_pass_manifest)
    replica._closed = closed
    with pytest.raises(NotLeaderOrFollower if closed else FileNotFoundError):
        asyncio.run(replica.pass_completed(RESULT, 3, OLDER, 2))
    assert not calls


def test_what_a_pass_made_does_not_fit_once_retention_has_taken_a_segment(replica, calls) -> None:
    """Also while its manifest is read."""

    async def read_pass_manifest(result: Any) -> Any:
        move_end(replica, 120)
        return manifest(Generation(3, 1), 110)

    async def go() -> None:
        replica._context.runtime.loop = asyncio.get_running_loop()
        opened(replica, read_pass_manifest=read_pass_manifest)
        log = replica._partition.log
        began_at, cuts = log.segments[0].base_offset, log.truncations
        pass_ = asyncio.ensure_future(replica.pass_completed(RESULT, 3, OLDER, cuts))
        while not calls:
            await asyncio.sleep(0)
        assert replica._pass_outputs.begins_at == began_at < log.segments[0].base_offset
        replica._pass_outputs.outcome.set_result(None)
        await pass_

    asyncio.run(go())


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_pass_made_is_of_the_log_as_it_begins(replica, calls, monkeypatch, closed) -> None:
    computing = ComputingPass(ManifestWork(), asyncio.Future(loop=asyncio.new_event_loop()))

    async def read_pass_manifest(result: Any) -> Any:
        return manifest(Generation(3, 1), 110)

    async def go() -> None:
        replica._context.runtime.loop = asyncio.get_running_loop()
        opened(replica, read_pass_manifest=read_pass_manifest).computing = computing
        move_end(replica, 7)
        replica._closed = closed
        replica._pass_began_ms = 1_000
        monkeypatch.setattr(shell, "monotonic_ms", lambda: 1_500)
        pass_ = asyncio.ensure_future(replica.pass_completed(RESULT, 3, OLDER, 2))
        while not calls and not pass_.done():
            await asyncio.sleep(0)
        assert computing.ended.done() and replica._opened_files.computing is None
        assert replica._pass_ms == 500
        if closed:
            with pytest.raises(NotLeaderOrFollower):
                await pass_
            return
        ref, outputs = ManifestRef(Generation(3, 1), 110), replica._pass_outputs
        assert calls == [ev.PassCompleted(ref, 3, OLDER)] and list(
            replica._opened_files.bodies
        ) == [ref]
        assert (outputs.ref, outputs.result, outputs.truncations, outputs.begins_at) == (
            ref,
            "result",
            2,
            7,
        )
        assert not pass_.done()
        outputs.outcome.set_result(None)
        await asyncio.wait_for(pass_, 60)

    asyncio.run(go())
    computing.ended.get_loop().close()
