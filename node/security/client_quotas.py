"""What clients have used of their quotas on this node, and how long they must wait (KIP-13, 55,
124, 219, 599; ``ClientQuotaManager``, ``QuotaUtils``, ``ControllerMutationQuotaManager``).

Each broker counts for itself. A :class:`ClientView` is what counts for one principal's client id,
found once (:func:`~kept.cluster.security.client_quotas.effective_quota`) and kept until quotas
change; clients that share a quota share its meter. Time is ``monotonic_ms``: a clock that is set
back moves nothing.

Clients invent their client ids, so views are bounded: the one not used for longest goes, and of a
long id a hash is remembered. A meter
that no view has any more stays while it may still hold its next user back (one that was idle for
its window is as good as a new one), and :data:`MAX_UNUSED` of them at most. Both are looked after a
few at a time, with each new view; a change of quotas has views found anew as they are used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from kept.cluster.security.client_quotas import (
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    IP,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    Quotas,
    effective_quota,
)
from kept.replication.quota import SAMPLE_MS, SAMPLES, RateWindow
from kept.storage.errors import ThrottlingQuotaExceeded

MAX_VIEWS: Final = 10_000
IDLE_MS: Final = 3_600_000
"""A view that was not used for so long goes, as Kafka's sensors do."""
MAX_DELAY_MS: Final = 2**31 - 1
"""``throttle_time_ms`` is an int32."""
MAX_UNUSED: Final = 10_000
"""Meters that no view has."""
MAX_ID_CHARACTERS: Final = 255
"""Of a client id that is remembered as it is; clients may send 32 KiB."""
_LOOKED_AT: Final = 8
"""Unused meters that are looked at with each new view, which has four at most."""


SharedBy = tuple[str, str, str]
"""A quota's key and who shares it: user, client id."""


class Meter:
    """What those who share a quota have used of it, as a rate over a window."""

    __slots__ = ("_max_delay_ms", "_window", "bound", "shared_by", "views")

    def __init__(self, window: RateWindow, max_delay_ms: int = MAX_DELAY_MS) -> None:
        self.bound = 0.0
        """Per second."""
        self.shared_by: SharedBy = ("", "", "")
        self.views = 0
        """Of how many views it is."""
        self._window = window
        self._max_delay_ms = max_delay_ms

    def record(self, value: float, now_ms: int) -> int:
        """So much was used: ms until the rate is within the bound again, 0 if it is."""
        self._window.record(value, now_ms)
        return self.delay_ms(now_ms)

    def record_unless_over(self, value: float, now_ms: int) -> int:
        """As :meth:`record`, but what would exceed the bound is not used, and not counted. Where
        nothing was used within the window it is, all the same (ours): a batch larger than the
        window's bytes would never be sent else.
        """
        delay_ms = 0 if self._window.is_empty(now_ms) else self.delay_ms(now_ms, value)
        if delay_ms == 0:
            self._window.record(value, now_ms)
        return delay_ms

    def delay_ms(self, now_ms: int, more: float = 0.0) -> int:
        """ms until the rate, with ``more`` used now, is within the bound again."""
        over = self._window.rate(now_ms, more) - self.bound
        if over <= 0:
            return 0
        if not self.bound:
            return self._max_delay_ms
        delay_ms = round(over / self.bound * self._window.window_ms(now_ms))
        return min(delay_ms, self._max_delay_ms)

    @property
    def window_value(self) -> float:
        """What may be used at once, if nothing else was, without being held back."""
        return self.bound * self._window.min_window_ms / 1000

    def is_idle(self, now_ms: int) -> bool:
        """Whether it is as good as a new one."""
        return self._window.is_empty(now_ms)


