"""Which nodes died: evidence comes in, and those who act on a death hear of it once.

Evidence is a stream or connection that broke. It is followed by a probe of the node's listener, and
only a refused probe shows that the process is gone (:meth:`kept.node.internode.peers.Peers.probe`).
Raft elects at once then, the controller looks at the broker's session, and clients are not sent
there any more (:mod:`kept.node.metadata.failure_suspicions`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kept.node.metadata.failure_suspicions import FailureSuspicions
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime


class FailureDetector:
    """``on_death`` are called with the id of a node whose process is gone."""

    def __init__(
        self, runtime: Runtime, metadata: MetadataLog, peers: Peers, counters: Counters
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._peers = peers
        self._counters = counters
        self._suspicions = FailureSuspicions()
        self.on_death: list[Callable[[int], None]] = []
        self._probes = TaskOwner(runtime.loop)

    def peer_down(self, node_id: int) -> None:
        """A node's process is gone."""
        log.warning("node is gone", node=node_id)
        now = self._runtime.loop.time()
        self._counters.cluster.node_gone(node_id, now)
        self._suspicions.suspect(node_id, self._metadata.image, now)
        for notify in self.on_death:
            notify(node_id)

    def connection_broke(self, node_id: int) -> None:
        """A connection to a leader broke: its process may be gone, and a probe will tell."""
        if not self.seems_gone(node_id):
            now = self._runtime.loop.time()
            self._suspicions.suspect(node_id, self._metadata.image, now)
            self.probe(node_id)

    def image_changed(self, image: Image) -> None:
        """The node is what ``image`` says: note who was fenced."""
        self._suspicions.image_changed(image, self._runtime.loop.time())

    @property
    def suspects_any(self) -> bool:
        """Whether :meth:`seems_gone` may be true of some node."""
        return self._suspicions.suspects_any

    def seems_gone(self, node_id: int) -> bool:
        """Whether there is evidence that a node died, though the image does not say so yet."""
        now = self._runtime.loop.time()
        return self._suspicions.is_suspected(node_id, self._metadata.image, now)

    def recently_fenced(self, node_id: int) -> bool:
        """Whether a broker was fenced a moment ago."""
        return self._suspicions.recently_fenced(node_id, self._runtime.loop.time())

    def probe(self, node_id: int) -> None:
        """Look whether a node's process is there; :meth:`peer_down` if it is not."""
        self._probes.spawn(self._probe(node_id))

    async def _probe(self, node_id: int) -> None:
        if await self._peers.probe(node_id) is None:
            self.peer_down(node_id)
        else:
            self._suspicions.clear(node_id)

    async def close(self) -> None:
        """Probe nobody any more."""
        await self._probes.close()
