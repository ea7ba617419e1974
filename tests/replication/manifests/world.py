"""A partition of a few replicas, its controller, and all that can happen, one step at a time.

Every public method that returns a bool is a step: False when it cannot happen now. Messages are
delayed and lost, replicas learn of the image when they do, jobs stop half way, processes die, disks
are wiped. :mod:`tests.replication.manifests.checks` looks on after each step.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kept.replication import fetch_messages
from kept.replication import follower as fol
from kept.replication import manifests_events as ev
from kept.replication.events import (
    BecameLeader,
    EligibleBrokersChanged,
    FollowerFetched,
    IsrChanged,
    IsrProposalRejected,
)
from kept.replication.fetch_messages import OffsetsResponse, PartitionResponse
from kept.replication.manifests import ManifestCore, ManifestRole
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition_core import PartitionCore
from kept.storage.errors import KeptError
from kept.storage.types import Generation
from tests.replication.manifests import logs
from tests.replication.manifests.logs import Body, Committed, Rec, Violation
from tests.replication.manifests.machine import TP, Machine, PassJob


class Image(Struct, frozen=True):
    """What the controller says; ``version`` counts all changes, ``partition_epoch`` the ISR's."""

    leader: int
    isr: tuple[int, ...]
    brokers: tuple[int, ...]
    """Broker epochs; 0 for one that is fenced."""
    epoch: int = 1
    partition_epoch: int = 1
    version: int = 0
    unclean: bool = False


