"""How long a node that starts waits to be let in, and when waiting makes no sense any more.

It waits for a controller, and then to be registered. It does not where every other node of
``controller.quorum.voters`` refuses it (another cluster's directories, an id that is used twice,
lists that disagree): nothing but a change of its settings or of its disk will help. One that
refuses is not enough, for that may be the one that is wrong; but it is where the node id is taken:
whoever says so has a stream to the other process and has just seen it answer. (A predecessor that
died or hangs answers nothing, so no restart is refused.) A broker that is not registered within
``initial.broker.registration.timeout.ms`` ends, as in Kafka: whoever watches it should know.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kept.node.internode.identity import node_id_taken
from kept.storage.errors import ConfigurationError, RequestTimedOut

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.runtime import Runtime

POLL_S: Final = 0.2
REFUSED_S: Final = 3.0
"""They must refuse for so long: nodes that start at the same time change their minds."""


class Joining:
    """The patience of one start."""

    def __init__(
        self, runtime: Runtime, config: NodeConfig, metadata: MetadataLog, peers: Peers
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._peers = peers
        self._others = {voter.node_id for voter in config.controller_quorum_voters}
        self._others.discard(config.node_id)
        self._began = runtime.loop.time()
        self._taken = node_id_taken(config.node_id)
        self._refused_since: float | None = None

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event of the start. Raises ConfigurationError, RequestTimedOut."""
        while not event.is_set():
            self._check_patience()
            try:
                async with asyncio.timeout(POLL_S):
                    await event.wait()
            except TimeoutError:
                continue

    def _check_patience(self) -> None:
        now = self._runtime.loop.time()
        refusals = self._peers.refusals
        is_taken = self._taken in refusals.values()
        by_all = bool(self._others) and self._others <= refusals.keys()
        if not (is_taken or by_all):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > REFUSED_S:
            if is_taken:
                raise ConfigurationError(self._taken)
            raise ConfigurationError(
                "all other nodes of controller.quorum.voters refuse this one: " + self._refusals
            )
        patience_s = self._config.initial_broker_registration_timeout_ms / 1000
        if self._config.is_broker and now - self._began > patience_s:
            raise RequestTimedOut(
                "this broker was not registered within initial.broker.registration.timeout.ms "
                f"({patience_s:g} s): {self._why}"
            )

    @property
    def _refusals(self) -> str:
        return "; ".join(
            f"node {node_id}: {self._peers.refusals[node_id]}"
            for node_id in sorted(self._others & self._peers.refusals.keys())
        )

    @property
    def _why(self) -> str:
        leader_id = self._metadata.leader_id
        if leader_id is not None:
            return f"node {leader_id}, the active controller, did not let it in"
        if self._others & self._peers.refusals.keys():
            return f"no controller is heard; {self._refusals}"
        return "no controller is heard: are the nodes of controller.quorum.voters running?"
