"""The manifest protocol: states and steps of a partition, its replicas and its controller.

An explicit-state model of docs/compaction-protocol.md. Every state is an immutable tuple, so that
states can be hashed, compared and replayed; :meth:`Model.actions` lists what may happen next and
:meth:`Model.step` gives the state after it. Nothing here uses the product's code: the model judges
the *rules*, the tests in ``tests/replication/manifests`` judge the code that follows them.

In the model: lagging views (a deposed leader goes on for as long as it likes), compare-and-set ISR
changes that are proposed, accepted and learned, acknowledgements that arrive late, fetches of one
record, truncation by leader epoch (KIP-101, KIP-279), swaps that stop half way, crashes that lose
the high watermark's checkpoint, wiped disks, records that rot, logs that part by damaged epochs,
unclean elections, and a clock that may expire every tombstone at once. Not in it: transactions,
producers, retention, power cuts, damaged manifests; the simulator (docs/simulation.md) has those,
with the product's own cores.

A :class:`Mistake` breaks one rule of the protocol; ``None`` is the protocol as it stands.

Long because the steps of one state machine are read together.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple


class Mistake(Enum):
    """One wrong wording of the rules each (docs/compaction-protocol.md tells their stories)."""

    CONFIRMED_ISR_ONLY = "publication ignores replicas whose entry is in flight (C1)"
    SHRINK_COUNTED_EARLY = "publication counts a removal that is not decided (C1)"
    ACT_BEFORE_PUBLICATION = "the leader swaps before any follower holds the manifest (C2)"
    DISCARD_HELD = "a new leader drops what it does not know to be published (C3)"
    ADMIT_EARLY = "a new leader admits replicas before it has published what it holds (C4)"
    TRUST_HELD = "a new leader takes what it holds for published (C5)"
    CLEAN_FIRST = "a new leader cleans before it has published what it holds (C5)"
    CLEAN_TO_OF_HELD = "a pass begins where a manifest ends that is held, not applied (C5)"
    APPLY_BELOW_LEO = "a follower applies before its log reaches the manifest's end (C6)"
    GENERATION_WITH_BATCHES = "an empty replica takes the generation of whom it fetches from (C7)"
    DIRTY_RANGE = "a manifest lists survivors of the dirty range only (C8)"
    DIFFERENCE = "a manifest lists what goes, and a replica may skip one (C8)"
    NUMBER_ONLY = "generations are bare numbers (C9)"
    ORDERED = "a replica takes newer manifests only, not different ones (C9)"
    PUBLISHED_AT_ANY_END = "'published' counts whatever the replica's log end was (C10)"
    APPLY_BEFORE_TRUNCATING = "applying before the log is known to agree (C11)"
    DESCENDING_SWAP = "segments are swapped from the end (C12)"
    HW_NOT_RAISED = "the high watermark is not raised to the manifest's end (C13)"
    APPLY_ON_PERSIST = "a follower applies what it holds, published or not (C14)"
    UNCLEAN_KEEPS_HELD = "an unclean leader keeps the manifest it holds (C15a)"
    UNCLEAN_WITHOUT_BASE = "an unclean leader forgets it and publishes no base (C15b)"
    UNCLEAN_FORGOTTEN = "the controller forgets 'unclean' at the next election (C15c)"
    UNCLEAN_KEEPS_CLEAN_TO = "the base generation counts as cleaned (C15d)"
    MISSING_IGNORED = "a replica that lacks a survivor applies all the same"
    KEEPS_APPLIED = "truncating below an applied manifest leaves the mark"
    WAIT_FOR_ALL = "publication waits for every replica"
    NO_ENTRY_GATE = "the ISR admits whoever has the log's end"
    HELD_ENTERS = "the ISR admits who holds the manifest, not only who applied it (C16)"
    GAPLESS_ENTERS = "the ISR admits who holds it, if no gap is above what it applied (C16)"
    COMPLETE_ONCE_PUBLISHED = "complete is also who takes a manifest that is published (C16)"
    COMPLETE_OF_EARLIER_EPOCH = "complete is also who takes an earlier leader's manifest (C16)"
    COMPLETE_BELOW_END = "complete is also who ends below the manifest's end (C16)"
    COMPLETE_AFTER_CUT = "complete is also who was cut below the manifest's end (C16)"
    COMPLETE_REMEMBERED = "the leader remembers who was complete before its log was cut (C16)"
    COMPLETE_WITHOUT_APPLIED = "complete is also who lacks what the leader has applied (C16)"
    APPLIED_REMEMBERED = "the leader remembers what was applied before its log was cut (C16)"
    CUT_UNASKED = "who lacks a record cuts its log as soon as it knows of no membership (C17)"
    MEMBERS_CUT = "the leader lets a replica cut its log that is proposed for the ISR (C17)"
    LACKING_ENTERS = "the ISR admits who has said that it lacks a record (C17)"
    BEYOND_HW = "a pass covers records above the high watermark"
    LATE_PASS = "the result of a pass is kept although the generation has moved"
    LAST_NOT_KEPT = "the last record of the cleaned range leaves no empty batch"
    OUT_OF_ORDER = "a follower applies an older published manifest after a newer one"
    OWN_CLOCK = "followers expire tombstones by their own clocks"
    MARK_BEFORE_SWAP = "'applied' is marked before the swap"
    NO_EPOCH_FENCE = "manifests of leaders of other epochs are taken"
    VOLATILE_ACK = "a manifest is acknowledged before it is durable"


class Violation(Exception):
    """A property of the protocol does not hold; the text begins with the property's name."""


class Act(Enum):
    """What a manifest says of an offset that survives."""

    KEEP = 0
    HORIZON = 1
    """A tombstone that is kept, and has got its delete horizon."""
    EMPTY = 2
    """Only the bounds of the batch stay."""


