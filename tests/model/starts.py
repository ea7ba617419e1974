"""States that an exploration begins in.

Unless said otherwise: ``a=1@0, a=tombstone@1, b=1@2`` are committed, replica 0 leads, and one
replica was away: it has the first record, and not its tombstone.
"""

from __future__ import annotations

import random

from tests.model.protocol import (
    NONE,
    Budget,
    Committed,
    Controller,
    Epochs,
    Leadership,
    Log,
    Record,
    Replica,
    State,
    latest,
    log_end,
)

A_LIVES, A_DELETED, B_LIVES = Record(0, 1, 0, True), Record(1, 1, 0, False), Record(2, 1, 1, True)


def state(
    logs: list[Log],
    budget: tuple[int, int, int, int],
    *,
    isr: int,
    committed: int,
    epochs: list[Epochs] | None = None,
    leaders: tuple[int, ...] = (0,),
    known: list[int] | None = None,
    up: list[bool] | None = None,
    keys: int = 2,
) -> State:
    """Replica ``leaders[-1]`` leads. ``known``: the leader epoch each replica knows."""
    replicas, epoch, leader = len(logs), len(leaders), leaders[-1]
    made = []
    for i, log in enumerate(logs):
        cache = epochs[i] if epochs else (((1, 0),) if log else ())
        leads = None
        if i == leader:
            cache = cache or ((epoch, 0),)
            ends = tuple(log_end(log) if j == i else -1 for j in range(replicas))
            leads = Leadership(isr, 0, 0, ends, (NONE,) * replicas, 0, None)
        high_watermark = committed if isr >> i & 1 else 0
        made.append(
            Replica(
                up[i] if up else True,
                log,
                cache,
                NONE,
                NONE,
                known[i] if known else epoch,
                high_watermark,
                False,
                None,
                leads,
                None,
                False,
                None,
            )
        )
    newest = latest(logs[leader], committed)
    values = tuple(
        (newest[key].offset, newest[key].epoch, newest[key].live) if key in newest else None
        for key in range(keys)
    )
    controller = Controller(epoch, isr, 0, leaders, False, ())
    return State(controller, tuple(made), Committed(committed, values), Budget(*budget))


def empty(budget: tuple[int, int, int, int] = (2, 1, 1, 2), replicas: int = 3) -> State:
    return state([()] * replicas, budget, isr=(1 << replicas) - 1, committed=0)


def away(
    has: int = 1,
    budget: tuple[int, int, int, int] = (0, 1, 0, 2),
    *,
    up: bool = True,
    tail: bool = True,
) -> State:
    """0 and 1 are in sync; 2 has the first ``has`` records and is outside the ISR."""
    log = (A_LIVES, A_DELETED, *((B_LIVES,) if tail else ()))
    return state(
        [log, log, log[:has]],
        budget,
        isr=0b011,
        committed=len(log),
        known=[1, 1, 1 if up else -1],
        up=[True, True, up],
    )


def returning(
    isr: int = 0b101,
    has: int = 1,
    budget: tuple[int, int, int, int] = (0, 1, 0, 1),
    replicas: int = 3,
    before: Log = (),
    *,
    tail: bool = True,
) -> State:
    """The others have everything, in the ISR or about to enter; 1 was away and is back."""
    records = (*before, A_LIVES, A_DELETED, *((B_LIVES,) if tail else ()))
    log = tuple(Record(o, 1, r.key, r.live) for o, r in enumerate(records))
    first = state(
        [log, log[: has + len(before)], *([log] * (replicas - 2))],
        budget,
        isr=isr,
        committed=len(log),
    )
    made = []
    for i, replica in enumerate(first.replicas):
        if i == 0:
            assert replica.leads is not None
            ends = tuple(-1 if j == 1 else len(log) for j in range(replicas))
            made.append(replica._replace(leads=replica.leads._replace(ends=ends)))
        else:
            end = log_end(replica.log)
            made.append(replica._replace(synced=True, high_watermark=end))
    return first._replace(replicas=tuple(made))


def diverged(budget: tuple[int, int, int, int] = (0, 1, 0, 2), *, up: bool = True) -> State:
    """2 led epoch 1 and has ``b@1`` that nobody else got; 0 leads epoch 2."""
    log = (A_LIVES, Record(1, 2, 0, False), Record(2, 2, 1, True))
    other = (A_LIVES, Record(1, 1, 1, True))
    cache = ((1, 0), (2, 1))
    return state(
        [log, log, other],
        budget,
        isr=0b011,
        committed=3,
        epochs=[cache, cache, ((1, 0),)],
        leaders=(2, 0),
        known=[2, 2, -1],
        up=[True, True, up],
    )


def stale_high_watermark(budget: tuple[int, int, int, int] = (0, 1, 1, 1)) -> State:
    """Key 0 lives at 0 and at 2; in-sync follower 1 knows a high watermark of 1 only."""
    log = (A_LIVES, Record(1, 1, 1, True), Record(2, 1, 0, True))
    first = state(
        [log, log, log[:1]],
        budget,
        isr=0b011,
        committed=3,
        known=[1, 1, -1],
        up=[True, True, False],
    )
    low = first.replicas[1]._replace(high_watermark=1)
    return first._replace(replicas=(first.replicas[0], low, first.replicas[2]))


class AtRandom:
    """One of the states above, or a random log, for random histories."""

    def __init__(self, budget: tuple[int, int, int, int], replicas: int = 3) -> None:
        self.budget = budget
        self.replicas = replicas

    def __call__(self, rng: random.Random) -> State:
        if self.replicas > 3:
            if rng.random() < 0.3:
                return empty(self.budget, self.replicas)
            isr = rng.choice((0b1101, 0b1001, 0b0101))
            return returning(isr, rng.randrange(3), self.budget, self.replicas)
        kind = rng.randrange(4)
        if kind == 0:
            return empty(self.budget)
        if kind == 1:
            return away(rng.randrange(3), self.budget, up=rng.random() < 0.5)
        if kind == 2:
            return diverged(self.budget)
        end = rng.randrange(4, 7)
        log = tuple(Record(o, 1, rng.randrange(2), rng.random() > 0.4) for o in range(end))
        has = rng.randrange(end + 1)
        return state([log, log, log[:has]], self.budget, isr=0b011, committed=end, known=[1, 1, -1])
