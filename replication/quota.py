"""Replication throttles (KIP-73; ``ReplicationQuotaManager``): a byte rate over a sliding window.

Only replicas listed in ``leader.`` or ``follower.replication.throttled.replicas`` of their topic
are throttled, and only while they are not in sync, so a throttle never costs an ISR its members.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kept.storage.types import MAX_INT64

UNLIMITED: Final = MAX_INT64
SAMPLES: Final = 11
"""``replication.quota.window.num``"""
SAMPLE_MS: Final = 1000
"""``replication.quota.window.size.seconds``"""


class ReplicationQuota:
    """Bytes per second that throttled replicas may take on this node in one direction."""

    def __init__(self, bytes_per_second: int = UNLIMITED) -> None:
        self.bytes_per_second = bytes_per_second
        self._samples: deque[list[int]] = deque()
        """[start in ms, bytes], ascending."""
        self._total = 0

    def record(self, size_bytes: int, now_ms: int) -> None:
        """Bytes of a throttled replica went through."""
        samples = self._samples
        if not samples or now_ms - samples[-1][0] >= SAMPLE_MS:
            samples.append([now_ms, 0])
        samples[-1][1] += size_bytes
        self._total += size_bytes

    def rate(self, now_ms: int) -> float:
        """Bytes per second over the window. As in Kafka an empty past counts as idle time."""
        samples = self._samples
        while samples and now_ms - samples[0][0] >= SAMPLES * SAMPLE_MS:
            self._total -= samples.popleft()[1]
        if not samples:
            return 0.0
        elapsed = max(now_ms - samples[0][0], (SAMPLES - 1) * SAMPLE_MS)
        return self._total * 1000 / elapsed

    def exceeded(self, now_ms: int) -> bool:
        """Throttled replicas must wait."""
        if self.bytes_per_second >= UNLIMITED:
            return False
        return self.rate(now_ms) > self.bytes_per_second


class ReplicationQuotas:
    """The two of a node: what followers out of sync may take from here, and what replicas here that
    are out of sync may fetch."""

    def __init__(self) -> None:
        self.leader = ReplicationQuota()
        self.follower = ReplicationQuota()
