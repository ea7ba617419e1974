"""What keeps a replica: start and retention, rolling, flushing, settings, closing.

Only the leader decides what goes (rule 43); a follower removes the segments that lie wholly below
the log start that its leader told.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kept.replication.events import CommitKnown, MinIsrChanged
from kept.replication.isr import IsrReplica
from kept.storage.durability import FlushTicket
from kept.storage.errors import MachineError, OffsetOutOfRange, PolicyViolation
from kept.storage.types import LogConfig

DELETE_TO_HIGH_WATERMARK: Final = -1
"""DeleteRecords' offset for "all that is committed"."""


class KeptReplica(IsrReplica):
    """A replica with its upkeep; see the module."""

    def delete_records(self, offset: int, now_ms: int) -> int:
        """Move the log start up to ``offset`` (-1: to HW); returns the low watermark.

        Raises PolicyViolation for a topic that is only compacted, OffsetOutOfRange below 0 or above
        HW, NotLeaderOrFollower, KafkaStorageError.
        """
        self._check_leader()
        config = self.log.config
        if config.compact and not config.delete:
            raise PolicyViolation(
                f"Records of partition {self.topic_partition} can not be deleted "
                "due to the configured policy"
            )
        if offset == DELETE_TO_HIGH_WATERMARK:
            offset = self.core.high_watermark
        if not 0 <= offset <= self.core.high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to {offset}, "
                f"the high watermark is {self.core.high_watermark}"
            )
        self._advance_start(offset, now_ms)
        return self.log.log_start_offset

    def low_watermark(self, live: Collection[int]) -> int:
        """The least log start among this leader and the ``live`` replicas; -1: one is not known.

        Raises NotLeaderOrFollower, KafkaStorageError.
        """
        self._check_leader()
        followers = self.core.followers
        starts = (followers[replica].log_start_offset for replica in followers if replica in live)
        return min((self.log.log_start_offset, *starts))

    def _advance_start(self, offset: int, now_ms: int) -> None:
        if offset > self.log.log_start_offset:
            self.log.advance_log_start(offset, now_ms)
            self._wake()

    def retention(self, now_ms: int) -> list[tuple[int, str]]:
        """Drop old segments by time, size and log start: (base offset, reason) of those that went.

        The leader decides (rule 43); elsewhere only what lies below the log start goes.
        """
        if self.offline is not None or self.suspended:
            return []
        start = self.log.log_start_offset
        try:
            gone = self.log.delete_old_segments(
                now_ms, self.core.high_watermark, by_policy=self._leading
            )
        except MachineError as error:
            self._failed(error)
        if self.log.log_start_offset != start:
            self._wake()
        return gone

    def update_config(self, config: LogConfig) -> None:
        """New settings of the topic; they hold at once."""
        self.log.update_config(config)
        self.step(MinIsrChanged(config.min_insync_replicas))

    def raise_high_watermark(self, offset: int) -> None:
        """Before a swap: what the manifest covers was committed, so HW is at least its end."""
        if offset > self.log.written_end_offset:
            raise OffsetOutOfRange(f"{self.topic_partition}: HW cannot be {offset}")
        self.step(CommitKnown(offset))

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll an active segment that is too old, also of an idle log (rule 3)."""
        self._check_online()
        try:
            return self.log.maybe_roll(now_ms)
        except MachineError as error:
            self._failed(error)

    def flush_due(self, now_ms: int) -> bool:
        """``flush.messages`` or ``flush.ms`` ask for a flush."""
        return self.offline is None and self.log.flush_due(now_ms)

    def flush_ticket(self) -> FlushTicket | None:
        """What is written and not durable, for the node's pool; None when there is nothing."""
        return None if self.offline is not None else self.log.flush_ticket()

    def expire_producers(self, now_ms: int) -> int:
        """Forget producers that were silent too long; returns how many."""
        return 0 if self.offline is not None else self.log.expire_producers(now_ms)

    def delete_expired(self, now_ms: int) -> int:
        """Remove files of segments that went ``file.delete.delay.ms`` ago; returns how many."""
        if self.offline is not None:
            return 0
        try:
            return self.log.delete_expired(now_ms)
        except MachineError as error:
            self._failed(error)

    def close(self, now_ms: int) -> None:
        """Stop leading, make everything durable, close the log. Blocks.

        Raises KafkaStorageError.
        """
        self.resign()
        if self.offline is None:
            try:
                self.log.close(now_ms)
            except MachineError as error:
                self._failed(error)