class TokenBucket:
    """What is left of a ``controller_mutation_rate``: it fills by ``bound`` tokens a second, up to
    those of ``burst_s`` seconds, and may be overdrawn by one request.
    """

    __slots__ = ("_at_ms", "_burst_s", "_tokens", "bound", "shared_by", "views")

    def __init__(self, burst_s: float) -> None:
        self.bound = 0.0
        self.shared_by: SharedBy = ("", "", "")
        self.views = 0
        self._burst_s = burst_s
        self._tokens = float("inf")
        self._at_ms = 0

    def _refill(self, now_ms: int) -> None:
        elapsed_s = max(now_ms - self._at_ms, 0) / 1000
        self._tokens = min(self.bound * self._burst_s, self._tokens + self.bound * elapsed_s)
        self._at_ms = now_ms

    def record(self, tokens: float, now_ms: int) -> None:
        """So many were used."""
        self._refill(now_ms)
        self._tokens -= tokens

    def delay_ms(self, now_ms: int) -> int:
        """ms until it is overdrawn no more; 0: it is not."""
        self._refill(now_ms)
        if self._tokens >= 0:
            return 0
        return min(round(-self._tokens / self.bound * 1000), MAX_DELAY_MS)

    def is_idle(self, now_ms: int) -> bool:
        """Whether it is full, as a new one."""
        self._refill(now_ms)
        return self._tokens >= self.bound * self._burst_s


class ControllerMutations:
    """What one request changes, counted by partitions (KIP-599). A ``strict`` one is refused what
    comes when nothing is left; another one is told to wait afterwards.
    """

    __slots__ = ("_bucket", "_now_ms", "_refused", "_strict")

    def __init__(self, bucket: TokenBucket | None, now_ms: int, *, strict: bool) -> None:
        self._bucket = bucket
        self._now_ms = now_ms
        self._strict = strict
        self._refused = False

    def record(self, partitions: int) -> None:
        """So many are created or deleted. Raises ThrottlingQuotaExceeded."""
        if self._bucket is None:
            return
        delay_ms = self._bucket.delay_ms(self._now_ms) if self._strict else 0
        if delay_ms:
            self._refused = True
            raise ThrottlingQuotaExceeded("The throttling quota has been exceeded.", delay_ms)
        self._bucket.record(partitions, self._now_ms)

    @property
    def throttle_ms(self) -> int:
        """What the client is told: of a strict one only if something was refused."""
        if self._bucket is None or (self._strict and not self._refused):
            return 0
        return self._bucket.delay_ms(self._now_ms)


def _short(client_id: str) -> str:
    """What stands for a client id in memory."""
    if len(client_id) <= MAX_ID_CHARACTERS:
        return client_id
    from hashlib import sha256

    return sha256(client_id.encode()).hexdigest()


class ClientView:
    """The meters that count for a principal's client; None where it has no such quota."""

    __slots__ = ("consumer", "generation", "mutations", "producer", "request", "used_ms")

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        """Of the quotas that it was found by."""
        self.producer: Meter | None = None
        """Bytes of Produce requests."""
        self.consumer: Meter | None = None
        """Bytes of records that are fetched."""
        self.request: Meter | None = None
        """Time of the loop, in percent."""
        self.mutations: TokenBucket | None = None
        self.used_ms = 0


M = TypeVar("M", Meter, TokenBucket)


