"""A rate over a sliding window (``Rate``, ``SampledStat`` of Apache Kafka 4.3), for the quotas of
clients as for replication throttles (KIP-73; ``ReplicationQuotaManager``).

Of the latter: only replicas listed in ``leader.`` or ``follower.replication.throttled.replicas`` of
their topic are throttled, and only while they are not in sync, so a throttle never costs an ISR its
members.
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


class RateWindow:
    """A rate over the last ``samples`` samples of ``sample_ms`` each, as Kafka measures it.

    A sample begins with the first value that is recorded after the one before is over, and goes a
    whole window after its last value. The window reaches back to the oldest sample, and is at least
    ``samples - 1`` samples and what has passed of the last: an empty past counts as idle time.
    """

    __slots__ = ("_sample_ms", "_samples", "_total", "_wanted")

    def __init__(self, samples: int = SAMPLES, sample_ms: int = SAMPLE_MS) -> None:
        self._wanted = samples
        self._sample_ms = sample_ms
        self._samples: deque[list[float]] = deque()
        """[start in ms, sum, last in ms], ascending."""
        self._total = 0.0

    def record(self, value: float, now_ms: int) -> None:
        """So much went through; a negative value takes back what did not."""
        samples = self._samples
        if not samples or now_ms - samples[-1][0] >= self._sample_ms:
            samples.append([now_ms, 0.0, now_ms])
        last = samples[-1]
        last[1] += value
        last[2] = now_ms
        self._total += value

    def _forget(self, now_ms: int) -> None:
        samples, age_ms = self._samples, self._wanted * self._sample_ms
        while samples and now_ms - samples[0][2] >= age_ms:
            self._total -= samples.popleft()[1]
        if not samples:
            self._total = 0.0  # what rounding left

    def is_empty(self, now_ms: int) -> bool:
        """Whether nothing was recorded within the window."""
        self._forget(now_ms)
        return not self._samples

    @property
    def min_window_ms(self) -> int:
        """No window is shorter."""
        return max((self._wanted - 1) * self._sample_ms, 1)

    def window_ms(self, now_ms: int) -> int:
        """How long the window is at ``now_ms``."""
        self._forget(now_ms)
        elapsed_ms = now_ms - int(self._samples[0][0]) if self._samples else 0
        missing = self._wanted - 1 - elapsed_ms // self._sample_ms
        return max(elapsed_ms + max(missing, 0) * self._sample_ms, 1)

    def rate(self, now_ms: int, more: float = 0.0) -> float:
        """Per second over the window, as if ``more`` had gone through, too."""
        window_ms = self.window_ms(now_ms)
        return (self._total + more) * 1000 / window_ms


class ReplicationQuota:
    """Bytes per second that throttled replicas may take on this node in one direction."""

    def __init__(
        self,
        bytes_per_second: int = UNLIMITED,
        *,
        samples: int = SAMPLES,
        sample_ms: int = SAMPLE_MS,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._window = RateWindow(samples, sample_ms)

    def record(self, size_bytes: int, now_ms: int) -> None:
        """Bytes of a throttled replica went through."""
        self._window.record(size_bytes, now_ms)

    def rate(self, now_ms: int) -> float:
        """Bytes per second over the window."""
        return self._window.rate(now_ms)

    def exceeded(self, now_ms: int) -> bool:
        """Throttled replicas must wait."""
        if self.bytes_per_second >= UNLIMITED:
            return False
        return self.rate(now_ms) > self.bytes_per_second


class ReplicationQuotas:
    """The two of a node: what followers out of sync may take from here, and what replicas here that
    are out of sync may fetch."""

    def __init__(self, samples: int = SAMPLES, sample_ms: int = SAMPLE_MS) -> None:
        self.leader = ReplicationQuota(samples=samples, sample_ms=sample_ms)
        self.follower = ReplicationQuota(samples=samples, sample_ms=sample_ms)
