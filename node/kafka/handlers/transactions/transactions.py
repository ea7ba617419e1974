"""AddPartitionsToTxn, AddOffsetsToTxn, EndTxn, DescribeTransactions, ListTransactions: taking
requests apart and answering. ``kept.node.coordinator.transactions`` decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.client.protocol.messages import LazyArray
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.coordinator.common.shard import coordinator_error
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions.id_pattern import compile_pattern
from kept.node.coordinator.transactions.records import TransactionState, partitions_by_topic
from kept.node.coordinator.transactions.transaction import TV2
from kept.node.kafka.handlers.transactions.transactional_requests import result_of
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.runtime.completable_future import CompletableFuture, all_of
from kept.node.security.access import CLUSTER
from kept.steps import Steps
from kept.storage.errors import CoordinatorNotAvailable, InvalidRequest, KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.topic_creation import TopicCreation
    from kept.node.metadata.metadata_log import MetadataLog

BATCHED_FROM: Final = 4
"""AddPartitionsToTxn is a broker's from this version on, with several ids."""
EPOCH_GROWS_FROM: Final = 5
"""EndTxn ends a transaction of a producer whose epoch grows with each (KIP-890)."""

HandlerResult = dict[str, Any]
Later = HandlerResult | CompletableFuture[Steps[HandlerResult]]
Errors = Mapping[TopicPartition, ErrorCode]

_UNDESCRIBED: Final[HandlerResult] = {
    "transaction_state": "",
    "transaction_timeout": 0,
    "transaction_start_time": 0,
    "producer_id": 0,
    "producer_epoch": 0,
    "topics": (),
}
"""What Kafka says besides an error."""

_STATES: Final = {state.kafka_name: state for state in TransactionState}


class _Named(Struct, frozen=True):
    """The partitions that a request names; where some do not exist, the ``errors`` of all."""

    partitions: tuple[TopicPartition, ...]
    errors: Errors = {}


