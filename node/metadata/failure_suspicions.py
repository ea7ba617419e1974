"""Brokers that went away a moment ago: what clients are told in between.

*Doubted.* When a leader's process dies its clients ask for the leader at once, of nodes whose image
still names the dead one: fencing and election take a moment. A client that is told the old leader
believes it, and librdkafka asks again only after a second. So until a probe says that a broker
whose connection broke lives, the image moved, or a short time has passed, answers wait a little,
and then say that there is no leader yet.

*Lingering.* librdkafka 2.16 that hears in one answer that a partition has another leader and that
the old one is no broker any more takes its partition from both, and needs a second more to find the
new one. So a broker that was just fenced stays in the list of brokers for some seconds, though it
leads nothing.

Nothing is decided by either (rule 35: a node acts on the image only).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kept.cluster.metadata.image import BrokerImage, Image

DOUBT_S: Final = 3.0
"""By then a controller has fenced who is gone, or nobody could."""
LINGER_S: Final = 5.0
"""Clients that had a connection have asked for the next leader by then."""


class FailureSuspicions:
    """Whom this node saw go. Times are the loop's, in seconds."""

    def __init__(self) -> None:
        self._doubted: dict[int, tuple[int, float]] = {}
        """Broker -> its epoch when it was last seen, and when the doubt ends."""
        self._fenced: dict[int, float] = {}
        """Broker -> until when it lingers."""
        self._brokers: Mapping[int, BrokerImage] = {}
        self._live: frozenset[int] = frozenset()

    def doubt(self, broker_id: int, image: Image, now: float) -> None:
        """Its connection broke, or a probe of it was refused."""
        broker = image.brokers.get(broker_id)
        if broker is not None and not broker.fenced:
            self._doubted[broker_id] = (broker.broker_epoch, now + DOUBT_S)

    def believe(self, broker_id: int) -> None:
        """It answers, or nobody can tell: silence is no evidence."""
        self._doubted.pop(broker_id, None)

    @property
    def doubts_anybody(self) -> bool:
        """Whether anybody is doubted, or was until a moment ago."""
        return bool(self._doubted)

    def is_doubted(self, broker_id: int, image: Image, now: float) -> bool:
        """Whether clients should not be told that it leads."""
        doubt = self._doubted.get(broker_id)
        if doubt is None:
            return False
        epoch, until = doubt
        broker = image.brokers.get(broker_id)
        if now < until and broker is not None and broker.broker_epoch == epoch:
            return True
        del self._doubted[broker_id]
        return False

    def image_moved(self, image: Image, now: float) -> None:
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

    def lingers(self, broker_id: int, now: float) -> bool:
        """Whether a fenced broker is still to be listed."""
        return now < self._fenced.get(broker_id, now)
