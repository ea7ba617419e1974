"""Transactional ids of the whole cluster, as any Kafka client sees them.

Each node lists what it coordinates. What a node that does not respond would have added is missing;
``unanswered`` names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.client.admin.transactions import (
    TransactionListing,
    describe_transaction,
    transactions_of_node,
)
from kept.cluster.security.acls import AclResourceType
from kept.node.admin.results import PartitionResult, Unanswered
from kept.node.runtime.tasks import gather_or_cancel
from kept.node.security.visibility import describable
from kept.storage.errors import CoordinatorNotAvailable, KeptError, TransactionalIdNotFound

if TYPE_CHECKING:
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.security.session import Session

MAX_IDS: Final = 1000
PATIENCE_S: Final = 5.0


class Transactions(Struct, frozen=True):
    """Ids of the cluster; ``left_out`` are those beyond :data:`MAX_IDS`, of those that may be
    described.
    """

    transactions: list[TransactionListing]
    left_out: int
    unanswered: list[Unanswered]


class TransactionDetail(Struct, frozen=True):
    """One id; ``started_ms`` -1: no transaction has begun."""

    transactional_id: str
    coordinator: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    partitions: list[PartitionResult]


@dataclass(frozen=True, slots=True)
class TransactionsView:
    """Describes the transactional ids of the cluster."""

    metadata: MetadataLog
    coordinator: TransactionCoordinator
    new_client: Callable[[], ClusterClient]

    async def transactions(self, session: Session, part_of_name: str = "") -> Transactions:
        """The ids that contain ``part_of_name``, as far as ``session`` may describe them."""
        client = self.new_client()
        found: list[TransactionListing] = []
        unanswered: list[Unanswered] = []

        async def of_node(node: int) -> None:
            try:
                found.extend(
                    await client.run(
                        transactions_of_node(node), patience_s=PATIENCE_S, node=node, retry=False
                    )
                )
            except KeptError as error:
                unanswered.append(Unanswered(node, error.client_message))

        try:
            brokers = self.metadata.image.brokers.items()
            await gather_or_cancel(of_node(node) for node, b in brokers if not b.fenced)
        finally:
            client.close()
        matching = sorted(
            (one for one in found if part_of_name in one.transactional_id),
            key=lambda one: one.transactional_id,
        )
        matching = await describable(
            session,
            AclResourceType.TRANSACTIONAL_ID,
            matching,
            lambda one: one.transactional_id,
        )
        unanswered.sort(key=lambda one: one.node)
        return Transactions(matching[:MAX_IDS], max(0, len(matching) - MAX_IDS), unanswered)

    async def transaction(self, session: Session, name: str) -> TransactionDetail:
        """One id, with the partitions of topics that ``session`` may describe, as
        DescribeTransactions shows them.

        Raises TransactionalIdNotFound, CoordinatorNotAvailable, and what its coordinator answers.
        """
        node = self.coordinator.shards.leader_of(name)
        if node is None:
            if self.coordinator.shards.partition_of(name) is None:
                raise TransactionalIdNotFound(f"no transactional id {name}: there are none yet")
            raise CoordinatorNotAvailable(f"nobody coordinates {name} now")
        client = self.new_client()
        try:
            found = await client.run(
                describe_transaction(name), patience_s=PATIENCE_S, node=node, retry=False
            )
        finally:
            client.close()
        topics = {tp.topic for tp in found.partitions}
        shown = {*await describable(session, AclResourceType.TOPIC, topics)}
        return TransactionDetail(
            name,
            node,
            found.state,
            found.producer_id,
            found.producer_epoch,
            found.timeout_ms,
            found.started_ms,
            [PartitionResult(*tp) for tp in sorted(found.partitions) if tp.topic in shown],
        )
