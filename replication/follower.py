"""The follower of one partition as a state machine: what to fetch, where to cut the log.

:meth:`FollowerCore.step` takes an event and returns effects, which the shell performs on the log at
once and in order; the core then sees the log as it has become, through :class:`FollowerLog`. No
clock, no disk.

What holds (rules 25-31, 43; KIP-101, KIP-279, KIP-320, KIP-595; ``AbstractFetcherThread``
and ``ReplicaFetcherThread``):

- A request names the leader epoch it is meant for, the log end, and the epoch of the last batch.
- Where the leader says that the logs part, the log is cut to min(the leader's end of that epoch,
  its own end of it, its log end); an epoch that is unknown here cuts at the end of the largest
  smaller one, and the leader is asked again. Nothing of such an answer is appended.
- A batch that reaches over our end, and begins at or above the high watermark, parts the logs, too:
  ours is cut at its base.
- In one leader epoch that happens until the logs agree, each time further down. Logs that part
  again after they agreed, or no further down, do so by damage (a log holds epochs that its
  checkpoint has not): that is said, and asked again later and later. A cut that has to wait for
  work on the log's files is tried again soon, and is none of that.
- Out of range: a leader whose log ends below ours has it cut there; one whose log starts above our
  end has everything dropped, and the log starts anew.
- The high watermark is min(the leader's, log end). Ours, not Kafka's: it never goes back but with
  a truncation, because what was once committed stays so.
- An answer counts only if it was given to the request that would be sent now: late, duplicated and
  reordered ones change nothing.
- Fenced and unknown epochs wait for the image, asking now and then; nothing but the image says who
  leads (rule 35). A hint (KIP-951) only tells how long to wait.
- ``agreed`` is true after an answer in this leader epoch that did not diverge (rule 14): what the
  leader says of manifests counts from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from msgspec import Struct

from kept.replication.fetch_messages import (
    CORRUPT_MESSAGE,
    FENCED_LEADER_EPOCH,
    KAFKA_STORAGE_ERROR,
    NONE,
    OFFSET_OUT_OF_RANGE,
    REPLICA_NOT_AVAILABLE,
    Buffer,
    OffsetsResponse,
    PartitionRequest,
    PartitionResponse,
)
from kept.storage.errors import (
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    ReplicaNotAvailable,
    ResourceExhausted,
)

NO_LEADER: Final = -1
CUT_RETRY_MS: Final = 100
"""A cut that has to wait is tried again after this: nothing is wrong, so it does not grow."""
OFFSET_BYTES: Final = 8
"""A batch begins with its base offset."""
AGREED: Final = (-1, -1)
"""Below every place where logs can diverge: see ``FollowerCore.diverged_at``."""


class FollowerLog(Protocol):
    """What the core reads of its replica; :class:`.follower_replica.FollowerReplica` is one."""

    @property
    def log_start_offset(self) -> int:
        """First offset."""

    @property
    def log_end_offset(self) -> int:
        """Where the next record goes."""

    @property
    def high_watermark(self) -> int:
        """What is known as committed."""

    @property
    def latest_epoch(self) -> int:
        """Leader epoch of the last batch; -1 when none is known."""

    @property
    def awaits_flush(self) -> bool:
        """``flush.messages``: what was appended is not durable, so not to be acknowledged yet."""

    def own_end_offset(self, leader_epoch: int) -> tuple[int, int] | None:
        """(largest own epoch <= ``leader_epoch``, its end); None when it is above all."""


# Events.


class BecameFollower(Struct, frozen=True):
    """The image names a leader (NO_LEADER: none) in an epoch."""

    leader_id: int
    leader_epoch: int


class FetchCompleted(Struct, frozen=True):
    """The leader's response to a fetch."""

    request: PartitionRequest
    response: PartitionResponse


class OffsetsReceived(Struct, frozen=True):
    """Where the leader's log starts and ends, as asked in that epoch."""

    leader_epoch: int
    response: OffsetsResponse


class EffectFailed(Struct, frozen=True):
    """An effect could not be performed."""

    error: KeptError


class StoppedFollowing(Struct, frozen=True):
    """This node leads, or hosts the partition no more."""


Event = BecameFollower | FetchCompleted | OffsetsReceived | EffectFailed | StoppedFollowing


# Effects.


class TruncateTo(Struct, frozen=True):
    """Cut the log, durably. Below HW only an unclean election or a power cut explains it; whoever
    cuts reports what goes (:mod:`.lost_records`).
    """

    offset: int


class StartAt(Struct, frozen=True):
    """Drop everything; the log starts at ``offset``."""

    offset: int


class AppendBatches(Struct, frozen=True):
    """Append the batches (there may be none), then follow the leader's HW and log start."""

    records: Buffer
    high_watermark: int
    log_start_offset: int


class ListOffsets(Struct, frozen=True):
    """Ask the leader for the ends of its log, by ListOffsets."""


class FetchAgain(Struct, frozen=True):
    """Fetch again at once."""


