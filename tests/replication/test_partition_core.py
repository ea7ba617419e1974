"""PartitionCore by scripted histories: ``histories/*.txt`` read as prose.

A line at the margin is an event; the indented lines under it are the effects, in order. After each
event the core's invariants are checked.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.replication import events as core
from kept.replication import manifests_events as ev
from kept.replication.partition_core import HIGH_WATERMARK_MOVED, PartitionCore
from kept.storage.errors import InvariantViolation, NotLeaderOrFollower
from kept.storage.types import Generation
from tests.support.histories import check_history

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.txt"))


def members(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def generation(text: str) -> Generation | None:
    return None if text == "none" else Generation(*map(int, text.split(".")))


def parse(line: str):
    """An event, None for a tick, and when; who waits is a letter, and its token that one's code."""
    name, *words = line.split()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    return event_of(name, given, words), int(given.get("at", 0))


def event_of(name: str, given: dict[str, str], words: list[str]):
    plain = [word for word in words if "=" not in word]
    number = int(given.get("pull", 0))
    match name:
        case "elected":
            return core.BecameLeader(
                int(given["epoch"]),
                int(given["version"]),
                members(given["replicas"]),
                members(given["isr"]),
                int(given["leo"]),
            )
        case "appended":
            return core.Appended(int(plain[0]))
        case "fetched":
            return core.FollowerFetched(int(given["by"]), int(plain[0]))
        case "committed":
            return core.CommitAdvanced(int(plain[0]))
        case "decided":
            return core.IsrChanged(
                int(given["version"]), members(given["replicas"]), members(given["isr"])
            )
        case "refused":
            return core.IsrProposalRejected(int(given["version"]))
        case "tick":
            return None
        case "await":
            return core.CommitAwaited(ord(plain[0]), int(plain[1]))
        case "forget":
            return core.WaitCancelled(ord(plain[0]))
        case "min-isr":
            return core.MinIsrChanged(int(plain[0]))
        case "eligible":
            return core.EligibleBrokersChanged(frozenset(members(plain[0])))
        case "offer":
            return core.ManifestOffered(generation(plain[0]), "applied" in plain)
        case "loses":
            return core.ManifestLost()
        case "holds":
            complete = "complete" in plain
            return core.ManifestAcknowledged(
                int(given["by"]), generation(plain[0]), complete=complete, number=number
            )
        case "applies":
            return core.ManifestApplied(int(given["by"]), generation(plain[0]), number=number)
        case "resigned":
            return core.StoppedLeading()
    raise AssertionError(f"unknown event: {name}")


def show(effect, high_watermark: int) -> str:
    match effect:
        case core.HighWatermarkMoved():
            return f"high watermark {high_watermark}"
        case core.Acknowledge(token, None):
            return f"acknowledge {chr(token)}"
        case core.Acknowledge(token, error):
            return f"tell {chr(token)}: {error.__name__}"
        case core.ProposeIsr(isr, _, version):
            return f"propose isr {','.join(map(str, isr))} at version {version}"
        case core.ManifestPublished(name):
            return f"published {name}"
        case ev.AnnounceManifest():
            return "announce"
    raise AssertionError(f"unknown effect: {effect}")


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    leader = PartitionCore(node_id=0, lag_time_max_ms=30_000)

    def happens(line: str) -> list[str]:
        event, now_ms = parse(line)
        if known := re.search(r"\bhw=(\d+)", line):  # as a replica
            leader.high_watermark = max(leader.high_watermark, int(known[1]))
        effects = leader.tick(now_ms) if event is None else leader.step(event, now_ms)
        leader.check_invariants()
        return [show(effect, leader.high_watermark) for effect in effects]

    check_history(path, happens, indent="    ")


def lone(leo: int = 0) -> PartitionCore:
    leader = PartitionCore(node_id=0)
    leader.become_leader(core.BecameLeader(1, 0, (0,), (0,), leo), 0)
    return leader


def test_a_follower_that_is_no_replica_is_refused() -> None:
    with pytest.raises(NotLeaderOrFollower, match="broker 7"):
        lone().fetched(7, 0, 0)


def test_an_older_leader_epoch_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="leader epoch 0 after 1"):
        lone().become_leader(core.BecameLeader(0, 0, (0,), (0,), 0), 0)


def test_invariants_name_what_is_broken() -> None:
    leader = lone(3)
    leader.high_watermark = 4
    with pytest.raises(InvariantViolation, match="HW above LEO"):
        leader.check_invariants()


def test_wait_order_is_by_offset_then_arrival() -> None:
    leader = PartitionCore(node_id=0)
    leader.become_leader(core.BecameLeader(1, 0, (0, 1), (0, 1), 0), 0)
    leader.appended(10)
    for token, end in enumerate((9, 3, 3, 5)):
        assert leader.commit_awaited(token, end) == ()
    leader.check_invariants()
    moved, *acknowledged = leader.fetched(1, 10, 1)
    assert moved is HIGH_WATERMARK_MOVED
    assert [effect.token for effect in acknowledged] == [1, 2, 3, 0]


