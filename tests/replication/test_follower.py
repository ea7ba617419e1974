"""FollowerCore by scripted histories: ``histories/follower/*.txt`` read as prose.

A line at the margin is an event; indented are the effects that come out, and the log after them.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kept.replication import follower as core
from kept.replication.fetch_messages import OffsetsResponse, PartitionRequest, PartitionResponse
from kept.replication.follower import FollowerCore, FollowerState
from kept.storage.errors import (
    CorruptMessage,
    InvariantViolation,
    KafkaStorageError,
    ReplicaNotAvailable,
    ResourceExhausted,
)
from kept.storage.types import TopicPartition
from tests.support.histories import check_history

HISTORIES = sorted((Path(__file__).parent / "histories" / "follower").glob("*.txt"))
TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=5)
CODES = {"out-of-range": 1, "not-leader": 6, "fenced": 74, "unknown-epoch": 75, "unknown-id": 100}
NAMES = {
    2: "corrupt",
    9: "not-available",
    56: "storage",
    **{code: name for name, code in CODES.items()},
}


@dataclass
class FakeLog:
    """A log of offsets and epochs only, with the rules of the real one."""

    log_start_offset: int = 0
    log_end_offset: int = 0
    high_watermark: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=list)
    awaits_flush: bool = False

    @property
    def latest_epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else -1

    def own_end_offset(self, epoch: int) -> tuple[int, int] | None:
        known = [entry[0] for entry in self.epochs]
        if not known or epoch > known[-1]:
            return None
        higher = bisect_right(known, epoch)
        if higher == 0:
            return epoch, self.epochs[0][1]
        end = self.epochs[higher][1] if higher < len(known) else self.log_end_offset
        return known[higher - 1], end

    def cut(self, offset: int) -> None:
        self.log_end_offset = min(self.log_end_offset, offset)
        self.log_start_offset = min(self.log_start_offset, offset)
        self.high_watermark = min(self.high_watermark, offset)
        self.epochs = [entry for entry in self.epochs if entry[1] < self.log_end_offset]

    def perform(self, effect: core.Effect, epoch: int) -> None:
        match effect:
            case core.TruncateTo(offset):
                self.cut(offset)
            case core.StartAt(offset):
                self.__init__(offset, offset, offset)
            case core.AppendBatches(records, high_watermark, log_start_offset):
                if len(records) and epoch > self.latest_epoch:
                    self.epochs.append((epoch, self.log_end_offset))
                self.log_end_offset += len(records)
                committed = min(high_watermark, self.log_end_offset)
                self.high_watermark = max(self.high_watermark, committed)
                self.log_start_offset = max(self.log_start_offset, log_start_offset)

    def __str__(self) -> str:
        epochs = ",".join(f"{epoch}@{start}" for epoch, start in self.epochs)
        return f"{self.log_start_offset}..{self.log_end_offset} hw={self.high_watermark} {epochs}"


def pair(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, second = text.partition("@")
    return int(first), int(second)


def show(effect: core.Effect) -> str:
    match effect:
        case core.TruncateTo(offset):
            return f"truncate to {offset}"
        case core.StartAt(offset):
            return f"start at {offset}"
        case core.AppendBatches(records, high_watermark, log_start):
            return f"append {len(records)} (leader's hw={high_watermark} start={log_start})"
        case core.ListOffsets():
            return "ask where the leader's log starts and ends"
        case core.FetchAgain():
            return "ask again"
        case core.Backoff(until, error, why):
            return f"back off until {until}: {NAMES[error]}" + (f": {why}" if why else "")
    raise AssertionError(effect)


class Story:
    def __init__(self) -> None:
        self.log = FakeLog()
        self.core = FollowerCore(self.log)
        self.kept: PartitionRequest | None = None

    def asked(self) -> PartitionRequest:
        log = self.log
        return PartitionRequest(
            TP,
            TOPIC_ID,
            self.core.leader_epoch,
            log.log_end_offset,
            log.latest_epoch,
            log.log_start_offset,
            100,
        )

    def event(self, line: str) -> list[str]:
        name, *words = line.split()
        given = dict(word.split("=", 1) for word in words if "=" in word)
        at = int(given.get("at", 0))
        before = str(self.log)
        epoch = int(given.get("epoch", self.core.leader_epoch))
        match name:
            case "log":
                epochs = [pair(entry) for entry in given.get("epochs", "").split(",") if entry]
                start, end = given["is"].split("..")
                self.log.__init__(int(start), int(end), int(given["hw"]), epochs)
                followed = core.BecameFollower(self.core.leader_id, self.core.leader_epoch)
                self.core = FollowerCore(self.log)
                self.core.step(followed, 0)
                return []
            case "follow":
                effects = self.core.step(core.BecameFollower(int(given["leader"]), epoch), 0)
            case "keep":
                self.kept = self.asked()
                return []
            case "answer" | "late":
                asked = self.kept if name == "late" else self.asked()
                answer = PartitionResponse(
                    TP,
                    CODES.get(given.get("error", ""), 0),
                    int(given.get("hw", -1)),
                    -1,
                    int(given.get("start", 0)),
                    pair(given.get("diverging")),
                    pair(given.get("hint")),
                    bytes(int(given.get("records", 0))),
                )
                effects = self.core.step(core.FetchCompleted(asked, answer), at)
            case "offsets":
                answer = OffsetsResponse(
                    TP,
                    CODES.get(given.get("error", ""), 0),
                    int(given.get("start", -1)),
                    int(given.get("end", -1)),
                )
                effects = self.core.step(core.OffsetsReceived(epoch, answer), at)
            case "failed":
                error = CorruptMessage() if "crc" in words else KafkaStorageError()
                effects = self.core.step(core.EffectFailed(error), at)
            case "stop":
                effects = self.core.step(core.StoppedFollowing(), 0)
            case "state":
                wants = "wants" if self.core.wants(at) else "waits"
                agreed = ", agreed" if self.core.agreed else ""
                return [f"{self.core.state.value}, {wants}{agreed}"]
            case _:
                raise AssertionError(line)
        if "refused" in words:  # the cut waits: the log stays as it is
            effects += self.core.step(core.EffectFailed(ReplicaNotAvailable()), at)
        elif "exhausted" in words:
            error = ResourceExhausted("/log", "open", OSError(24, "no descriptor"))
            effects += self.core.step(core.EffectFailed(error), at)
        else:
            for effect in effects:
                self.log.perform(effect, epoch)
        self.core.check_invariants()
        shown = [show(effect) for effect in effects]
        if str(self.log) != before:
            shown.append(str(self.log))
        return shown or ["nothing"]


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check_history(path, Story().event, indent="    ")


def test_there_are_histories() -> None:
    assert len(HISTORIES) >= 5


def test_an_older_leader_epoch_is_a_bug() -> None:
    follower = FollowerCore(FakeLog())
    follower.step(core.BecameFollower(1, 4), 0)
    with pytest.raises(InvariantViolation, match="leader epoch 3 after 4"):
        follower.step(core.BecameFollower(1, 3), 0)


def test_what_is_not_durable_yet_is_not_asked_beyond() -> None:
    log = FakeLog()
    follower = FollowerCore(log)
    follower.step(core.BecameFollower(1, 4), 0)
    log.awaits_flush = True
    assert not follower.wants(0)
    log.awaits_flush = False
    assert follower.wants(0)


def test_a_want_of_descriptors_is_waited_out_and_a_broken_disk_is_not() -> None:
    follower = FollowerCore(FakeLog())
    follower.step(core.BecameFollower(1, 4), 0)
    error = ResourceExhausted("/log", "open", OSError(24, "Too many open files"))
    (backoff,) = follower.step(core.EffectFailed(error), 1000)
    assert backoff.until_ms > 1000 and "Too many open files" in backoff.why
    assert follower.state is not FollowerState.FAILED
    follower.step(core.EffectFailed(error.as_failure()), 2000)
    assert follower.state is FollowerState.FAILED


def test_invariants_name_what_is_broken() -> None:
    follower = FollowerCore(FakeLog(high_watermark=3))
    with pytest.raises(InvariantViolation, match="HW above LEO"):
        follower.check_invariants()
    follower = FollowerCore(FakeLog(), state=FollowerState.FETCHING)
    with pytest.raises(InvariantViolation, match="follows nobody"):
        follower.check_invariants()