class ClientQuotas:
    """The quotas that are in force, and what was used of them. Windows are in samples and ms."""

    def __init__(
        self,
        samples: int = SAMPLES,
        sample_ms: int = SAMPLE_MS,
        controller_samples: int = SAMPLES,
        controller_sample_ms: int = SAMPLE_MS,
    ) -> None:
        self.active = False
        """Whether there is any quota of users or client ids: what the hot path asks."""
        self._quotas: Quotas = {}
        self._samples = samples
        self._sample_ms = sample_ms
        self._burst_s = controller_samples * controller_sample_ms / 1000
        self._views: OrderedDict[tuple[str, bytes], ClientView] = OrderedDict()
        """By principal and client id, least recently used first."""
        self._generation = 0
        self._rates: dict[SharedBy, Meter] = {}
        self._buckets: dict[SharedBy, TokenBucket] = {}
        self._unused: OrderedDict[SharedBy, Meter | TokenBucket] = OrderedDict()
        """Those of both that no view has."""

    def __len__(self) -> int:
        return len(self._views)

    def replace(self, quotas: Quotas) -> None:
        """These are in force from now on. What was used stays used."""
        self._quotas = quotas
        self.active = any(kind != IP for of in quotas for kind, _ in of)
        self._generation += 1

    def view(self, principal: str, client_id: bytes, now_ms: int) -> ClientView:
        """What counts for this client."""
        known_as = client_id
        if len(client_id) > MAX_ID_CHARACTERS:
            from hashlib import sha256

            known_as = sha256(client_id).digest()
        key = (principal, known_as)
        view = self._views.get(key)
        if view is not None and view.generation == self._generation:
            view.used_ms = now_ms
            self._views.move_to_end(key)
            return view
        if view is not None:
            self._release(self._views.pop(key))
        view = self._views[key] = self._find(principal, client_id)
        view.used_ms = now_ms
        self._forget(now_ms)
        return view

    def mutations(
        self, principal: str, client_id: str | None, now_ms: int, *, strict: bool
    ) -> ControllerMutations:
        """The quota of what a request changes."""
        bucket = None
        if self.active:
            bucket = self.view(principal, (client_id or "").encode(), now_ms).mutations
        return ControllerMutations(bucket, now_ms, strict=strict)

    def _find(self, principal: str, client_id: bytes) -> ClientView:
        of = principal.partition(":")[2], client_id.decode("utf-8", "replace")
        view = ClientView(self._generation)
        view.producer = self._shared(self._rates, PRODUCER_BYTE_RATE, of, self._new_rate)
        view.consumer = self._shared(self._rates, CONSUMER_BYTE_RATE, of, self._new_rate)
        view.request = self._shared(self._rates, REQUEST_PERCENTAGE, of, self._new_request_rate)
        view.mutations = self._shared(self._buckets, CONTROLLER_MUTATION_RATE, of, self._new_bucket)
        return view

    def _shared(
        self, meters: dict[SharedBy, M], key: str, of: tuple[str, str], new: Callable[[], M]
    ) -> M | None:
        """The meter of the quota ``key`` that counts for a user's client id."""
        quota = effective_quota(self._quotas, key, *of)
        if quota is None:
            return None
        shared_by = (key, quota.user, _short(quota.client_id))
        meter = meters.get(shared_by)
        if meter is None:
            meter = meters[shared_by] = new()
            meter.shared_by = shared_by
        elif not meter.views:
            del self._unused[shared_by]
        meter.bound = quota.bound
        meter.views += 1
        return meter

    def _new_rate(self) -> Meter:
        return Meter(RateWindow(self._samples, self._sample_ms))

    def _new_request_rate(self) -> Meter:
        return Meter(RateWindow(self._samples, self._sample_ms), self._sample_ms)

    def _new_bucket(self) -> TokenBucket:
        return TokenBucket(self._burst_s)

    def _forget(self, now_ms: int) -> None:
        """Let views go that are too many or were not used for long, and meters as well."""
        views, unused = self._views, self._unused
        while len(views) > MAX_VIEWS or next(iter(views.values())).used_ms < now_ms - IDLE_MS:
            self._release(views.popitem(last=False)[1])
        for _ in range(min(_LOOKED_AT, len(unused))):
            shared_by, meter = unused.popitem(last=False)
            if len(unused) < MAX_UNUSED and not meter.is_idle(now_ms):
                unused[shared_by] = meter
            else:
                self._rates.pop(shared_by, None)
                self._buckets.pop(shared_by, None)

    def _release(self, view: ClientView) -> None:
        for meter in (view.producer, view.consumer, view.request, view.mutations):
            if meter is not None:
                meter.views -= 1
                if not meter.views:
                    self._unused[meter.shared_by] = meter
