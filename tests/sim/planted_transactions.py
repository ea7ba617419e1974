"""Planted bugs of transactions: of their coordinator, their markers and what readers get (stage
``transactions``). Many more are planted over the cores alone:
``tests/node/coordinator/transactions/test_planted_bugs.py`` and
``tests/replication/test_transactions_world.py``.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.transactions.events import EndTransaction
from kept.node.coordinator.transactions.records import TransactionState
from kept.storage.types import TopicPartition
from tests.sim.planted import plant
from tests.sim.planted_replicas import returns

STAGE = "transactions"
COORDINATOR = "kept.node.coordinator.transactions"


def contrary(original: Any) -> Any:
    """A partition gets the marker of an abort for a commit."""

    def append_marker(self: Any, marker: Any, *args: Any, **kwargs: Any) -> Any:
        if self.topic_partition == TopicPartition("t", 1):
            marker = marker._replace(is_commit=False)
        return original(self, marker, *args, **kwargs)

    return append_marker


def same_epoch(original: Any) -> Any:
    """A new instance gets the epoch of the one before."""

    def prepare_epoch(before: Any, epoch: int, *args: Any) -> Any:
        return original(before, before.epoch, *args)

    return prepare_epoch


def ended_at_once(original: Any) -> Any:
    """The end of a transaction is answered while its record is on its way."""

    def append(self: Any, changes: Any, request: Any = None, result: Any = None) -> None:
        if isinstance(request, EndTransaction):
            self._respond(request.request, result)
            request = None
        original(self, changes, request, result)

    return append


def epoch_counted_down(original: Any) -> Any:
    """Who coordinates later writes its markers with a lower epoch."""

    def append_marker(self: Any, marker: Any, *args: Any, **kwargs: Any) -> Any:
        marker = marker._replace(coordinator_epoch=1000 - marker.coordinator_epoch)
        return original(self, marker, *args, **kwargs)

    return append_marker


def also_without_leader(original: Any) -> Any:
    """A partition of which another node says that it does not lead it counts as written."""
    return original | {ErrorCode.not_leader_or_follower}


def completed_contrary(original: Any) -> Any:
    """What was to be committed is recorded as aborted."""

    def prepare_complete(before: Any, now_ms: int) -> Any:
        state = TransactionState.PREPARE_ABORT
        return original(replace(before, state=state), now_ms)

    return prepare_complete


plant(
    "transactions-lso-is-hw", STAGE, 1, "aborted-read",
    "who reads what is committed reads below the first open transaction",
    ("kept.storage.producers.producer_states.ProducerStates.first_undecided_offset", returns(None)),
)  # fmt: skip
plant(
    "transactions-aborts-unlisted", STAGE, 1, "aborted-read",
    "a fetch lists the aborted transactions among its records",
    ("kept.storage.log.log.Log.aborted_in_slice", returns([])),
)  # fmt: skip
plant(
    "transactions-stale-connection", STAGE, 1, "aborted-read torn commit-lost",
    "what comes over a connection that its producer gave up is not served",
    (f"{COORDINATOR}.connections.ConnectionOrder.is_stale", returns(False)),
    holds=0.5,
)  # fmt: skip
plant(
    "transactions-offsets-unheld", STAGE, 1, "offset-torn",
    "a stable offset waits for the transaction that commits another one",
    ("kept.node.coordinator.groups.offsets.OpenTransactions.holds", returns(False)),
)  # fmt: skip
plant(
    "transactions-same-epoch", STAGE, 1, "producer-id",
    "a new instance has a new epoch",
    (f"{COORDINATOR}.transaction.prepare_epoch", same_epoch),
)  # fmt: skip
plant(
    "transactions-contrary", STAGE, 1, "commit-lost torn",
    "all markers of a transaction say the same",
    ("kept.replication.partition.Partition.append_marker", contrary),
)  # fmt: skip
plant(
    "transactions-ended-at-once", STAGE, 2, "commit-lost aborted-read torn",
    "the end of a transaction is answered when its record is committed",
    (f"{COORDINATOR}.core.TransactionCore._append", ended_at_once),
    strikes=0.3,
)  # fmt: skip
plant(
    "transactions-coordinators-unordered", STAGE, 1, "markers",
    "a marker of a coordinator is refused behind one of its successor",
    ("kept.replication.partition.Partition.append_marker", epoch_counted_down),
    ("kept.storage.producers.producer_states.ProducerStates.coordinator_epoch", returns(-1)),
    strikes=0.3,
)  # fmt: skip
plant(
    "transactions-marker-not-written", STAGE, 5, "aborted-read hanging commit-lost torn",
    "a transaction has ended when each of its partitions has the marker",
    (f"{COORDINATOR}.markers._WRITTEN", also_without_leader),
    strikes=0.3,
)  # fmt: skip
plant(
    "transactions-completed-contrary", STAGE, 1, "state",
    "what was decided is how a transaction ends",
    (f"{COORDINATOR}.transaction.prepare_complete", completed_contrary),
    (f"{COORDINATOR}.transaction.check_transition", returns(None)),
)  # fmt: skip
plant(
    "transactions-never-time-out", STAGE, 1, "hanging",
    "a transaction that nobody ends is aborted in time",
    (f"{COORDINATOR}.core.TransactionCore._abort_timed_out", returns(None)),
)  # fmt: skip
