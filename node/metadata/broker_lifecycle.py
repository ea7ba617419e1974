"""This node's membership as a broker: registration, heartbeats, and whether it may serve.

The shell of :class:`kept.cluster.controller.broker_lifecycle.BrokerLifecycle`: time, calls to the
active controller (which may be this node), and the effects on what is hosted here. A lone node
needs none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.cluster.controller import broker_lifecycle, features
from kept.cluster.controller.broker_lifecycle import SUSPENDED, BrokerLifecycle, BrokerState
from kept.cluster.controller.brokers import RegisterRequest
from kept.cluster.controller.heartbeats import (
    HeartbeatRequest,
    PartitionKey,
    ReplicaLog,
    unfenced_for_ms,
)
from kept.cluster.metadata.image import ImageApplied
from kept.node.config.core_settings import lifecycle_settings
from kept.node.metadata.serving_lease import NEVER
from kept.node.runtime.clock import by_perf_counter, elapsed_ms
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError, NetworkException

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.config.live_config import LiveConfig
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.metadata.serving_lease import ServingLease
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.shutdown import Shutdown

TICKS_PER_STALL: Final = 8
CALL_S: Final = 2.0


class BrokerReplicas(Protocol):
    """What a broker's life asks of its replicas."""

    def suspend(self) -> None:
        """Serve nobody until :meth:`resume`."""

    def resume(self, image: Image) -> None:
        """Take every role of ``image``, or go on with it."""

    def led_up_to(self, index: int) -> int:
        """Up to which entry, ``index`` at most, everything that was to be led here is led."""

    def mark_running(self, broker_epoch: int) -> Coroutine[Any, Any, None]:
        """Mark the log directories with the epoch of this registration."""

    def replica_logs(self, partitions: Iterable[PartitionKey]) -> list[ReplicaLog]:
        """How long the logs here are that the controller asks for."""


