"""Where new replicas go: round robin over the brokers, a partition's replicas on different racks.

Brokers are put in one ring, a broker of each rack in turn. Partition p is led by ring position
``shift + p``; its followers are the next ones on the ring, those of racks that the partition does
not use yet first. Every round over the ring moves the followers on by one, so that the partitions
of one leader are followed by different brokers. Fenced brokers come last and never lead
(``StripedReplicaPlacer``; simpler, and without its randomness: the caller gives ``shift``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kept.cluster.metadata.image import BrokerImage
from kept.storage.errors import InvalidReplicationFactor


def place(
    brokers: Iterable[BrokerImage], partitions: range, replication_factor: int, shift: int = 0
) -> list[tuple[int, ...]]:
    """Replicas, in order of preference, for each number in ``partitions``.

    Raises InvalidReplicationFactor when the brokers do not suffice or none of them is active.
    """
    by_id = sorted(brokers, key=lambda broker: broker.broker_id)
    live = _ring([broker for broker in by_id if broker.active])
    spare = _ring([broker for broker in by_id if not broker.active])
    if not live:
        raise InvalidReplicationFactor(
            f"Unable to replicate the partition {replication_factor} time(s): "
            "All brokers are currently fenced or in controlled shutdown."
        )
    if replication_factor > len(by_id):
        raise InvalidReplicationFactor(
            f"Unable to replicate the partition {replication_factor} time(s): The target "
            f"replication factor of {replication_factor} cannot be reached because only "
            f"{len(by_id)} broker(s) are registered."
        )
    placed: list[tuple[int, ...]] = []
    for number in partitions:
        lead = (shift + number) % len(live)
        turn = (shift + number) // len(live)
        chosen = _choose(_turned(live, lead, turn), replication_factor)
        missing = replication_factor - len(chosen)
        if missing:
            chosen += _choose(_turned(spare, number % len(spare), turn), missing)
        placed.append(tuple(broker.broker_id for broker in chosen))
    return placed


def _ring(brokers: Sequence[BrokerImage]) -> list[BrokerImage]:
    """Brokers with a rack's next one as far away as the racks allow."""
    racks: dict[str | None, list[BrokerImage]] = {}
    for broker in brokers:
        racks.setdefault(broker.rack, []).append(broker)
    ordered = [racks[rack] for rack in sorted(racks, key=lambda rack: rack or "")]
    longest = max(map(len, ordered), default=0)
    return [rack[turn] for turn in range(longest) for rack in ordered if turn < len(rack)]


def _turned(ring: list[BrokerImage], first: int, turn: int) -> list[BrokerImage]:
    """The ring from ``first`` on; the others after it are rotated by ``turn``."""
    others = ring[first + 1 :] + ring[:first]
    if others:
        by = turn % len(others)
        others = others[by:] + others[:by]
    return [ring[first], *others]


def _choose(candidates: list[BrokerImage], count: int) -> list[BrokerImage]:
    """The first ``count``, each from the rack that was used least so far."""
    if len({broker.rack for broker in candidates}) <= 1:
        return candidates[:count]
    used: dict[str | None, int] = {}
    rest = list(candidates)
    chosen: list[BrokerImage] = []
    while rest and len(chosen) < count:
        best = min(rest, key=lambda broker: used.get(broker.rack, 0))
        rest.remove(best)
        used[best.rack] = used.get(best.rack, 0) + 1
        chosen.append(best)
    return chosen