class NumberOnly(Generation):
    """The planted bug: two leaders' generations of one number are taken for the same."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generation) and self.number == other.number

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.number)


class World:
    """A partition of a few replicas, and its controller. ``bugs`` name mistakes of the shell, for
    the tests of the checks.

    ``compacts``: the topic's policy, which anybody may change; ``compacted``: it was so once.
    """

    compacts = compacted = True

    def __init__(
        self,
        replicas: int = 3,
        *,
        manifest_core: type = ManifestCore,
        leader_core: type = PartitionCore,
        machine: type = Machine,
        bugs: frozenset[str] = frozenset(),
        unclean: bool = False,
        isr: tuple[int, ...] | None = None,
    ) -> None:
        self.manifest_core, self.leader_core, self.bugs = manifest_core, leader_core, bugs
        self.may_be_unclean = unclean
        self.seen: dict[str, int] = {}
        self.ever_unclean = -1
        """Leader epoch of the last unclean election."""
        self.ever_torn = False
        self.now_ms = 0
        self.replicas = tuple(range(replicas))
        members = self.replicas if isr is None else isr
        self.image = Image(0, members, (1,) * replicas)
        self.committed = Committed()
        self.machines = [machine(self, node) for node in self.replicas]

    def bug(self, name: str) -> bool:
        return name in self.bugs

    def saw(self, what: str) -> None:
        """For the tests that every history is not the same: what was come across."""
        self.seen[what] = self.seen.get(what, 0) + 1

    def generation(self, epoch: int, number: int) -> Generation:
        return (NumberOnly if self.bug("number-only") else Generation)(epoch, number)

    # The controller.

    def change(self, *, isr_too: bool = True, **fields: Any) -> None:
        image = self.image
        self.image = replace(
            image,
            version=image.version + 1,
            partition_epoch=image.partition_epoch + isr_too,
            **fields,
        )

    def elect(self, node: int) -> bool:
        if node not in self.image.isr or not self.machines[node].up:
            return False
        self.change(leader=node, epoch=self.image.epoch + 1)
        if self.bug("forget-unclean"):
            self.change(unclean=False)
        return True

    def elect_unclean(self, node: int) -> bool:
        live = [member for member in self.image.isr if self.machines[member].up]
        if not self.may_be_unclean or live or not self.machines[node].up:
            return False
        self.change(leader=node, epoch=self.image.epoch + 1, isr=(node,), unclean=True)
        self.ever_unclean = self.image.epoch
        self.committed = Committed()
        return True

    def fence(self, node: int) -> bool:
        """A dead member leaves the ISR, unless it is the last."""
        image = self.image
        if self.machines[node].up or node not in image.isr or image.isr == (node,):
            return False
        self.change(isr=tuple(member for member in image.isr if member != node))
        return True

    def decide(self, node: int) -> bool:
        """What a leader asks for: compare-and-set
        (``kept.cluster.controller.partition_election.alter_isr``)."""
        machine, image = self.machines[node], self.image
        core = machine.leader
        if not machine.up or core.pending_isr is None:
            return False
        if (core.leader_epoch, core.partition_epoch) != (image.epoch, image.partition_epoch):
            return False  # invalid update version: the image will tell
        new = [member for member in core.pending_isr if member not in image.isr]
        epochs = dict(zip(core.pending_isr, core.pending_epochs, strict=True))
        fits = all(
            self.machines[m].up and epochs[m] in (-1, self.machines[m].broker_epoch) for m in new
        )
        unclean = image.unclean and not core.all_published
        if not fits or (unclean and new):
            machine.step(IsrProposalRejected(image.partition_epoch))
            return True
        self.saw("joined" if new else "left")
        if any(core.followers[member].applied != core.published for member in new):
            self.saw("joined before it had applied")
        self.change(isr=core.pending_isr, unclean=unclean)
        return True

    def learn(self, node: int) -> bool:
        """A replica hears of the newest image."""
        machine, image = self.machines[node], self.image
        if not machine.up or machine.view == image.version:
            return False
        machine.view = image.version
        if image.leader != node:
            return self._follow(machine)
        core = machine.leader
        if core.leading and core.leader_epoch == image.epoch:
            machine.step(IsrChanged(image.partition_epoch, self.replicas, image.isr))
            machine.step(self._leads(machine))
        elif machine.born_epoch == image.epoch:
            return True  # restarted in its own epoch: leads again only in a new one
        else:
            self._lead(machine)
        eligible = frozenset(n for n in self.replicas if image.brokers[n])
        machine.step(EligibleBrokersChanged(eligible, tuple(enumerate(image.brokers))))
        return True

    def _lead(self, machine: Machine) -> None:
        image, end = self.image, machine.log_end_offset
        machine.assign(image.epoch, end)
        machine.follower.step(fol.StoppedFollowing(), self.now_ms)
        if image.unclean:
            self.committed = Committed()
            self.committed.advance(machine.disk.log, end)
        if machine.manifests.held != machine.manifests.applied:
            self.saw("a new leader finishes")
        machine.step(
            BecameLeader(
                image.epoch, image.partition_epoch, self.replicas, image.isr, end, awaits_offer=True
            )
        )
        if self.bug("discard"):
            machine.disk.held, machine.disk.complete = machine.disk.applied, False
            machine.manifests.held = machine.manifests.applied
            machine.manifests.complete = False
        machine.step(self._leads(machine))

    def _leads(self, machine: Machine) -> ev.StartedLeading:
        """As the shell says it: where nothing was ever compacted there is nothing to begin anew."""
        image, core = self.image, machine.manifests
        before = self.compacts if self.bug("forget-policy") else self.compacted
        unclean = image.unclean and (before or core.held is not None or core.lost)
        return ev.StartedLeading(image.epoch, unclean, image.isr == (machine.id,))

    def _follow(self, machine: Machine) -> bool:
        image = self.image
        if machine.leader.leading:
            machine.did(machine.leader.resigned())
        machine.leader.follow(image.epoch, image.partition_epoch, self.replicas, image.isr)
        machine.follower.step(fol.BecameFollower(image.leader, image.epoch), self.now_ms)
        machine.step(ev.StartedFollowing(image.epoch))
        return True

    def alter(self, node: int) -> bool:
        """The topic's policy is changed."""
        self.compacts = not self.compacts
        self.compacted = True
        self.saw("policy changed")
        return True

    # Time and clients.

    def tick(self, passed_ms: int) -> bool:
        self.now_ms += passed_ms
        for machine in self.machines:
            if machine.up and machine.leader.leading:
                machine.did(machine.leader.tick(self.now_ms))
        return True

    def produce(self, node: int, key: int, *, live: bool) -> bool:
        machine = self.machines[node]
        if not machine.up or not machine.leader.leading:
            return False
        end = machine.log_end_offset
        machine.append(Rec(end, machine.leader.leader_epoch, key, live))
        machine.did(machine.leader.appended(end + 1))
        return True

    def committed_by(self, machine: Machine) -> None:
        core = machine.leader
        if core.leading and core.leader_epoch >= self.ever_unclean:
            self.committed.advance(machine.disk.log, core.high_watermark)

    # Replication.

    def followed(self, machine: Machine) -> Machine | None:
        """The leader that it follows, if they talk in one epoch."""
        if not machine.up or machine.follower.leader_id in (fol.NO_LEADER, machine.id):
            return None
        leader = self.machines[machine.follower.leader_id]
        same = leader.leader.leader_epoch == machine.follower.leader_epoch
        return leader if leader.up and leader.leader.leading and same else None

    def fetch(self, node: int) -> bool:
        """One record at most."""
        machine = self.machines[node]
        leader = self.followed(machine)
        if leader is None:
            return False
        if machine.follower.state is fol.FollowerState.LISTING_OFFSETS:
            answer = OffsetsResponse(TP, 0, 0, leader.log_end_offset)
            epoch = machine.follower.leader_epoch
            event = fol.OffsetsReceived(epoch, answer)
            machine.follower_did(machine.follower.step(event, self.now_ms))
            return True
        asked = machine.fetch_request()
        machine.fetched(asked, self._fetch_answer(leader, machine, asked))
        return True

    def _fetch_answer(self, leader: Machine, machine: Machine, asked: Any) -> PartitionResponse:
        epoch, end = asked.last_fetched_epoch, asked.fetch_offset
        if epoch >= 0:
            found = leader.own_end_offset(epoch)
            if found is None:
                return PartitionResponse(TP, fetch_messages.OFFSET_OUT_OF_RANGE)
            if found[0] < epoch or found[1] < end:
                self.saw("divergence")
                return PartitionResponse(TP, diverging=found)
        elif end > leader.log_end_offset:
            return PartitionResponse(TP, fetch_messages.OFFSET_OUT_OF_RANGE)
        try:
            effects = leader.leader.step(
                FollowerFetched(machine.id, end, machine.broker_epoch), self.now_ms
            )
        except KeptError:
            return PartitionResponse(TP, fetch_messages.NOT_LEADER_OR_FOLLOWER)
        leader.did(effects)
        rec = next((rec for rec in leader.disk.log if rec.offset >= end), None)
        if rec is not None and rec.offset > end:
            self.saw("fetched over a gap")
        if self.bug("generation-with-batches") and end == 0 and rec is not None:
            machine.disk.held, machine.disk.applied = leader.disk.held, leader.disk.applied
            machine.manifests.held = leader.manifests.held
            machine.manifests.applied = leader.manifests.applied
        records = b"" if rec is None else leader.encoded(rec)
        return PartitionResponse(TP, 0, leader.high_watermark, records=records)

    def pull(self, node: int) -> bool:
        """A follower sends a request."""
        machine = self.machines[node]
        if not machine.up or self.followed(machine) is None:
            return False
        request = machine.manifests.start_pull(machine.log_end_offset, machine.broker_epoch)
        if request is None:
            return False
        machine.request, machine.answer = request, None
        machine.old_requests = [*machine.old_requests[-2:], request]
        return True

    def hear_pull(self, node: int, *, again: bool = False) -> bool:
        """It arrives at the leader (``again``: an old one does, once more)."""
        machine = self.machines[node]
        request = machine.request
        if again:
            request = machine.old_requests[0] if machine.old_requests else None
        if request is None:
            return False
        if not again:
            machine.request = None
        right = (m for m in self._leaders() if m.leader.leader_epoch == request.leader_epoch)
        return self._hear(machine, request, next(right, None), again=again)

    def hear_zombie(self, node: int) -> bool:
        """It arrives at one that was deposed, and does not know."""
        machine = self.machines[node]
        request, machine.request = machine.request, None
        leader = min(self._leaders(), key=lambda m: m.leader.leader_epoch, default=None)
        return request is not None and self._hear(machine, request, leader, again=False)

    def _leaders(self) -> list[Machine]:
        return [m for m in self.machines if m.up and m.manifests.role is ManifestRole.LEADER]

    def _hear(
        self, machine: Machine, request: ev.PullRequest, leader: Machine | None, *, again: bool
    ) -> bool:
        try:
            if leader is None:
                raise KeptError("nobody there")
            effects = leader.leader.step(ev.PullRequestReceived(request), self.now_ms)
        except KeptError:
            if not again and machine.up:
                machine.step(ev.PullFailed(request))
            return not again
        leader.did(effects)
        answer = leader.leader.pull_response(request)
        bodies = {ref.generation: leader.body(ref) for ref in answer.bodies}
        if not again:
            machine.answer = (request, answer, bodies)
        return True

    def hear_answer(self, node: int) -> bool:
        machine = self.machines[node]
        if machine.answer is None or not machine.up:
            return False
        request, answer, _ = machine.answer
        published = answer.published
        late = published is not None and machine.log_end_offset < published.end_offset
        if late and self.bug("late-end"):
            answer = replace(answer, published=None)
        machine.step(ev.PullResponseReceived(request, answer))
        machine.answer = None
        return True

    def lose(self, node: int) -> bool:
        """The connection breaks."""
        machine = self.machines[node]
        asked = machine.manifests.in_flight
        if not machine.up or asked is None:
            return False
        machine.request = machine.answer = None
        machine.step(ev.PullFailed(asked))
        return True

    # Compaction.

    def start_pass(self, node: int, end: int, *, expire: bool) -> bool:
        """A leader computes a manifest over what is committed below ``end``."""
        machine = self.machines[node]
        core = machine.manifests
        if not machine.up or machine.pass_ is not None or not core.may_compute:
            return False
        body = machine.compute(end, expire=expire) if self.compacts else None
        if body is None:
            return False
        machine.pass_ = PassJob(body, machine.leader.leader_epoch, core.applied)
        return True

    def end_pass(self, node: int) -> bool:
        machine = self.machines[node]
        if machine.pass_ is None or not machine.up:
            return False
        job = machine.pass_
        machine.step(ev.PassCompleted(job.body.ref, job.leader_epoch, job.based_on))
        machine.pass_ = None
        return True

    def missing_from(self, machine: Machine, body: Body) -> int | None:
        leads = machine.manifests.role is ManifestRole.LEADER
        if leads or self.bug("ignore-missing") or self.bug("dirty") or self.bug("difference"):
            return None
        found = logs.missing(machine.disk.log, body)
        if found is not None and self.bug("below-leo") and found >= machine.log_end_offset:
            return None
        damaged = machine.disk.damaged & body.survivors.keys()
        return min(damaged if found is None else {found, *damaged}, default=None)

    def swapped(self, machine: Machine, body: Body, at: int) -> list[Rec]:
        """Segments up to ``at`` are in place."""
        log, low = machine.disk.log, 0
        if self.bug("difference") or (self.bug("dirty") and machine.leader.leading):
            return [rec for rec in log if rec.offset >= at or rec.offset not in body.removed]
        if self.bug("dirty"):
            low = body.low
        elif self.bug("descending"):
            low, at = body.end_offset - at, body.end_offset
        done = logs.apply(log, body, low, at)
        if self.bug("own-clock"):  # its own clock says that what had a horizon has passed it
            marked = {rec.offset for rec in log if rec.horizon and low <= rec.offset < at}
            done = [rec for rec in done if rec.offset not in marked]
        return done

    def store(self, node: int) -> bool:
        return self.machines[node].up and self.machines[node].move_store()

    def work(self, node: int, at: int) -> bool:
        """One step of applying."""
        return self.machines[node].up and self.machines[node].move_apply(at)

    def fail_store(self, node: int) -> bool:
        """The disk refuses."""
        machine = self.machines[node]
        if not machine.up or machine.store is None or machine.store.base:
            return False
        machine.store = None
        machine.step(ev.ManifestStoreFailed())
        return True

    def fail_apply(self, node: int) -> bool:
        """There is no room for the outputs."""
        machine = self.machines[node]
        if not machine.up or machine.job is None or machine.job.begun:
            return False
        body, machine.job = machine.job.body, None
        machine.step(ev.ApplyAborted(body.ref))
        return True

    def retry(self, node: int) -> bool:
        machine = self.machines[node]
        if not machine.up or machine.job is not None or machine.manifests.role is ManifestRole.NONE:
            return False
        machine.step(ev.RetryTriggered())
        return machine.job is not None

    # Crashes.

    def crash(self, node: int) -> bool:
        machine = self.machines[node]
        if not machine.up:
            return False
        machine.crash()
        self.broker(node, 0)
        return True

    def restart(self, node: int) -> bool:
        machine = self.machines[node]
        if machine.up:
            return False
        machine.restart()
        self.broker(node, machine.broker_epoch)
        return True

    def wipe(self, node: int) -> bool:
        """Another disk; only outside of the ISR, and not proposed (rule 33)."""
        machine = self.machines[node]
        proposed = any(m.leader.pending_isr and node in m.leader.pending_isr for m in self.machines)
        if machine.up or node in self.image.isr or proposed:
            return False
        machine.wipe()
        return True

    def tear(self, node: int) -> bool:
        """A start finds the file of what it holds damaged; of one replica at a time."""
        machine = self.machines[node]
        disk = machine.disk
        whole = not any(m.torn for m in self.machines)
        if machine.up or disk.held is None or disk.swapping is not None or not whole:
            return False
        machine.tear()
        self.ever_torn = True
        return True

    def rot(self, node: int) -> bool:
        """A process that runs finds it damaged, if only when it applies it; of one replica at a
        time.
        """
        machine = self.machines[node]
        held = machine.manifests.held
        job = machine.job
        if machine.up and job is not None and job.body.ref == held and not job.begun:
            machine.job = None
            machine.step(ev.ApplyAborted(job.body.ref))
        whole = not any(m.torn for m in self.machines)
        if not machine.up or held is None or machine.disk.swapping is not None or not whole:
            return False
        leader = machine.leader
        alone = leader.leading and leader.isr == (node,) and leader.pending_isr is None
        before = machine.manifests.held
        machine.step(ev.ManifestDamaged(held, alone))
        if machine.manifests.making_base and before != machine.manifests.held:
            self.saw("begun anew while it ran")
            machine.torn = True
        self.ever_torn = self.ever_torn or machine.torn
        if machine.torn:
            self.saw("lost while it ran")
        return machine.torn

    def decay(self, node: int, offset: int) -> bool:
        """A record is damaged, which shows when a manifest is applied."""
        machine = self.machines[node]
        damaged = machine.disk.damaged | {
            rec.offset for rec in machine.disk.log if rec.offset == offset
        }
        if machine.manifests.role is not ManifestRole.FOLLOWER or damaged == machine.disk.damaged:
            return False
        machine.disk.damaged = damaged
        return True

    def broker(self, node: int, epoch: int) -> None:
        brokers = list(self.image.brokers)
        brokers[node] = epoch
        self.change(isr_too=False, brokers=tuple(brokers))

    # What must not happen.

    def cuts(self, machine: Machine, offset: int) -> None:
        """Rule 19: with unclean election off nothing committed is ever cut."""
        if self.ever_unclean < 0 and machine.id in self.image.isr and offset < self.committed.end:
            raise Violation(f"S5 member {machine.id} cuts at {offset} below {self.committed.end}")
        applied = machine.disk.applied
        if applied is not None and offset < applied.end_offset:
            self.saw("cut below b")
        if offset in machine.disk.damaged:
            self.saw("cut where a record is damaged")

    def missing_survivor(self, machine: Machine, ref: ManifestRef, offset: int) -> None:
        self.saw("missing survivor")
        member = machine.id in self.image.isr
        if offset in machine.disk.damaged:
            self.saw(f"damaged {'as a member' if member else 'outside the ISR'}")
            return
        if self.ever_unclean < 0 and (member or not self.ever_torn):
            raise Violation(f"S5 replica {machine.id} lacks survivor {offset} of {ref.generation}")
