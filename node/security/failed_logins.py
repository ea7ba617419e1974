"""How long an address waits for the answer to a login that failed: longer each time.

Kafka waits ``connection.failed.authentication.delay.ms``, always. Here each further failure of the
same address within :data:`REMEMBER_MS` doubles that, up to :data:`MAX_DELAY_MS`, so that passwords
are not tried by the thousand; :data:`MAX_ADDRESSES` addresses are remembered, those that failed
last. Pure: time is an argument.
"""

from __future__ import annotations

from typing import Final

REMEMBER_MS: Final = 10_000
MAX_DELAY_MS: Final = 5_000
MAX_ADDRESSES: Final = 4_096


class FailedLogins:
    """Addresses whose logins failed lately."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}
        """When the last one failed, and the delay that it got."""

    def __len__(self) -> int:
        return len(self._failed)

    def delay_ms(self, host: str, base_ms: int, now_ms: int) -> int:
        """A login of ``host`` failed: how long its answer waits. ``base_ms``: after the first."""
        at, delay = self._failed.pop(host, (now_ms - REMEMBER_MS, 0))
        lately = now_ms - at < REMEMBER_MS + delay
        delay = min(2 * delay, max(MAX_DELAY_MS, base_ms)) if lately and delay else base_ms
        self._failed[host] = now_ms, delay
        if len(self._failed) > MAX_ADDRESSES:
            del self._failed[next(iter(self._failed))]
        return delay
