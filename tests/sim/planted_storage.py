"""Planted bugs of logs, of what outlives a process, and of who may be a broker (rules 22-36)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kept.cluster.controller.broker_decisions import Fence
from kept.cluster.metadata.records import NO_LEADER
from kept.cluster.raft.ready import Role
from kept.storage.errors import InvalidRequest
from tests.sim.planted import plant
from tests.sim.planted_cluster import FOLLOWER, LEADER, LIFECYCLE, MEMBER, PARTITION, returns

ELECTION = "kept.cluster.controller.partition_election"
FOLLOWING = "kept.replication.follower_replica.FollowerReplica"


def cut_at_recovery_point(original: Any) -> Any:
    """A start trusts the last flush alone, whatever the page cache holds."""

    def open_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = original(self, *args, **kwargs)
        log.truncate_to(max(log.recovery_point, log.log_start_offset))
        return log

    return open_log


def nothing_synced(_: Any) -> Any:
    def run(self: Any) -> None:
        return None

    return run


def never_awaits(_: Any) -> Any:
    return property(lambda self: False)


def ready_as_leader(_: Any) -> Any:
    return property(lambda self: self.role is Role.LEADER)


def always_recovered(_: Any) -> Any:
    return property(lambda self: True)


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


def everyone_is_a_stranger(original: Any) -> Any:
    """Whoever is registered in its place is taken for a process elsewhere."""

    def displaced(self: Any, other: Any, now_ms: int) -> None:
        original(self, None if other is None else replace(other, directories=()), now_ms)

    return displaced


def shortest(original: Any) -> Any:
    """The shortest log leads when a whole ISR lost power."""

    def longest(state: Any, logs: Any) -> int:
        return min(logs, key=lambda broker: logs[broker].length, default=NO_LEADER)

    return longest


def unchecked(original: Any) -> Any:
    """An ISR change is taken without compare-and-set."""

    def checked(image: Any, request: Any) -> Any:
        state = image.partition(request.topic_id, request.partition)
        return original(image, request) if state is None else state

    return checked


def just_resumed(_: Any) -> Any:
    return lambda self: None


def saved_for_ever(_: Any) -> Any:
    def retire(self: Any) -> None:
        return None

    return retire


def cut_to_own_end(_: Any) -> Any:
    """A diverging follower keeps all that it has."""

    def parting(self: Any, epoch: int, end_offset: int) -> int:
        return int(self.log.log_end_offset)

    return parting


def waits_for_all(_: Any) -> Any:
    """Nobody leaves the ISR for being slow."""

    def lags(self: Any, replica: int) -> bool:
        return False

    return lags


def everyone_clean(original: Any) -> Any:
    """A broker that lost power stays in the ISR: the clean mark is not compared."""

    def register(image: Any, registration: Any, **kwargs: Any) -> Any:
        old = image.brokers.get(registration.broker_id)
        epoch = -1 if old is None else old.broker_epoch
        return original(image, replace(registration, clean_epoch=epoch), **kwargs)

    return register


def nobody_leaves(original: Any) -> Any:
    """Only a leader with its replica changes an ISR."""

    def alter_isr(image: Any, request: Any) -> Any:
        if request.broker_id not in {broker_id for broker_id, _ in request.isr}:
            raise InvalidRequest("it leaves itself out")
        return original(image, request)

    return alter_isr


def one_boot(_: Any) -> Any:
    """A machine that lost power says that it has run all the time."""
    return lambda self: "boot"


def one_at_a_time(original: Any) -> Any:
    """Of those that died together one is fenced after the other."""

    def due(self: Any, decision: Any) -> Any:
        if isinstance(decision, Fence):
            return replace(decision, gone={decision.broker_id: decision.broker_epoch})
        return original(self, decision)

    return due


plant(
    "cut-at-recovery-point", "cores", 5, "kill-lost committed-lost isr-holds prefix",
    "what a killed process had written is there (33)",
    ("kept.storage.directory.LogDirectory.open_log", cut_at_recovery_point),
)  # fmt: skip
plant(
    "flush-without-fsync", "storage", 10, "acknowledged-lost prefix",
    "with flush.messages=1 an acknowledgement waits for the fsync (33)",
    ("kept.storage.log.durability.FlushTicket.run", nothing_synced),
)  # fmt: skip
plant(
    "follower-does-not-flush", "scripted", 19, "acknowledged-lost isr-holds committed-lost",
    "with flush.messages=1 a follower counts when it is durable (33)",
    (f"{FOLLOWING}.awaits_flush", never_awaits),
)  # fmt: skip
plant(
    "decides-at-once", "cores", 175, "decided-on-old-image",
    "a new controller decides when its image holds all that was committed (35)",
    (f"{MEMBER}.controller_ready", ready_as_leader),
)  # fmt: skip
plant(
    "acts-on-old-image", "storage", 4, "kill-lost committed-lost isr-holds prefix",
    "a start removes nothing by an image that is older than its logs (35)",
    (f"{MEMBER}.recovered", always_recovered),
)  # fmt: skip
plant(
    "reads-uncommitted", "cores", 1, "consumer-uncommitted",
    "consumers read below HW (38)",
    (f"{PARTITION}.fetch", reads_to_the_end),
)  # fmt: skip
plant(
    "late-register-ends", "scripted", 4, "exit",
    "the registration of a dead process of this directory ends nobody (35)",
    (f"{LIFECYCLE}._displaced", everyone_is_a_stranger),
)  # fmt: skip
plant(
    "shortest-leads", "storage", 24, "acknowledged-lost committed-lost kill-lost isr-holds prefix",
    "of an ISR that lost power the longest log leads (33)",
    ("kept.cluster.controller.unclean_recovery.longest", shortest),
)  # fmt: skip
plant(
    "isr-without-cas", "scripted", 1, "isr-holds committed-lost one-leader invariants prefix",
    "an ISR change is compare-and-set on the partition epoch (35)",
    (f"{ELECTION}._checked_state", unchecked),
)  # fmt: skip
plant(
    "proposal-forgotten", "scripted", 10, "liveness",
    "an ISR proposed while suspended is asked for afterwards (30)",
    ("kept.replication.replica.Replica._repeat_proposal", just_resumed),
)  # fmt: skip
plant(
    "saves-for-the-dead", "cores", 3, "vanished epoch-matching",
    "a deleted log saves nothing (24)",
    ("kept.storage.log.leader_epoch_cache.LeaderEpochCache.retire", saved_for_ever),
)  # fmt: skip
plant(
    "cuts-to-own-end", "cores", 3,
    "prefix liveness replicas-differ epoch-matching committed-lost isr-holds",
    "the cut is the least of three ends (27)",
    (f"{FOLLOWER}._parting", cut_to_own_end),
)  # fmt: skip
plant(
    "sequences-unchecked", "cores", 3, "sequence",
    "a batch that comes again is there once (idempotence)",
    ("kept.storage.producers.producer_states.ProducerStates.check", returns(None)),
)  # fmt: skip
plant(
    "slow-stay-in-isr", "cores", 93, "liveness",
    "a member that lags leaves the ISR (30)",
    (f"{LEADER}._lags", waits_for_all),
)  # fmt: skip
plant(
    "broker-epoch-uncompared", "storage", 36,
    "committed-lost isr-holds acknowledged-lost prefix sequence-refused",
    "who lost power leaves the ISR (33)",
    ("kept.cluster.controller.brokers.register_broker", everyone_clean),
)  # fmt: skip
plant(
    "unclean-elects", "storage", 4, "unclean",
    "unclean only when configured (36)",
    ("tests.sim.node.unclean_allowed_by", returns(lambda topic: True)),
    ("kept.cluster.controller.broker_decisions.unclean_allowed_by", returns(lambda topic: True)),
)  # fmt: skip
plant(
    "offline-stays", "directories", 4, "liveness",
    "a replica whose log directory failed leaves the ISR, and others lead (30)",
    (f"{ELECTION}.alter_isr", nobody_leaves),
)  # fmt: skip
plant(
    "boot-outlives-power", "crashes", 1,
    "committed-lost isr-holds acknowledged-lost prefix sequence-refused liveness",
    "who was killed may have all that it had, who lost power not (33)",
    ("kept.testing.simulated_disk.SimulatedDisk.boot_id", one_boot),
)  # fmt: skip
plant(
    "fenced-one-by-one", "crashes", 2, "slow-return",
    "an ISR of which nobody is left stays whole: two of three are enough (33)",
    ("kept.cluster.controller.broker_sessions.BrokerSessions.due", one_at_a_time),
)  # fmt: skip
