"""How many connections a second are accepted: in all, by a listener, and from an address (KIP-402,
KIP-612; ``ConnectionQuotas`` of Apache Kafka 4.3). Pure; time is ``monotonic_ms``.

Rates are taken as those of clients' quotas are, over the same samples, and hold back for one sample
at most. ``max.connection.creation.rate`` is for all listeners of clients together, or with a
listener's prefix for that one alone: over it, sockets wait to be accepted. An address has a quota
(``connection_creation_rate`` of an ``ip``): over that, a socket is closed, and does not count.

Unlike in Kafka no quota of an address holds on the listener between nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kept.cluster.security.addresses import canonical_address
from kept.cluster.security.client_quotas import CONNECTION_CREATION_RATE, IP, Quotas
from kept.node.security.client_quotas import Meter
from kept.replication.quota import SAMPLE_MS, SAMPLES, RateWindow
from kept.storage.types import MAX_INT32

MAX_ADDRESSES: Final = 10_000
"""Addresses that are remembered, those that connected last."""
UNLIMITED: Final = MAX_INT32


class ConnectionRates:
    """What was accepted lately. Windows are in samples and ms."""

    def __init__(self, samples: int = SAMPLES, sample_ms: int = SAMPLE_MS) -> None:
        self._samples = samples
        self._sample_ms = sample_ms
        self._bounds: dict[str | None, float] = {}
        """By address; None: of those that have none of their own."""
        self._of_all = self._new_meter()
        self._of_listeners: dict[str, Meter] = {}
        self._of_addresses: OrderedDict[str, Meter] = OrderedDict()
        """The one that connected last is the last."""

    def _new_meter(self) -> Meter:
        return Meter(RateWindow(self._samples, self._sample_ms), self._sample_ms)

    def replace(self, quotas: Quotas) -> None:
        """These quotas are in force from now on. Of several that name one address in different
        spellings the least counts.
        """
        bounds: dict[str | None, float] = {}
        for of, values in quotas.items():
            bound = values.get(CONNECTION_CREATION_RATE)
            for kind, name in of:
                if kind == IP and bound is not None:
                    # Of IPv4 there is one spelling, and each costs some microseconds.
                    several = name is not None and ":" in name
                    address = canonical_address(name) if several else name
                    bounds[address] = min(bound, bounds.get(address, bound))
        self._bounds = bounds

    def record(self, now_ms: int, bound: int, listener: str = "") -> int:
        """One more is accepted by a listener, or ("") by any of them, which accept ``bound`` a
        second: ms until it is its turn, 0 for at once.
        """
        if bound >= UNLIMITED:
            return 0
        meter = self._of_all
        if listener:
            meter = self._of_listeners.get(listener) or self._of_listeners.setdefault(
                listener, self._new_meter()
            )
        meter.bound = bound
        return meter.record(1, now_ms)

    def record_address(self, now_ms: int, host: str) -> int:
        """One more comes from an address (its canonical spelling): 0 if it may, else ms until it is
        to be closed; it does not count then.
        """
        bound = self._bounds.get(host, self._bounds.get(None))
        if bound is None:
            return 0
        meter = self._of_addresses.pop(host, None) or self._new_meter()
        self._of_addresses[host] = meter
        if len(self._of_addresses) > MAX_ADDRESSES:
            self._of_addresses.popitem(last=False)
        meter.bound = bound
        delay_ms = meter.record(1, now_ms)
        if delay_ms:
            meter.record(-1, now_ms)
        return delay_ms
