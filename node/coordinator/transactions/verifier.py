"""The side of partitions' leaders: is a partition in the transaction that a producer writes in?

The coordinator of the transactional id says so (KIP-890), by AddPartitionsToTxn: it verifies only,
or adds the partition for producers that do not add it themselves. One request is under way to each
node; what comes meanwhile goes with the next one. A request names an id once. Where this node is
the coordinator there is no request: it is asked at once.

Source: Kafka's ``AddPartitionsToTxnManager``. Ours: of two questions about one id the later waits
for the earlier one; Kafka refuses the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.common.shard import coordinator_error
from kept.node.coordinator.transactions.records import partitions_by_topic
from kept.node.coordinator.transactions.transaction import TV2
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.runtime.counters import REQUEST_BUCKETS
from kept.node.runtime.error_codes import code_for
from kept.node.runtime.histogram import Histogram
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError, NetworkException, RequestTimedOut
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.coordinator.transactions.marker_channel import NodeCalls
    from kept.node.runtime.runtime import Runtime

ADD_PARTITIONS_VERSION: Final = 5
MAX_QUESTIONS: Final = 1000
"""In one request."""
ANSWER_S: Final = 10.0

Errors = Mapping[TopicPartition, ErrorCode]


class _Question(Struct, frozen=True, eq=False):
    """What a leader wants to know."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: frozenset[TopicPartition]
    adds: bool
    answer: CompletableFuture[Errors]

    def values(self) -> dict[str, Any]:
        """As the request has it."""
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "verify_only": not self.adds,
            "topics": [
                {"name": topic, "partitions": numbers}
                for topic, numbers in partitions_by_topic(self.partitions)
            ],
        }

    def answer_all(self, error: ErrorCode) -> None:
        """The same for all partitions."""
        self.resolve(dict.fromkeys(self.partitions, error))

    def resolve(self, errors: Errors) -> None:
        """Answer, unless that is done."""
        if not self.answer.done():
            self.answer.set_result(errors)


class Verifier:
    """Finds out from coordinators whether a partition is in a producer's transaction."""

    def __init__(
        self,
        runtime: Runtime,
        config: LiveConfig,
        transactions: TransactionCoordinator,
        calls: NodeCalls,
    ) -> None:
        self._config = config
        self._loop = runtime.loop
        self._transactions = transactions
        self._calls = calls
        self._tasks = TaskOwner(runtime.loop)
        self.seconds = Histogram(REQUEST_BUCKETS)
        """Times of requests to coordinators that were answered."""
        self.failures = 0
        """Questions to which the answer was not yes for every partition."""
        self._queues: dict[int, list[_Question]] = {}
        """What is to be asked of each node; a node is here while a task serves its queue."""

    def verify(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: frozenset[TopicPartition],
        *,
        adds: bool,
    ) -> CompletableFuture[Errors]:
        """What the coordinator says of each partition; ``adds``: they join the transaction.

        Never raises: if no answer can be had, NETWORK_EXCEPTION, COORDINATOR_NOT_AVAILABLE or
        another code of the coordinator's is that of all partitions. With
        ``transaction.partition.verification.enable`` off nobody is asked whether they are in it.
        """
        answer: CompletableFuture[Errors] = CompletableFuture()
        question = _Question(transactional_id, producer_id, epoch, partitions, adds, answer)
        node = self._transactions.shards.leader_of(transactional_id)
        if not adds and not self._config.current.transaction_partition_verification_enable:
            question.answer_all(ErrorCode.none)
        elif node is None:
            question.answer_all(ErrorCode.coordinator_not_available)
        elif node == self._transactions.identity.node_id:
            self._ask_here(question)
        elif node in self._queues:
            self._queues[node].append(question)
        else:
            self._queues[node] = [question]
            self._tasks.spawn(self._serve(node))
        return answer

    def coordinator_epoch(self, transactional_id: str) -> int:
        """The leader epoch of the id's coordinator, as far as this node knows; -1: none."""
        return self._transactions.coordinator_epoch(transactional_id)

    async def close(self) -> None:
        """Ask nobody any more; whoever waits gets NOT_COORDINATOR."""
        await self._tasks.close()
        await self._calls.close()

    def _ask_here(self, question: _Question) -> None:
        """This node coordinates the id."""
        started = self._loop.time()

        def said(errors: Errors) -> None:
            self.seconds.observe(self._loop.time() - started)
            self._count(errors)
            question.resolve(errors)

        name, partitions = question.transactional_id, question.partitions
        producer = question.producer_id, question.epoch
        try:
            if question.adds:
                added = self._transactions.add(name, *producer, partitions, TV2)
                added.add_done_callback(
                    lambda done: said(dict.fromkeys(partitions, done.result().error))
                )
            else:
                verified = self._transactions.verify(name, *producer, partitions)
                verified.add_done_callback(lambda done: said(done.result().errors(partitions)))
        except KeptError as error:
            said(dict.fromkeys(partitions, coordinator_error(error)))

    def _count(self, errors: Errors) -> None:
        self.failures += any(error is not ErrorCode.none for error in errors.values())

    async def _serve(self, node: int) -> None:
        asked: list[_Question] = []
        try:
            while self._queues[node]:
                asked, self._queues[node] = _next_request(self._queues[node])
                await self._ask(node, asked)
        finally:
            for question in (*asked, *self._queues.pop(node)):
                question.answer_all(ErrorCode.not_coordinator)

    async def _ask(self, node: int, asked: list[_Question]) -> None:
        values = {"transactions": [question.values() for question in asked]}
        started = self._loop.time()
        try:
            response = await self._calls.call(
                node, ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, values, ANSWER_S
            )
        except KeptError as error:
            lost = isinstance(error, NetworkException | RequestTimedOut)
            code = ErrorCode.network_exception if lost else ErrorCode(code_for(error))
            self.failures += len(asked)
            for question in asked:
                question.answer_all(code)
            return
        self.seconds.observe(self._loop.time() - started)
        answers = {result.transactional_id: result for result in response.results_by_transaction}
        for question in asked:
            result = answers.get(question.transactional_id)
            topics = () if result is None else result.topic_results
            said = {
                TopicPartition(topic.name, part.partition_index): part.partition_error_code
                for topic in topics
                for part in topic.results_by_partition
            }
            unsaid = ErrorCode.unknown_server_error
            errors = {tp: said.get(tp, unsaid) for tp in question.partitions}
            self._count(errors)
            question.resolve(errors)


def _next_request(queue: list[_Question]) -> tuple[list[_Question], list[_Question]]:
    """The questions of the next request, the oldest of each id, and those that wait for it."""
    asked: dict[str, _Question] = {}
    rest = []
    for question in queue:
        if question.transactional_id in asked or len(asked) >= MAX_QUESTIONS:
            rest.append(question)
        else:
            asked[question.transactional_id] = question
    return list(asked.values()), rest
