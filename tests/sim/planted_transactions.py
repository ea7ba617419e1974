"""Planted bugs of transactions: of their coordinator, their markers and what readers get (stage
``transactions``). Many more are planted over the cores alone:
``tests/node/coordinator/transactions/test_planted_bugs.py`` and
``tests/replication/test_transactions_world.py``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.transactions.events import EndTransaction
from kept.node.coordinator.transactions.records import TransactionState
from kept.storage.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    TransactionCoordinatorFenced,
)
from kept.storage.types import TopicPartition
from tests.sim.planted import plant
from tests.sim.planted_replicas import RESTS_S, nothing_synced, returns

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

    def append(
        self: Any, changes: Any, request: Any = None, result: Any = None, **more: Any
    ) -> None:
        if isinstance(request, EndTransaction):
            self._respond(request.request, result)
            request = None
        original(self, changes, request, result, **more)

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


def always_committed(original: Any) -> Any:
    """The offsets of a transaction that is aborted count, too."""

    def append_staged(self: Any, event: Any) -> None:
        pending = self.pending[event.append]
        if pending.marker is not None:
            pending.marker = replace(pending.marker, is_commit=True)
        original(self, event)

    return append_staged


def any_generation(original: Any) -> Any:
    """A commit in a transaction is taken from whoever was a member once."""

    def validate_commit(self: Any, group: Any, event: Any) -> None:
        if event.producer is None:
            original(self, group, event)

    return validate_commit


def any_epoch(original: Any) -> Any:
    """A fenced instance goes on writing."""

    def check_transactional(self: Any, producer_id: int, *args: Any) -> Any:
        try:
            return original(self, producer_id, *args)
        except (InvalidProducerEpoch, InvalidTxnState):
            return None

    return check_transactional


def nothing_verified(original: Any) -> Any:
    """No leader asks whether a transaction is open."""

    def verification_guard(self: Any, producer_id: int, epoch: int, *args: Any, **kw: Any) -> Any:
        with suppress(InvalidProducerEpoch):
            original(self, producer_id, epoch, *args, **kw)

    return verification_guard


def forgets_coordinators(original: Any) -> Any:
    """A replica that starts does not know which coordinator wrote a producer's last marker."""

    def restore(self: Any, producers: Any) -> None:
        states = list(producers)
        for _, state in states:
            state.coordinator_epoch = -1
        original(self, states)

    return restore


def said_to_be_written(_: Any) -> Any:
    """An operator's marker is not written."""

    def write_txn_markers(self: Any, ctx: Any, request: Any) -> Any:
        yield from ()
        return {
            "markers": [
                {
                    "producer_id": marker.producer_id,
                    "topics": [
                        {
                            "name": topic.name,
                            "partitions": [
                                {"partition_index": index, "error_code": ErrorCode.none}
                                for index in topic.partition_indexes
                            ],
                        }
                        for topic in marker.topics
                    ],
                }
                for marker in request.markers
            ]
        }

    return write_txn_markers


