"""How a node takes part in its cluster: it meets the others, registers, and leaves in order.

A lone node has the same link without peers: it knows its cluster id, registers itself, and never
has anybody to hand over to. What others say comes in through :class:`~.peers.Peers`; the metadata
log's Raft messages go out and in here, and who depends on what the log says is told
(``on_metadata_changed``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kept.cluster.controller import brokers, features, scram_changes
from kept.node.config import listeners
from kept.node.metadata import directory_ids, quorum_check
from kept.node.metadata.broker_lifecycle import BrokerLifecycleManager
from kept.node.metadata.join_timeout import Joining
from kept.node.runtime.logging import log

if TYPE_CHECKING:
    from kept.cluster.controller.brokers import RegisterRequest
    from kept.cluster.metadata.image import Image
    from kept.cluster.metadata.voters import Voter
    from kept.node.config.live_config import LiveConfig
    from kept.node.internode.peers import Peers
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.failure_detector import FailureDetector
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime

RETRY_S: Final = 0.05
POLL_S: Final = 0.01
ELECTIONS: Final = 3
"""A node that stops gives up on a controller after the time of this many elections."""

NewLifecycle = Callable[["RegisterRequest"], BrokerLifecycleManager]


class ClusterLink:
    """Meets the other nodes, registers this one, and leaves the cluster in order.
    ``on_metadata_changed`` are called when the metadata's image or this node's role in its quorum
    moved, before that is acted on.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        metadata: MetadataLog,
        identity: NodeIdentity,
        addresses: AddressBook,
        peers: Peers,
        detector: FailureDetector,
        counters: Counters,
        new_lifecycle: NewLifecycle,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._identity = identity
        self._addresses = addresses
        self._peers = peers
        self._detector = detector
        self._counters = counters
        self._new_lifecycle = new_lifecycle
        self.on_metadata_changed: list[Callable[[], None]] = []
        self._lifecycle: BrokerLifecycleManager | None = None
        self._joining: Joining
        self._voters: tuple[Voter, ...] = ()
        self._moved = asyncio.Event()

    @property
    def may_be_fenced(self) -> bool:
        """Whether no controller has answered for so long that one may have fenced this broker."""
        return self._lifecycle is not None and self._lifecycle.may_be_fenced

    @property
    def out_of_touch(self) -> bool:
        """Whether no controller answered for as long as one waits before it fences."""
        return self._lifecycle is not None and self._lifecycle.out_of_touch

    # Life.

    async def start(self) -> None:
        """Speak with the others, and take part in the metadata log."""
        peers, metadata = self._peers, self._metadata
        self._joining = Joining(self._runtime, self._config.current, metadata, peers)
        peers.cluster_id = metadata.raft_node.cluster_id or ""
        peers.voters = self._config.current.controller_quorum_voters
        peers.has_log = metadata.raft_node.last_index > 0
        peers.directory_id = metadata.raft_node.directory_id
        peers.own_address = self._addresses.own_node_address() or ("", 0)
        peers.start()
        metadata.send = peers.send
        metadata.probe = self._detector.probe
        metadata.on_applied = self._metadata_changed
        peers.on_message = metadata.receive
        peers.may_lead = metadata.raft_node.trusts
        peers.on_peer_down = self._detector.peer_down
        metadata.start_ticking()
        metadata.pump()
        if metadata.leads:
            self._metadata_changed()  # a sole voter has led since its log was opened
        voters = self._config.current.controller_quorum_voters
        log.info("joining", voters=",".join(map(str, voters)))

    async def cluster_id(self) -> str:
        """The cluster's id; waits until a controller was elected for the first time, and the image
        is no older than what this node acted on before it started: logs of topics that are not in
        an older one would be deleted. Raises as :meth:`Joining.until`.
        """
        member, config = self._metadata.raft_node, self._config.current
        while (known := self._metadata.image.cluster_id) is None or not member.recovered:
            self._moved.clear()
            await self._joining.until(self._moved)
        node_id, disk = self._identity.node_id, self._runtime.disk
        directory_ids.remember_cluster(disk, config.metadata_log_dir, node_id, known)
        vote = {voter.node_id for voter in member.voters}
        await quorum_check.check_voters(self._peers, known, config.controller_quorum_voters, vote)
        return known

    async def register(self, registration: RegisterRequest) -> None:
        """Take part as a broker; done when this node serves. Raises as :meth:`Joining.until`."""
        lifecycle = self._lifecycle = self._new_lifecycle(registration)
        lifecycle.controller_is(self._metadata.leader_id)
        lifecycle.start()
        lifecycle.image_acted_on(self._metadata.image)
        lifecycle.logs_opened()
        await self._joining.until(lifecycle.registered)
        await lifecycle.running.wait()

    def register_alone(self, registration: RegisterRequest) -> None:
        """A lone node takes part at once. Blocks."""
        image = self._metadata.image
        records = brokers.register_broker(image, registration, fenced=False)
        if image.brokers.keys() <= {registration.broker_id}:
            records += features.raise_levels(image, features.common_levels([features.SUPPORTED]))
        self._metadata.propose_now(scram_changes.with_decoys(image, records, os.urandom))
        broker = self._metadata.image.brokers[self._identity.node_id]
        self._identity.broker_epoch = broker.broker_epoch

    async def leave(self) -> None:
        """Hand over leadership of partitions, then of the metadata; then the process may end."""
        if self._config.current.alone:
            return
        if self._lifecycle is not None:
            watching = self._runtime.loop.create_task(self._watch_controller(self._lifecycle))
            await self._lifecycle.shut_down()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._hand_over()

    @property
    def _patience_s(self) -> float:
        return ELECTIONS * self._config.current.controller_quorum_fetch_timeout_ms / 1000

    async def _hand_over(self) -> None:
        """Another voter leads before this one ends: nobody waits for an election."""
        metadata, patience_s = self._metadata, self._patience_s
        led = metadata.leads
        try:
            async with asyncio.timeout(patience_s):
                while metadata.raft_node.hand_over():
                    metadata.pump()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("nobody took over as controller", waited_s=patience_s)
        if led and metadata.leader_id is not None:
            log.info("controller handed over", to=metadata.leader_id)

    async def _watch_controller(self, lifecycle: BrokerLifecycleManager) -> None:
        """The last nodes to stop have nobody to hand over to: they don't wait for an answer."""
        loop, metadata, patience_s = self._runtime.loop, self._metadata, self._patience_s
        known_at = loop.time()
        while True:
            if metadata.raft_node.majority_is_gone:
                lifecycle.no_controller("no majority of the controllers is left to hand over to")
            if metadata.leader_id is not None:
                known_at = loop.time()
            elif loop.time() - known_at > patience_s:
                lifecycle.no_controller(f"no controller for {patience_s:g} s to hand over to")
            await asyncio.sleep(RETRY_S)

    async def close_lifecycle(self) -> None:
        """Take part as a broker no more, without asking anybody."""
        if self._lifecycle is not None:
            await self._lifecycle.close()

    async def stop(self) -> None:
        """Speak with nobody any more."""
        await self._detector.close()
        await self._peers.stop()

    # What moves.

    def acted_on(self, image: Image) -> None:
        """The node is what ``image`` says."""
        self._detector.image_changed(image)
        if self._lifecycle is not None:
            self._lifecycle.image_acted_on(image)

    def _metadata_changed(self) -> None:
        metadata, peers = self._metadata, self._peers
        self._moved.set()
        self._counters.cluster.controller_is(
            metadata.leader_id, metadata.raft_node.term, self._runtime.loop.time()
        )
        peers.cluster_id = metadata.raft_node.cluster_id or ""
        peers.has_log = metadata.raft_node.last_index > 0
        if metadata.image.voters is not self._voters:
            self._voters = metadata.image.voters
            peers.voters = self._with_addresses(self._voters)
            self._warn_of_replaced_disk()
        for notify in self.on_metadata_changed:
            notify()
        if self._lifecycle is not None:
            self._lifecycle.controller_is(metadata.leader_id)

    def _warn_of_replaced_disk(self) -> None:
        """A voter whose disk was replaced should not stay an observer unnoticed."""
        node_id, directory_id = self._identity.node_id, self._metadata.raft_node.directory_id
        own = [voter for voter in self._voters if voter.node_id == node_id]
        if own and own[0].directory_id != directory_id:
            what = f"its vote belongs to another disk, {own[0].directory_id}"
            why = f"{what}: kept cluster voter add {node_id} gives it to this one"
            log.warning("this node only observes the metadata", reason=why)

    def _with_addresses(self, voters: tuple[Voter, ...]) -> tuple[listeners.ConfiguredVoter, ...]:
        """Voters as a Hello tells them: the log of a node that was alone has no address of it."""
        addressed = []
        for voter in voters:
            known = (voter.host, voter.port) if voter.host else None
            address = known or self._addresses.node_address(voter.node_id)
            if address is not None:
                addressed.append(listeners.ConfiguredVoter(voter.node_id, *address))
        return tuple(addressed)