@dataclass(frozen=True, slots=True)
class TransactionsHandler:
    """Transactional ids and their transactions."""

    metadata: MetadataLog
    groups: GroupCoordinator
    transactions: TransactionCoordinator
    topics: TopicCreation

    def add_partitions_to_txn(self, ctx: RequestContext, request: Any) -> Steps[Later]:
        """Partitions join a transaction: of one producer (up to v3), or as brokers ask for several,
        who may also want to know only whether they are in it.
        """
        if ctx.api_version < BATCHED_FROM:
            errors = yield from self._of_client(ctx, request)
            return errors.map(_answer_client)
        if not ctx.may(AclOperation.CLUSTER_ACTION, *CLUSTER):
            code = ErrorCode.cluster_authorization_failed
            return {"error_code": code, "results_by_transaction": ()}
        names, said = [], []
        for asked in request.transactions:
            names.append(asked.transactional_id)
            said.append((yield from self._of_broker(ctx, asked)))
            yield
        return all_of(said).map(partial(_answer_broker, names))

    def _of_client(self, ctx: RequestContext, request: Any) -> Steps[CompletableFuture[Errors]]:
        name, topics = request.v3_and_below_transactional_id, request.v3_and_below_topics
        if not ctx.may(AclOperation.WRITE, AclResourceType.TRANSACTIONAL_ID, name):
            named = yield from self._named(topics)
            code = ErrorCode.transactional_id_authorization_failed
            return CompletableFuture.completed(dict.fromkeys(named.partitions, code))
        named = yield from self._named(
            topics, lambda name: ctx.may(AclOperation.WRITE, AclResourceType.TOPIC, name)
        )
        return self._add(
            ctx,
            name,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            named,
            ev.ClientConnection(ctx.connection or 0, ctx.api_key),
        )

    def _of_broker(self, ctx: RequestContext, asked: Any) -> Steps[CompletableFuture[Errors]]:
        named = yield from self._named(asked.topics)
        if asked.verify_only:
            return self._verify(ctx, asked, named)
        return self._add(
            ctx, asked.transactional_id, asked.producer_id, asked.producer_epoch, named, None
        )

    def _verify(self, ctx: RequestContext, asked: Any, named: _Named) -> CompletableFuture[Errors]:
        if named.errors:
            return CompletableFuture.completed(named.errors)
        verified: CompletableFuture[ev.VerifyPartitionsResult] = result_of(
            ctx,
            lambda: self.transactions.verify(
                asked.transactional_id,
                asked.producer_id,
                asked.producer_epoch,
                frozenset(named.partitions),
            ),
            ev.VerifyPartitionsResult,
        )
        return verified.map(lambda result: result.errors(named.partitions))

    def _named(
        self, topics: Iterable[Any], may_write: Callable[[str], bool] = lambda _: True
    ) -> Steps[_Named]:
        """What a request names, one partition a step, and whether whoever makes it may write it."""
        image = self.metadata.image
        refused: dict[TopicPartition, ErrorCode | None] = {}
        for topic in topics:
            writable = may_write(topic.name)
            for number in topic.partitions:
                error = None
                if not writable:
                    error = ErrorCode.topic_authorization_failed
                elif image.partition(topic.name, number) is None:
                    error = ErrorCode.unknown_topic_or_partition
                refused[TopicPartition(topic.name, number)] = error
                yield
        if not any(refused.values()):
            return _Named(tuple(refused))
        untried = ErrorCode.operation_not_attempted
        return _Named(tuple(refused), {tp: error or untried for tp, error in refused.items()})

    def _add(  # noqa: PLR0917
        self,
        ctx: RequestContext,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        named: _Named,
        connection: ev.ClientConnection | None,
    ) -> CompletableFuture[Errors]:
        """All of the partitions, or none. ``connection`` of a client, None of a broker."""
        if named.errors:
            return CompletableFuture.completed(named.errors)
        version = 0 if connection is not None else TV2
        partitions = frozenset(named.partitions)
        added: CompletableFuture[ev.AddPartitionsResult] = result_of(
            ctx,
            lambda: self.transactions.add(
                transactional_id, producer_id, epoch, partitions, version, connection
            ),
            ev.AddPartitionsResult,
        )
        return added.map(lambda result: dict.fromkeys(named.partitions, result.error))

    async def add_offsets_to_txn(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """The offsets of a group join a transaction: the partition that keeps them does."""
        try:
            partition = await self._offsets_partition(request.group_id)
        except KeptError as error:
            return {"error_code": coordinator_error(error)}
        errors = await self._add(
            ctx,
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            _Named((partition,)),
            ev.ClientConnection(ctx.connection or 0, ctx.api_key),
        )
        return {"error_code": errors[partition]}

    async def _offsets_partition(self, group: str) -> TopicPartition:
        if CONSUMER_OFFSETS not in self.metadata.image.topics:
            await self.topics.create_internal(CONSUMER_OFFSETS)
        number = self.groups.shards.partition_of(group)
        if number is None:
            raise CoordinatorNotAvailable(f"{CONSUMER_OFFSETS} does not exist yet")
        return TopicPartition(CONSUMER_OFFSETS, number)

    def end_txn(self, ctx: RequestContext, request: Any) -> CompletableFuture[HandlerResult]:
        """Commit or abort; answered when the decision is committed."""
        name, grows = request.transactional_id, ctx.api_version >= EPOCH_GROWS_FROM
        connection = None if grows else ev.ClientConnection(ctx.connection or 0, ctx.api_key)
        ended: CompletableFuture[ev.EndTransactionResult] = result_of(
            ctx,
            lambda: self.transactions.shards.submit_completable(
                name,
                lambda number: ev.EndTransaction(
                    number,
                    name,
                    request.producer_id,
                    request.producer_epoch,
                    request.committed,
                    TV2 if grows else 0,
                    connection,
                ),
            ),
            ev.EndTransactionResult,
        )
        return ended.map(_answer_end)

    def describe_transactions(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """Transactional ids in full, but for the topics that may not be described."""

        def described(transactional_id: str) -> HandlerResult:
            return self._described(ctx, transactional_id)

        ids = tuple(dict.fromkeys(request.transactional_ids))
        return {"transaction_states": LazyArray(ids, described)}

    def _described(self, ctx: RequestContext, transactional_id: str) -> HandlerResult:
        found, error = None, ErrorCode.transactional_id_not_found
        try:
            if not transactional_id:
                raise InvalidRequest("an empty transactional id")
            found = self.transactions.describe(transactional_id)
        except KeptError as refusal:
            error = coordinator_error(refusal)
        if found is None:
            return _UNDESCRIBED | {"error_code": error, "transactional_id": transactional_id}
        return {
            "error_code": ErrorCode.none,
            "transactional_id": transactional_id,
            "transaction_state": found.state.kafka_name,
            "transaction_timeout": found.timeout_ms,
            "transaction_start_time": found.start_ms,
            "producer_id": found.producer_id,
            "producer_epoch": found.epoch,
            "topics": [
                {"topic": topic, "partitions": numbers}
                for topic, numbers in partitions_by_topic(found.partitions)
                if ctx.may(AclOperation.DESCRIBE, AclResourceType.TOPIC, topic, audited=False)
            ],
        }

    def list_transactions(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Transactional ids that this node coordinates, those that the filters let through and that
        may be described.
        """
        unknown: list[str] = []
        states: set[TransactionState] = set()
        for state in request.state_filters:  # each may be of 32 KiB, 16 MiB in all
            yield
            if state in _STATES:
                states.add(_STATES[state])
            else:
                unknown.append(state)
        try:
            wanted = ev.TransactionFilter(
                states,
                frozenset(request.producer_id_filters),
                getattr(request, "duration_filter", -1),
                compile_pattern(getattr(request, "transactional_id_pattern", None)),
            )
            listed = []
            if states or not unknown:
                listed = yield from self.transactions.list_transactions(wanted)
        except re.error:
            return _listed(ErrorCode.invalid_regular_expression)
        except KeptError as refusal:
            return _listed(coordinator_error(refusal))
        ids = (entry.transactional_id for entry in listed)
        visible = yield from ctx.permitted(
            AclOperation.DESCRIBE, AclResourceType.TRANSACTIONAL_ID, ids
        )
        shown = []
        for entry in listed:
            yield
            if entry.transactional_id in visible:
                shown.append(entry)
        return _listed(ErrorCode.none, unknown, shown)


def _listed(
    error: ErrorCode, unknown: Sequence[str] = (), found: Sequence[ev.ListedTransaction] = ()
) -> HandlerResult:
    return {
        "error_code": error,
        "unknown_state_filters": unknown,
        "transaction_states": LazyArray(found, _listed_id),
    }


def _listed_id(entry: ev.ListedTransaction) -> HandlerResult:
    return {
        "transactional_id": entry.transactional_id,
        "producer_id": entry.producer_id,
        "transaction_state": entry.state.kafka_name,
    }


def _answer_end(result: ev.EndTransactionResult) -> HandlerResult:
    return {
        "error_code": result.error,
        "producer_id": result.producer_id,
        "producer_epoch": result.epoch,
    }


def _answer_client(errors: Errors) -> Steps[HandlerResult]:
    return {"results_by_topic_v3_and_below": (yield from _by_topic(errors))}


def _answer_broker(names: list[str], errors: list[Errors]) -> Steps[HandlerResult]:
    results = []
    for name, of_name in zip(names, errors, strict=True):
        topics = yield from _by_topic(of_name)
        results.append({"transactional_id": name, "topic_results": topics})
    return {"error_code": ErrorCode.none, "results_by_transaction": results}


def _by_topic(errors: Errors) -> Steps[list[HandlerResult]]:
    """As the answer has them, one partition a step."""
    topics: dict[str, list[HandlerResult]] = {}
    for tp, error in errors.items():
        topics.setdefault(tp.topic, []).append(
            {"partition_index": tp.partition, "partition_error_code": error}
        )
        yield
    return [{"name": name, "results_by_partition": parts} for name, parts in topics.items()]
