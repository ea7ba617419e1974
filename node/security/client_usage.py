"""What clients of HTTP and gRPC use of their quotas, and how they are held back.

It counts as what Kafka's clients use does (:mod:`kept.node.security.client_quotas`): by the user
and the client id :data:`HTTP_CLIENT_ID` or :data:`GRPC_CLIENT_ID`, at the node that is asked. Bytes
of batches that are appended draw on ``producer_byte_rate``, those of batches that leaders give for
a request on ``consumer_byte_rate``, the time that a request takes of the loop on
``request_percentage``. Changes of metadata are asked of the controller in the user's name, and draw
on ``controller_mutation_rate`` there.

A response of Kafka tells its client how long to wait, and nothing is read of the connection
meanwhile. These protocols have no such field, and their clients open connections as they like, so
that who is over a rate waits before the next request that draws on it
(:meth:`ClientUsage.admit`), or is told when to come again. A request that was admitted is done: it
may overdraw a rate once, as in Kafka, by a fetch or by the record that it produces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from kept.node.runtime.clock import monotonic_ms
from kept.storage.errors import ThrottlingQuotaExceeded

if TYPE_CHECKING:
    from kept.node.runtime.counters import Counters
    from kept.node.security.client_quotas import ClientQuotas, ClientView
    from kept.node.security.session import Session

T = TypeVar("T")

HTTP_CLIENT_ID: Final = "kept-http"
GRPC_CLIENT_ID: Final = "kept-grpc"

QuotaKind = Literal["request", "produce", "fetch"]
"""Which rates a request draws on: that of its time, and beside it one of bytes, perhaps."""
PAUSE_MS: Final = 1000
"""Whoever waits learns within this time that quotas have changed."""
_SETTINGS: Final = {
    "request": "request_percentage",
    "produce": "producer_byte_rate",
    "fetch": "consumer_byte_rate",
}


class ClientUsage:
    """Of one principal by one protocol. ``quotas`` None: nothing is counted."""

    __slots__ = ("_client_id", "_counters", "_principal", "_quotas")

    def __init__(
        self,
        quotas: ClientQuotas | None,
        counters: Counters | None,
        principal: str = "",
        client_id: str = "",
    ) -> None:
        self._quotas = quotas
        self._counters = counters
        self._principal = principal
        self._client_id = client_id

    def _view(self, now_ms: int) -> ClientView | None:
        if self._quotas is None or not self._quotas.active:
            return None
        return self._quotas.view(self._principal, self._client_id.encode(), now_ms)

    @property
    def is_metered(self) -> bool:
        """Whether there is any quota."""
        return self._quotas is not None and self._quotas.active

    # What is held back.

    def throttle_delay(self, kind: QuotaKind) -> tuple[int, QuotaKind]:
        """ms until no rate that a request of a kind draws on is exceeded, and which one is."""
        now_ms = monotonic_ms()
        view = self._view(now_ms)
        if view is None:
            return 0, kind
        delay_ms = 0 if view.request is None else view.request.delay_ms(now_ms)
        of_bytes = {"produce": view.producer, "fetch": view.consumer}.get(kind)
        of_bytes_ms = 0 if of_bytes is None else of_bytes.delay_ms(now_ms)
        return (of_bytes_ms, kind) if of_bytes_ms > delay_ms else (delay_ms, "request")

    def is_over(self, kind: QuotaKind) -> bool:
        """Whether a request of a kind would have to wait now."""
        return self.throttle_delay(kind)[0] > 0

    def holds_back(self, kind: QuotaKind, interval_s: float) -> bool:
        """The same for what is done again and again, ``interval_s`` apart: it is left out now."""
        delay_ms, of = self.throttle_delay(kind)
        if delay_ms:
            assert self._counters is not None
            self._counters.throttled(of, min(delay_ms, int(1000 * interval_s)))
        return delay_ms > 0

    async def admit(self, kind: QuotaKind, patience_s: float = float("inf")) -> None:
        """Wait until a request of a kind may be served: as long as the rate says at first, or less
        where quotas change meanwhile. Raises ThrottlingQuotaExceeded at once where that takes
        longer than ``patience_s``.
        """
        delay_ms, of = self.throttle_delay(kind)
        if not delay_ms:
            return
        assert self._counters is not None
        if delay_ms > 1000 * patience_s:
            self._counters.throttled(of, delay_ms)
            raise ThrottlingQuotaExceeded(
                f"{self._principal} by {self._client_id} is over the quota {_SETTINGS[of]}; "
                f"try again in {delay_ms / 1000:.1f} s",
                delay_ms,
            )
        end_ms = monotonic_ms() + delay_ms
        while delay_ms > 0:
            pause_ms = min(delay_ms, PAUSE_MS)
            self._counters.throttled(of, pause_ms)
            await asyncio.sleep(pause_ms / 1000)
            still_ms, of = self.throttle_delay(kind)
            delay_ms = min(still_ms, end_ms - monotonic_ms())

    # What is used.

    def produced(self, size_bytes: int) -> None:
        """A batch is appended."""
        now_ms = monotonic_ms()
        view = self._view(now_ms)
        if view is not None and view.producer is not None:
            view.producer.record(size_bytes, now_ms)

    def consumed(self, size_bytes: int) -> None:
        """Batches were fetched."""
        now_ms = monotonic_ms()
        view = self._view(now_ms)
        if view is not None and view.consumer is not None:
            view.consumer.record(size_bytes, now_ms)

    def most_fetched(self, size_bytes: int) -> int:
        """What one fetch should bring at most, ``size_bytes`` or less: what the window of
        ``consumer_byte_rate`` holds.
        """
        view = self._view(monotonic_ms())
        if view is None or view.consumer is None:
            return size_bytes
        return max(1, min(size_bytes, int(view.consumer.window_value)))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``; the time that it takes of the loop is used."""
        if not self.is_metered:
            return await work
        return await _Timed(work, self._ran)

    def _ran(self, seconds: float) -> None:
        now_ms = monotonic_ms()
        view = self._view(now_ms)
        if view is not None and view.request is not None:
            view.request.record(100 * seconds, now_ms)


UNMETERED: Final = ClientUsage(None, None)
"""Of nodes, and of probes."""


class _Timed(Awaitable[T], Generic[T]):
    """Awaits ``work``, and tells of each step of it how long the loop was in it."""

    def __init__(self, work: Coroutine[Any, Any, T], spent: Any) -> None:
        self._work = work
        self._spent = spent

    def __await__(self) -> Generator[Any, Any, T]:
        work, error = self._work, None
        while True:
            started = perf_counter()
            try:
                waits_for = work.send(None) if error is None else work.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._spent(perf_counter() - started)
            error = None
            try:
                yield waits_for
            except BaseException as raised:  # noqa: BLE001 - it is for the work, as a cancellation
                error = raised


class ClientUsages:
    """Makes them for one protocol."""

    def __init__(self, quotas: ClientQuotas, counters: Counters, client_id: str) -> None:
        self._quotas = quotas
        self._counters = counters
        self._client_id = client_id

    def of(self, session: Session) -> ClientUsage:
        """What whoever speaks uses."""
        if session.is_node:
            return UNMETERED
        return ClientUsage(self._quotas, self._counters, session.principal, self._client_id)
