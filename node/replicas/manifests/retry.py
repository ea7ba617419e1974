"""What one replica's manifests fail at: said, counted, and tried again later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kept.node.replicas.manifests.errors import check_stopped
from kept.node.runtime.logging import log
from kept.storage.errors import client_message

if TYPE_CHECKING:
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.storage.types import TopicPartition

RETRY_S: Final = 1.0
RETRY_MAX_S: Final = 300.0
"""What failed is tried again after a second, then after twice as long each time."""
ADOPTED: Final = "Apache Kafka compacted each replica on its own before it was adopted"

REMEDY: Final = (
    "Start the replica that may have it, or put the damaged file back and start this node anew"
)


@dataclass(slots=True)
class RetrySchedule:
    """Why the last try to store or apply failed, and how often in a row."""

    runtime: Runtime = field(repr=False)
    counters: Counters = field(repr=False)
    topic_partition: TopicPartition
    retry: Callable[[], Any] = field(repr=False)
    """Called when it is time to try again."""
    reason: str = ""
    count: int = 0
    retry_at_ms: int | None = None
    """When it is tried again; None: not before somebody says so."""
    _said: tuple[object, ...] | None = None
    """The failure that was said last: it is news once."""
    _lacks: tuple[object, ...] | None = None
    """The record that is missing, as was said last."""
    _timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def failed(self, what: str, generation: str, error: BaseException) -> None:
        """Say so, and try again later; what a check has stopped waits for somebody to ask."""
        self.reason = client_message(error)
        self.count += 1
        failure = (what, generation, str(error))
        known, self._said = failure == self._said, failure
        (log.info if known else log.error)(
            what,
            topic=self.topic_partition.topic,
            partition=self.topic_partition.partition,
            generation=generation,
            error=str(error) or type(error).__name__,
            failures=self.count,
        )
        self.cancel()
        if check_stopped(error):
            self.counters.checks_failed += 1
            return
        wait_s = min(RETRY_S * 2 ** min(self.count - 1, 16), RETRY_MAX_S)
        self.retry_at_ms = self.runtime.now_ms() + int(1000 * wait_s)
        self._timer = self.runtime.loop.call_later(wait_s, self.retry)

    def record_missing(self, generation: str, offset: int, *, epoch: int, adopted: bool) -> None:
        """A record that a manifest lists is not here. ``adopted``: the directory was Kafka's.

        The log is cut before the manifest is tried again. That waits where the leader of this
        ``epoch`` has sent what is there already: it lacks the record, too.
        """
        if not self._is_new_failure(epoch, generation, offset):
            self.reason = f"{self._lacking(generation, offset)}; its leader does not send it"
            return
        self.cancel()
        (log.warning if adopted else log.error)(
            "a record that the leader has is missing here",
            topic=self.topic_partition.topic,
            partition=self.topic_partition.partition,
            offset=offset,
            generation=generation,
            why=f"{ADOPTED if adopted else 'damage, or an unclean election'}; the log is cut "
            "there and fetched again",
        )

    def record_missing_everywhere(self, generation: str, offset: int, *, epoch: int) -> None:
        """As :meth:`record_missing`, at a leader without another member of the ISR. It is tried on:
        the record may come back.
        """
        self.reason = (
            f"{self._lacking(generation, offset)}; no other replica is in sync that might have it. "
            f"{REMEDY}"
        )
        if self._is_new_failure(epoch, generation, offset):
            log.warning(
                "a record that survives is missing on all replicas in sync",
                topic=self.topic_partition.topic,
                partition=self.topic_partition.partition,
                offset=offset,
                generation=generation,
                why=f"nothing is compacted here, and no replica joins without it. {REMEDY}",
            )

    def _lacking(self, generation: str, offset: int) -> str:
        return f"the record at offset {offset} survives in generation {generation}, and is missing"

    def _is_new_failure(self, *lacks: object) -> bool:
        known, self._lacks = lacks == self._lacks, lacks
        return not known

    def cancel(self) -> None:
        """Try nothing by itself any more."""
        self.retry_at_ms = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reset(self) -> None:
        """It succeeded, or nobody wants it any more."""
        self.cancel()
        self.reason, self.count = "", 0
        self._said = self._lacks = None
