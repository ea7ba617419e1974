"""Stage A: the metadata's Raft alone. Members on simulated disks, clients that propose and read.

A history: three or five voters and some observers; faults for a while, then everything is healed,
and within :data:`PATIENCE_US` there must be a leader, a new proposal committed everywhere, and all
members at the same image, which holds every proposal that was acknowledged, once.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from uuid import UUID

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_files import DiskWork
from kept.cluster.metadata.metadata_node import MetadataNode, Outcome
from kept.cluster.metadata.records import ConfigRecord, ResourceType
from kept.cluster.metadata.snapshot import check_install
from kept.cluster.metadata.voters import Voter
from kept.cluster.raft.messages import (
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    Message,
    VoteReply,
)
from kept.cluster.raft.ready import RaftSettings, Role
from kept.storage.errors import KeptError, MachineError, NotController
from tests.sim.faults import KINDS, Nemesis, Profile
from tests.sim.machine import Exited, Machine
from tests.sim.network import REFUSED, Network
from tests.sim.raft_checks import RaftChecks, View
from tests.sim.raft_split import FAULTS_S, Split, voter
from tests.sim.world import MS, SECOND, Violation, World

TICK_MS = 50
PATIENCE_US = 40 * SECOND
HAND_OVER_US = 3 * SECOND
HAND_OVER_LOOK_MS = 10
SETTINGS = RaftSettings()


class RaftApp:
    """One process: a member, its ticks, its one outstanding work for the disk.

    A pump of its own in the place of ``MetadataLog``, which the other stages run: here messages are
    lost, duplicated and reordered one by one, as no connection does it.
    """

    def __init__(self, machine: Machine, history: RaftHistory) -> None:
        self.machine = machine
        self.history = history
        self.node_id = machine.node_id
        self.process = machine.generation
        seed = machine.world.between(0, 1 << 30)
        self.random = Random(seed)
        self.member = MetadataNode.open(
            "/meta",
            machine.disk,
            node_id=self.node_id,
            directory_id=UUID(int=self.node_id + 1),
            voters=history.voters,
            observer=self.node_id not in history.voter_ids,
            random=self.random.randrange,
            raft=SETTINGS,
            snapshot_after_bytes=history.snapshot_after_bytes,
        )
        self.working = False
        self.waiting: dict[int, str] = {}
        self.reads: dict[object, int] = {}

    def started(self) -> None:
        self.history.judge(self)
        self.machine.after_ms(self.random.randrange(TICK_MS) + 1, self.tick)

    def tick(self) -> None:
        self.member.tick()
        self.pump()
        self.machine.after_ms(TICK_MS, self.tick)

    def receive(self, sender: int, message: object) -> None:
        assert isinstance(message, Message)
        if not quiet(message):
            self.machine.world.note(self.machine.name, f"<- n{sender}", message)
        if isinstance(message, InstallSnapshot) and check_install(message):
            return  # as ``node/metadata`` does
        self.member.receive(message)
        self.pump()

    def peer_down(self, node_id: int) -> None:
        self.machine.world.note(self.machine.name, f"hears that n{node_id} is down")
        self.member.peer_down(node_id)
        self.pump()

    def propose(self, name: str) -> None:
        """Raises NotController, or another KeptError when it is refused."""
        record = ConfigRecord(ResourceType.BROKER, "", name, name)
        index = self.member.propose([record])
        self.machine.world.note(self.machine.name, f"proposes {name} as entry {index}")
        self.waiting[index] = name
        self.pump()

    def read(self, token: object) -> None:
        """A linearizable read: whatever is acknowledged now must be seen."""
        self.reads[token] = self.history.acknowledged_to
        self.member.read_barrier(token)
        self.pump()

    def change_voters_safely(self, voters: tuple[Voter, ...]) -> None:
        """An operator's change of who votes."""
        try:
            index = self.member.change_voters(voters)
        except KeptError as error:
            self.machine.world.note(self.machine.name, f"refuses other voters: {error}")
            return
        ids = [voter.node_id for voter in voters]
        self.machine.world.note(self.machine.name, f"proposes voters {ids} as entry {index}")
        self.machine.world.counts["voters changed"] += 1
        self.pump()

    def transfer_safely(self, to: int) -> None:
        """An operator hands leadership on."""
        try:
            self.member.transfer(to)
        except KeptError:
            return
        self.machine.world.counts["leaderships handed over"] += 1
        self.pump()

    def propose_safely(self, name: str) -> None:
        """A client's proposal to whoever it may be."""
        try:
            self.propose(name)
        except NotController:
            self.machine.world.note(self.machine.name, f"is no controller: {name} refused")
        except KeptError as error:
            self.machine.world.note(self.machine.name, f"refuses {name}: {error}")

    def read_safely(self, token: object) -> None:
        """A client's read from whoever it may be."""
        try:
            self.read(token)
        except KeptError:
            self.reads.pop(token, None)

    def pump(self) -> None:
        """What may leave leaves; one work is with the disk at a time."""
        self.history.judge(self)
        self.send(self.member.drain_messages())
        for node_id in sorted(self.member.drain_probes()):
            self.probe(node_id)
        if self.working:
            return
        work = self.member.work()
        if work is not None:
            self.working = True
            self.machine.after_us(self.disk_us(), self.run_work, work)

    def disk_us(self) -> int:
        return self.machine.world.between(*self.machine.disk_us) // 2

    def send(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            self.history.said(self, message)
            self.machine.network.send(self.node_id, message.to, message)

    def probe(self, node_id: int) -> None:
        """Connect to it: only a refusal is evidence."""

        def answered(answer: object) -> None:
            if answer is REFUSED:
                self.peer_down(node_id)

        self.machine.network.call(self.node_id, node_id, "probe", None, answered, 500)

    def serve_probe(self, sender: int, request: object, reply: Callable[[object], None]) -> None:
        reply("here")

    def run_work(self, work: DiskWork) -> None:
        try:
            work.run()
        except MachineError as error:
            self.machine.world.note(self.machine.name, f"cannot write: {error}")
            self.member.disk_failed()
            self.machine.world.counts["disk errors"] += 1
            self.send(self.member.drain_messages())
            self.machine.after_ms(200, self.run_work, work)
            return
        self.machine.after_us(self.disk_us(), self.work_done, work)

    def work_done(self, work: DiskWork) -> None:
        self.working = False
        outcome = self.member.done(work)
        if self.member.refusal is not None:
            raise Violation("refusal", f"n{self.node_id}: {self.member.refusal}")
        self.history.judge(self)
        self.history.outcome(self, outcome)
        self.send(outcome.messages)
        self.pump()

    def shut_down(self) -> None:
        """TERM."""
        self.hand_over("told to end")

    def hand_over(self, reason: str) -> None:
        """Let another one lead, as ``ClusterLink.leave`` does, then end."""
        if self.member.role is Role.LEADER:
            self.machine.world.counts["controllers that handed over"] += 1
        self._hand_over(reason, self.machine.world.now_us + HAND_OVER_US)

    def _hand_over(self, reason: str, give_up_us: int) -> None:
        if self.machine.world.now_us < give_up_us and self.member.hand_over():
            self.pump()
            self.machine.after_ms(HAND_OVER_LOOK_MS, self._hand_over, reason, give_up_us)
        else:
            self.end(reason)

    def end(self, reason: str) -> None:
        """The process is over."""
        raise Exited(reason)


def quiet(message: Message) -> bool:
    """A heartbeat or its answer: the trace leaves them out."""
    if isinstance(message, AppendEntries):
        return not message.entries
    return isinstance(message, AppendEntriesReply) and message.accepted


class RaftHistory:
    """One seed; see the module. ``kinds``: the faults that may be drawn. ``changes``: how much of
    what clients do is an operator's, who then changes voters twice in a row, too, and as soon as
    somebody is elected; as drawn if None. ``splits``: that operator does what
    :mod:`tests.sim.raft_split` says, and nothing else.
    """

    stage = "raft"

    def __init__(
        self,
        seed: int,
        *,
        tracing: bool = False,
        kinds: tuple[str, ...] = KINDS,
        assertions: bool = True,
        changes: float | None = None,
        splits: bool = False,
    ) -> None:
        self.world = world = World(seed, tracing=tracing)
        self.network = Network(world)
        self.raft = RaftChecks()
        self.assertions = assertions
        count = world.random.choice((3, 3, 5))
        self.observers = world.random.choice((0, 1, 2))
        self.voter_ids = frozenset(range(count))
        self.voters = tuple(map(voter, range(count)))
        self.snapshot_after_bytes = world.random.choice((300, 2_000, 1 << 20))
        self.machines = [
            Machine(world, self.network, i, self.boot) for i in range(count + self.observers)
        ]
        self.fault_us = world.between(3, 15) * SECOND
        self.profile = Profile.draw(world, kinds)
        self.nemesis = Nemesis(world, self.network, self.machines, self.profile, self.leader)
        self.acknowledged: dict[str, int] = {}
        self.acknowledged_to = 0
        self.proposed = 0
        self.reads_done = 0
        self.lies = world.chance(0.3)
        self.operated = world.chance(0.4) or changes is not None
        self.changes, self.in_a_row = (0.05, 0.0) if changes is None else (changes, 0.5)
        self.elected: set[int] = set()
        """Terms in which somebody leads."""
        self.duels = self.stage == "raft" and world.extra.random() < 0.2
        self.split: Split | None = None
        if splits:
            self.split, self.operated, self.duels = Split(self), False, False
            self.fault_us = FAULTS_S * SECOND
        for machine in self.machines:
            machine.on_death.append(self._died)

    def __str__(self) -> str:
        profile = self.profile
        return (
            f"{len(self.voter_ids)} voters, {self.observers} observers, snapshots after "
            f"{self.snapshot_after_bytes} bytes, faults for {self.fault_us // SECOND} s: "
            f"{', '.join(sorted(profile.kinds))}, every {profile.pace_ms} ms"
        )

    def boot(self, machine: Machine) -> RaftApp:
        """A process starts."""
        return RaftApp(machine, self)

    # The run.

    def run(self) -> None:
        """Raises Violation."""
        world = self.world
        world.note("history", str(self))
        for machine in self.machines:
            world.after(world.between(0, 300) * MS, machine.start)
        world.after(world.between(100, 3000) * MS, self.nemesis.start)
        world.after(500 * MS, self._client)
        if self.duels:
            world.after(1000 * MS, self._duel)
        if self.split is not None:
            world.after(1000 * MS, self.split.prepare)
        world.run(self.fault_us)
        self.nemesis.heal()
        self._live()

    def _live(self) -> None:
        world = self.world
        world.run(world.now_us + 3 * SECOND)
        limit = world.now_us + PATIENCE_US
        last = f"last-{self.proposed}"
        while not self._agreed(last):
            if world.now_us >= limit:
                raise Violation("liveness", f"healed, and not agreed on {last}: {self._state()}")
            leader = self.leader()
            if leader is not None and last not in self.acknowledged:
                app = leader.app
                assert isinstance(app, RaftApp)
                if last not in app.waiting.values():
                    leader.deliver("propose_safely", last)
            world.run(world.now_us + 500 * MS)
        self._finish()

    def _agreed(self, last: str) -> bool:
        images = [app.member.image for app in self.apps()]
        return (
            len(images) == len(self.machines)
            and all(last in image.config(ResourceType.BROKER, "") for image in images)
            and len({image.index for image in images}) == 1
        )

    def _state(self) -> str:
        return "; ".join(
            f"n{app.node_id} {app.member.role.value} term {app.member.term} "
            f"commit {app.member.commit_index} image {app.member.image.index}"
            for app in self.apps()
        )

    def _finish(self) -> None:
        images: list[Image] = [app.member.image for app in self.apps()]
        first = images[0]
        for image in images[1:]:
            if image != first:
                raise Violation("state-machine-safety", "the images differ at the same index")
        held = first.config(ResourceType.BROKER, "")
        lost = [name for name in self.acknowledged if name not in held]
        if lost:
            raise Violation("committed-lost", f"acknowledged and gone: {lost}")

    def apps(self) -> list[RaftApp]:
        """The living processes."""
        return [m.app for m in self.machines if isinstance(m.app, RaftApp)]

    def leader(self) -> Machine | None:
        """Who leads the newest term."""
        leading = [app for app in self.apps() if app.member.role is Role.LEADER]
        return max(leading, key=lambda app: app.member.term).machine if leading else None

    def _died(self, machine: Machine, kind: str) -> None:
        """Whoever had a connection hears of a killed process; of a dark machine nobody does."""
        self.world.mark("died", machine.node_id, kind)
        if kind == "power":
            return
        for other in self.machines:
            if other is not machine and self.network.passes(machine.node_id, other.node_id):
                delay = self.world.between(1, 20) * MS
                self.world.after(delay, other.deliver, "peer_down", machine.node_id)

    # The client.

    def _client(self) -> None:
        world = self.world
        if not self.nemesis.healed or len(self.acknowledged) < 1:
            world.after(world.between(10, 250) * MS, self._client)
        machine = world.random.choice(self.machines)
        if world.chance(0.6):
            machine = self.leader() or machine
        if self.lies and world.chance(0.02):
            liar = world.random.choice(self.machines)
            machine.deliver("peer_down", liar.node_id)
        elif self.operated and world.chance(self.changes) and not self.nemesis.healed:
            self._operate()
        elif world.chance(0.2):
            self.proposed += 1
            machine.deliver("read_safely", ("read", self.proposed))
        else:
            self.proposed += 1
            machine.deliver("propose_safely", f"p{self.proposed}")

    def _operate(self, elected: Machine | None = None) -> None:
        """A voter joins or leaves, or leadership is handed over."""
        world, leader = self.world, elected or self.leader()
        if leader is None or not isinstance(leader.app, RaftApp):
            return
        voters = leader.app.member.voters
        if elected is None and world.chance(0.3):
            leader.deliver("transfer_safely", world.random.choice(voters).node_id)
            return
        chosen = world.random.choice(self.machines).node_id
        left = tuple(voter for voter in voters if voter.node_id != chosen)
        if len(left) == len(voters):
            left = (*voters, voter(chosen))
        if len(left) >= 2:
            leader.deliver("change_voters_safely", left)
        if self.in_a_row and world.extra.random() < self.in_a_row:
            world.after(world.extra.randint(0, 20) * MS, self._operate)

    def _was_elected(self, app: RaftApp) -> None:
        """An operator finds a new leader before it has committed anything."""
        self.elected.add(app.member.term)
        if self.split is not None:
            self.split.elected(app.machine)
        if self.in_a_row and self.world.extra.random() < self.in_a_row:
            self.world.after(self.world.extra.randint(0, 2) * MS, self._operate, app.machine)

    def _duel(self) -> None:
        """Leadership is handed to two, one of whom the other two don't hear: both stand for the
        same term, and whoever votes for one may die before the other asks (:meth:`said`).
        """
        world, leader = self.world, self.leader()
        if self.nemesis.healed:
            return
        world.after(world.extra.randint(200, 900) * MS, self._duel)
        if leader is None or not isinstance(leader.app, RaftApp):
            return
        others = [v.node_id for v in leader.app.member.voters if v.node_id != leader.node_id]
        if len(others) < 2:
            return
        one, two = world.extra.sample(others, 2)
        unheard = {(one, leader.node_id), (one, two)} - self.network.cuts
        self.network.cuts |= unheard
        world.after(60 * MS, self.network.cuts.difference_update, unheard)
        world.counts["leaderships handed to two"] += 1
        leader.deliver("transfer_safely", one)
        delay = world.extra.randint(3, 20) * MS
        world.after(delay, leader.deliver, "transfer_safely", two)

    def _voted(self, machine: Machine) -> None:
        """A voter dies with its vote on the way, and is soon back."""
        extra = self.world.extra
        if extra.random() < 0.5:
            self.world.counts["voters that died"] += 1
            self.world.after(extra.randint(0, 1000), machine.kill)
            self.world.after(extra.randint(2, 8) * MS, machine.start)

    def counts(self) -> dict[str, int]:
        """What happened, for the totals."""
        return dict(self.world.counts) | {
            "proposals acknowledged": len(self.acknowledged),
            "reads": self.reads_done,
            "terms": len(self.raft.leaders),
        }

    def close(self) -> None:
        """Nothing to give back."""

    # What is judged.

    def judge(self, app: RaftApp) -> None:
        """After every step of a member."""
        member = app.member
        if self.assertions:
            member.check_invariants()
        if member.role is Role.LEADER and member.term not in self.elected:
            self._was_elected(app)
        self.raft.look(
            app.node_id,
            app.process,
            term=member.term,
            leads=member.role is Role.LEADER,
            commit=member.commit_index,
            log=View(member.core.log),
        )

    def said(self, app: RaftApp, message: Message) -> None:
        """A message leaves: what it promises holds for ever."""
        self.raft.said(app.node_id, message)
        if self.duels and isinstance(message, VoteReply) and message.granted:
            self._voted(app.machine)

    def outcome(self, app: RaftApp, outcome: Outcome) -> None:
        """What a member says and what it applied."""
        world = self.world
        for index in outcome.lost_proposals:
            app.waiting.pop(index, None)
        for image, _, index in outcome.applied:
            world.mark("applied", app.node_id, index)
            held = image.config(ResourceType.BROKER, "")
            self.raft.applied(app.node_id, app.process, index, sorted(held))
            name = app.waiting.pop(index, None)
            if name is None:
                continue
            if name not in held:
                raise Violation("committed-lost", f"{name} acknowledged at {index}, not in there")
            world.note(app.machine.name, f"acknowledges {name}, entry {index}")
            self.acknowledged[name] = index
            self.acknowledged_to = max(self.acknowledged_to, index)
        for token, index in outcome.reads:
            asked = app.reads.pop(token, 0)
            self.reads_done += 1
            if index < asked:
                raise Violation("stale-read", f"n{app.node_id}: {index}, {asked} was acknowledged")
