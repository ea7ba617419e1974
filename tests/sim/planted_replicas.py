"""Planted bugs of replication, of logs and of what consumers read (rules 24-38), in real nodes.

Shown by the tests of the cores instead (planted there, they fail): ``tests/replication`` that a
pending ISR counts, who joins has caught up, cuts go by epoch, a fetch at the end is empty, a
proposal is repeated, and a fetch counts with the broker's epoch alone; ``tests/cluster`` that who
slept serves nothing, old images decide and remove nothing, a register of the dead ends nobody, ISR
changes are compare-and-set, unclean recovery takes the longest log, who lost power leaves the ISR,
and what strangers may say to the Raft core.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kept.cluster.controller.broker_decisions import Fence
from kept.storage.errors import InvalidProducerEpoch, OffsetOutOfRange
from tests.sim.planted import plant

LEADER = "kept.replication.partition_core.PartitionCore"
FOLLOWER = "kept.replication.follower.FollowerCore"
PARTITION = "kept.replication.partition.Partition"
SKIPPED = 3
RESTS_S = 20.0
"""A cluster is at rest by then; what a planted bug keeps from it is seen so soon."""
DIFFERS = "prefix liveness replicas-differ epoch-matching committed-lost isr-holds"


def returns(value: Any) -> Any:
    """Whatever it is called with, it returns that."""
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


def hw_back(original: Any) -> Any:
    """HW follows the lowest LEO down, too."""

    def advance(self: Any) -> Any:
        effects = original(self)
        if self.leading and self.followers:
            known = [f.log_end_offset for f in self.followers.values() if f.log_end_offset >= 0]
            self.high_watermark = min([self.high_watermark, *known])
        return effects

    return advance


def never_cut(_: Any) -> Any:
    """A diverging follower appends what comes."""

    def truncate_to(self: Any, offset: int) -> None:
        return None

    return truncate_to


def cut_to_own_end(_: Any) -> Any:
    """A diverging follower keeps all that it has."""

    def common_end(self: Any, epoch: int, end_offset: int) -> int:
        return int(self.log.log_end_offset)

    return common_end


def no_epoch_bump(original: Any) -> Any:
    """Another leader, the same epoch."""

    def changed(state: Any, **kwargs: Any) -> Any:
        found = original(state, **kwargs)
        if found is None:
            return None
        return replace(found, leader_epoch=state.leader_epoch)

    return changed


def cut_at_recovery_point(original: Any) -> Any:
    """A start trusts the last flush alone, whatever the page cache holds."""

    def open_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = original(self, *args, **kwargs)
        log.truncate_to(max(log.recovery_point, log.log_start_offset))
        return log

    return open_log


def reads_to_the_end(original: Any) -> Any:
    """Consumers see what is not committed."""

    def fetch(self: Any, offset: int, max_bytes: int, **kwargs: Any) -> Any:
        if kwargs.get("replica_id", -1) >= 0 or not self.core.leading:
            return original(self, offset, max_bytes, **kwargs)
        known, self.core.high_watermark = self.core.high_watermark, self.log.written_end_offset
        try:
            return original(self, offset, max_bytes, **kwargs)
        finally:
            self.core.high_watermark = known

    return fetch


def skips(original: Any) -> Any:
    """Consumers get what is behind the offset that they ask for."""

    def fetch(self: Any, offset: int, max_bytes: int, **kwargs: Any) -> Any:
        later = offset + SKIPPED
        if kwargs.get("replica_id", -1) < 0 and later < self.core.high_watermark:
            return original(self, later, max_bytes, **kwargs)
        return original(self, offset, max_bytes, **kwargs)

    return fetch


def nothing_synced(_: Any) -> Any:
    def run(self: Any) -> None:
        return None

    return run


def one_at_a_time(original: Any) -> Any:
    """Of those that died together one is fenced after the other."""

    def due(self: Any, decision: Any) -> Any:
        if isinstance(decision, Fence):
            return replace(decision, gone={decision.broker_id: decision.broker_epoch})
        return original(self, decision)

    return due


def waits_for_all(_: Any) -> Any:
    """Nobody leaves the ISR for being slow."""

    def lags(self: Any, replica: int) -> bool:
        return False

    return lags


def any_epoch(original: Any) -> Any:
    """A batch of an epoch that its producer has left behind is appended."""

    def check(self: Any, *args: Any) -> Any:
        try:
            return original(self, *args)
        except InvalidProducerEpoch:
            return None

    return check


def everywhere(_: Any) -> Any:
    """Every topic may elect a leader outside of its ISR, whatever it says."""

    def unclean_allowed_by(image: Any, default: bool) -> Any:
        return lambda topic: True

    return unclean_allowed_by


def starts_with_the_epoch(original: Any) -> Any:
    """A new leader takes the start of its epoch for the start of its log."""

    def fetch(self: Any, offset: int, max_bytes: int, **kwargs: Any) -> Any:
        start = self.core.epoch_start_offset
        if kwargs.get("replica_id", -1) < 0 and self.core.leading and offset < start:
            raise OffsetOutOfRange(f"{self.topic_partition}: {offset} is below {start}")
        return original(self, offset, max_bytes, **kwargs)

    return fetch


def deletes_what_is_there(_: Any) -> Any:
    """Records are deleted up to the end of the log, whatever is asked for."""

    def delete_records(self: Any, offset: int) -> int:
        self._check_leader()
        self._advance_start(self.log.log_end_offset)
        return int(self.log.log_start_offset)

    return delete_records


plant(
    "hw-from-any-replica",
    "nodes",
    1,
    "isr-holds committed-lost prefix",
    "HW is the lowest LEO of the ISR (30)",
    (f"{LEADER}._advance", any_replica_counts),
)
plant(
    "hw-from-leader",
    "nodes",
    1,
    "isr-holds committed-lost prefix",
    "HW is the lowest LEO of the ISR (30)",
    (f"{LEADER}._advance", leader_alone_counts),
)
plant(
    "hw-goes-back",
    "nodes",
    18,
    "high-watermark-back",
    "HW never goes back on a leader (30)",
    (f"{LEADER}._advance", hw_back),
)
plant(
    "never-truncates",
    "nodes",
    5,
    DIFFERS,
    "a deposed leader's tail is cut (27)",
    ("kept.replication.follower_replica.FollowerReplica.truncate_to", never_cut),
    heal_s=RESTS_S,
)
plant(
    "cuts-to-own-end",
    "nodes",
    5,
    DIFFERS,
    "the cut is the least of three ends (27)",
    (f"{FOLLOWER}._common_end", cut_to_own_end),
    heal_s=RESTS_S,
)
plant(
    "no-divergence",
    "nodes",
    18,
    DIFFERS,
    "a diverging fetch gets no data (26)",
    ("kept.replication.partition.diverging_epoch", returns(None)),
    heal_s=RESTS_S,
)
plant(
    "same-epoch",
    "nodes",
    1,
    "one-leader epoch-matching invariants",
    "one leader per epoch (36)",
    ("kept.cluster.controller.partition_election.next_record", no_epoch_bump),
)
plant(
    "cut-at-recovery-point",
    "nodes",
    2,
    "kill-lost committed-lost isr-holds prefix",
    "what a killed process had written is there (33)",
    ("kept.storage.directory.LogDirectory.open_log", cut_at_recovery_point),
)
plant(
    "sequences-unchecked",
    "nodes",
    2,
    "sequence",
    "a batch that comes again is there once (idempotence)",
    ("kept.storage.producers.producer_states.ProducerStates.check", returns(None)),
)
plant(
    "reads-uncommitted",
    "nodes",
    1,
    "consumer-uncommitted",
    "consumers read below HW (38)",
    (f"{PARTITION}.fetch", reads_to_the_end),
)
plant(
    "records-skipped",
    "nodes",
    1,
    "consumer-gap",
    "a fetch begins with the batch that holds its offset (32)",
    (f"{PARTITION}.fetch", skips),
)
plant(
    "slow-stay-in-isr",
    "nodes",
    7,
    "liveness",
    "a member that lags leaves the ISR (30)",
    (f"{LEADER}._lags", waits_for_all),
    trial="limp",
)
plant(
    "flush-without-fsync",
    "nodes",
    7,
    "acknowledged-lost prefix",
    "with flush.messages=1 an acknowledgement waits for the fsync (33)",
    ("kept.storage.log.durability.FlushTicket.run", nothing_synced),
    durable=True,
    trial="",
)
plant(
    "fenced-one-by-one",
    "nodes",
    2,
    "slow-return",
    "an ISR of which nobody is left stays whole: two of three are enough (33)",
    ("kept.cluster.controller.broker_sessions.BrokerSessions.complete_decision", one_at_a_time),
    trial="return",
)
plant(
    "starts-with-the-epoch",
    "nodes",
    1,
    "consumer-out-of-range",
    "what is committed can be read from whoever leads (32)",
    (f"{PARTITION}.fetch", starts_with_the_epoch),
)
plant(
    "deletes-uncommitted",
    "nodes",
    7,
    "retention",
    "records are deleted below HW (43)",
    (f"{PARTITION}.delete_records", deletes_what_is_there),
)
plant(
    "unclean",
    "nodes",
    6,
    "unclean",
    "a leader outside of the ISR is elected where the topic allows one (36)",
    ("kept.cluster.controller.broker_decisions.unclean_allowed_by", everywhere),
    ("kept.cluster.controller.broker_sessions.unclean_allowed_by", everywhere),
)
plant(
    "old-epochs-appended",
    "nodes",
    1,
    "producer-epoch sequence",
    "a batch of an older epoch of its producer is refused (KIP-360)",
    ("kept.storage.producers.producer_states.ProducerStates.check", any_epoch),
    raises=True,
)
plant(
    "device-ignored",
    "nodes",
    1,
    "liveness",
    "a log directory whose device fails goes offline, and others lead what it held (KIP-112)",
    ("kept.node.replicas.replica_manager.ReplicaManager._fail", returns(None)),
    trial="device",
)
