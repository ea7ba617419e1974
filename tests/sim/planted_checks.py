"""Planted bugs for checkers that the bugs of other modules reach second, or never."""

from __future__ import annotations

from typing import Any

from kept.storage.errors import OffsetOutOfRange
from tests.sim.planted import plant
from tests.sim.planted_cluster import MEMBER, PARTITION
from tests.sim.planted_raft import REPLICATOR

SKIPPED = 3


def drops_its_last(original: Any) -> Any:
    """A leader takes back what it has not committed."""

    def tick(self: Any) -> None:
        log = self.state.log
        if log.last_index > max(log.commit_index, self.first_of_term):
            log.truncate_from(log.last_index)
        original(self)

    return tick


def skips(original: Any) -> Any:
    """Consumers get what is behind the offset that they ask for."""

    def fetch(self: Any, offset: int, max_bytes: int, **kwargs: Any) -> Any:
        later = offset + SKIPPED
        if kwargs.get("replica_id", -1) < 0 and later < self.core.high_watermark:
            return original(self, later, max_bytes, **kwargs)
        return original(self, offset, max_bytes, **kwargs)

    return fetch


def nothing_there(original: Any) -> Any:
    """A consumer that has read everything is told that its offset does not exist."""

    def fetch(self: Any, offset: int, max_bytes: int, **kwargs: Any) -> Any:
        if kwargs.get("replica_id", -1) < 0 and offset == self.core.high_watermark > 0:
            raise OffsetOutOfRange("the end")
        return original(self, offset, max_bytes, **kwargs)

    return fetch


def another_cluster(original: Any) -> Any:
    """A member takes its own cluster for another one once it is in the log."""

    def check(self: Any) -> None:
        original(self)
        if self.image.cluster_id is not None:
            self.refusal = "it belongs to another cluster"

    return check


plant(
    "leader-takes-back", "raft", 2, "leader-append-only",
    "a leader never changes its own log (Raft 5.3)",
    (f"{REPLICATOR}.tick", drops_its_last),
)  # fmt: skip
plant(
    "records-skipped", "cores", 1, "consumer-gap",
    "a fetch begins with the batch that holds its offset (32)",
    (f"{PARTITION}.fetch", skips),
)  # fmt: skip
plant(
    "end-is-out-of-range", "cores", 1, "consumer-out-of-range",
    "a fetch at the end is empty (38)",
    (f"{PARTITION}.fetch", nothing_there),
)  # fmt: skip
plant(
    "foreign-to-itself", "raft", 1, "refusal",
    "a member is refused by what it is, not by chance (34)",
    (f"{MEMBER}._check_identity", another_cluster),
)  # fmt: skip
