"""Laws that every strategy must keep, as a test kit.

::

    from kept.testing.strategies import check_strategy

    def test_my_strategy():
        check_strategy(MyStrategy(config))

:func:`check_strategy` runs the strategy, through the cleaner's own engine, over many small random
histories (pinned seed) and raises AssertionError with the history of the first broken law:

- **winner**: of every key that was ever written at least one record survives, until its tombstone
  expires;
- **order**: what survives is in the log's order, unchanged, and nothing is invented;
- **tombstones**: when the winner is a tombstone, nothing older of its key survives;
- **progress**: room for one key is enough to get on, and known keys are still updated when it is
  full;
- **classes**: scanning in several classes of keys gives what one scan gives;
- **stable**: cleaning what is clean changes nothing, and cleaning in two steps keeps the same
  winners.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kept.compaction.strategies.scans import class_of, keeps, without_older
from kept.compaction.strategy import From, Only, Strategy, Verdict
from kept.storage.records import Record

SEED: Final = 4
HISTORIES: Final = 200
_HASH_KEY: Final = bytes(range(16))

MakeRecord = Callable[[random.Random, int], Record]
"""Makes a random record with the given offset; override it to exercise headers of your own."""


def random_record(draw: random.Random, offset: int) -> Record:
    """A record with one of few keys, sometimes a tombstone, with a version header."""
    key = draw.choice((b"a", b"b", b"user.1", b"user.2", b"cfg.x"))
    value = None if draw.random() < 0.2 else b"value-%d" % offset
    version = b"%d" % draw.randrange(5)
    headers = (("version", version),) if draw.random() < 0.8 else ()
    return Record(offset, 1000 + draw.randrange(10), key, value, headers)


def clean(
    strategy: Strategy, log: Sequence[Record], classes: int = 1, room: int = 1 << 30
) -> list[Record]:
    """What the cleaner leaves of a log, with no tombstone expired yet."""
    kept: set[int] = set()
    for chosen in range(classes):
        part = [
            (strategy.key(record), record)
            for record in log
            if class_of(_HASH_KEY, strategy.key(record), classes) == chosen
        ]
        survivors = verdicts(strategy, part, room)
        kept |= {record.offset for key, record in part if keeps(survivors.get(key), record.offset)}
    return [record for record in log if record.offset in kept]


def verdicts(
    strategy: Strategy, part: Iterable[tuple[bytes, Record]], room: int
) -> dict[bytes, Verdict]:
    """The engine's verdicts about records that fit into one scan."""
    part = list(part)
    tombstones = {record.offset for _, record in part if record.value is None}
    state = strategy.init(room)
    newest: dict[bytes, int] = {}
    for key, record in part:
        full = strategy.reduce(state, key, record)
        assert not full or room < 1 << 30, "reduce refused a key although there was room"
        newest[key] = record.offset
    return {
        key: without_older(verdict, newest.get(key, -1), tombstones.__contains__)
        for key, verdict in strategy.collect(state).items()
    }


def winners(strategy: Strategy, log: Sequence[Record]) -> dict[bytes, Record]:
    """The newest surviving record of each key."""
    return {strategy.key(record): record for record in clean(strategy, log)}


def check_strategy(
    strategy: Strategy, make_record: MakeRecord = random_record, histories: int = HISTORIES
) -> None:
    """Check all laws; raises AssertionError with the history that breaks one."""
    draw = random.Random(SEED)
    for _ in range(histories):
        log, offset = [], 0
        for _ in range(draw.randrange(1, 30)):
            log.append(make_record(draw, offset))
            offset += draw.choice((1, 1, 1, 3))
        for law in LAWS:
            law(strategy, log)


def law_winner(strategy: Strategy, log: Sequence[Record]) -> None:
    """Every key keeps at least one record."""
    left = {strategy.key(record) for record in clean(strategy, log)}
    for record in log:
        assert strategy.key(record) in left, f"nothing is left of {record.key!r} in {log}"


def law_order(strategy: Strategy, log: Sequence[Record]) -> None:
    """Survivors are records of the log, in its order; verdicts name offsets that exist."""
    left = clean(strategy, log)
    offsets = [record.offset for record in left]
    assert offsets == sorted(set(offsets)), f"out of order: {offsets}"
    part = [(strategy.key(record), record) for record in log]
    for key, verdict in verdicts(strategy, part, 1 << 30).items():
        own = {record.offset for k, record in part if k == key}
        assert own, f"a verdict about {key!r}, which was never seen"
        if isinstance(verdict, Only):
            assert verdict.offsets <= own, f"{verdict} names records that {key!r} has not in {log}"
        else:
            assert isinstance(verdict, From), f"{verdict!r} is neither From nor Only"


def law_tombstones(strategy: Strategy, log: Sequence[Record]) -> None:
    """A winning tombstone stands alone: nothing comes back when it expires."""
    left = clean(strategy, log)
    for key, winner in winners(strategy, log).items():
        if winner.value is None:
            older = [r for r in left if strategy.key(r) == key and r.offset < winner.offset]
            assert not older, f"{older} would come back when {winner} expires, in {log}"


def law_progress(strategy: Strategy, log: Sequence[Record]) -> None:
    """With room for one key it takes one, goes on updating it, and says that others are refused."""
    state = strategy.init(1)
    used: set[bytes] = set()
    for record in log:
        key = strategy.key(record)
        full = strategy.reduce(state, key, record)
        assert not (full and key in used), f"{key!r} is known and was refused, in {log}"
        assert not (full and not used), f"the first key was refused, in {log}"
        if not full:
            used.add(key)
    known = [record for record in log if strategy.key(record) in used]
    alone = verdicts(strategy, [(strategy.key(r), r) for r in known], 1 << 30)
    assert dict(strategy.collect(state)).keys() == alone.keys(), f"keys got lost, in {log}"


def law_classes(strategy: Strategy, log: Sequence[Record]) -> None:
    """Several scans over classes of keys are as good as one over all."""
    assert clean(strategy, log, classes=3) == clean(strategy, log), f"classes differ, in {log}"


def law_stable(strategy: Strategy, log: Sequence[Record]) -> None:
    """Cleaning again changes nothing; cleaning a prefix first keeps the winners."""
    once = clean(strategy, log)
    assert clean(strategy, once) == once, f"a second pass removes more, in {log}"
    for cut in (len(log) // 3, len(log) // 2):
        steps = [*clean(strategy, log[:cut]), *log[cut:]]
        assert winners(strategy, steps) == winners(strategy, log), (
            f"cleaning the first {cut} records first changes the winners, in {log}"
        )


LAWS: Final = (law_winner, law_order, law_tombstones, law_progress, law_classes, law_stable)
"""The laws, each ``law(strategy, log)``."""