plant(
    "transactions-lso-is-hw",
    STAGE,
    1,
    "aborted-read",
    "who reads what is committed reads below the first open transaction",
    ("kept.storage.producers.producer_states.ProducerStates.first_undecided_offset", returns(None)),
)
plant(
    "transactions-aborts-unlisted",
    STAGE,
    1,
    "aborted-read",
    "a fetch lists the aborted transactions among its records",
    ("kept.storage.log.log.Log.aborted_in_slice", returns([])),
)
plant(
    "transactions-stale-connection",
    STAGE,
    1,
    "aborted-read torn commit-lost",
    "what comes over a connection that its producer gave up is not served",
    (f"{COORDINATOR}.connection_order.ConnectionOrder.is_stale", returns(False)),
    holds=0.5,
)
plant(
    "transactions-offsets-unheld",
    STAGE,
    1,
    "offset-torn",
    "a stable offset waits for the transaction that commits another one",
    ("kept.node.coordinator.groups.offsets.OpenTransactions.holds", returns(False)),
)
plant(
    "transactions-same-epoch",
    STAGE,
    1,
    "producer-id",
    "a new instance has a new epoch",
    (f"{COORDINATOR}.transaction.prepare_epoch", same_epoch),
)
plant(
    "transactions-contrary",
    STAGE,
    1,
    "commit-lost torn",
    "all markers of a transaction say the same",
    ("kept.replication.partition.Partition.append_marker", contrary),
)
plant(
    "transactions-ended-at-once",
    STAGE,
    5,
    "commit-lost aborted-read torn",
    "the end of a transaction is answered when its record is committed",
    (f"{COORDINATOR}.core.TransactionCore._append", ended_at_once),
    strikes=0.3,
)
plant(
    "transactions-coordinators-unordered",
    STAGE,
    1,
    "markers",
    "a marker of a coordinator is refused behind one of its successor",
    ("kept.replication.partition.Partition.append_marker", epoch_counted_down),
    ("kept.storage.producers.producer_states.ProducerStates.coordinator_epoch", returns(-1)),
    strikes=0.3,
)
plant(
    "transactions-marker-not-written",
    STAGE,
    7,
    "aborted-read hanging commit-lost torn",
    "a transaction has ended when each of its partitions has the marker",
    (f"{COORDINATOR}.markers._WRITTEN", also_without_leader),
    strikes=0.3,
)
plant(
    "transactions-completed-contrary",
    STAGE,
    1,
    "state",
    "what was decided is how a transaction ends",
    (f"{COORDINATOR}.transaction.prepare_complete", completed_contrary),
    (f"{COORDINATOR}.transaction.check_transition", returns(None)),
)
plant(
    "transactions-never-time-out",
    STAGE,
    1,
    "hanging",
    "a transaction that nobody ends is aborted in time",
    (f"{COORDINATOR}.core.TransactionCore._abort_timed_out", returns(None)),
)
plant(
    "transactions-fenced-write",
    STAGE,
    2,
    "fenced markers aborted-read",
    "an instance that is fenced writes nothing any more (I6)",
    ("kept.storage.producers.producer_states.ProducerStates.check_transactional", any_epoch),
    ("kept.replication.partition.Partition.verification_guard", nothing_verified),
    fences=True,
)
plant(
    "transactions-producers-forgotten",
    STAGE,
    6,
    "producer-state markers",
    "what a replica knows of producers after a start follows from its log (I11)",
    ("kept.storage.producers.producer_states.ProducerStates.restore", forgets_coordinators),
)
plant(
    "transactions-hanging-stay",
    STAGE,
    1,
    "hanging",
    "a transaction that hangs is ended by its operator (T55)",
    (
        "kept.node.kafka.handlers.transactions.write_txn_markers."
        "WriteTxnMarkersHandler.write_txn_markers",
        said_to_be_written,
    ),
    hangs=True,
)
plant(
    "transactions-unsynced",
    STAGE,
    5,
    "commit-lost torn acknowledged-lost acknowledged "
    "aborted-read offset-torn producer-id state isr-holds prefix",
    "with flush.messages=1 a transaction that ended survives a power loss of all (33)",
    ("kept.storage.log.durability.FlushTicket.run", nothing_synced),
    durable=True,
)
plant(
    "transactions-aborted-offsets",
    STAGE,
    1,
    "moved offset-torn",
    "offsets move with the records that were made of what is below them (I10)",
    ("kept.node.coordinator.groups.core.GroupCore._append_staged", always_committed),
    moves=True,
)
plant(
    "transactions-old-generation-moves",
    STAGE,
    6,
    "moved",
    "who is no member of a generation moves nothing (KIP-447, I10)",
    (
        "kept.node.coordinator.groups.offset_requests.OffsetRequests._validate_commit",
        any_generation,
    ),
    moves=True,
    naps=0.08,
    suffer_s=20.0,
)


def as_if_stable(original: Any) -> Any:
    """A pass maps what open transactions write, too."""

    def view(log: Any, state: Any, last_stable_offset: int, *args: Any) -> Any:
        return original(log, state, max(last_stable_offset, log.log_end_offset), *args)

    return view


def coordinator_forgotten(original: Any) -> Any:
    """Who leads offsets does not note which coordinator wrote a marker there."""

    def append_marker(self: Any, marker: Any, producer_id: int, *args: Any, **kw: Any) -> Any:
        info = original(self, marker, producer_id, *args, **kw)
        if self.topic_partition.topic == "__consumer_offsets":
            self.log.producers.get(producer_id).coordinator_epoch = -1
        return info

    return append_marker


def deleted_is_waited_for(original: Any) -> Any:
    """A marker waits for a partition that was deleted, and never looks for it again."""

    def _route(self: Any, job: Any, partitions: Any) -> None:
        image = self._image
        there = [tp for tp in partitions if image is None or image.partition(*tp) is not None]
        original(self, job, there)

    return _route


def open_ones_expire(original: Any) -> Any:
    """A producer is forgotten though it has a transaction open."""

    def expire(self: Any, now_ms: int) -> int:
        for producer_id, state in self.items():
            if state.last_timestamp <= now_ms - self.expiration_ms:
                state.txn_first_offset = None
                self._open.pop(producer_id, None)
                self._closed[producer_id] = None
        return int(original(self, now_ms))

    return expire