class Backoff(Struct, frozen=True):
    """Fetch nothing of this partition before ``until_ms``; ``error`` is Kafka's code for why, and
    ``why`` what is to be logged, if anything.
    """

    until_ms: int
    error: int
    why: str = ""


Effect = TruncateTo | StartAt | AppendBatches | ListOffsets | FetchAgain | Backoff
Effects = tuple[Effect, ...]


class FollowerState(Enum):
    """What the follower is about."""

    IDLE = "idle"
    """There is no leader to follow."""
    FETCHING = "fetching"
    LISTING_OFFSETS = "asking for the leader's offsets"
    FAILED = "failed"
    """Its disk failed; only another leader epoch starts it again."""


@dataclass(slots=True)
class FollowerCore:
    """One partition's follower. Fields are read by the shell and moved only by events.

    ``diverged_at``: (log end, epoch) of the last fetch in this leader epoch that diverged;
    ``repeated_divergences``: how many diverged no further down than the one before.
    """

    log: FollowerLog
    backoff_min_ms: int = 10
    backoff_max_ms: int = 1000
    state: FollowerState = FollowerState.IDLE
    leader_id: int = NO_LEADER
    leader_epoch: int = -1
    retry_at_ms: int = 0
    failures: int = 0
    agreed: bool = False
    leader_high_watermark: int = -1
    diverged_at: tuple[int, int] | None = None
    repeated_divergences: int = 0

    def step(self, event: Event, now_ms: int) -> Effects:
        """Take one event; returns what the shell must do, in order."""
        match event:
            case FetchCompleted():
                return self.fetch_completed(event.request, event.response, now_ms)
            case BecameFollower():
                return self._became_follower(event)
            case OffsetsReceived():
                return self._offsets(event, now_ms)
            case EffectFailed():
                return self._effect_failed(event, now_ms)
            case StoppedFollowing():
                self.state = FollowerState.IDLE
                self.leader_id = NO_LEADER
                self.agreed = False
                return ()

    def tick(self, now_ms: int) -> Effects:  # noqa: ARG002
        """Nothing follows from time alone: :meth:`wants` tells who may be asked for by now."""
        return ()

    def _became_follower(self, event: BecameFollower) -> Effects:
        if event.leader_epoch < self.leader_epoch:
            raise InvariantViolation(f"leader epoch {event.leader_epoch} after {self.leader_epoch}")
        known = (event.leader_id, event.leader_epoch) == (self.leader_id, self.leader_epoch)
        if known and self.state is not FollowerState.IDLE:
            return ()
        self.leader_id, self.leader_epoch = event.leader_id, event.leader_epoch
        self.agreed = False
        self.leader_high_watermark = -1
        self.retry_at_ms = self.failures = self.repeated_divergences = 0
        self.diverged_at = None
        self.state = FollowerState.IDLE if event.leader_id == NO_LEADER else FollowerState.FETCHING
        return ()

    # Requests.

    def wants(self, now_ms: int) -> bool:
        """It has a request to send now: Fetch, or ListOffsets (``state`` tells)."""
        if self.state is FollowerState.FETCHING:
            return now_ms >= self.retry_at_ms and not self.log.awaits_flush
        return self.state is FollowerState.LISTING_OFFSETS and now_ms >= self.retry_at_ms

    @property
    def awaits_flush(self) -> bool:
        """Only a flush of its log keeps it from fetching (rule 33)."""
        return self.state is FollowerState.FETCHING and self.log.awaits_flush

    @property
    def in_sync(self) -> bool:
        """It had everything committed at the last response: replication is not throttled."""
        return 0 <= self.leader_high_watermark <= self.log.log_end_offset

    # Responses.

    def fetch_completed(
        self, request: PartitionRequest, response: PartitionResponse, now_ms: int
    ) -> Effects:
        """As :class:`FetchCompleted`, for the path of every fetch."""
        log = self.log
        log_end_offset = log.log_end_offset
        if (
            self.state is not FollowerState.FETCHING
            or request.leader_epoch != self.leader_epoch
            or request.fetch_offset != log_end_offset
            or request.last_fetched_epoch != log.latest_epoch
        ):
            return ()
        if response.error != NONE:
            if response.error == OFFSET_OUT_OF_RANGE:
                self.state = FollowerState.LISTING_OFFSETS
                self.retry_at_ms = now_ms
                return (ListOffsets(),)
            return self._back_off(response.error, response.current_leader, now_ms)
        self.failures = self.retry_at_ms = 0
        if response.diverging is not None:
            return self._diverged(request, response.diverging, now_ms)
        if len(response.records) >= OFFSET_BYTES and log.log_start_offset < log_end_offset:
            base_offset = int.from_bytes(response.records[:OFFSET_BYTES], "big", signed=True)
            if log.high_watermark <= base_offset < log_end_offset:
                # The leader's batch reaches over our end: our last one is another. Its epochs do
                # not tell where its log start lies inside of that batch.
                self.agreed = False
                return (TruncateTo(base_offset), FetchAgain())
        self.agreed, self.diverged_at = True, AGREED
        self.leader_high_watermark = response.high_watermark
        return (
            AppendBatches(response.records, response.high_watermark, response.log_start_offset),
        )

    def _diverged(
        self, request: PartitionRequest, diverging: tuple[int, int], now_ms: int
    ) -> Effects:
        """Cut our log, and fetch again."""
        at, before = (request.fetch_offset, request.last_fetched_epoch), self.diverged_at
        self.agreed, self.diverged_at = False, at
        cut = TruncateTo(self._common_end(*diverging))
        if before is None or (at != before and at[0] <= before[0] and at[1] <= before[1]):
            return (cut, FetchAgain())
        self.repeated_divergences += 1
        why = (
            f"parts from its leader at {cut.offset} once more in leader epoch {self.leader_epoch} "
            f"(there epoch {diverging[0]} ends at {diverging[1]}): is a leader-epoch-checkpoint "
            "damaged?"
        )
        wait_ms = self._doubled_ms(self.repeated_divergences)
        return (cut, *self._wait(wait_ms, CORRUPT_MESSAGE, now_ms, why))

    def _common_end(self, epoch: int, end_offset: int) -> int:
        """Up to where both logs are the same at most; further rounds may find less (KIP-279)."""
        log_end_offset = self.log.log_end_offset
        own = self.log.own_end_offset(epoch)
        if own is None:
            return min(end_offset, log_end_offset)
        own_epoch, own_end = own
        if own_epoch != epoch:
            return min(own_end, log_end_offset)
        return min(end_offset, own_end, log_end_offset)

    def _offsets(self, event: OffsetsReceived, now_ms: int) -> Effects:
        answer = event.response
        if (
            self.state is not FollowerState.LISTING_OFFSETS
            or event.leader_epoch != self.leader_epoch
        ):
            return ()
        if answer.error != NONE:
            return self._back_off(answer.error, answer.current_leader, now_ms)
        self.state = FollowerState.FETCHING
        self.agreed, self.diverged_at = False, None
        self.retry_at_ms = 0
        log_end_offset = self.log.log_end_offset
        if answer.log_end_offset < log_end_offset:
            return (TruncateTo(answer.log_end_offset), FetchAgain())
        if answer.log_start_offset > log_end_offset:
            return (StartAt(answer.log_start_offset), FetchAgain())
        # The leader has moved on meanwhile. A second time in a row waits.
        self.failures += 1
        if self.failures == 1:
            return (FetchAgain(),)
        return self._wait(self._growing_ms(), OFFSET_OUT_OF_RANGE, now_ms)

    # Errors.

    def _back_off(self, error: int, hint: tuple[int, int] | None, now_ms: int) -> Effects:
        self.failures += 1
        newer = hint is not None and hint[1] > self.leader_epoch
        if error == FENCED_LEADER_EPOCH or newer:
            return self._wait(self.backoff_max_ms, error, now_ms)
        return self._wait(self._growing_ms(), error, now_ms)

    def _growing_ms(self) -> int:
        return self._doubled_ms(self.failures)

    def _doubled_ms(self, times: int) -> int:
        return min(self.backoff_max_ms, self.backoff_min_ms << min(times - 1, 20))

    def _wait(self, wait_ms: int, error: int, now_ms: int, why: str = "") -> Effects:
        self.retry_at_ms = now_ms + wait_ms
        return (Backoff(self.retry_at_ms, error, why),)

    def _effect_failed(self, event: EffectFailed, now_ms: int) -> Effects:
        if self.state is FollowerState.IDLE:
            return ()
        self.agreed = False
        if isinstance(event.error, ReplicaNotAvailable | ResourceExhausted):
            # The log is as it was: that the next answer diverges at the same place is no damage.
            self.diverged_at = None
        if isinstance(event.error, ReplicaNotAvailable):
            return self._wait(CUT_RETRY_MS, REPLICA_NOT_AVAILABLE, now_ms)
        self.failures += 1
        if isinstance(event.error, ResourceExhausted):
            return self._wait(self.backoff_max_ms, KAFKA_STORAGE_ERROR, now_ms, str(event.error))
        if isinstance(event.error, KafkaStorageError | MachineError):
            self.state = FollowerState.FAILED
            return ()
        return self._wait(self._growing_ms(), CORRUPT_MESSAGE, now_ms)

    def check_invariants(self) -> None:
        """Raises InvariantViolation for a state that must not exist."""
        log = self.log
        wrong = {
            "HW above LEO": log.high_watermark > log.log_end_offset,
            "start above LEO": log.log_start_offset > log.log_end_offset,
            "follows nobody": self.state is not FollowerState.IDLE and self.leader_id == NO_LEADER,
            "agreed with nobody": self.agreed and self.leader_epoch < 0,
        }
        broken = [name for name, is_so in wrong.items() if is_so]
        if broken:
            raise InvariantViolation(f"{'; '.join(broken)}: {self}")
