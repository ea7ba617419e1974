"""Planted bugs of replication, the controller and the logs (rules 24-36)."""

from __future__ import annotations

from typing import Any

from kept.replication.events import UNKNOWN_OFFSET
from tests.sim.planted import plant

LEADER = "kept.replication.partition_core.PartitionCore"
FOLLOWER = "kept.replication.follower.FollowerCore"
PARTITION = "kept.replication.partition.Partition"
REPLICA = "kept.replication.replica.Replica"
LIFECYCLE = "kept.cluster.controller.broker_lifecycle.BrokerLifecycle"
MEMBER = "kept.cluster.metadata.metadata_node.MetadataNode"


def returns(value: Any) -> Any:
    """Whatever it was asked, that is the answer."""
    return lambda _: lambda *args, **kwargs: value


def any_replica_counts(original: Any) -> Any:
    """HW is the largest LEO of any replica."""

    def advance(self: Any) -> Any:
        if self.leading:
            ends = [f.log_end_offset for f in self.followers.values()]
            self.high_watermark = max(self.high_watermark, *ends, 0)
            self.high_watermark = min(self.high_watermark, self.log_end_offset)
        return original(self)

    return advance


def leader_alone_counts(original: Any) -> Any:
    """HW is the leader's LEO."""

    def advance(self: Any) -> Any:
        if self.leading:
            self.high_watermark = self.log_end_offset
        return original(self)

    return advance


def acknowledged_at_once(original: Any) -> Any:
    """acks=all does not wait."""

    def when_committed(self: Any, end_offset: int, callback: Any) -> None:
        callback(None)

    return when_committed


def pending_forgotten(original: Any) -> Any:
    """A proposed ISR does not hold back HW."""

    def holds_back(self: Any, replica: int, follower: Any) -> bool:
        return replica in self.isr

    return holds_back


def joins_anyhow(original: Any) -> Any:
    """The ISR takes who has not caught up."""

    def expand(self: Any, replica: int, follower: Any) -> Any:
        if self.pending_isr is not None or follower.log_end_offset == UNKNOWN_OFFSET:
            return ()
        return self._propose(frozenset((*self.isr, replica)))

    return expand


def never_cut(original: Any) -> Any:
    """A diverging follower appends what comes."""

    def truncate_to(self: Any, offset: int) -> None:
        return None

    return truncate_to


def cut_deeper(original: Any) -> Any:
    """A follower cuts to its high watermark when it gets another leader (before KIP-101)."""

    def became(self: Any, event: Any) -> Any:
        if self.log.replica.is_follower and self.log.log_end_offset > self.log.high_watermark:
            self.log.truncate_to(self.log.high_watermark)
        return original(self, event)

    return became


def hw_back(original: Any) -> Any:
    """HW follows the lowest LEO down, too."""

    def advance(self: Any) -> Any:
        effects = original(self)
        if self.leading and self.followers:
            known = [f.log_end_offset for f in self.followers.values() if f.log_end_offset >= 0]
            self.high_watermark = min([self.high_watermark, *known])
        return effects

    return advance


def serves_after_stall(original: Any) -> Any:
    def notice(self: Any, now_ms: int) -> None:
        return None

    return notice


def no_epoch_bump(original: Any) -> Any:
    """Another leader, the same epoch."""
    from msgspec.structs import replace

    def changed(state: Any, **kwargs: Any) -> Any:
        found = original(state, **kwargs)
        if found is None:
            return None
        return replace(found, leader_epoch=state.leader_epoch)

    return changed


plant(
    "hw-from-any-replica",
    "cores",
    1,
    "isr-holds committed-lost prefix",
    "HW is the lowest LEO of the ISR (30)",
    (f"{LEADER}._advance", any_replica_counts),
)
plant(
    "hw-from-leader",
    "cores",
    1,
    "isr-holds committed-lost prefix",
    "HW is the lowest LEO of the ISR (30)",
    (f"{LEADER}._advance", leader_alone_counts),
)
plant(
    "ack-before-hw",
    "cores",
    1,
    "acknowledged",
    "acks=all waits for HW (33)",
    (f"{PARTITION}.when_committed", acknowledged_at_once),
)
plant(
    "pending-isr-forgotten",
    "cores",
    10,
    "isr-holds committed-lost",
    "a pending ISR counts (30)",
    (f"{LEADER}._holds_back", pending_forgotten),
)
plant(
    "joins-behind",
    "cores",
    1,
    "isr-holds committed-lost",
    "who joins has LEO >= HW (30)",
    (f"{LEADER}._expand", joins_anyhow),
)
plant(
    "never-truncates",
    "cores",
    3,
    "prefix liveness replicas-differ epoch-matching committed-lost",
    "a deposed leader's tail is cut (27)",
    ("kept.replication.follower_replica.FollowerReplica.truncate_to", never_cut),
)
plant(
    "cuts-to-hw",
    "cores",
    25,
    "isr-holds committed-lost prefix",
    "cut by epoch, not to HW (KIP-101)",
    (f"{FOLLOWER}._became_follower", cut_deeper),
)
plant(
    "hw-goes-back",
    "cores",
    5,
    "high-watermark-back",
    "HW never goes back on a leader (30)",
    (f"{LEADER}._advance", hw_back),
)
plant(
    "no-divergence",
    "cores",
    3,
    "prefix epoch-matching committed-lost replicas-differ liveness",
    "a diverging fetch gets no data (26)",
    ("kept.replication.partition.diverging_epoch", returns(None)),
)
plant(
    "stalled-serves",
    "cores",
    78,
    "stalled-leader",
    "who slept does not act on its leadership",
    (f"{LIFECYCLE}._notice_stall", serves_after_stall),
    ("tests.sim.node.SimNode.may_serve", returns(True)),
)
plant(
    "same-epoch",
    "cores",
    2,
    "one-leader epoch-matching invariants",
    "one leader per epoch (36)",
    ("kept.cluster.controller.partition_election.changed", no_epoch_bump),
)
