"""Brokers that went away a moment ago: what clients are told in between.

*Suspected.* When a leader's process dies its clients ask for the leader at once, of nodes whose
image still names the dead one: fencing and election take a moment. A client that is told the old
leader believes it, and librdkafka asks again only after a second. So until a probe says that a
broker whose connection broke lives, the image moved, or a short time has passed, answers wait a
little, and then say that there is no leader yet.

*Fenced a moment ago.* librdkafka 2.16 that hears in one answer that a partition has another leader
and that the old one is no broker any more takes its partition from both, and needs a second more to
find the new one. So a broker that was just fenced stays in the list of brokers for some seconds,
though it leads nothing.

Nothing is decided by either (rule 35: a node acts on the image only).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kept.cluster.metadata.image import BrokerImage, Image

SUSPICION_S: Final = 3.0
"""By then a controller has fenced who is gone, or nobody could."""
LINGER_S: Final = 5.0
"""Clients that had a connection have asked for the next leader by then."""


class FailureSuspicions:
    """Whom this node saw go. Times are the loop's, in seconds."""

    def __init__(self) -> None:
        self._suspected: dict[int, tuple[int, float]] = {}
        """Broker -> its epoch when it was last seen, and when the suspicion ends."""
        self._fenced: dict[int, float] = {}
        """Broker -> until when clients still get it."""
        self._brokers: Mapping[int, BrokerImage] = {}
        self._live: frozenset[int] = frozenset()

    def suspect(self, broker_id: int, image: Image, now: float) -> None:
        """Its connection broke, or a probe of it was refused."""
        broker = image.brokers.get(broker_id)
        if broker is not None and not broker.fenced:
            self._suspected[broker_id] = (broker.broker_epoch, now + SUSPICION_S)

    def clear(self, broker_id: int) -> None:
        """It answers, or nobody can tell: silence is no evidence."""
        self._suspected.pop(broker_id, None)

    @property
    def suspects_any(self) -> bool:
        """Whether anybody is suspected, or was until a moment ago."""
        return bool(self._suspected)

    def is_suspected(self, broker_id: int, image: Image, now: float) -> bool:
        """Whether clients should not be told that it leads."""
        suspicion = self._suspected.get(broker_id)
        if suspicion is None:
            return False
        epoch, until = suspicion
        broker = image.brokers.get(broker_id)
        if now < until and broker is not None and broker.broker_epoch == epoch:
            return True
        del self._suspected[broker_id]
        return False

    def image_changed(self, image: Image, now: float) -> None:
        """Note who was fenced."""
        if image.brokers is self._brokers:
            return  # nearly every entry: an image shares what did not change with the one before
        self._brokers = image.brokers
        live = frozenset(broker.broker_id for broker in image.brokers.values() if not broker.fenced)
        for gone in self._live - live:
            self._fenced[gone] = now + LINGER_S
        for back in live & self._fenced.keys():
            del self._fenced[back]
        self._live = live

    def recently_fenced(self, broker_id: int, now: float) -> bool:
        """Whether a broker was fenced a moment ago, and is still to be listed."""
        return now < self._fenced.get(broker_id, now)