class BrokerLifecycleManager:
    """Registers this node as a broker, sends its heartbeats, and says whether it may serve."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        metadata: MetadataLog,
        identity: NodeIdentity,
        peers: Peers,
        lease: ServingLease,
        shutdown: Shutdown,
        replicas: BrokerReplicas,
        registration: RegisterRequest,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._identity = identity
        self._peers = peers
        self._lease = lease
        self._shutdown = shutdown
        self._replicas = replicas
        self.core = BrokerLifecycle(registration, lifecycle_settings(config.current))
        self.registered = asyncio.Event()
        """The controller has let this process in."""
        self.running = asyncio.Event()
        """It is registered and not fenced."""
        self.stopped = asyncio.Event()
        """It may end: in order, or because it must (``failure``)."""
        self.failure: str | None = None
        self._calls = TaskOwner(runtime.loop)
        self._ticker: asyncio.TimerHandle | None = None
        self._controller: int | None = None
        self._marked_epoch = -1
        """The broker epoch that the log directories are marked with."""
        self._answered_at = runtime.loop.time()
        """When the newest heartbeat was sent that was answered, and acted on as far as the answer
        knew: this broker was not fenced within a session of it, and knows what it leads."""
        self._heard = (0, self._answered_at)
        """(index of the controller's image, when it was asked) of the newest answer."""

    @property
    def out_of_touch(self) -> bool:
        """No controller answered for as long as one waits before it fences: others may lead."""
        return self._silent_ms > self._config.current.broker_session_timeout_ms

    @property
    def may_be_fenced(self) -> bool:
        """No controller answered for so long that one may have fenced this broker already."""
        config = self._config.current
        session_ms, interval_ms = (
            config.broker_session_timeout_ms,
            config.broker_heartbeat_interval_ms,
        )
        return self._silent_ms >= unfenced_for_ms(session_ms, interval_ms)

    @property
    def _silent_ms(self) -> float:
        return (self._runtime.loop.time() - self._answered_at) * 1000

    # Life.

    def start(self) -> None:
        """Register, and go on from there."""
        self._lease.check = self.check_stalled
        self._step(broker_lifecycle.Started())
        self._tick()

    def _tick(self) -> None:
        self._perform(self.core.tick(elapsed_ms()))
        seconds = self.core.settings.stall_ms / TICKS_PER_STALL / 1000
        self._ticker = self._runtime.loop.call_later(seconds, self._tick)

    def check_stalled(self) -> None:
        """Before leadership is acted on, later than the last tick allows: was this a stall?"""
        self._perform(self.core.tick(elapsed_ms()))

    def logs_opened(self) -> None:
        """The logs here are open: this broker may lead."""
        self._step(broker_lifecycle.LogsRecovered())

    def image_acted_on(self, image: Image) -> None:
        """The node is what ``image`` says."""
        self._step(ImageApplied(image))
        self._in_touch()

    def _in_touch(self) -> None:
        index, asked_at = self._heard
        if self.core.image.index >= index:
            self._answered_at = asked_at

    def controller_is(self, node_id: int | None) -> None:
        """The active controller, as far as it is known."""
        if node_id == self._controller:
            return
        self._controller = node_id
        self._peers.hold_control(node_id)
        if node_id is not None:
            self._step(broker_lifecycle.ControllerChanged())

    async def shut_down(self) -> None:
        """Hand over what is led; returns when the process may end."""
        self._step(broker_lifecycle.ShutdownRequested())
        await self.stopped.wait()

    def no_controller(self, reason: str) -> None:
        """There is none to hand over to."""
        self._step(broker_lifecycle.QuorumLost(reason))

    async def close(self) -> None:
        """End without asking anybody."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self._calls.close()

    # Effects.

    def _step(self, event: broker_lifecycle.Event) -> None:
        self._perform(self.core.step(event, elapsed_ms()))

    def _perform(self, effects: tuple[broker_lifecycle.Effect, ...]) -> None:
        self._identity.broker_epoch = self.core.broker_epoch
        for effect in effects:
            match effect:
                case broker_lifecycle.Register():
                    self._calls.spawn(self._register(effect.registration))
                case broker_lifecycle.SendHeartbeat():
                    self._calls.spawn(self._heartbeat(effect))
                case broker_lifecycle.StopServing():
                    log.warning("serving suspended", reason=effect.reason)
                    self._replicas.suspend()
                case broker_lifecycle.ResumeServing():
                    self._replicas.resume(self.core.image)
                case broker_lifecycle.Exit():
                    self._exit(effect)
        valid_until_ms = self.core.valid_until_ms
        self._lease.until = (
            NEVER  # partitions refuse by themselves while serving is suspended
            if valid_until_ms == SUSPENDED
            else by_perf_counter(valid_until_ms)
        )
        if self.core.broker_epoch >= 0:
            self.registered.set()
            if self.core.broker_epoch != self._marked_epoch:
                self._marked_epoch = self.core.broker_epoch
                self._calls.spawn(self._replicas.mark_running(self._marked_epoch))
        if self.core.state is BrokerState.RUNNING:
            self.running.set()

    def _exit(self, effect: broker_lifecycle.Exit) -> None:
        if effect.failed:
            self.failure = effect.reason
            self._shutdown.fatal(effect.reason)
        self.stopped.set()

    async def _register(self, registration: RegisterRequest) -> None:
        try:
            controller = self._metadata.leader_id
            if controller is None:
                raise NetworkException("Register: no controller is known")
            reply = await self._peers.call(controller, "Register", registration, CALL_S)
        except KeptError as error:
            self._step(broker_lifecycle.RegistrationFailed(error))
        else:
            self._step(broker_lifecycle.Registered(reply.broker_epoch))

    async def _heartbeat(self, effect: broker_lifecycle.SendHeartbeat) -> None:
        request = HeartbeatRequest(
            effect.broker_id,
            effect.broker_epoch,
            self._replicas.led_up_to(effect.applied_index),
            wants_fence=effect.wants_fence,
            wants_shutdown=effect.wants_shutdown,
            logs=tuple(self._replicas.replica_logs(effect.report)),
            features=features.SUPPORTED,
        )
        asked_at = self._runtime.loop.time()
        try:
            reply = await self._peers.heartbeat(request, CALL_S)
        except KeptError as error:
            self._step(broker_lifecycle.HeartbeatFailed(effect.number, error))
            return
        self._heard = (reply.index, asked_at)
        self._in_touch()
        self._step(broker_lifecycle.HeartbeatResponseReceived(effect.number, reply))
