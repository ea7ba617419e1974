"""How long a network waits for the answer to a login that failed: longer each time.

Kafka waits ``connection.failed.authentication.delay.ms``, always. Here each further failure of the
same network (an IPv4 address, a /64 of IPv6) within :data:`REMEMBER_MS` doubles that, up to
:data:`MAX_DELAY_MS`, so that passwords are not tried by the thousand; :data:`MAX_NETWORKS` networks
are remembered, those that failed last. Pure: time is an argument.
"""

from __future__ import annotations

from typing import Final

REMEMBER_MS: Final = 10_000
MAX_DELAY_MS: Final = 5_000
MAX_NETWORKS: Final = 4_096


class FailedLogins:
    """Networks whose logins failed lately."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}
        """When the last one failed, and the delay that it got."""

    def __len__(self) -> int:
        return len(self._failed)

    def delay_ms(self, network: str, base_ms: int, now_ms: int) -> int:
        """A login of ``network`` failed: how long its answer waits; ``base_ms`` after the first."""
        at, delay = self._failed.pop(network, (now_ms - REMEMBER_MS, 0))
        lately = now_ms - at < REMEMBER_MS + delay
        delay = min(2 * delay, max(MAX_DELAY_MS, base_ms)) if lately and delay else base_ms
        self._failed[network] = now_ms, delay
        if len(self._failed) > MAX_NETWORKS:
            del self._failed[next(iter(self._failed))]
        return delay