plant(
    "transactions-aborted-supersede",
    STAGE,
    1,
    "compacted-view aborted-read",
    "a record of an aborted transaction replaces nothing (I13)",
    ("kept.compaction.cleaner.scan_stats.AbortedIndex.has", returns(False)),
    ("kept.compaction.cleaner.self_check.check", returns(0)),
    compacts=True,
)
plant(
    "transactions-open-supersede",
    STAGE,
    1,
    "compacted-view",
    "a pass ends at the last stable offset (I13)",
    ("kept.node.compaction.cleaner.view", as_if_stable),
    compacts=True,
)
plant(
    "transactions-offsets-coordinator",
    STAGE,
    1,
    "producer-state",
    "what a leader of offsets knows of producers follows from its log (I11)",
    ("kept.replication.partition.Partition.append_marker", coordinator_forgotten),
)
plant(
    "transactions-deleted-waited-for",
    STAGE,
    1,
    "liveness state hanging",
    "a partition that is deleted needs no marker any more (T28)",
    (f"{COORDINATOR}.markers.MarkerSender._route", deleted_is_waited_for),
    recreates=True,
    compacts=False,
    trial="",
    heal_s=RESTS_S,
)
plant(
    "transactions-open-expires",
    STAGE,
    3,
    "aborted-read",
    "no producer is forgotten that has a transaction open (T45)",
    ("kept.storage.producers.producer_states.ProducerStates.expire", open_ones_expire),
    expires=True,
    hangs=True,
)


def whatever_connection(_: Any) -> Any:
    """Markers are served over a connection that their coordinator gave up, too."""

    def admit(self: Any, client_id: Any, connection: Any) -> bool:
        return True

    return admit


plant(
    "transactions-late-marker",
    STAGE,
    4,
    "markers aborted-read torn commit-lost",
    "a marker over a connection that its coordinator gave up is not written (T25)",
    ("kept.node.kafka.marker_connections.MarkerConnections.admit", whatever_connection),
    late_markers=True,
    levels=(1,),
    lingers_s=0.3,
    compacts=False,
    hangs=False,
    moves=False,
)


def from_memory(_: Any) -> Any:
    """A coordinator says what it remembers, whoever leads."""

    def _prove(self: Any, shard: Any, effect: Any) -> None:
        shard.respond(effect.request, effect.result)

    return _prove


plant(
    "transactions-connection-of-before",
    STAGE,
    1,
    "aborted-read torn commit-lost state",
    "a coordinator that leads again serves no connection of before",
    (f"{COORDINATOR}.connection_order.ConnectionOrder.lead_again", returns(None)),
    returns=True,
    levels=(1,),
    holds=0.3,
    lingers_s=0.3,
    steady=True,
    faults=("cut",),
    compacts=False,
    hangs=False,
    moves=False,
)
plant(
    "transactions-marker-of-before",
    STAGE,
    1,
    "markers aborted-read torn commit-lost",
    "a leader that leads again writes no marker over a connection of before",
    (f"{COORDINATOR}.marker_writer.MarkerWriter.is_stale", returns(False)),
    returns=True,
    late_markers=True,
    levels=(1,),
    holds=0.0,
    lingers_s=0.3,
    steady=True,
    faults=("cut",),
    compacts=False,
    hangs=False,
    moves=False,
)
plant(
    "transactions-from-memory",
    STAGE,
    1,
    "commit-lost torn aborted-read state",
    "who was replaced says of no transaction that it has ended",
    (f"{COORDINATOR}.coordinator.TransactionCoordinator._prove", from_memory),
    replaces=True,
    holds=0.0,
    returns=False,
    faults=("clock",),
    steady=True,
    strikes=0.0,
    compacts=False,
    hangs=False,
    moves=False,
    late_markers=False,
)


def believed(original: Any) -> Any:
    """A leader takes the word of a coordinator though it knows its successor."""

    def note_coordinator_epoch(self: Any, producer_id: int, epoch: int) -> None:
        with suppress(TransactionCoordinatorFenced):
            original(self, producer_id, epoch)

    return note_coordinator_epoch


plant(
    "transactions-replaced-believed",
    STAGE,
    1,
    "markers aborted-read hanging",
    "who was replaced confirms no transaction that its successor has ended",
    ("kept.replication.partition.Partition.note_coordinator_epoch", believed),
    replaces=True,
    holds=0.0,
    returns=False,
    faults=("clock",),
    steady=True,
    strikes=0.0,
    compacts=False,
    hangs=False,
    moves=False,
    late_markers=False,
)