class Record(NamedTuple):
    """``key`` -1 is an empty batch that was kept."""

    offset: int
    epoch: int
    key: int
    live: bool
    horizon: bool = False


class Manifest:
    """Interned: manifests of equal content are one object. Ends are exclusive."""

    __slots__ = ("clean_to", "dirty_from", "end", "epoch", "generation", "removed", "survivors")
    _all: dict[tuple[Any, ...], Manifest] = {}  # noqa: RUF012

    epoch: int
    generation: int
    end: int
    clean_to: int
    survivors: dict[int, Act]
    removed: frozenset[int]
    dirty_from: int

    @classmethod
    def of(
        cls,
        epoch: int,
        generation: int,
        end: int,
        clean_to: int,
        *,
        survivors: Iterable[tuple[int, Act]] = (),
        removed: Iterable[int] = (),
        dirty_from: int = 0,
    ) -> Manifest:
        kept = tuple(survivors)
        key = (epoch, generation, end, clean_to, kept, tuple(removed), dirty_from)
        manifest = cls._all.get(key)
        if manifest is None:
            manifest = cls._all[key] = cls()
            manifest.epoch, manifest.generation = epoch, generation
            manifest.end, manifest.clean_to, manifest.dirty_from = end, clean_to, dirty_from
            manifest.survivors, manifest.removed = dict(kept), frozenset(key[5])
        return manifest

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.generation

    def __repr__(self) -> str:
        marks = {Act.KEEP: "", Act.HORIZON: "h", Act.EMPTY: "-"}
        kept = ",".join(f"{offset}{marks[act]}" for offset, act in self.survivors.items())
        return f"{self.epoch}.{self.generation}(end={self.end} keeps {kept or 'nothing'})"


NONE = Manifest.of(0, 0, 0, 0)
"""What a replica holds and has applied before there was any compaction."""

Log = tuple[Record, ...]
Epochs = tuple[tuple[int, int], ...]
"""The leader epoch cache: (epoch, start offset), ascending."""


class Leadership(NamedTuple):
    """What a replica knows as leader of one epoch; sets of replicas are bit masks."""

    isr: int
    version: int
    pending: int
    """The ISR that was proposed and not yet decided; 0: none."""
    ends: tuple[int, ...]
    """Log end of each replica as of its last fetch in this epoch; -1: it has not fetched."""
    applied: tuple[Manifest | None, ...]
    """What each replica said it has applied, in this epoch; None: it has to say so anew."""
    holders: int
    """Who acknowledged the manifest that this leader holds, in this epoch."""
    published: Manifest | None
    cut: int = 0
    """Who fetched in this epoch from below where it was: it is not believed to be complete."""
    complete: int = 0
    """Who said in this epoch that it holds what this leader holds, and is complete."""


class Replica(NamedTuple):
    up: bool
    log: Log
    epochs: Epochs
    held: Manifest
    applied: Manifest
    epoch: int
    """The leader epoch that it knows; -1: none since it started."""
    high_watermark: int
    synced: bool
    """It has fetched without divergence from the leader of this epoch."""
    published: Manifest | None
    """What the leader of this epoch said is published."""
    leads: Leadership | None
    acknowledges: tuple[int, Manifest] | None
    """An acknowledgement on its way: (leader epoch, manifest)."""
    swapping: bool
    """A swap is half done."""
    computed: Manifest | None
    """The result of a pass that has not been handed in yet."""
    complete: bool = False
    """It had everything below the end of ``held`` before anybody acted on that."""
    damaged: int = -1
    """The first offset whose record it has found damaged; -1: none."""
    may_cut: bool = False
    """Its leader said, when it knew of ``damaged``, that it counts this replica no more."""


class Controller(NamedTuple):
    epoch: int
    isr: int
    version: int
    leaders: tuple[int, ...]
    """The leader of each epoch, from epoch 1 on."""
    unclean: bool
    """The leader was elected from outside the ISR and has not published its base generation."""
    unclean_epochs: tuple[int, ...]


class Committed(NamedTuple):
    """What was acknowledged: everything below ``end``; per key its latest (offset, epoch, live)."""

    end: int
    latest: tuple[tuple[int, int, bool] | None, ...]


class Budget(NamedTuple):
    """How often the environment may still do something; it bounds an exploration."""

    appends: int
    passes: int
    crashes: int
    isr_changes: int


class State(NamedTuple):
    controller: Controller
    replicas: tuple[Replica, ...]
    committed: Committed
    budget: Budget


class Action(NamedTuple):
    kind: str
    replica: int = -1
    x: Any = None
    y: Any = None

    def __repr__(self) -> str:
        parts = [self.kind, *(str(p) for p in self[1:] if p is not None and p != -1)]
        return " ".join(parts)


def log_end(log: Log) -> int:
    return log[-1].offset + 1 if log else 0


def end_of_epoch(epochs: Epochs, end: int, epoch: int) -> tuple[int, int]:
    """(largest epoch not above ``epoch``, its end); (-1, -1) where the epoch is unknown."""
    if not epochs or epoch > epochs[-1][0]:
        return -1, -1
    if epoch == epochs[-1][0]:
        return epoch, end
    for i, (other, start) in enumerate(epochs):
        if other > epoch:
            return (epoch, start) if i == 0 else (epochs[i - 1][0], start)
    raise AssertionError(epochs)


def latest(log: Log, end: int) -> dict[int, Record]:
    """The last record of each key below ``end``."""
    return {r.key: r for r in log if r.offset < end and r.key >= 0}


def members(mask: int, replicas: int) -> list[int]:
    return [i for i in range(replicas) if mask >> i & 1]


def put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


