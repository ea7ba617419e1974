"""What a leader knows of another replica: how far it is, and since when (``Replica.scala``)."""

from __future__ import annotations

from dataclasses import dataclass

from kept.replication.events import UNKNOWN_OFFSET, Identity
from kept.storage.errors import NotLeaderOrFollower


@dataclass(slots=True)
class Follower:
    """One other replica.

    ``log_end_offset``: UNKNOWN_OFFSET until it fetches in this epoch. ``caught_up_ms``: when it
    last had all that the leader had at that time. ``broker_epoch``: of the process that fetched
    last (KIP-903), -1 when it did not say.
    """

    log_end_offset: int = UNKNOWN_OFFSET
    caught_up_ms: int = 0
    fetched_ms: int = 0
    end_at_fetch: int = UNKNOWN_OFFSET
    held: Identity = None
    applied: Identity = None
    broker_epoch: int = -1

    def fetched(
        self, log_end_offset: int, leader_end_offset: int, now_ms: int, broker_epoch: int
    ) -> None:
        """It has everything below ``log_end_offset``, and the leader below ``leader_end_offset``.

        Raises NotLeaderOrFollower for a request of an earlier life of that broker.
        """
        if broker_epoch != self.broker_epoch:
            if -1 < broker_epoch < self.broker_epoch:
                raise NotLeaderOrFollower(
                    f"a fetch of broker epoch {broker_epoch} after one of {self.broker_epoch}"
                )
            self.broker_epoch = broker_epoch
        if log_end_offset >= leader_end_offset:
            self.caught_up_ms = max(self.caught_up_ms, now_ms)
        elif self.end_at_fetch != UNKNOWN_OFFSET and log_end_offset >= self.end_at_fetch:
            self.caught_up_ms = max(self.caught_up_ms, self.fetched_ms)
        self.log_end_offset = log_end_offset
        self.end_at_fetch = leader_end_offset
        self.fetched_ms = now_ms
