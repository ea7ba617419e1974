"""What must hold after every step (S1 to S5, S7), and in the end (L1, L2).

S1 no resurrection; S2 the latest acknowledged value of every key is on every member; S3 members at
one generation are equal; S5 no member cuts or lacks what is committed (checked where it happens);
S7 a reader up to the replica's own high watermark never misses a key that was never deleted. L1 one
replica down for ever stops nothing; L2 once all are connected all come to the newest generation.
"""

from __future__ import annotations

import copy

from tests.replication.manifests import logs
from tests.replication.manifests.logs import Violation
from tests.replication.manifests.world import World

ROUNDS = 60


def check(world: World) -> None:
    """Raises Violation."""
    image, committed = world.image, world.committed
    members = [world.machines[member] for member in image.isr]
    for machine in members:
        if world.ever_unclean >= 0 and image.unclean and machine.leader.leader_epoch != image.epoch:
            continue  # elected uncleanly, and does not know yet
        log = machine.disk.log
        if logs.log_end(log) < committed.end:
            raise Violation(f"S2 member {machine.id} ends below what is committed")
        table = logs.view(log, committed.end)
        for key in range(logs.KEYS):
            want, found = committed.table.get(key), table.get(key)
            alive = found is not None and found.live
            if want is None or not want.live:
                if alive:
                    raise Violation(f"S1 key {key} lives again at member {machine.id}: {found}")
            elif found is None or found[:4] != want[:4]:
                raise Violation(f"S2 member {machine.id} has {found} instead of {want}")
        if machine.up and world.ever_unclean < 0:
            _read_up_to_own_watermark(world, machine.id)
    for index, one in enumerate(members):
        for other in members[index + 1 :]:
            _equal(one, other)


def _read_up_to_own_watermark(world: World, node: int) -> None:
    machine = world.machines[node]
    table = logs.view(machine.disk.log, machine.high_watermark)
    for key, since in world.committed.live_since.items():
        if since < machine.high_watermark and key not in table:
            raise Violation(f"S7 member {node} up to {machine.high_watermark} misses key {key}")


def _equal(one, other) -> None:
    a, b = one.disk, other.disk
    if a.applied is None or b.applied is None or a.swapping or b.swapping:
        return
    if a.applied.ref != b.applied.ref:
        return
    end = a.applied.end_offset
    mine, theirs = ([rec for rec in disk.log if rec.offset < end] for disk in (a, b))
    if mine != theirs:
        raise Violation(
            f"S3 members {one.id} and {other.id} differ at {a.applied.ref}: {mine} {theirs}"
        )


# In the end.


def check_liveness(world: World, down: tuple[int, ...] = ()) -> None:
    """Heal a copy of the world but for ``down``; all must come together, and go on cleaning."""
    world = copy.deepcopy(world)
    for node in down:
        world.crash(node)
    if not _settle(world, down):
        return  # the last member is the one that is down
    up = [machine for machine in world.machines if machine.id not in down]
    _together(world, up)
    world.compacts = world.compacted = True
    for live in (False, True):
        leader = world.image.leader
        world.produce(leader, 1, live=live)
        _settle(world, down)
        machine = world.machines[leader]
        end = machine.high_watermark
        if end != machine.log_end_offset:
            raise Violation(f"L1 the high watermark stays at {end}")
        if not world.start_pass(leader, end, expire=True):
            raise Violation(f"L1 leader {leader} may not clean: {machine.manifests}")
        world.end_pass(leader)
        _settle(world, down)
        _together(world, up)
        for machine in up:
            applied = machine.disk.applied
            if applied is None or applied.end_offset < end:
                raise Violation(f"L1 replica {machine.id} stays at {applied}")
            left = [r for r in machine.disk.log if r.key != logs.EMPTY and not r.live]
            if any(rec.offset < end for rec in left):
                raise Violation(f"L1 a tombstone stays at {machine.id}: {left}")


def _together(world: World, up: list) -> None:
    if not set(world.image.isr) >= {machine.id for machine in up}:
        raise Violation(f"L2 the ISR stays {world.image.isr}, without one of {[m.id for m in up]}")
    refs = {None if m.disk.applied is None else m.disk.applied.ref.generation for m in up}
    if len(refs) != 1:
        raise Violation(f"L2 generations differ at rest: {refs}")
    if len({tuple(machine.disk.log) for machine in up}) != 1:
        raise Violation(f"L2 logs differ at rest: {[machine.disk.log for machine in up]}")


def _settle(world: World, down: tuple[int, ...]) -> bool:
    """A fair schedule until nothing moves; False when there is nobody to lead."""
    for node in world.replicas:
        if node not in down:
            world.restart(node)
    for _ in range(ROUNDS):
        moved = _elect_if_needed(world)
        if moved is None:
            return False
        for node in world.replicas:
            moved |= world.learn(node)
        for node in world.replicas:
            for _ in range(40):
                before = world.machines[node].log_end_offset, world.machines[node].follower.agreed
                if not world.fetch(node):
                    break
                machine = world.machines[node]
                if before == (machine.log_end_offset, machine.follower.agreed):
                    break
                moved = True
            world.lose(node)
            world.pull(node)
            world.hear_pull(node)
            world.hear_answer(node)
            moved |= world.end_pass(node) | world.store(node)
            while world.work(node, 1 << 60):
                moved = True
            world.retry(node)
        world.tick(1000)
        for node in world.replicas:
            moved |= world.decide(node)
        for node in world.replicas:
            moved |= world.fence(node)
        if not moved:
            world.now_ms += 40_000
            ends = [machine.log_end_offset for machine in world.machines]
            _hear_all(world)  # also of followers that had backed off
            world.tick(0)
            busy = any(m.job is not None or m.store is not None for m in world.machines if m.up)
            busy = busy or ends != [machine.log_end_offset for machine in world.machines]
            decided = [world.decide(node) for node in world.replicas]
            if not any(decided) and not busy:
                return True
        check(world)
    raise Violation(f"L2 no rest: {world.image}")


def _hear_all(world: World) -> None:
    """After a long time, the next requests, before the leader looks at who lags."""
    for node in world.replicas:
        world.fetch(node)
        world.pull(node)
        world.hear_pull(node)
        world.hear_answer(node)


def _elect_if_needed(world: World) -> bool | None:
    leader = world.machines[world.image.leader]
    leads = leader.up and leader.leader.leading and leader.leader.leader_epoch == world.image.epoch
    unheard = leader.up and leader.view != world.image.version
    dead_again = leader.born_epoch == world.image.epoch and not leads
    if leads and leader.manifests.lost:  # somebody who knows should lead
        for node in world.image.isr:
            if node != leader.id and world.elect(node):
                return True
    if leads or (unheard and not dead_again):
        return False
    for node in world.image.isr:
        if world.elect(node):
            return True
    return None