class Model:
    """The protocol, or one mistake in it. ``max_epoch`` bounds elections.

    ``half_swaps``: swaps may stop after any offset. ``expire_at_once``: a pass may drop tombstones
    that have just been written, as with a clock that may be anywhere. ``slow_passes``: the result
    of a pass may come any time later. ``unclean``: replicas outside the ISR may be elected.
    ``rots``: a follower may find a record damaged. ``parts``: the log of a replica outside the ISR
    may part from its leader's once more, for epochs are damaged. ``delayed``: acknowledgements
    travel by themselves. ``only``: check these properties alone.
    """

    def __init__(
        self,
        replicas: int = 3,
        mistake: Mistake | None = None,
        *,
        keys: int = 2,
        max_epoch: int = 3,
        half_swaps: bool = True,
        expire_at_once: bool = True,
        slow_passes: bool = False,
        unclean: bool = False,
        rots: bool = False,
        parts: bool = False,
        delayed: bool = True,
        reads_at_hw: bool = False,
        only: str = "",
    ) -> None:
        self.replicas = replicas
        self.mistake = mistake
        self.keys = keys
        self.max_epoch = max_epoch
        self.half_swaps = half_swaps
        self.expire_at_once = expire_at_once
        self.slow_passes = slow_passes
        self.unclean = unclean
        self.rots = rots
        self.parts = parts
        self.delayed = delayed
        self.reads_at_hw = reads_at_hw
        self.only = only

    # What may happen next.

    def actions(self, state: State) -> list[Action]:
        found: list[Action] = []
        for i, replica in enumerate(state.replicas):
            if not replica.up:
                found.append(Action("restart", i))
                continue
            if state.budget.crashes:
                found.append(Action("crash", i))
                if not state.controller.isr >> i & 1 and replica.log:
                    found.append(Action("wipe", i))
            if replica.epoch != state.controller.epoch:
                found.append(Action("learn", i))
            if replica.epoch < 1:
                continue
            if replica.leads is not None:
                found += self._leader_actions(state, i, replica, replica.leads)
            else:
                found += self._damage(state, i, replica)
                found += self._follower_actions(state, i, replica)
            if replica.acknowledges is not None:
                epoch = replica.acknowledges[0]
                if self._leads(state, state.controller.leaders[epoch - 1], epoch):
                    found.append(Action("acknowledge", i))
        return found + self._controller_actions(state)

    def _damage(self, state: State, i: int, replica: Replica) -> list[Action]:
        in_sync = bool(state.controller.isr >> i & 1)
        found = []
        if state.budget.crashes:
            if self.rots and replica.damaged < 0 and not replica.swapping:
                found += [Action("rot", i, record.offset) for record in replica.log]
            if self.parts and not in_sync:
                found += [Action("part", i, record.offset) for record in replica.log]
        if replica.damaged >= 0:
            unasked = self.mistake is Mistake.CUT_UNASKED and not in_sync
            if replica.may_cut or unasked:
                found.append(Action("cut", i))
        return found

    @staticmethod
    def _leads(state: State, i: int, epoch: int) -> bool:
        replica = state.replicas[i]
        return replica.up and replica.epoch == epoch and replica.leads is not None

    def _leader_actions(
        self, state: State, i: int, replica: Replica, leads: Leadership
    ) -> list[Action]:
        controller, _, _, budget = state
        found = []
        if replica.epoch == controller.epoch and leads.version != controller.version:
            found.append(Action("learn_isr", i))
        if budget.appends:
            found += [
                Action("append", i, key, live) for key in range(self.keys) for live in (True, False)
            ]
        held = replica.held
        waits_for = self._publishing_set(leads) & ~(1 << i)
        if leads.published is not held and waits_for & ~leads.holders == 0:
            found.append(Action("publish", i))
        if leads.published is held and replica.applied is not held:
            found.append(Action("apply", i, held))
            found += self._half_swaps(i, held)
        finished = leads.published is held and replica.applied is held
        unfinished = (Mistake.CLEAN_FIRST, Mistake.CLEAN_TO_OF_HELD)
        if budget.passes and (finished or self.mistake in unfinished):
            found += self._passes(i, replica)
        if not leads.pending and budget.isr_changes:
            for other in range(self.replicas):
                bit = 1 << other
                if other == i:
                    continue
                if leads.isr & bit:
                    found.append(Action("propose", i, leads.isr & ~bit))
                elif self._may_enter(replica, leads, other):
                    found.append(Action("propose", i, leads.isr | bit))
        return found

    def _passes(self, i: int, replica: Replica) -> list[Action]:
        """Passes up to every possible end, with and without expired tombstones."""
        end = replica.high_watermark
        if self.mistake is Mistake.BEYOND_HW:
            end = log_end(replica.log)
        first_dirty = self._clean_to(replica)
        expires = any(
            r.key >= 0 and not r.live and (r.horizon or self.expire_at_once) and r.offset < end
            for r in replica.log
        )
        kinds = ["pass"]
        if self.slow_passes:
            if replica.computed is not None:
                return [Action("hand_in", i)]
            kinds.append("compute")
        found = [
            Action(kind, i, to, False) for kind in kinds for to in range(first_dirty + 1, end + 1)
        ]
        if expires:
            found += [
                Action(kind, i, to, True)
                for kind in kinds
                for to in range(max(first_dirty, 1), end + 1)
            ]
        return found

    def _half_swaps(self, i: int, manifest: Manifest) -> list[Action]:
        if not self.half_swaps:
            return []
        return [Action("half_swap", i, manifest, offset) for offset in range(1, manifest.end + 1)]

    def _follower_actions(self, state: State, i: int, replica: Replica) -> list[Action]:
        found = []
        leader = state.controller.leaders[replica.epoch - 1]
        reachable = leader != i and self._leads(state, leader, replica.epoch)
        if reachable:
            found += [Action("fetch", i), Action("pull", i, leader)]
        if self.mistake is Mistake.NO_EPOCH_FENCE:
            found += [
                Action("pull", i, other)
                for other, deposed in enumerate(state.replicas)
                if other != i
                and deposed.up
                and deposed.leads is not None
                and 0 < deposed.epoch < replica.epoch
            ]
        target = replica.published
        if self.mistake is Mistake.APPLY_ON_PERSIST:
            target = replica.held
        if (
            target is not None
            and target is not replica.applied
            and replica.damaged < 0
            and (replica.synced or self.mistake is Mistake.APPLY_BEFORE_TRUNCATING)
            and (log_end(replica.log) >= target.end or self.mistake is Mistake.APPLY_BELOW_LEO)
        ):
            found.append(Action("apply", i, target))
            found += self._half_swaps(i, target)
            if self.mistake is Mistake.MARK_BEFORE_SWAP:
                found.append(Action("mark", i, target))
        if self.mistake is Mistake.OUT_OF_ORDER and reachable:
            older = state.replicas[leader].applied
            before = older is not NONE and older.order < replica.applied.order
            if before and log_end(replica.log) >= older.end:
                found.append(Action("apply", i, older))
        return found

    def _controller_actions(self, state: State) -> list[Action]:
        controller, replicas, _, _ = state
        found = []
        leader = controller.leaders[-1]
        leads = replicas[leader].leads
        if leads is not None and self._leads(state, leader, controller.epoch):
            if leads.pending and leads.version == controller.version and not controller.unclean:
                new = leads.pending & ~controller.isr
                alive = all(replicas[j].up for j in members(new, self.replicas))
                found.append(Action("accept") if alive else Action("reject"))
            if controller.unclean:
                found.append(Action("clear_unclean"))
        if controller.epoch < self.max_epoch:
            live = [i for i in members(controller.isr, self.replicas) if replicas[i].up]
            found += [Action("elect", i) for i in live]
            if self.unclean and not live:
                found += [Action("elect_unclean", i) for i, r in enumerate(replicas) if r.up]
        return found

    # The rules that the steps use.

    def _publishing_set(self, leads: Leadership) -> int:
        """Who must hold a manifest before it is published: what holds back the high watermark."""
        if self.mistake is Mistake.WAIT_FOR_ALL:
            return (1 << self.replicas) - 1
        if self.mistake is Mistake.CONFIRMED_ISR_ONLY:
            return leads.isr
        if self.mistake is Mistake.SHRINK_COUNTED_EARLY:
            return leads.pending or leads.isr
        if self.mistake is Mistake.ACT_BEFORE_PUBLICATION:
            return 0
        return leads.isr | leads.pending

    def same(self, one: Manifest, other: Manifest) -> bool:
        """Identities are compared for equality, never by order."""
        if self.mistake is Mistake.NUMBER_ONLY:
            return one.generation >= other.generation
        if self.mistake is Mistake.ORDERED:
            return one.order >= other.order
        return one is other

    def _clean_to(self, replica: Replica) -> int:
        if self.mistake is Mistake.CLEAN_TO_OF_HELD:
            return replica.held.clean_to
        return replica.applied.clean_to

    def _may_enter(self, replica: Replica, leads: Leadership, other: int) -> bool:
        """Whether the leader may propose ``other`` for the ISR."""
        start = replica.epochs[-1][1]
        if leads.ends[other] < max(replica.high_watermark, start, 0):
            return False
        if self.mistake is Mistake.NO_ENTRY_GATE:
            return True
        if self.mistake is Mistake.HELD_ENTERS:
            return leads.published is replica.held and bool(leads.holders >> other & 1)
        if self.mistake in (Mistake.ADMIT_EARLY, Mistake.CLEAN_FIRST, Mistake.CLEAN_TO_OF_HELD):
            applied = leads.applied[other]
            return applied is not None and self.same(applied, replica.applied)
        if leads.published is None:
            return False
        if leads.published is replica.held and leads.complete >> other & 1:
            return True
        applied = leads.applied[other]
        return applied is not None and self.same(applied, leads.published)

    def _is_complete(self, replica: Replica, leader: Replica) -> bool:
        """Whether a replica that takes what its leader holds has everything below its end.

        Its leader made the manifest and has not published it, so nobody has acted on it; and what
        was acted on before is what the replica has applied, or was complete for.
        """
        held, leads, mistake = leader.held, leader.leads, self.mistake
        assert leads is not None
        before = replica.applied is leader.applied
        before = before or (replica.complete and replica.held is leader.applied)
        return (
            replica.synced
            and (leads.published is not held or mistake is Mistake.COMPLETE_ONCE_PUBLISHED)
            and (held.epoch == leader.epoch or mistake is Mistake.COMPLETE_OF_EARLIER_EPOCH)
            and (log_end(replica.log) >= held.end or mistake is Mistake.COMPLETE_BELOW_END)
            and (before or mistake is Mistake.COMPLETE_WITHOUT_APPLIED)
        )

    def _reports_complete(self, replica: Replica) -> bool:
        if self.mistake is Mistake.GAPLESS_ENTERS:
            there = {record.offset for record in replica.log if record.key >= 0}
            return there.issuperset(range(replica.applied.end, replica.held.end))
        return replica.complete

    def filtered(
        self, replica: Replica, manifest: Manifest, low: int, high: int
    ) -> tuple[Log, int]:
        """The log with ``manifest`` applied to ``low..high``; and the first survivor that the
        replica does not have, or -1."""
        high = min(high, manifest.end)
        if self.mistake is Mistake.DIFFERENCE:
            return self._without_removed(replica.log, manifest, low, high), -1
        if self.mistake is Mistake.DIRTY_RANGE:
            if replica.leads is not None:  # it made the manifest and knows the rest
                return self._without_removed(replica.log, manifest, low, high), -1
            low = max(low, manifest.dirty_from)
        kept: list[Record] = []
        seen = set()
        missing = -1
        for record in replica.log:
            if not low <= record.offset < high:
                kept.append(record)
                seen.add(record.offset)
                continue
            act = manifest.survivors.get(record.offset)
            if act is None:
                continue
            seen.add(record.offset)
            if act is not Act.EMPTY and record.key < 0 and missing < 0:
                missing = record.offset
            expired = record.key >= 0 and not record.live and record.horizon
            if self.mistake is Mistake.OWN_CLOCK and expired and act is not Act.EMPTY:
                continue
            kept.append(_with(record, act))
        end = log_end(replica.log)
        for offset in manifest.survivors:
            if offset not in seen and low <= offset < min(high, end):
                missing = offset if missing < 0 else min(missing, offset)
        return tuple(kept), missing

    @staticmethod
    def _without_removed(log: Log, manifest: Manifest, low: int, high: int) -> Log:
        kept = []
        for record in log:
            if low <= record.offset < high:
                if record.offset in manifest.removed:
                    continue
                act = manifest.survivors.get(record.offset)
                record = record if act is None else _with(record, act)
            kept.append(record)
        return tuple(kept)

    # Steps. Each takes the state and gives the next one, or None where nothing changes.

    def step(self, state: State, action: Action) -> State | None:
        new: State | None = getattr(self, f"_{action.kind}")(state, action)
        return None if new is None or new == state else new

    def _put(self, state: State, i: int, replica: Replica) -> State:
        return state._replace(replicas=put(state.replicas, i, replica))

    def _accept(self, state: State, _: Action) -> State:
        controller = state.controller
        leads = state.replicas[controller.leaders[-1]].leads
        assert leads is not None
        decided = controller._replace(isr=leads.pending, version=controller.version + 1)
        return state._replace(controller=decided)

    def _reject(self, state: State, _: Action) -> State:
        leader = state.controller.leaders[-1]
        replica = state.replicas[leader]
        assert replica.leads is not None
        return self._put(state, leader, replica._replace(leads=replica.leads._replace(pending=0)))

    def _clear_unclean(self, state: State, _: Action) -> State:
        return state._replace(controller=state.controller._replace(unclean=False))

    def _elect(self, state: State, action: Action) -> State:
        controller = state.controller
        elected = controller._replace(
            epoch=controller.epoch + 1,
            version=controller.version + 1,
            leaders=(*controller.leaders, action.replica),
        )
        return state._replace(controller=elected)

    def _elect_unclean(self, state: State, action: Action) -> State:
        state = self._elect(state, action)
        controller = state.controller
        elected = controller._replace(
            isr=1 << action.replica,
            unclean=self.mistake is not Mistake.UNCLEAN_FORGOTTEN,
            unclean_epochs=(*controller.unclean_epochs, controller.epoch),
        )
        forgotten = Committed(0, (None,) * self.keys)
        return state._replace(controller=elected, committed=forgotten)

    def _restart(self, state: State, action: Action) -> State:
        i = action.replica
        return self._put(state, i, state.replicas[i]._replace(up=True))

    def _crash(self, state: State, action: Action) -> State:
        i = action.replica
        replica = state.replicas[i]
        high_watermark = 0  # its checkpoint may be as old as it likes
        if self.mistake is not Mistake.HW_NOT_RAISED:
            high_watermark = (replica.held if replica.swapping else replica.applied).end
        replica = replica._replace(
            up=False,
            epoch=-1,
            high_watermark=high_watermark,
            synced=False,
            published=None,
            leads=None,
            damaged=-1,
            may_cut=False,
        )
        if self.mistake is Mistake.VOLATILE_ACK:
            replica = replica._replace(held=replica.applied, complete=False)
        budget = state.budget._replace(crashes=state.budget.crashes - 1)
        return self._put(state, i, replica)._replace(budget=budget)

    def _wipe(self, state: State, action: Action) -> State | None:
        """An empty disk under the same id: whatever its leaders knew of it counts no more."""
        i = action.replica
        for j, other in enumerate(state.replicas):
            leads = other.leads
            if leads is None:
                continue
            if leads.pending >> i & 1:
                return None
            if j != i:
                forgotten = leads._replace(
                    ends=put(leads.ends, i, -1),
                    applied=put(leads.applied, i, NONE),
                    holders=leads.holders & ~(1 << i),
                    complete=leads.complete & ~(1 << i),
                )
                state = self._put(state, j, other._replace(leads=forgotten))
        budget = state.budget._replace(crashes=state.budget.crashes - 1)
        return self._put(state, i, empty_replica(epoch=-1))._replace(budget=budget)

    def _rot(self, state: State, action: Action) -> State:
        """A follower finds a record damaged: it claims nothing more, and is to be cut there."""
        i = action.replica
        replica = state.replicas[i]._replace(damaged=action.x)
        budget = state.budget._replace(crashes=state.budget.crashes - 1)
        return self._put(state, i, replica)._replace(budget=budget)

    def _cut(self, state: State, action: Action) -> State:
        """It cuts its log there; its leader sees so by its next fetch."""
        i, replica = action.replica, state.replicas[action.replica]
        replica = self._truncated(state, i, replica, replica.damaged)
        return self._put(state, i, replica._replace(synced=False, published=None))

    def _part(self, state: State, action: Action) -> State | None:
        """A replica's log and its leader's part once more after they had agreed, for the epochs of
        one are damaged: the log is cut, and fetched from there at once. (Who proposes it for the
        ISR before that believes it to have what it had.)
        """
        i = action.replica
        if any(
            other.leads is not None and other.leads.pending >> i & 1 for other in state.replicas
        ):
            return None
        replica = self._truncated(state, i, state.replicas[i], action.x)
        replica = replica._replace(synced=False, published=None, swapping=False)
        leader_id = state.controller.leaders[replica.epoch - 1]
        if self._leads(state, leader_id, replica.epoch):
            leader = state.replicas[leader_id]
            assert leader.leads is not None
            leads = self._fetched_from(leader.leads, i, log_end(replica.log))
            state = self._put(state, leader_id, leader._replace(leads=leads))
        budget = state.budget._replace(crashes=state.budget.crashes - 1)
        return self._put(state, i, replica)._replace(budget=budget)

    def _learn(self, state: State, action: Action) -> State:
        """A replica sees the newest leader epoch, and leads in it or follows."""
        i = action.replica
        controller = state.controller
        replica = state.replicas[i]._replace(
            leads=None, synced=False, published=None, damaged=-1, may_cut=False
        )
        # A leader that restarted within its epoch leads again only in a new one.
        relead = bool(replica.epochs) and replica.epochs[-1][0] == controller.epoch
        if controller.leaders[-1] == i and not relead:
            return self._lead(state, i, replica)
        return self._put(state, i, replica._replace(epoch=controller.epoch))

    def _lead(self, state: State, i: int, replica: Replica) -> State:
        controller, _, committed, _ = state
        epoch, end = controller.epoch, log_end(replica.log)
        epochs = (*(e for e in replica.epochs if e[1] < end), (epoch, end))
        unclean = controller.unclean
        if self.mistake is Mistake.UNCLEAN_FORGOTTEN:
            unclean = epoch in controller.unclean_epochs
        if unclean:
            committed = _committed_of(replica.log, end, self.keys)
            replica = self._begin_anew(replica, epoch)
        elif self.mistake is Mistake.DISCARD_HELD and (
            replica.held is not replica.applied and state.replicas[i].published is not replica.held
        ):
            replica = replica._replace(held=replica.applied, complete=False)
        published = None
        if replica.held is replica.applied or self.mistake is Mistake.TRUST_HELD:
            published = replica.held  # what is applied had been published
        ends = put((-1,) * self.replicas, i, end)
        leads = Leadership(
            controller.isr, controller.version, 0, ends, (NONE,) * self.replicas, 0, published
        )
        replica = replica._replace(epochs=epochs, epoch=epoch, leads=leads)
        return self._advanced(state._replace(committed=committed), i, replica)

    def _begin_anew(self, replica: Replica, epoch: int) -> Replica:
        """An unclean leader's base generation: everything it has survives, nothing is clean."""
        if self.mistake is Mistake.UNCLEAN_KEEPS_HELD:
            return replica
        if self.mistake is Mistake.UNCLEAN_WITHOUT_BASE:
            base = Manifest.of(epoch, 0, 0, 0)
        else:
            end = log_end(replica.log)
            clean_to = end if self.mistake is Mistake.UNCLEAN_KEEPS_CLEAN_TO else 0
            survivors = [(r.offset, act_of(r)) for r in replica.log]
            base = Manifest.of(epoch, 0, end, clean_to, survivors=survivors)
        return replica._replace(held=base, applied=base, complete=False)

    def _learn_isr(self, state: State, action: Action) -> State:
        i = action.replica
        controller, replica = state.controller, state.replicas[i]
        assert replica.leads is not None
        leads = replica.leads._replace(isr=controller.isr, version=controller.version, pending=0)
        return self._advanced(state, i, replica._replace(leads=leads))

    def _append(self, state: State, action: Action) -> State:
        i, replica = action.replica, state.replicas[action.replica]
        assert replica.leads is not None
        offset = log_end(replica.log)
        record = Record(offset, replica.epoch, action.x, action.y)
        leads = replica.leads._replace(ends=put(replica.leads.ends, i, offset + 1))
        budget = state.budget._replace(appends=state.budget.appends - 1)
        replica = replica._replace(log=(*replica.log, record), leads=leads)
        return self._advanced(state._replace(budget=budget), i, replica)

    def _advanced(self, state: State, i: int, replica: Replica) -> State:
        """The leader's high watermark: the smallest end over confirmed and proposed ISR."""
        leads = replica.leads
        assert leads is not None
        counted = members(leads.isr | leads.pending, self.replicas)
        high_watermark = min(leads.ends[j] for j in counted)
        if high_watermark > replica.high_watermark:
            replica = replica._replace(high_watermark=high_watermark)
        committed = state.committed
        deposed = any(epoch > replica.epoch for epoch in state.controller.unclean_epochs)
        if replica.high_watermark > committed.end and not deposed:
            known = list(committed.latest)
            for record in replica.log:
                if committed.end <= record.offset < replica.high_watermark and record.key >= 0:
                    known[record.key] = (record.offset, record.epoch, record.live)
            committed = Committed(replica.high_watermark, tuple(known))
        return self._put(state, i, replica)._replace(committed=committed)

    def _propose(self, state: State, action: Action) -> State:
        i, replica = action.replica, state.replicas[action.replica]
        assert replica.leads is not None
        budget = state.budget._replace(isr_changes=state.budget.isr_changes - 1)
        leads = replica.leads._replace(pending=action.x)
        return self._put(state, i, replica._replace(leads=leads))._replace(budget=budget)

    def _pass(self, state: State, action: Action) -> State:
        """A pass of the leader: its manifest is durable, and offered."""
        i, replica = action.replica, state.replicas[action.replica]
        assert replica.leads is not None
        manifest = self._survey(replica, action.x, expire=action.y)
        leads = replica.leads._replace(holders=0, complete=0)
        budget = state.budget._replace(passes=state.budget.passes - 1)
        replica = replica._replace(held=manifest, leads=leads, complete=True)
        return self._put(state, i, replica)._replace(budget=budget)

    def _compute(self, state: State, action: Action) -> State:
        i, replica = action.replica, state.replicas[action.replica]
        computed = self._survey(replica, action.x, expire=action.y)
        return self._put(state, i, replica._replace(computed=computed))

    def _hand_in(self, state: State, action: Action) -> State:
        i, replica = action.replica, state.replicas[action.replica]
        computed, leads = replica.computed, replica.leads
        assert computed is not None
        assert leads is not None
        current = computed.epoch == replica.epoch
        current = current and computed.generation == replica.held.generation + 1
        if current or self.mistake is Mistake.LATE_PASS:
            leads = leads._replace(holders=0, complete=0)
            replica = replica._replace(held=computed, leads=leads, complete=True)
        budget = state.budget._replace(passes=state.budget.passes - 1)
        return self._put(state, i, replica._replace(computed=None))._replace(budget=budget)

    def _survey(self, replica: Replica, to: int, *, expire: bool) -> Manifest:
        """What survives of the log below ``to``, by the latest offset of each key."""
        first_dirty = self._clean_to(replica)
        newest = {
            r.key: r.offset for r in replica.log if first_dirty <= r.offset < to and r.key >= 0
        }
        survivors: list[tuple[int, Act]] = []
        removed = []
        for record in replica.log:
            if record.offset >= to:
                break
            act = None
            if record.key >= 0 and record.offset >= newest.get(record.key, -1):
                expired = expire and (record.horizon or self.expire_at_once)
                if record.live:
                    act = Act.KEEP
                elif not expired:
                    act = Act.HORIZON
            last = record.offset == to - 1 and self.mistake is not Mistake.LAST_NOT_KEPT
            if act is None and last:
                act = Act.EMPTY
            if act is None:
                removed.append(record.offset)
            else:
                survivors.append((record.offset, act))
        end = to
        if replica.applied.end > to:
            end = replica.applied.end  # only clean_to says how far keys are unique
            survivors += [(r.offset, act_of(r)) for r in replica.log if to <= r.offset < end]
        generation = replica.held.generation + 1
        return Manifest.of(
            replica.epoch,
            generation,
            end,
            to,
            survivors=survivors,
            removed=removed,
            dirty_from=first_dirty,
        )

    def _publish(self, state: State, action: Action) -> State:
        i, replica = action.replica, state.replicas[action.replica]
        assert replica.leads is not None
        leads = replica.leads._replace(published=replica.held)
        return self._put(state, i, replica._replace(leads=leads))

    def _mark(self, state: State, action: Action) -> State:
        i = action.replica
        return self._put(state, i, state.replicas[i]._replace(applied=action.x))

    def _half_swap(self, state: State, action: Action) -> State | None:
        i, replica, manifest = action.replica, state.replicas[action.replica], action.x
        low, high = 0, action.y
        if self.mistake is Mistake.DESCENDING_SWAP:
            low, high = manifest.end - action.y, manifest.end
        log, missing = self.filtered(replica, manifest, low, high)
        if missing >= 0 or log == replica.log:
            return None
        replica = self._raised(replica._replace(log=log, swapping=True), manifest)
        return self._put(state, i, replica)

    def _raised(self, replica: Replica, manifest: Manifest) -> Replica:
        if self.mistake is Mistake.HW_NOT_RAISED:
            return replica
        raised = max(replica.high_watermark, min(manifest.end, log_end(replica.log)))
        return replica._replace(high_watermark=raised)

    def _apply(self, state: State, action: Action) -> State:
        i, replica, manifest = action.replica, state.replicas[action.replica], action.x
        log, missing = self.filtered(replica, manifest, 0, manifest.end)
        if missing >= 0 and self.mistake is not Mistake.MISSING_IGNORED:
            controller = state.controller
            taking_over = controller.unclean and replica.epoch != controller.epoch
            in_sync = controller.isr >> i & 1 and not taking_over
            if in_sync or not self.unclean:
                self.violated(f"S5 replica {i} lacks survivor {missing} of {manifest}")
            if replica.leads is None:
                return self._put(state, i, replica._replace(damaged=missing))
            replica = self._truncated(state, i, replica, missing)._replace(applied=NONE)
            return self._put(state, i, replica)
        replica = replica._replace(log=log, applied=manifest, swapping=False)
        return self._put(state, i, self._raised(replica, manifest))

    def _truncated(self, state: State, i: int, replica: Replica, offset: int) -> Replica:
        controller, committed = state.controller, state.committed
        taking_over = controller.unclean and replica.epoch != controller.epoch
        in_sync = controller.isr >> i & 1 and not taking_over
        if in_sync and not self.unclean and offset < committed.end:
            self.violated(f"S5 replica {i} of the ISR is cut to {offset}, below {committed.end}")
        log = tuple(r for r in replica.log if r.offset < offset)
        end = log_end(log)
        epochs = tuple(e for e in replica.epochs if e[1] < min(offset, end))
        applied = replica.applied
        if end < applied.end and self.mistake is not Mistake.KEEPS_APPLIED:
            applied = NONE
        kept = end >= replica.held.end or self.mistake is Mistake.COMPLETE_AFTER_CUT
        complete = replica.complete and kept
        high_watermark = min(replica.high_watermark, offset, end)
        if offset <= replica.damaged:
            replica = replica._replace(damaged=-1, may_cut=False)
        return replica._replace(
            log=log,
            epochs=epochs,
            applied=applied,
            high_watermark=high_watermark,
            complete=complete,
        )

    def _fetch(self, state: State, action: Action) -> State:
        """One fetch: the follower is cut where it diverges, or gets one record."""
        i = action.replica
        replica = state.replicas[i]
        leader_id = state.controller.leaders[replica.epoch - 1]
        leader = state.replicas[leader_id]
        assert leader.leads is not None
        end = log_end(replica.log)
        if replica.epochs:
            last_epoch = replica.epochs[-1][0]
            epoch, epoch_end = end_of_epoch(leader.epochs, log_end(leader.log), last_epoch)
            if epoch < 0:
                self.violated(f"S5 the leader does not know epoch {last_epoch} of replica {i}")
            if epoch < last_epoch or epoch_end < end:
                own, own_end = end_of_epoch(replica.epochs, end, epoch)
                offset = min(own_end, epoch_end, end) if own == epoch else min(own_end, end)
                return self._put(state, i, self._truncated(state, i, replica, offset))
        leads = self._fetched_from(leader.leads, i, end)
        state = self._advanced(state, leader_id, leader._replace(leads=leads))
        leader = state.replicas[leader_id]
        record = next((r for r in leader.log if r.offset >= end), None)
        if record is not None:
            if self.mistake is Mistake.GENERATION_WITH_BATCHES and end == 0:
                replica = replica._replace(applied=leader.applied, held=leader.applied)
            replica = replica._replace(
                log=(*replica.log, record), epochs=_with_epoch(replica.epochs, record)
            )
        end = log_end(replica.log)
        high_watermark = min(leader.high_watermark, end)
        if self.mistake is not Mistake.HW_NOT_RAISED:
            high_watermark = max(high_watermark, min(replica.applied.end, end))
        replica = replica._replace(synced=True, high_watermark=high_watermark)
        return self._put(state, i, replica)

    def _fetched_from(self, leads: Leadership, i: int, end: int) -> Leadership:
        """What a leader knows of a replica that fetches from ``end``."""
        if end < leads.ends[i]:
            if self.mistake is not Mistake.COMPLETE_REMEMBERED:
                leads = leads._replace(cut=leads.cut | 1 << i, complete=leads.complete & ~(1 << i))
            if self.mistake is not Mistake.APPLIED_REMEMBERED:
                leads = leads._replace(applied=put(leads.applied, i, None))
        return leads._replace(ends=put(leads.ends, i, end))

    def _pull(self, state: State, action: Action) -> State:
        """A follower hears what its leader holds and has published; it says what it has."""
        i, leader_id = action.replica, action.x
        replica, leader = state.replicas[i], state.replicas[leader_id]
        leads = leader.leads
        assert leads is not None
        if replica.damaged >= 0:
            return self._pull_of_damaged(state, i, leader_id)
        current = leader.epoch == replica.epoch
        synced = replica.synced or self.mistake is Mistake.APPLY_BEFORE_TRUNCATING
        if current and synced:
            leads = leads._replace(applied=put(leads.applied, i, replica.applied))
            believed = not leads.cut >> i & 1
            if replica.held is leader.held and believed and self._reports_complete(replica):
                leads = leads._replace(complete=leads.complete | 1 << i)
        if self._takes(replica.held, leader.held):
            complete = current and self._is_complete(replica, leader)
            replica = replica._replace(held=leader.held, complete=complete)
        if current:
            published = leads.published
            reaches = published is not None and synced
            reaches = reaches and log_end(replica.log) >= (published.end if published else 0)
            anywhere = (Mistake.PUBLISHED_AT_ANY_END, Mistake.APPLY_BELOW_LEO)
            if not reaches and self.mistake not in anywhere:
                published = None
            replica = replica._replace(published=published)
        if not leads.holders >> i & 1:
            if self.delayed:
                replica = replica._replace(acknowledges=(leader.epoch, replica.held))
            elif current and self.same(replica.held, leader.held):
                leads = leads._replace(holders=leads.holders | 1 << i)
        state = self._put(state, leader_id, leader._replace(leads=leads))
        return self._put(state, i, replica)

    def _pull_of_damaged(self, state: State, i: int, leader_id: int) -> State:
        """Its leader believes nothing of it any more, and says whether it counts it."""
        leader = state.replicas[leader_id]
        leads = leader.leads
        assert leads is not None
        counted = (leads.isr | leads.pending) >> i & 1 and self.mistake is not Mistake.MEMBERS_CUT
        if self.mistake is not Mistake.LACKING_ENTERS:
            mine = 1 << i
            leads = leads._replace(
                applied=put(leads.applied, i, None),
                holders=leads.holders & ~mine,
                complete=leads.complete & ~mine,
            )
        state = self._put(state, leader_id, leader._replace(leads=leads))
        return self._put(state, i, state.replicas[i]._replace(may_cut=not counted))

    def _takes(self, mine: Manifest, offered: Manifest) -> bool:
        if self.mistake is Mistake.NUMBER_ONLY:
            return offered.generation > mine.generation
        if self.mistake is Mistake.ORDERED:
            return offered.order > mine.order
        return mine is not offered

    def _acknowledge(self, state: State, action: Action) -> State:
        i = action.replica
        replica = state.replicas[i]
        assert replica.acknowledges is not None
        epoch, manifest = replica.acknowledges
        state = self._put(state, i, replica._replace(acknowledges=None))
        leader_id = state.controller.leaders[epoch - 1]
        leader = state.replicas[leader_id]
        assert leader.leads is not None
        if self.same(manifest, leader.held):
            leads = leader.leads._replace(holders=leader.leads.holders | 1 << i)
            state = self._put(state, leader_id, leader._replace(leads=leads))
        return state

    def violated(self, what: str) -> None:
        """Raise :class:`Violation`, unless only other properties are checked."""
        if not self.only or what.split(maxsplit=1)[0] in self.only.split():
            raise Violation(what)


def _with(record: Record, act: Act) -> Record:
    if act is Act.EMPTY:
        return Record(record.offset, record.epoch, -1, False)
    return record._replace(horizon=act is Act.HORIZON) if record.key >= 0 else record


def act_of(record: Record) -> Act:
    """The act that leaves a record as it is."""
    if record.key < 0:
        return Act.EMPTY
    return Act.HORIZON if record.horizon else Act.KEEP


def _with_epoch(epochs: Epochs, record: Record) -> Epochs:
    if epochs and epochs[-1][0] == record.epoch:
        return epochs
    kept = (e for e in epochs if e[0] < record.epoch and e[1] < record.offset)
    return (*kept, (record.epoch, record.offset))


def _committed_of(log: Log, end: int, keys: int) -> Committed:
    known = latest(log, end)
    return Committed(
        end,
        tuple(
            (r.offset, r.epoch, r.live) if (r := known.get(key)) is not None else None
            for key in range(keys)
        ),
    )


def empty_replica(*, epoch: int) -> Replica:
    return Replica(True, (), (), NONE, NONE, epoch, 0, False, None, None, None, False, None)
