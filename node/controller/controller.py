"""The active controller's shell: decisions in their turn, the lives of brokers, calls of brokers.

Decisions are pure functions of the image (``kept.cluster.controller``). They queue here:
each is taken on the image that the one before it left, proposed, and done when it is in the image.
Whoever asks at a node that does not lead gets NotController. Liveness is the core's
(:class:`kept.cluster.controller.broker_sessions.BrokerSessions`); this module gives it time, probes
and decisions.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.controller import brokers, partition_election, scram_changes, unclean_recovery
from kept.cluster.controller.broker_decisions import decide
from kept.cluster.controller.broker_sessions import (
    BrokerSessions,
    ConnectionLost,
    ControllerElected,
    ControllerResigned,
    Decide,
    DecisionCompleted,
    Effect,
    Event,
    Probe,
    ProbeCompleted,
    SettingsChanged,
)
from kept.cluster.controller.brokers import RegisterRequest
from kept.cluster.controller.heartbeats import HeartbeatReply, HeartbeatRequest
from kept.cluster.controller.partition_election import AlterIsr, unclean_allowed_by
from kept.cluster.metadata.image import Image, ImageApplied
from kept.cluster.metadata.records import MetadataRecord
from kept.node.config.core_settings import TICK_MS, session_settings
from kept.node.controller.proposals import Change, check_leads, not_controller, resolve
from kept.node.controller.quorum_reconfiguration import QuorumReconfiguration
from kept.node.internode import controller_rpc
from kept.node.internode.rpc_errors import failure_of
from kept.node.runtime.clock import elapsed_ms
from kept.node.runtime.fd_quota import OpenFiles, check_room
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError, NetworkException, NotController, StaleBrokerEpoch

if TYPE_CHECKING:
    from kept.cluster.controller.unclean_recovery import Reports
    from kept.cluster.metadata.image import Delta
    from kept.node.config.live_config import LiveConfig
    from kept.node.internode.peers import Peers
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime

TICK_S: Final = 0.1


class Controller:
    """Takes the active controller's decisions, and serves the brokers' calls."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        metadata: MetadataLog,
        identity: NodeIdentity,
        peers: Peers,
        addresses: AddressBook,
        open_files: OpenFiles,
        counters: Counters,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._peers = peers
        self._open_files = open_files
        self._counters = counters
        self.sessions = BrokerSessions(session_settings(config.current))
        self.quorum_reconfiguration = QuorumReconfiguration(runtime, metadata, identity, addresses)
        self.turn = asyncio.Lock()
        """Held while a decision is taken, until it is in the image."""
        self._tasks = TaskOwner(runtime.loop)
        self._ticker: asyncio.TimerHandle | None = None
        self._awake_ms = elapsed_ms()
        self._gaps = 1
        """How often this process stood still: another node may have been elected meanwhile."""
        self._sure_since = 0
        """The gap after which a majority confirmed that this node leads."""
        self._broken: Counter[int] = Counter()
        """How often the control stream of each broker broke."""

    # Life.

    def start(self) -> None:
        """Take notice of who leads."""
        self._peers.on_control_lost = self._connection_lost
        self._tick()

    def serve_brokers(self) -> None:
        """Answer brokers, this node's among them."""
        for method, handler in (
            ("Register", self._register),
            ("Heartbeat", self._heartbeat),
            ("AlterPartitions", self._alter_partitions),
            ("AllocateProducerIds", self._allocate_producer_ids),
            ("ChangeVoters", self.quorum_reconfiguration.change),
            ("Confirm", self._confirm),
        ):
            self._peers.serve(method, handler)

    async def close(self) -> None:
        """Decide nothing more."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self._tasks.close()

    def metadata_changed(self) -> None:
        """The image or the role of this node has changed."""
        metadata = self._metadata
        if metadata.leads and not self.sessions.active:
            log.info("controller", term=metadata.raft_node.term, index=metadata.image.index)
            unheard = metadata.raft_node.predecessor.items()
            silent_ms = {node_id: ticks * TICK_MS for node_id, ticks in unheard}
            self._step(ControllerElected(metadata.image, silent_ms))
        elif not metadata.leads and self.sessions.active:
            log.info("controller no more", term=metadata.raft_node.term)
            self._step(ControllerResigned())
        elif self.sessions.active:
            self._step(ImageApplied(metadata.image))

    def _notice_gap(self) -> None:
        now_ms = elapsed_ms()
        if now_ms - self._awake_ms > self.sessions.settings.stall_ms:
            self._gaps += 1
        self._awake_ms = now_ms

    def _tick(self) -> None:
        self._notice_gap()
        settings = session_settings(self._config.current)
        if settings != self.sessions.settings:
            self._step(SettingsChanged(settings))
        if self.sessions.active:
            self._perform(self.sessions.tick(elapsed_ms()))
        self._ticker = self._runtime.loop.call_later(TICK_S, self._tick)

    # Decisions.

    async def decide(self, change: Change) -> int:
        """Take a decision in its turn; the index of the image that holds it.

        The turn lasts until the decision is in the image, also where whoever asked has gone: the
        next one must not be taken on an image that lacks it. Raises what the decision raises,
        NotController.
        """
        return await asyncio.shield(self._tasks.spawn(self._decide(change), awaited=True))

    async def _decide(self, change: Change) -> int:
        metadata = self._metadata
        async with self.turn:
            check_leads(metadata)
            records = await resolve(change, lambda: metadata.image, self._runtime.slices)
            if not records:
                return metadata.image.index
            check_room(self._open_files, metadata.image, records)
            return await metadata.propose(records)

    # Unclean elections.

    @property
    def log_reports(self) -> Reports:
        """What replicas have told the controller of their logs; nothing in a cluster of one."""
        return self.sessions.reports

    def warn_of_unclean_elections(self, image: Image, delta: Delta) -> None:
        """An entry is about to be acted on: the active controller counts its unclean elections and
        logs what is known of the logs, for acknowledged records may be lost (rule 36).
        """
        if not delta.partitions or not self._metadata.leads:
            return
        for election in unclean_recovery.unclean_elections(image, delta, self.log_reports):
            self._counters.cluster.unclean_elections += 1
            log.warning("unclean election", report=str(election))

    # Effects of the sessions.

    def _step(self, event: Event) -> HeartbeatReply | None:
        return self._perform(self.sessions.step(event, elapsed_ms()))

    def _perform(self, effects: Sequence[Effect]) -> HeartbeatReply | None:
        answer = None
        for effect in effects:
            match effect:
                case Probe():
                    self._tasks.spawn(self._probe(effect))
                case Decide():
                    self._tasks.spawn(self._make_decision(effect))
                case HeartbeatReply():
                    answer = effect
        return answer

    async def _probe(self, effect: Probe) -> None:
        result = await self._peers.probe(effect.broker_id)
        self._step(ProbeCompleted(effect.broker_id, result, effect.broker_epoch))

    async def _make_decision(self, effect: Decide) -> None:
        decision = effect.decision

        def change(image: Image) -> list[MetadataRecord]:
            return decide(image, self.sessions.complete_decision(decision))

        error: KeptError | None = None
        try:
            await self.decide(change)
        except KeptError as failed:
            error = failed
        if error is None:
            log.info("decided", what=decision.name, broker=decision.broker_id, reason=effect.reason)
        elif not isinstance(error, NotController):
            log.error("decision failed", what=decision.name, error=str(error))
        self._step(DecisionCompleted(decision, error))

    def _connection_lost(self, broker_id: int) -> None:
        self._broken[broker_id] += 1
        self._step(ConnectionLost(broker_id))

    def peer_down(self, node_id: int) -> None:
        """A node's process is gone: look, as when its control stream breaks."""
        self._connection_lost(node_id)

    # Calls of brokers.

    def _check_leads(self) -> None:
        metadata = self._metadata
        if not self.sessions.active and not (self._config.current.alone and metadata.leads):
            raise not_controller(metadata)

    async def _register(self, request: RegisterRequest) -> controller_rpc.RegisterReply:
        self._check_leads()
        default = self._config.current.unclean_leader_election_enable

        def change(image: Image) -> Sequence[MetadataRecord]:
            records = brokers.register_broker(
                image,
                request,
                session_live=self.sessions.is_live(request.broker_id, elapsed_ms()),
                unclean_allowed=unclean_allowed_by(image, default),
            )
            return scram_changes.with_decoys(image, records, os.urandom)

        await self.decide(change)
        broker = self._metadata.image.brokers[request.broker_id]
        log.info("broker registered", broker=request.broker_id, epoch=broker.broker_epoch)
        return controller_rpc.RegisterReply(broker.broker_epoch)

    async def _heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self._check_leads()
        self._notice_gap()
        broken = self._broken[request.broker_id]
        while (gaps := self._gaps) != self._sure_since:
            # Its own broker slept as long, and may serve again once the controller has answered.
            await self._metadata.read_barrier()
            self._check_leads()
            self._sure_since = gaps
        if self._broken[request.broker_id] != broken:
            raise NetworkException(
                f"broker {request.broker_id} has hung up meanwhile: it may be dead"
            )
        reply = self._step(request)
        assert reply is not None
        return reply

    async def _confirm(self, request: controller_rpc.ConfirmRequest) -> controller_rpc.ConfirmReply:
        """Up to where the broker must look to see all that was decided before it asked."""
        self._check_leads()
        index = await self._metadata.read_barrier()
        broker = self._metadata.image.brokers.get(request.broker_id)
        if broker is None or broker.broker_epoch != request.broker_epoch:
            raise StaleBrokerEpoch(f"broker {request.broker_id} is another process by now")
        return controller_rpc.ConfirmReply(index)

    async def _alter_partitions(
        self, request: controller_rpc.AlterPartitionsRequest
    ) -> controller_rpc.AlterPartitionsReply:
        """ISR changes of one leader: each is taken or refused on its own, in one entry."""
        self._check_leads()
        errors: dict[Any, KeptError] = {}

        def change(image: Image) -> list[MetadataRecord]:
            nonlocal errors
            alterations = [_alter_isr(request, change) for change in request.changes]
            records, errors = partition_election.alter_isrs(image, alterations)
            return records

        await self.decide(change)
        image = self._metadata.image
        results = [
            _isr_result(image, proposal, errors.get((proposal.topic_id, proposal.partition)))
            for proposal in request.changes
        ]
        return controller_rpc.AlterPartitionsReply(tuple(results))

    async def _allocate_producer_ids(
        self, request: controller_rpc.AllocateProducerIdsRequest
    ) -> controller_rpc.AllocateProducerIdsReply:
        self._check_leads()
        block = range(0)

        def change(image: Image) -> list[MetadataRecord]:
            nonlocal block
            records, block = brokers.allocate_producer_ids(
                image, request.broker_id, request.broker_epoch
            )
            return records

        await self.decide(change)
        return controller_rpc.AllocateProducerIdsReply(block.start, len(block))


def _alter_isr(
    request: controller_rpc.AlterPartitionsRequest, asked: controller_rpc.IsrChange
) -> AlterIsr:
    return AlterIsr(
        asked.topic_id,
        asked.partition,
        request.broker_id,
        request.broker_epoch,
        asked.leader_epoch,
        asked.partition_epoch,
        tuple((member.broker_id, member.broker_epoch) for member in asked.isr),
        asked.leader_recovery_state == 0,
        asked.last_epoch,
    )


def _isr_result(
    image: Image, asked: controller_rpc.IsrChange, error: KeptError | None
) -> controller_rpc.IsrResult:
    state = image.partition(asked.topic_id, asked.partition)
    failure = None if error is None else failure_of(error)
    if state is None:
        return controller_rpc.IsrResult(asked.topic_id, asked.partition, failure)
    return controller_rpc.IsrResult(
        asked.topic_id,
        asked.partition,
        failure,
        state.leader,
        state.leader_epoch,
        state.partition_epoch,
        state.isr,
        int(state.unclean),
    )
