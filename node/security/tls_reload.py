"""New certificates without a restart: what the files of TLS say is read again and again.

Files are read, not watched: mounted secrets change by renamed links, which watching does not see
(KIP-1288). Two reads that are a tick apart must agree, so that half of a rotation is not taken:
with a key but not its certificate yet, OpenSSL refuses, and what was in force stays. New
connections have the new certificate; those that are open live on. This holds for connections to
other nodes, too.

As in Kafka a new certificate must have the subject of the old one and all its names, unless
``ssl.allow.dn.changes`` or ``ssl.allow.san.changes`` is set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kept.node.runtime.logging import log
from kept.node.runtime.tasks import PeriodicTask
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from kept.client.security.tls import TlsConfig
    from kept.node.config.live_config import LiveConfig
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.listener_tls import ListenerTls

DAY_S: Final = 86_400
WARNINGS_S: Final = (30 * DAY_S, 7 * DAY_S, DAY_S, 0)
"""Time left of a certificate at which a line is written."""


class Rotation:
    """What is known of one listener's files; a pure core but for the context that it makes."""

    def __init__(self, tls: ListenerTls) -> None:
        self.tls = tls
        self.failed = False
        """What is in the files cannot be used: what was in force before still is."""
        self._pending: TlsConfig | None = None
        self._refused: TlsConfig | str | None = None
        self._is_early = False
        """What was refused was not valid yet: it is tried again, since it will be."""
        self._warned_s: float = WARNINGS_S[0] + 1

    def step(self, read: TlsConfig | ConfigurationError, now_s: float) -> None:
        """The files were read; ``now_s`` is the wall clock, in seconds since 1970."""
        if isinstance(read, ConfigurationError):
            self._pending = None
            self._refuse(str(read), str(read))
        elif read == self.tls.config:
            self._pending = self._refused = None
            self.failed = False
        elif read != self._pending:
            self._pending = read
        elif read != self._refused or self._is_early:
            self._take(read, now_s)
        self._warn(now_s)

    def _take(self, read: TlsConfig, now_s: float) -> None:
        self._is_early = read.keys is not None and now_s < read.keys.leaf.not_before
        try:
            self.tls.check_change(read, now_s)
            self.tls.use(read)
        except ConfigurationError as error:
            self._refuse(read, str(error))
            return
        self.failed, self._refused, self._warned_s = False, None, WARNINGS_S[0] + 1
        log.info("certificate replaced", listener=self.tls.name, subject=self.tls.subject)

    def _refuse(self, what: TlsConfig | str, why: str) -> None:
        if what != self._refused:
            self._refused = what
            log.error("new certificate not taken", listener=self.tls.name, error=why)
        self.failed = True

    def left_s(self, now_s: float) -> float:
        """Time until the certificate in force expires, in seconds."""
        return self.tls.not_after - now_s

    def _warn(self, now_s: float) -> None:
        left = self.left_s(now_s)
        reached = [limit for limit in WARNINGS_S if left <= limit < self._warned_s]
        if reached:
            self._warned_s = min(reached)
            what = "certificate expires soon" if left > 0 else "certificate has expired"
            log.warning(what, listener=self.tls.name, days=round(left / DAY_S, 1))


class TlsReload:
    """Reads the files of all listeners every ``kept.tls.reload.ms``."""

    def __init__(
        self, runtime: Runtime, config: LiveConfig, listeners: Sequence[ListenerTls]
    ) -> None:
        self._runtime = runtime
        self._config = config
        self.rotations = [Rotation(tls) for tls in listeners]
        self._reading = PeriodicTask(
            runtime.loop, self._read_all, self._wait_s, failure="certificates not read"
        )

    def start(self) -> None:
        """Read from now on."""
        if self.rotations:
            self._reading.start()

    async def stop(self) -> None:
        """Read no more."""
        await self._reading.stop()

    def _wait_s(self) -> float:
        return self._config.current.tls_reload_ms / 1000

    async def _read_all(self) -> None:
        for rotation in self.rotations:
            try:
                await self._read(rotation)
            except Exception as error:  # noqa: BLE001 - the next certificate may be read
                log.exception("certificates not read", error, listener=rotation.tls.name)

    async def _read(self, rotation: Rotation) -> None:
        try:
            read: TlsConfig | ConfigurationError
            read = await self._runtime.in_thread(rotation.tls.read)
        except ConfigurationError as error:
            read = error
        rotation.step(read, time.time())

    # Metrics.

    def expiry(self) -> Iterator[tuple[tuple[str], float]]:
        """Seconds until each listener's certificate expires, by listener."""
        now_s = time.time()
        for rotation in self.rotations:
            yield (rotation.tls.name,), round(rotation.left_s(now_s))

    def failures(self) -> Iterator[tuple[tuple[str], int]]:
        """1 for each listener whose files cannot be used as they are now."""
        for rotation in self.rotations:
            yield (rotation.tls.name,), int(rotation.failed)
