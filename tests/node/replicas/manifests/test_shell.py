"""When the shell of a replica's manifests tells its core, asks its leader, waits and gives up.

The core, the partition and the node are made up: what each is told or asked is written down.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Final

import pytest

from kept.node.replicas.manifests import replica as shell
from kept.node.replicas.manifests.failures import ManifestUnreadable, PassFailed
from kept.node.replicas.manifests.replica import NEVER, ReplicaManifests
from kept.node.replicas.manifests.workers import Work
from kept.replication import manifests_events as ev
from kept.replication.manifests import Role
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import (
    KafkaStorageError,
    MachineError,
    NotLeaderOrFollower,
    ReplicaNotAvailable,
    ResourceExhausted,
)
from kept.storage.types import Generation, TopicPartition
from tests.support.replicas import manifest_context

TP: Final = TopicPartition("orders", 0)
OLDER: Final = ManifestRef(Generation(1, 5), 100)
NEWER: Final = ManifestRef(Generation(1, 6), 120)


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

    context = manifest_context(calls, record=SimpleNamespace(isr=(1, 2)))
    partition = SimpleNamespace(
        topic_partition=TP, log_end_offset=110, leader_id=2, offline=None, is_leader=False,
        core=SimpleNamespace(leading=True, isr=(1,), pending_isr=None, lacking=(), manifests=None),
        applied_end=100,
        follower=SimpleNamespace(cut_to_fetch_again=lambda offset: calls.append(("cut", offset))),
    )  # fmt: skip
    hosted: Any = SimpleNamespace(partition=partition, directory="directory", compaction="state")
    found = Written(context, hosted)
    found.calls = calls
    found.core = SimpleNamespace(  # type: ignore[assignment]
        role=Role.FOLLOWER, leader_epoch=3, synced=True, held=OLDER, applied=OLDER,
        leader_published=OLDER, published=OLDER, lost=False, has_offered=True, making_base=False,
        storing=None, in_flight=None,
        missing=None, in_isr=False, may_compute=False, applying=None, replaces=None,
        pull=lambda *given: given, pull_response=lambda request: ("answer", request),
    )  # fmt: skip
    found.retry_schedule = SimpleNamespace(  # type: ignore[assignment]
        count=0, reason="", failed=lambda *given: calls.append(("failed", *given[:2])),
        over=lambda: calls.append("over"), wait_no_longer=lambda: calls.append("no wait"),
    )  # fmt: skip
    return found


# Fetches.


@pytest.mark.parametrize(
    ("core", "agreed", "epoch", "expected"),
    [
        ({}, True, 3, []),
        ({"synced": False}, True, 3, [ev.Synced(3, True), "pull"]),
        ({"synced": False, "held": None}, True, 3, [ev.Synced(3, True)]),
        ({"synced": False, "held": None, "lost": True}, True, 3, [ev.Synced(3, True), "pull"]),
        ({}, False, 3, [ev.Synced(3, False)]),
        ({"synced": False}, True, 2, []),
        ({"synced": False, "role": Role.LEADER}, True, 3, []),
    ],
)
def test_what_a_fetch_showed_is_told_once(replica, calls, *, core, agreed, epoch, expected) -> None:
    vars(replica.core).update(core)
    replica.fetched(epoch, agreed)
    assert calls == [one if not isinstance(one, str) else (one,) for one in expected]


@pytest.mark.parametrize(("end", "asks"), [(119, 0), (120, 1), (121, 1)])
def test_who_lacks_records_asks_once_they_have_come(replica, calls, *, end, asks) -> None:
    replica._awaited_end = 120
    replica._partition.log_end_offset = end
    replica.fetched(3, True)
    replica.fetched(3, True)
    assert calls == [("pull",)] * asks
    assert replica._awaited_end == (NEVER if asks else 120)


# Pulls.


def request(end: int = 110) -> Any:
    return SimpleNamespace(log_end_offset=end)


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
    replica._partition.log_end_offset = end
    answer: Any = SimpleNamespace(held=held, published=published)
    replica.pulled(asked, answer, {})
    assert calls == [ev.Pulled(asked, answer), *[("pull",)] * asks]
    assert replica._awaited_end == awaited


def test_an_answer_to_another_question_is_none(replica, *, calls) -> None:
    replica.core.in_flight = request()
    replica._opened_files = SimpleNamespace(bodies={})
    replica.pulled(request(5), SimpleNamespace(held=NEWER, published=None), {NEWER: "body"})
    assert calls == [] and replica._opened_files.bodies == {}
    replica.pulled(
        replica.core.in_flight, SimpleNamespace(held=None, published=None), {NEWER: "body"}
    )
    assert len(calls) == 1 and replica._opened_files.bodies == {NEWER: "body"}


@pytest.mark.parametrize("why", ["", "closed", "no leader", "offline"])
def test_nothing_is_asked_without_a_leader_or_a_log(replica, *, why) -> None:
    replica._closed = why == "closed"
    replica._partition.leader_id = shell.NO_LEADER if why == "no leader" else 2
    replica._partition.offline = "broken" if why == "offline" else None
    assert replica.pull() == (None if why else (110, 9))


@pytest.mark.parametrize(("leads", "closed"), [(True, False), (False, False), (True, True)])
def test_only_the_leader_answers(replica, calls, *, leads, closed) -> None:
    replica._partition.is_leader, replica._closed = leads, closed
    if leads and not closed:
        assert replica.receive_pull(one := request()) == ("answer", one)
        assert calls == [ev.PullReceived(one)]
    else:
        with pytest.raises(NotLeaderOrFollower):
            replica.receive_pull(request())


def test_only_a_follower_of_a_cluster_asks(replica, *, calls) -> None:
    replica.schedule_pull()
    assert calls.pop() == ("pull",)
    for change in ({"role": Role.LEADER}, {"role": Role.NONE}):
        vars(replica.core).update(change)
        replica.schedule_pull()
    replica.core.role = Role.FOLLOWER
    replica._closed = True
    replica.schedule_pull()
    replica._announce()
    replica._closed = False
    replica._announce()
    assert calls == [("announce",)]


# Cuts.


@pytest.mark.parametrize("busy", ["", "storing", "work", "closed"])
def test_a_cut_waits_for_whoever_uses_the_files(replica, *, busy) -> None:
    replica.check_cut()
    work = Work()
    if busy == "storing":
        replica.core.storing = object()
    elif busy == "work":
        replica._works.add(work)
    replica._closed = busy == "closed"
    if busy:
        with pytest.raises(ReplicaNotAvailable):
            replica.check_cut()
    else:
        replica.check_cut()
    assert work.cancelled is (busy == "work")


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (None, [("cut", 7), ("nudge",)]),
        (ReplicaNotAvailable("files"), [("later", 0.1, 7)]),
        (KafkaStorageError("offline"), []),
    ],
)
def test_a_log_is_cut_where_a_record_is_missing(replica, calls, *, error, then) -> None:
    def refuse(_: int) -> None:
        raise error

    if error is not None:
        replica._partition.follower.cut_to_fetch_again = refuse
    replica.core.missing = 7
    replica._cut_log(8)
    replica.core.in_isr = True
    replica._cut_log(7)
    replica.core.in_isr, replica._closed = False, True
    replica._cut_log(7)
    assert calls == []
    replica._closed = False
    replica._cut_log(7)
    timers = replica._context.runtime.loop.timers
    assert calls + [("later", timer.seconds, *timer.given) for timer in timers] == then


# Roles.


@pytest.mark.parametrize(
    ("core", "begins"),
    [({}, False), ({"leader_epoch": 2}, True), ({"role": Role.LEADER}, True)],
)
@pytest.mark.parametrize("making_base", [True, False])
def test_another_epoch_or_role_throws_away_what_was_done_for_the_old_one(
    replica, calls, *, core, begins, making_base
) -> None:
    vars(replica.core).update(core, making_base=making_base)
    replica._awaited_end, replica.renew = 120, True
    pass_, building = Work(), Work()
    replica._works.add(building)
    replica._opened_files = SimpleNamespace(computing=SimpleNamespace(work=pass_))
    replica.follow(SimpleNamespace(leader_epoch=3, isr=(1, 2)))
    assert calls == [ev.Follows(3, True)]
    assert (replica._awaited_end, replica.renew) == ((NEVER, False) if begins else (120, True))
    assert pass_.cancelled is begins
    assert building.cancelled is (begins and making_base)
    replica.core.leader_epoch = 3
    replica.follow(SimpleNamespace(leader_epoch=3, isr=(2,)))
    assert calls[1:] == [ev.Follows(3, False)]


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
    vars(replica.core).update(core, role=Role.LEADER)
    event = ev.Leads(3, False, alone)
    monkeypatch.setattr(shell, "leads", lambda *_: event)
    replica.lead(SimpleNamespace(leader_epoch=3))
    assert calls == [event, *[(name,) for name in expected]]


# What is unreadable, what failed.


@pytest.mark.parametrize(
    ("core", "isr", "more", "expected"),
    [
        ({}, (1, 2), {}, [ev.Damaged(OLDER), ("pull",)]),
        ({"role": Role.LEADER, "may_compute": True}, (1, 2), {}, [("renew",)]),
        ({"role": Role.LEADER}, (1, 2), {"renew": True}, [("renew",)]),
        ({"role": Role.LEADER}, (1, 2), {}, [ev.Damaged(OLDER, alone=True)]),
        ({"role": Role.LEADER}, (1, 2), {"pending": (1, 2)}, [("resign",)]),
        ({"role": Role.LEADER}, (1,), {"pending": (1, 2)},
         [("failed", "manifest not applied", "1.5")]),
        ({"role": Role.LEADER, "may_compute": True, "applied": NEWER}, (1, 2),
         {"pending": (1, 2)}, [("resign",)]),
        ({"held": NEWER, "leader_published": NEWER, "published": NEWER}, (1, 2), {}, []),
        ({}, (1, 2), {"closed": True}, []),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_read(replica, calls, *, core, isr, more, expected) -> None:
    vars(replica.core).update(core)
    replica.renew = more.get("renew", False)
    replica._closed = more.get("closed", False)
    replica._partition.core.pending_isr = more.get("pending")
    replica._context.metadata.image.record = SimpleNamespace(isr=isr)
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
            replica._made = SimpleNamespace(outcome=outcome)
        replica._failed("w", OLDER, error)
        assert outcome.done() is waits and replica._made is None
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
        ({}, 1, ["no wait", ev.Retried(), ("pull",)]),
        ({"role": Role.NONE}, 1, ["no wait"]),
        ({"making_base": True, "role": Role.LEADER}, 1, ["no wait", ("base", 3)]),
    ],
)
def test_what_failed_is_tried_again(replica, calls, *, monkeypatch, core, count, expected) -> None:
    vars(replica.core).update(core)
    replica.retry_schedule.count = count
    monkeypatch.setattr(
        Written, "_make_base", lambda _, effect, work: ("base", effect.leader_epoch)
    )
    monkeypatch.setattr(Written, "_spawn", lambda _, work: calls.append(work))
    assert replica.retry() is bool(count)
    assert calls == expected
    if core.get("making_base"):
        calls.clear()
        assert replica.retry() and ("base", 3) not in calls, "it is being made"
    replica._closed = True
    assert not replica.retry()


@pytest.mark.parametrize("disk", [True, False])
def test_what_was_applied_is_forgotten_even_if_the_disk_cannot(replica, calls, *, disk) -> None:
    def change() -> None:
        if disk:
            raise MachineError("/d", "unlink", OSError(5, "EIO"))

    replica._forget_applied(change)
    assert (replica._hosted.compaction, replica._partition.applied_end) == (None, 0)
    assert calls == [("fail",)] * disk


# Passes.


@pytest.mark.parametrize(
    ("core", "reason", "why", "soon"),
    [
        ({"may_compute": True}, "", None, False),
        ({}, "stopped", "stopped", True),
        ({"role": Role.FOLLOWER}, "", "this node does not lead the partition", False),
        ({"lost": True}, "", "what this replica held is damaged: another one is to lead", False),
        ({"making_base": True}, "",
         "the base generation after an unclean election is being made", True),
        ({"applying": NEWER}, "", "generation 1.6 is being applied", True),
        ({}, "", "generation 1.5 is not published yet: it waits for this node", True),
        ({"storing": SimpleNamespace(held=NEWER)}, "",
         "generation 1.6 is not published yet: it waits for this node", True),
    ],
)  # fmt: skip
def test_why_no_pass_may_begin(replica, *, core, reason, why, soon) -> None:
    vars(replica.core).update({"role": Role.LEADER, **core})
    replica.retry_schedule.reason = reason
    assert (replica.pass_blocked_by, replica.pass_expected) == (why, soon)
    replica._partition.core.lacking = (2, 3)
    if why is not None and why.endswith("this node"):
        assert replica.pass_blocked_by == why.replace("this node", "2, 3")


@pytest.mark.parametrize(
    ("passed_ms", "pass_ms", "overdue", "applies", "gives"),
    [
        (59_999, 0, False, True, True), (60_000, 0, False, True, False),
        (79_999, 20_000, False, True, True), (80_000, 20_000, False, True, False),
        (4_999, 20_000, True, True, True), (5_000, 20_000, True, True, False),
        (0, 0, False, False, False),
    ],
)  # fmt: skip
def test_replicas_have_time_to_apply_but_not_for_ever(
    replica, *, monkeypatch, passed_ms, pass_ms, overdue, applies, gives
) -> None:
    monkeypatch.setattr(shell, "monotonic_ms", lambda: 1_000_000 + passed_ms)
    monkeypatch.setattr(shell, "others_apply", lambda _: applies)
    replica._published_ms, replica._pass_ms = 1_000_000, pass_ms
    replica._partition.config = SimpleNamespace(max_compaction_lag_ms=5_000)
    assert replica.waits_for_appliers(overdue=overdue) is gives


def test_a_pass_begins_only_when_it_may(replica) -> None:
    for may, closed in ((False, False), (True, True)):
        replica.core.may_compute, replica._closed = may, closed
        with pytest.raises(NotLeaderOrFollower):
            replica.begin_pass(Work())


@pytest.mark.parametrize("readable", [True, False])
def test_a_manifest_that_travels_is_read_or_the_error_is_told(replica, calls, readable) -> None:
    async def encoded(_: Any) -> bytes:
        if not readable:
            raise ManifestUnreadable("torn")
        return b"body"

    replica._opened_files = SimpleNamespace(encoded=encoded)
    if readable:
        assert asyncio.run(replica.encoded(OLDER)) == b"body" and calls == []
        return
    with pytest.raises(ManifestUnreadable):
        asyncio.run(replica.encoded(OLDER))
    assert calls == [ev.Damaged(OLDER), ("pull",)]


@pytest.mark.parametrize(
    ("error", "missing", "bug"),
    [(PassFailed("torn", "LogsDiffer", 17), 17, False), (OSError(2, "gone"), None, False),
     (ValueError("a bug"), None, True)],
)  # fmt: skip
def test_an_apply_that_fails_is_told_once(replica, calls, capsys, *, error, missing, bug) -> None:
    async def bring(*_: Any) -> None:
        raise error

    replica._opened_files = SimpleNamespace(bring=bring)
    replica._works.add(work := Work())
    asyncio.run(replica._apply(OLDER, work))
    assert calls == [("failed", "manifest not applied", "1.5"), ev.ApplyEnded(OLDER, missing)]
    assert not replica._works
    assert ("ValueError" in capsys.readouterr().err) is bug


@pytest.mark.parametrize(
    ("error", "cancelled", "fails"),
    [
        (NotLeaderOrFollower("x"), True, False), (NotLeaderOrFollower("x"), False, True),
        (MachineError("/d", "write", OSError(5, "EIO")), True, True),
    ],
)  # fmt: skip
def test_what_was_withdrawn_has_not_failed_unless_a_disk_has(
    replica, calls, *, error, cancelled, fails
) -> None:
    work = Work()
    if cancelled:
        work.cancel()
    replica._stopped(work, "w", OLDER, error)
    assert bool(calls) is fails


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_pass_made_is_of_the_log_as_it_begins(replica, calls, monkeypatch, closed) -> None:
    computing = SimpleNamespace(over=asyncio.Future(loop=asyncio.new_event_loop()))

    async def made(result: Any) -> Any:
        return SimpleNamespace(generation=Generation(3, 1), end_offset=110)

    async def go() -> None:
        replica._context.runtime.loop = asyncio.get_running_loop()
        replica._opened_files = SimpleNamespace(made=made, computing=computing, bodies={})
        segments = [SimpleNamespace(base_offset=offset) for offset in (7, 50)]
        replica._partition.log = SimpleNamespace(segments=segments)
        replica._closed = closed
        replica._pass_began_ms = 1_000
        monkeypatch.setattr(shell, "monotonic_ms", lambda: 1_500)
        pass_ = asyncio.ensure_future(replica.pass_made("result", 3, OLDER, 2))
        while not calls and not pass_.done():
            await asyncio.sleep(0)
        assert computing.over.done() and replica._opened_files.computing is None
        assert replica._pass_ms == 500
        if closed:
            with pytest.raises(NotLeaderOrFollower):
                await pass_
            return
        ref, made_ = ManifestRef(Generation(3, 1), 110), replica._made
        assert calls == [ev.PassDone(ref, 3, OLDER)] and list(replica._opened_files.bodies) == [ref]
        assert (made_.ref, made_.result, made_.truncations, made_.begins_at) == (
            ref,
            "result",
            2,
            7,
        )
        assert not pass_.done()
        made_.outcome.set_result(None)
        await asyncio.wait_for(pass_, 60)

    asyncio.run(go())
    computing.over.get_loop().close()