EVENTS = st.one_of(
    st.builds(lambda n: ("append", n), st.integers(0, 5)),
    st.tuples(st.just("fetch"), st.integers(1, 2), st.integers(0, 6), st.integers(0, 20_000)),
    st.builds(lambda ok: ("controller", ok), st.booleans()),
    st.builds(lambda dt: ("tick", dt), st.integers(0, 40_000)),
    st.builds(lambda who: ("eligible", who), st.frozensets(st.integers(1, 2))),
    st.builds(lambda n: ("min-isr", n), st.integers(1, 3)),
    st.builds(lambda n: ("await", n), st.integers(0, 8)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_random_histories_keep_the_law_of_the_high_watermark(events) -> None:
    """HW never goes back, and every member of confirmed and proposed ISR has what is below it."""
    leader = PartitionCore(node_id=0)
    leader.step(core.BecameLeader(1, 0, (0, 1, 2), (0, 1), 0), 0)
    has = {0: 0, 1: 0, 2: 0}
    proposals: list[core.ProposeIsr] = []
    waiting: dict[int, int] = {}
    now = 0
    for number, event in enumerate(events):
        before = leader.high_watermark
        match event:
            case ("append", count):
                has[0] += count
                effects = leader.step(core.Appended(has[0]), 0)
            case ("fetch", replica, back, dt):
                now += dt
                has[replica] = max(has[replica], has[0] - back)
                effects = leader.step(core.FollowerFetched(replica, has[replica]), now)
            case ("controller", accepts):
                if not proposals:
                    continue
                last = proposals.pop()
                if accepts:
                    version = leader.partition_epoch + 1
                    effects = leader.step(core.IsrChanged(version, (0, 1, 2), last.isr), 0)
                else:
                    effects = leader.step(core.IsrProposalRejected(last.partition_epoch), 0)
            case ("tick", dt):
                now += dt
                effects = leader.tick(now)
            case ("eligible", who):
                effects = leader.step(core.EligibleBrokersChanged(who), 0)
            case ("min-isr", least):
                effects = leader.step(core.MinIsrChanged(least), 0)
            case ("await", ahead):
                waiting[number] = leader.high_watermark + ahead
                effects = leader.step(core.CommitAwaited(number, waiting[number]), 0)
        leader.check_invariants()
        assert leader.high_watermark >= before
        if leader.high_watermark > before:
            assert all(has[member] >= leader.high_watermark for member in leader.maximal_isr)
        for effect in effects:
            if isinstance(effect, core.ProposeIsr):
                assert not proposals, "one proposal at a time"
                proposals.append(effect)
            elif isinstance(effect, core.Acknowledge):
                assert waiting.pop(effect.token) <= leader.high_watermark
    assert all(end > leader.high_watermark for end in waiting.values())


def test_what_is_to_be_applied_is_committed_before_anything_else_is_done() -> None:
    """The high watermark is at least at the end of what is put into place (rule 12)."""
    follower = PartitionCore(node_id=1)
    ref = ev.ManifestRef(Generation(2, 2), 100)
    follower.step(ev.StartedFollowing(2), 0)
    follower.step(ev.DivergenceChecked(2, agreed=True), 0)
    asked = follower.manifests.start_pull(100)
    assert asked is not None
    follower.step(ev.PullResponseReceived(asked, ev.PullResponse(ref, ref, (ref,))), 0)
    assert follower.high_watermark == 0
    assert follower.step(ev.ManifestStored(ref), 0) == (HIGH_WATERMARK_MOVED, ev.ApplyManifest(ref))
    assert follower.high_watermark == 100


def test_what_every_replica_holds_is_published_and_applied_in_the_step_that_shows_it() -> None:
    """Nobody between the two has to carry it from one to the other."""
    leader = PartitionCore(node_id=0)
    leader.step(core.BecameLeader(2, 0, (0, 1), (0, 1), 100, awaits_offer=True), 0)
    leader.step(ev.StartedLeading(2), 0)
    leader.fetched(1, 100, 0)
    ref = ev.ManifestRef(Generation(2, 1), 100)
    assert isinstance(leader.step(ev.PassCompleted(ref, 2, None), 0)[0], ev.StoreManifest)
    assert leader.step(ev.ManifestStored(ref), 0) == (ev.AnnounceManifest(),)
    pull = ev.PullRequest(1, -1, 2, 1, ref, None, True, 100, ())
    published = core.ManifestPublished(ref.generation)
    assert leader.step(ev.PullRequestReceived(pull), 0) == (published, ev.ApplyManifest(ref))
    leader.check_invariants()
