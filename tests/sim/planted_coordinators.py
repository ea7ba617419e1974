"""Planted bugs around the cores of transactions, in what the shells of a node have them do: what is
taken for durable too soon, what a new coordinator reads and sends again, and whom a
leader waits for (stage ``transactions``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.transactions.events import WriteMarkers
from kept.node.coordinator.transactions.records import TransactionState
from kept.node.runtime.completable_future import CompletableFuture
from tests.sim.planted import plant
from tests.sim.planted_groups import OFTEN, SHARD, loads_at_once
from tests.sim.planted_replicas import RESTS_S
from tests.sim.planted_transactions import COORDINATOR, STAGE

CORE: Final = f"{COORDINATOR}.core.TransactionCore"
SOON_MS: Final = 100
"""So soon an append is late, as it is behind a follower that the ISR has not lost yet."""


def committed_when_written(_: Any) -> Any:
    """What a coordinator has written counts as committed, whatever its followers have."""

    def _wait_for_commit(self: Any, append: int, end_offset: int) -> None:
        self._append_committed(append)

    return _wait_for_commit


def nothing_sent_again(original: Any) -> Any:
    """A new coordinator knows what its predecessor decided, and sends no markers for it."""

    def loaded(self: Any, now_ms: int) -> Iterator[None]:
        effects = yield from original(self, now_ms)
        return tuple(effect for effect in effects if not isinstance(effect, WriteMarkers))

    return loaded


def late_is_forgotten(original: Any) -> Any:
    """What is not committed in time counts as refused, though it is in the log."""

    def _append_timed_out(self: Any, event: Any) -> None:
        original(self, event)
        pending = self.pending.get(event.append)
        if pending is None or pending.completes:
            return
        del self.pending[event.append]
        for name in pending.transitions:
            held = self.ids[name]
            self._end_pending(name, held, event.append)
            self._count(name, held, self._newest(name, held))
            if held.committed is None:
                del self.ids[name]
            self._unpark(held)

    return _append_timed_out


def only_what_is_known(original: Any) -> Any:
    def _append_committed(self: Any, event: Any) -> None:
        if event.append in self.pending:
            original(self, event)

    return _append_committed


def unanswered_is_written(_: Any) -> Any:
    """Markers count as written whose request got no answer."""

    def _failed(self: Any, node: int) -> None:
        for job, partitions in self._in_flight.pop(node, {}).items():
            self._written(job, set(partitions))

    return _failed


def not_waited_for(original: Any) -> Any:
    """A leader asks the coordinator, and takes the batch before there is an answer."""

    def verify(self: Any, name: str, *producer: Any, adds: bool) -> CompletableFuture[Any]:
        original(self, name, *producer, adds=adds)
        return CompletableFuture.completed(dict.fromkeys(producer[-1], ErrorCode.none))

    return verify


def ended_by_the_one_before(original: Any) -> Any:
    """The end of a transaction that comes again ends the next one (version 2)."""

    def decide_end(event: Any, present: Any, **how: Any) -> Any:
        is_open = present is not None and present.state is TransactionState.ONGOING
        if is_open and event.client_version and event.epoch == present.epoch - 1:
            event = replace(event, epoch=present.epoch)
        return original(event, present, **how)

    return decide_end


def pending_lost(original: Any) -> Any:
    """A new coordinator of a group reads no offsets of transactions that are open."""

    def replay(self: Any, record: Any, record_offset: int, producer_id: int = -1) -> None:
        if producer_id == -1:
            original(self, record, record_offset)

    return replay


plant(
    "transactions-committed-when-written",
    STAGE,
    2,
    "commit-lost aborted-read torn producer-id state offset-torn offset-lost offset-back moved",
    "what a coordinator decides is said, and sent, when it is replicated (49)",
    (f"{SHARD}._wait_for_commit", committed_when_written),
    strikes=OFTEN,
)
plant(
    "transactions-loads-at-once",
    STAGE,
    1,
    "commit-lost aborted-read torn producer-id state",
    "a new coordinator waits until the high watermark reaches the end of its log (49)",
    (f"{SHARD}._await_committed", loads_at_once),
    strikes=OFTEN,
)
plant(
    "transactions-markers-not-sent-again",
    STAGE,
    1,
    "hanging state liveness",
    "a new coordinator sends all markers of what was decided (49)",
    (f"{CORE}.loaded", nothing_sent_again),
    strikes=OFTEN,
    heal_s=RESTS_S,
)
plant(
    "transactions-late-is-forgotten",
    STAGE,
    2,
    "state commit-lost aborted-read torn",
    "an append that is late is pending until its end is known (49)",
    (f"{CORE}._append_timed_out", late_is_forgotten),
    (f"{CORE}._append_committed", only_what_is_known),
    (
        f"{COORDINATOR}.coordinator.TransactionCoordinator.commit_timeout_ms",
        lambda _: staticmethod(lambda: SOON_MS),
    ),
    fences=True,
)
plant(
    "transactions-unanswered-is-written",
    STAGE,
    1,
    "hanging aborted-read commit-lost torn",
    "a marker is sent again until there is an answer (49)",
    (f"{COORDINATOR}.markers.MarkerSender._failed", unanswered_is_written),
)
plant(
    "transactions-not-waited-for",
    STAGE,
    1,
    "markers aborted-read commit-lost torn hanging fenced",
    "the first batch of a transaction waits for the coordinator's answer (46)",
    (f"{COORDINATOR}.verifier.Verifier.verify", not_waited_for),
    levels=(2,),
)
plant(
    "transactions-ended-by-the-one-before",
    STAGE,
    2,
    "aborted-read commit-lost torn",
    "an EndTxn that comes late ends no later transaction (KIP-890)",
    (f"{COORDINATOR}.requests.decide_end", ended_by_the_one_before),
    holds=0.5,
    levels=(2,),
)
plant(
    "transactions-pending-offsets-lost",
    STAGE,
    1,
    "offset-torn",
    "a new coordinator of a group has the offsets of open transactions (45)",
    ("kept.node.coordinator.groups.core.GroupCore.replay", pending_lost),
    strikes=OFTEN,
)
