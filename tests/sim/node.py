"""A simulated node: a metadata member, a broker's life, the controller's part, partitions.

The twin of what ``node/`` does with asyncio: ``metadata``, ``controlling``, ``broker_lifecycle``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.cluster.controller import broker_lifecycle, brokers, partition_election
from kept.cluster.controller.broker_decisions import decide
from kept.cluster.controller.broker_lifecycle import BrokerLifecycle, LifecycleSettings
from kept.cluster.controller.broker_sessions import (
    TIMEOUT,
    BrokerSessions,
    ConnectionLost,
    Decide,
    Decided,
    Elected,
    HeartbeatRequest,
    ImageApplied,
    Probe,
    Probed,
    Resigned,
    SessionSettings,
)
from kept.cluster.controller.brokers import RegisterRequest
from kept.cluster.controller.heartbeats import HeartbeatReply, ReplicaLog
from kept.cluster.controller.partition_election import AlterIsr, unclean_allowed_by
from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.metadata_node import Outcome
from kept.cluster.metadata.records import Endpoint
from kept.cluster.metadata.snapshot import difference
from kept.storage.directory import previous_broker_epoch
from kept.storage.errors import KeptError, NetworkException, NotController
from kept.storage.types import TopicPartition
from tests.sim.directories import Directories
from tests.sim.machine import Exited, Machine
from tests.sim.network import NO_ANSWER, REFUSED
from tests.sim.raft_cluster import TICK_MS as RAFT_TICK_MS
from tests.sim.raft_cluster import RaftApp
from tests.sim.replicas import UPKEEP_MS, Reply

if TYPE_CHECKING:
    from tests.sim.cluster import ClusterHistory

LIFECYCLE = LifecycleSettings(
    heartbeat_interval_ms=500, session_timeout_ms=3000, stall_ms=800, answer_timeout_ms=1000
)
SESSIONS = SessionSettings(
    session_timeout_ms=3000, heartbeat_interval_ms=500, stall_ms=800, clear_elr_after_ms=1500,
    imbalance_check_ms=5000, decision_timeout_ms=5000,
)  # fmt: skip
TICK_MS = 100
CONFIRM_MS, LOOK_MS = 2000, 20
Decision = tuple[Callable[[Image], Sequence[Any]], Callable[[KeptError | None], None]]


class SimNode(RaftApp):
    """One process of a cluster node."""

    history: ClusterHistory  # type: ignore[assignment]

    def __init__(self, machine: Machine, history: ClusterHistory) -> None:
        super().__init__(machine, history)  # type: ignore[arg-type]
        self.directories = Directories(machine, history.log_dirs)
        random = Random(machine.world.between(0, 1 << 30))
        self.incarnation = UUID(int=random.getrandbits(128))
        registration = RegisterRequest(
            machine.node_id, self.incarnation, (Endpoint("SIM", "PLAINTEXT", "sim", 1),), None,
            previous_broker_epoch(self.directories.all), self.directories.ids,
        )  # fmt: skip
        self.lifecycle = BrokerLifecycle(registration, LIFECYCLE)
        self.sessions = BrokerSessions(SESSIONS)
        self.replicas = history.replicas_of(self)
        self.decisions: deque[Decision] = deque()
        self.deciding: tuple[int, Callable[[KeptError | None], None]] | None = None
        self.controller: int | None = None
        self.elected_at = 0
        self.acting = False
        self.awake_ms = self.now_ms()
        self.barrier: object | None = None
        self.deposed = False
        """Since a gap, as long as the sessions have not heard of it."""
        self.behind_barrier: list[tuple[int, Any, Reply]] = []
        self.confirms: dict[object, Reply] = {}
        self.marked_epoch = -1

    @property
    def image(self) -> Image:
        return self.member.image

    def started(self) -> None:
        super().started()
        self.begin()
        self.machine.after_ms(TICK_MS, self.slow_tick)
        self.machine.after_ms(UPKEEP_MS, self.keep)

    def begin(self) -> None:
        """Act on the image, once it is as new as what was acted on before (``node/membership``)."""
        if self.acting or not self.member.recovered or not self.image.index:
            return
        self.acting = True
        image = self.image
        self.replicas.remove_strays(image)
        self.act(image, difference(Image(), image))
        self.live(broker_lifecycle.Start())
        self.live(broker_lifecycle.LogsOpened())

    def now_ms(self) -> int:
        return self.machine.monotonic_ms

    def notice_gap(self) -> None:
        """As ``node/controlling``: after a gap a controller makes sure that it still is one."""
        if self.now_ms() - self.awake_ms > SESSIONS.stall_ms:
            self.barrier = object()
            try:
                self.member.read_barrier(self.barrier)
            except NotController:  # and the outcome that says so is still to come
                self.barrier, self.deposed = None, True
        self.awake_ms = self.now_ms()

    def pass_barrier(self, outcome: Outcome) -> None:
        """Heartbeats that waited are answered, or refused."""
        for token, index in outcome.reads:
            if token in self.confirms:
                self.confirms.pop(token)(index)
        for token in outcome.lost_reads:
            if token in self.confirms:
                self.confirms.pop(token)(NotController("no more", -1))
        if self.barrier not in {*(token for token, _ in outcome.reads), *outcome.lost_reads}:
            return
        self.barrier = None
        waiting, self.behind_barrier = self.behind_barrier, []
        for source, request, reply in waiting:
            self.serve_heartbeat(source, request, reply)

    def slow_tick(self) -> None:
        if self.sessions.active:
            self.notice_gap()
        else:
            self.awake_ms = self.now_ms()
        self.perform_life(self.lifecycle.tick(self.now_ms()))
        if self.sessions.active:
            self.perform(self.sessions.tick(self.now_ms()))
        self.machine.after_ms(TICK_MS, self.slow_tick)

    def keep(self) -> None:
        self.replicas.upkeep()
        self.machine.after_ms(UPKEEP_MS, self.keep)

    def own_tick(self) -> None:
        """Whoever acts on leadership looks at the clock first (see ``may_serve``)."""

    def may_serve(self) -> bool:
        return self.now_ms() < self.lifecycle.valid_until_ms

    def confirm(self, then: Callable[[bool], None]) -> None:
        """Prove that this node knows who leads (``node/confirming``)."""
        until_ms = self.now_ms() + CONFIRM_MS

        def wait(index: int) -> None:
            if self.image.index >= index or self.now_ms() > until_ms:
                then(self.image.index >= index)
            else:
                self.machine.after_ms(LOOK_MS, wait, index)

        def answered(answer: Any) -> None:
            if isinstance(answer, int):
                wait(answer)
            else:
                then(False)

        self.ask_controller("confirm", None, answered)

    def die_of(self, error: Exception) -> None:
        raise Exited(str(error))

    # The metadata.

    def handle(self, outcome: Outcome) -> None:
        """What the member brought: decisions end, the image moves."""
        for index in outcome.lost_proposals:
            if self.deciding is not None and self.deciding[0] == index:
                self.decided(NotController("lost", -1))
        acting = self.acting
        for image, delta, index in outcome.applied:
            if acting:
                self.act(image, delta)
            else:
                self.history.checks.metadata(image.index, image, delta)
            if self.deciding is not None and self.deciding[0] <= index:
                self.decided(None)
        self.begin()
        if outcome.applied or outcome.role_changed:
            self.moved()
        self.pass_barrier(outcome)

    def act(self, image: Image, delta: Delta) -> None:
        self.history.checks.metadata(image.index, image, delta)
        self.replicas.apply(image, delta)
        self.live(broker_lifecycle.ImageApplied(image))

    def moved(self) -> None:
        """Role or image changed."""
        leads = self.member.controller_ready
        if leads and not self.sessions.active:
            self.machine.world.note(
                self.machine.name, f"is the controller, term {self.member.term}"
            )
            self.deposed = False
            before = self.member.predecessor.items()
            silent_ms = {node_id: ticks * RAFT_TICK_MS for node_id, ticks in before}
            self.step_sessions(Elected(self.image, silent_ms))
        elif not leads and self.sessions.active:
            self.machine.world.note(self.machine.name, "is the controller no more")
            self.step_sessions(Resigned())
            if self.deciding is not None:
                self.decided(NotController("no more", -1))
            self.decide_next()
        elif self.sessions.active:
            self.step_sessions(ImageApplied(self.image))
        leader = self.member.leader_id
        if leader != self.controller:
            self.controller = leader
            if leader is not None:
                self.live(broker_lifecycle.ControllerChanged())

    # Decisions.

    def decide(
        self, change: Callable[[Image], Sequence[Any]], then: Callable[[KeptError | None], None]
    ) -> None:
        self.decisions.append((change, then))
        self.decide_next()

    def decided(self, error: KeptError | None) -> None:
        assert self.deciding is not None
        _, then = self.deciding
        self.deciding = None
        then(error)
        self.machine.after_us(0, self.decide_next)

    def decide_next(self) -> None:
        while self.deciding is None and self.decisions:
            change, then = self.decisions.popleft()
            try:
                if not self.member.controller_ready:
                    raise NotController("not the controller", -1)
                self.history.decides(self)
                records = change(self.image)
                if records:
                    index = self.member.propose(list(records))
                    self.deciding = (index, then)
                    self.machine.world.note(
                        self.machine.name, f"decides entry {index}:", tuple(records)
                    )
                    self.pump()
                    continue
            except KeptError as error:
                then(error)
                continue
            then(None)

    def step_sessions(self, event: Any) -> HeartbeatReply | None:
        return self.perform(self.sessions.step(event, self.now_ms()))

    def perform(self, effects: Sequence[Any]) -> HeartbeatReply | None:
        answer = None
        for effect in effects:
            if isinstance(effect, Probe):
                self.probe_broker(effect)
            elif isinstance(effect, Decide):
                self.decide_for_sessions(effect)
            else:
                answer = effect
        return answer

    def probe_broker(self, effect: Probe) -> None:
        def answered(answer: Any) -> None:
            found = None if answer is REFUSED else TIMEOUT if answer is NO_ANSWER else answer
            self.step_sessions(Probed(effect.broker_id, found, effect.broker_epoch))

        self.machine.network.call(self.node_id, effect.broker_id, "probe", None, answered, 400)

    def decide_for_sessions(self, effect: Decide) -> None:
        def then(error: KeptError | None) -> None:
            if self.sessions.active:
                self.step_sessions(Decided(decision, error))

        decision = effect.decision
        if decision.name in ("fence", "recover", "shut-down"):
            self.machine.world.note(
                self.machine.name, f"will {decision.name} n{decision.broker_id}: {effect.reason}"
            )
        self.decide(lambda image: decide(image, self.sessions.due(decision)), then)

    def peer_down(self, node_id: int) -> None:
        super().peer_down(node_id)
        if self.sessions.active:
            self.step_sessions(ConnectionLost(node_id))

    # Calls.

    def ask_controller(self, method: str, request: Any, answered: Callable[[Any], None]) -> None:
        leader = self.member.leader_id

        def hear(answer: Any) -> None:
            if answer is NO_ANSWER or answer is REFUSED:
                answer = NetworkException(f"{method}: {answer!r}")
            answered(answer)

        if leader is None:
            self.machine.after_ms(50, answered, NetworkException("no controller is known"))
        else:
            self.machine.network.call(self.node_id, leader, method, request, hear, 1000)

    def serve_probe(self, sender: int, request: object, reply: Reply) -> None:
        reply(self.incarnation)

    def serve_register(self, source: int, request: RegisterRequest, reply: Reply) -> None:
        if not self.sessions.active:
            reply(NotController("no", -1))
            return

        def change(image: Image) -> Sequence[Any]:
            live = self.sessions.is_live(request.broker_id, self.now_ms())
            allowed = unclean_allowed_by(image, False)
            return brokers.register_broker(
                image, request, session_live=live, unclean_allowed=allowed
            )

        def then(error: KeptError | None) -> None:
            reply(error or self.image.brokers[request.broker_id].broker_epoch)
            if error is None:
                self.history.registered(request.broker_id)

        self.decide(change, then)

    def serve_heartbeat(self, source: int, request: Any, reply: Reply) -> None:
        if not self.sessions.active:
            reply(NotController("no", -1))
            return
        self.notice_gap()
        if self.deposed:
            reply(NotController("no more", -1))
            return
        if self.barrier is not None:
            self.behind_barrier.append((source, request, reply))
            self.pump()
            return
        effect, logs = request
        try:
            answer = self.step_sessions(
                HeartbeatRequest(
                    effect.broker_id,
                    effect.broker_epoch,
                    effect.applied_index,
                    effect.wants_fence,
                    effect.wants_shutdown,
                    tuple(logs),
                )
            )
        except KeptError as error:
            reply(error)
            return
        reply(answer)

    def serve_confirm(self, source: int, request: None, reply: Reply) -> None:
        token = object()
        try:
            self.member.read_barrier(token)
        except NotController as error:
            reply(error)
            return
        self.confirms[token] = reply
        self.pump()

    def serve_alter_isrs(self, source: int, request: Any, reply: Reply) -> None:
        if not self.sessions.active:
            reply(NotController("no", -1))
            return
        items, broker_epoch = request
        errors: dict[Any, KeptError] = {}

        def change(image: Image) -> Sequence[Any]:
            nonlocal errors
            asked = [
                AlterIsr(
                    item.topic_id, item.partition, source, broker_epoch, item.leader_epoch,
                    item.partition_epoch, item.isr, item.base_published,
                )
                for item in items
            ]  # fmt: skip
            records, errors = partition_election.alter_isrs(image, asked)
            return records

        self.decide(change, lambda error: reply(error or errors))

    def serve_create(self, source: int, change: Callable[[Image], Any], reply: Reply) -> None:
        self.decide(change, reply)

    def serve_change(self, source: int, change: Callable[[Image], Any], reply: Reply) -> None:
        """An admin request. (The controller's node gets it: forwarding is not simulated.)"""
        self.decide(change, reply)

    def serve_delete_records(self, source: int, request: Any, reply: Reply) -> None:
        self.replicas.serve_delete_records(source, request, reply)

    def serve_metadata(self, source: int, request: object, reply: Reply) -> None:
        leaders: dict[TopicPartition, int] = {}
        for topic in self.image.topics.values():
            for state in topic.partitions:
                if state.leader >= 0:
                    leaders[TopicPartition(topic.name, state.partition)] = state.leader
        reply(leaders)

    def serve_fetch(self, source: int, request: Any, reply: Reply) -> None:
        self.replicas.serve_fetch(source, request, reply)

    def serve_offsets(self, source: int, request: Any, reply: Reply) -> None:
        self.replicas.serve_offsets(source, request, reply)

    def serve_produce(self, source: int, request: Any, reply: Reply) -> None:
        self.replicas.serve_produce(source, request, reply)

    def serve_read(self, source: int, request: Any, reply: Reply) -> None:
        self.replicas.serve_read(source, request, reply)

    # The broker's life.

    def live(self, event: broker_lifecycle.Event) -> None:
        self.perform_life(self.lifecycle.step(event, self.now_ms()))

    def perform_life(self, effects: Sequence[broker_lifecycle.Effect]) -> None:
        for effect in effects:
            match effect:
                case broker_lifecycle.Register():
                    self.ask_controller("register", effect.registration, self.registered)
                case broker_lifecycle.Heartbeat():
                    logs = self.logs(effect.report)
                    self.ask_controller(
                        "heartbeat", (effect, logs),
                        partial(self.heartbeat_answered, effect.number),
                    )  # fmt: skip
                case broker_lifecycle.StopServing():
                    self.machine.world.note(self.machine.name, f"serves nobody: {effect.reason}")
                    self.replicas.suspend()
                case broker_lifecycle.ResumeServing():
                    self.replicas.resume(self.lifecycle.image)
                case broker_lifecycle.Exit():
                    self.leave(effect)
        epoch = self.lifecycle.broker_epoch
        if epoch not in (-1, self.marked_epoch):
            self.marked_epoch = epoch
            self.machine.after_us(self.machine.disk_us[0], self.mark_running, epoch)
        if self.history.assertions:
            self.lifecycle.check_invariants()

    def mark_running(self, epoch: int) -> None:
        """As ``node/log_directories``."""
        for directory in self.directories.online:
            self.replicas.attempt(partial(directory.mark_running, epoch))

    def registered(self, answer: Any) -> None:
        self.machine.world.note(self.machine.name, "hears of its registration:", repr(answer))
        if isinstance(answer, KeptError):
            self.live(broker_lifecycle.RegistrationFailed(answer))
        else:
            self.live(broker_lifecycle.Registered(answer))

    def heartbeat_answered(self, number: int, answer: Any) -> None:
        if isinstance(answer, HeartbeatReply):
            self.live(broker_lifecycle.HeartbeatAnswered(number, answer))
        else:
            self.live(broker_lifecycle.HeartbeatFailed(number, answer))

    def logs(self, report: tuple[Any, ...]) -> list[ReplicaLog]:
        found = []
        for topic_id, number in report:
            state = self.image.partition(topic_id, number)
            topic = self.image.topics_by_id.get(topic_id)
            if state is None or topic is None:
                continue
            partition = self.replicas.partitions.get(TopicPartition(topic.name, number))
            if partition is not None:
                found.append(
                    ReplicaLog(
                        topic_id, number, state.leader_epoch, partition.latest_epoch,
                        partition.log_end_offset,
                    )
                )  # fmt: skip
        return found

    def shut_down(self) -> None:
        """TERM."""
        self.live(broker_lifecycle.ShutDown())

    def leave(self, effect: broker_lifecycle.Exit) -> None:
        if effect.failed:
            self.history.checks.gives_up(self.node_id, effect.reason)
        self.hand_over(effect.reason)

    def end(self, reason: str) -> None:
        self.replicas.close()
        self.directories.close(self.lifecycle.broker_epoch)
        raise Exited(reason)
