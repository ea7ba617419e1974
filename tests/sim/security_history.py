"""Stage ``security``: the stage ``nodes`` with administrators of ACLs, SCRAM credentials and client
quotas (:mod:`tests.sim.security_clients`), judged by :mod:`tests.sim.security_checks`.

Requests reach any node and are forwarded; records wait until every broker has said that it reads
them. The metadata log is replaced by snapshots again and again, so that nodes start from one of
their own, and those that were away get one of the leader's. No power is lost: what is acknowledged
is never given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from kept.cluster.metadata.metadata_node import MetadataNode
from kept.node.kafka import api
from kept.storage.errors import KeptError
from tests.sim.nodes_history import HEAL_S, NodesHistory
from tests.sim.security_checks import SecurityChecks
from tests.sim.security_clients import ALTER_QUOTAS, Administrator, Judge, Petitioner
from tests.sim.world import Violation

ADMINISTRATORS: Final = 3


class SecurityHistory(NodesHistory):
    """One seed of stage ``security``."""

    power_share = 0.0
    trials = ("return", "")
    changes_voters = False
    again_s = 15.0
    consumers = False
    more = False

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.settings |= {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "kept.node.network.trusted": "true",
            "kept.audit": "off",
            "metadata.log.max.record.bytes.between.snapshots": self.random.choice(
                ("1000", "6000", "4194304")
            ),
        }
        self.operator.kinds = []
        self.security = SecurityChecks()
        self.administrators: list[Administrator] = []
        self.more_kinds = ("quota",) if ALTER_QUOTAS in api.served() else ()

    def counts(self) -> dict[str, int]:
        """See :meth:`NodesHistory.counts`."""
        return super().counts() | {
            "images compared": self.security.compared,
            "decisions compared": self.security.decisions,
        }

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See :meth:`NodesHistory.watched`: each image of each node is compared, and what it begins
        with.
        """
        counts = self.world.counts
        done_in_steps = MetadataNode.done_in_steps
        opened = vars(MetadataNode)["open"].__func__

        def done(node: MetadataNode, work: Any) -> Any:
            before = node.image.index
            outcome = yield from done_in_steps(node, work)
            for image, _, _ in outcome.applied:
                counts["snapshots of a leader"] += image.index > before + 1
                before = image.index
                self.judge(self.security.image, f"n{node.node_id}", image)
            return outcome

        def reopened(cls: type[MetadataNode], *args: Any, **kwargs: Any) -> MetadataNode:
            node: MetadataNode = opened(cls, *args, **kwargs)
            counts["starts from a snapshot"] += node.image.index > 0
            self.judge(self.security.image, f"n{node.node_id} at its start", node.image)
            return node

        with (
            super().watched(),
            mock.patch.object(MetadataNode, "done_in_steps", done),
            mock.patch.object(MetadataNode, "open", classmethod(reopened)),
        ):
            yield

    def make_clients(self) -> list[Any]:
        """See :meth:`NodesHistory.make_clients`."""
        self.administrators = [Administrator(self, number) for number in range(ADMINISTRATORS)]
        self.writers.extend(self.administrators)  # type: ignore[arg-type]
        return [*self.administrators, Petitioner(self), Petitioner(self), Judge(self)]

    async def verify(self) -> None:
        """Every node has all that was acknowledged, and tells it."""
        deadline = self.loop.time() + HEAL_S
        for administrator in self.administrators:
            while True:
                try:
                    await administrator.verify()
                    break
                except KeptError as error:
                    if self.loop.time() > deadline:
                        raise Violation("liveness", f"ACLs are not told: {error}") from error
                    await asyncio.sleep(0.1)
            administrator.client.close()
        newest = self.security.newest
        await self.until(
            lambda: all(
                m.node is not None and m.node.parts.metadata.acted_index >= newest
                for m in self.machines
            ),
            "all nodes at the newest entry",
        )
