"""What must hold in every state, and where every state must be able to get to.

- S1 no resurrection: a key whose tombstone was acknowledged is not live on an in-sync replica;
- S2 nothing lost: the latest acknowledged value of a key is on every in-sync replica;
- S3 in-sync replicas that applied the same manifest hold the same records below its end;
- S5 an in-sync replica is never cut below what is committed and lacks no survivor; without unclean
  elections no replica lacks one;
- S6 at rest all replicas read the same values;
- S7 a consumer that reads a follower up to its high watermark misses no key that always lived;
- L1 one replica that is away for ever stops neither cleaning nor the expiry of tombstones;
- L2 once everybody can talk, everybody reaches the newest generation and the ISR.
"""

from __future__ import annotations

from tests.model.protocol import (
    NONE,
    Action,
    Budget,
    Manifest,
    Mistake,
    Model,
    State,
    Violation,
    latest,
    log_end,
    members,
)

ROUNDS = 80
"""Fair rounds after which a history that still moves counts as one that never rests."""


def check(model: Model, state: State) -> None:
    """Raise :class:`Violation` where a safety property does not hold."""
    controller, replicas, committed, _ = state
    in_sync = members(controller.isr, model.replicas)
    unclean = controller.unclean or controller.epoch in controller.unclean_epochs
    for i in in_sync:
        replica = replicas[i]
        if unclean and replica.epoch != controller.epoch:
            continue  # elected, and it has not taken over
        if log_end(replica.log) < committed.end:
            model.violated(f"S2 replica {i} ends at {log_end(replica.log)}, below {committed.end}")
        visible = latest(replica.log, committed.end)
        for key, known in enumerate(committed.latest):
            record = visible.get(key)
            if known is None or not known[2]:
                if record is not None and record.live:
                    model.violated(f"S1 key {key} lives again on replica {i}: {record}, {known}")
            elif record is None or (record.offset, record.epoch, record.live) != known:
                model.violated(f"S2 key {key} was acknowledged at {known}; replica {i}: {record}")
        if model.reads_at_hw and replica.high_watermark < committed.end:
            seen = latest(replica.log, replica.high_watermark)
            if 0 not in seen and replica.high_watermark > 0:  # key 0 lives from offset 0 on
                model.violated(f"S7 read to its high watermark, replica {i} misses key 0")
    for one in in_sync:
        for other in in_sync[: in_sync.index(one)]:
            _check_equal(model, state, one, other)


def _check_equal(model: Model, state: State, one: int, other: int) -> None:
    a, b = state.replicas[one], state.replicas[other]
    if a.applied is NONE or b.applied is NONE or a.swapping or b.swapping:
        return
    equal = a.applied is b.applied
    if model.mistake is Mistake.NUMBER_ONLY:
        equal = a.applied.generation == b.applied.generation
    if model.mistake is Mistake.ORDERED:
        equal = a.applied.order == b.applied.order
    if equal and _below(a.log, a.applied) != _below(b.log, a.applied):
        model.violated(f"S3 replicas {one} and {other} differ at {a.applied}: {a.log} / {b.log}")


def _below(log: tuple, manifest: Manifest) -> tuple:
    return tuple(r for r in log if r.offset < manifest.end)


