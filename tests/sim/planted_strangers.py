"""Planted bugs of what is believed of those who reach the listener between nodes."""

from __future__ import annotations

from typing import Any

from tests.sim.planted import plant

CORE = "kept.cluster.raft.core"
FOLLOWER = "kept.cluster.raft.follower.Follower"
OBSERVER = "kept.cluster.raft.observer.Observer"
LEADER = "kept.replication.partition_core.PartitionCore"


def no_flaw(_: Any) -> Any:
    def flaw(message: Any) -> str:
        return ""

    return flaw


def everybody_is_known(_: Any) -> Any:
    def trusts(self: Any, message: Any) -> bool:
        return True

    return trusts


def any_term(_: Any) -> Any:
    return 1 << 63


def vouched_for_ever(_: Any) -> Any:
    def follow_sender(self: Any, message: Any) -> None:
        self.state.follow(message.sender)
        self.state.leader_directory = message.directory_id

    return follow_sender


def any_life_counts(original: Any) -> Any:
    """A fetch of a replica counts whatever broker epoch it names."""

    def fetched(self: Any, replica_id: int, end: int, now_ms: int, broker_epoch: int = -1) -> Any:
        known = self.broker_epochs.get(replica_id, -1)
        return original(self, replica_id, end, now_ms, known)

    return fetched


plant(
    "flaws-believed",
    "strangers",
    1,
    "crash invariants committed-differs commit-back log-matching",
    "what contradicts itself is dropped whole",
    (f"{CORE}.flaw", no_flaw),
)
plant(
    "strangers-believed",
    "strangers",
    1,
    "crash election-safety log-matching committed-differs leader-completeness one-leader liveness",
    "voters are a node id and a directory of the log",
    (f"{OBSERVER}.trusts", everybody_is_known),
)
plant(
    "terms-unbounded",
    "strangers",
    2,
    "liveness log-matching",
    "one message raises the term by a step",
    (f"{CORE}.TERM_STEP", any_term),
)
plant(
    "vouched-for-ever",
    "strangers",
    3,
    "crash election-safety log-matching committed-differs leader-completeness one-leader liveness",
    "what voters said of others counts until a known leader is heard",
    (f"{FOLLOWER}._follow_sender", vouched_for_ever),
)
plant(
    "any-life-counts",
    "strangers",
    2,
    "isr-holds committed-lost acknowledged prefix",
    "a replica's fetch has the broker epoch of the image (KIP-903)",
    (f"{LEADER}.fetched", any_life_counts),
)