class _Fair:
    """A fair schedule from a state: everybody but ``down`` starts, talks, and goes on."""

    def __init__(self, model: Model, state: State, down: int | None) -> None:
        self.model = Model(
            model.replicas,
            model.mistake,
            keys=model.keys,
            max_epoch=10**6,
            half_swaps=False,
            expire_at_once=model.expire_at_once,
            slow_passes=False,
            unclean=model.unclean,
            rots=model.rots,
            parts=model.parts,
            delayed=model.delayed,
            reads_at_hw=model.reads_at_hw,
            only=model.only,
        )
        self.state = state._replace(budget=state.budget._replace(isr_changes=99))
        self.up = [i for i in range(model.replicas) if i != down]
        if down is not None and state.replicas[down].up:
            self.state = self.state._replace(budget=Budget(0, 0, 1, 99))
            self.do(Action("crash", down))

    @property
    def leader(self) -> int:
        return self.state.controller.leaders[-1]

    def do(self, action: Action) -> None:
        after = self.model.step(self.state, action)
        if after is not None:
            check(self.model, after)
            self.state = after

    def do_if_possible(self, *kinds: str, replica: int) -> None:
        for action in self.model.actions(self.state):
            wanted = action.kind in kinds and action.replica == replica
            if wanted and action in self.model.actions(self.state):
                self.do(action)

    def rest(self) -> bool:
        """Go on until nothing moves; False where no member of the ISR is up."""
        for _ in range(ROUNDS):
            before = self._standing()
            if not self._have_leader():
                return False
            for i in self.up:
                if i != self.leader:
                    self._follow(i)
            for kind in ("learn_isr", "publish", "apply"):
                self.do_if_possible(kind, replica=self.leader)
            self._change_isr()
            if self._standing() == before:
                return True
        raise Violation(f"L2 no rest after {ROUNDS} fair rounds")

    def _standing(self) -> tuple:
        return self.state[:3]

    def _have_leader(self) -> bool:
        for i in self.up:
            self.do_if_possible("restart", replica=i)
        leader = self.state.replicas[self.leader]
        deposed = leader.epoch == self.state.controller.epoch and leader.leads is None
        if not leader.up or deposed or leader.epoch == -1:
            live = [
                i
                for i in members(self.state.controller.isr, self.model.replicas)
                if self.state.replicas[i].up
            ]
            if not live:
                return False
            self.do(Action("elect", live[0]))
        for i in self.up:
            self.do_if_possible("learn", replica=i)
        return True

    def _follow(self, i: int) -> None:
        for _ in range(30):
            before = self._standing()
            self.do_if_possible("fetch", "pull", "apply", "acknowledge", "cut", replica=i)
            if self._standing() == before:
                return

    def _change_isr(self) -> None:
        leads = self.state.replicas[self.leader].leads
        old = leads.isr if leads is not None else 0
        for action in self.model.actions(self.state):
            if action.kind != "propose" or action.replica != self.leader:
                continue
            added = members(action.x & ~old, self.model.replicas)
            removed = members(old & ~action.x, self.model.replicas)
            if any(i in self.up for i in added) or any(self._drops(i) for i in removed):
                self.do(action)
                break
        for kind in ("clear_unclean", "accept", "reject"):
            self.do_if_possible(kind, replica=-1)
        self.do_if_possible("learn_isr", replica=self.leader)

    def _drops(self, i: int) -> bool:
        return i not in self.up or self.state.replicas[i].damaged >= 0

    def check_rest(self) -> None:
        replicas, isr = self.state.replicas, self.state.controller.isr
        if any(not isr >> i & 1 for i in self.up):
            raise Violation(f"L2 the ISR stays {isr:b}, though {self.up} are up")
        applied = {replicas[i].applied for i in self.up}
        if len(applied) != 1 or replicas[self.leader].held not in applied:
            raise Violation(f"L2 generations differ at rest: {applied}")
        if len({_below(replicas[i].log, replicas[i].applied) for i in self.up}) != 1:
            raise Violation("S3 logs differ at rest")
        values = {
            tuple(sorted(r[:3] for r in latest(replicas[i].log, 1 << 30).values() if r.live))
            for i in self.up
        }
        if len(values) != 1:
            raise Violation("S6 replicas read differently at rest")

    def clean_on(self, *, live: bool) -> None:
        """Append and clean once more; an expired tombstone must go everywhere."""
        self.state = self.state._replace(budget=Budget(1, 1, 0, 99))
        self.do(Action("append", self.leader, 1, live))
        self.rest()
        end = self.state.replicas[self.leader].high_watermark
        passes = [
            action
            for action in self.model.actions(self.state)
            if action.kind == "pass" and action.replica == self.leader and action.x == end
        ]
        if not passes:
            raise Violation("L1 the leader may not clean")
        self.do(max(passes, key=lambda action: action.y))
        self.rest()
        leader = self.state.replicas[self.leader]
        if leader.applied.end < log_end(leader.log):
            raise Violation("L1 what is published does not reach the log's end")
        for i in self.up if live else ():
            replica = self.state.replicas[i]
            if any(r.key >= 0 and not r.live for r in _below(replica.log, replica.applied)):
                raise Violation(f"L1 a tombstone stays on replica {i}: {replica.log}")


def check_liveness(
    model: Model, state: State, down: int | None = None, *, clean: bool = True
) -> None:
    """From ``state`` on a fair schedule comes to rest, all replicas but ``down`` equal and in sync;
    with ``clean``, cleaning goes on after that."""
    fair = _Fair(model, state, down)
    if not fair.rest():
        return
    fair.check_rest()
    if clean:
        fair.clean_on(live=False)
        fair.check_rest()
        fair.clean_on(live=True)
        fair.check_rest()
