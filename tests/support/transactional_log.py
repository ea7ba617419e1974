"""Transactions of two producers as a follower gets them from its leader."""

from __future__ import annotations

from kept.storage.records import EndTxnMarker, build_batch, build_control_batch
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.segments.txn_index import AbortedTxn


class Feed:
    """Batches as a leader would send them."""

    def __init__(self, kit) -> None:
        self.kit = kit
        self.offset = 0
        self.sequences: dict[int, int] = {}

    def data(self, pid: int, count: int = 2) -> bytes:
        rows = [(self.kit.NOW, b"k", b"v" * 30, ())] * count
        sequence = self.sequences.get(pid, 0)
        self.sequences[pid] = sequence + count
        made = build_batch(
            rows,
            base_offset=self.offset,
            producer_id=pid,
            producer_epoch=0,
            base_sequence=sequence,
            is_transactional=True,
            leader_epoch=0,
        )
        self.offset += count
        return made

    def marker(self, pid: int, kind: int) -> bytes:
        made = build_control_batch(
            EndTxnMarker(kind == COMMIT, 4),
            pid,
            0,
            self.kit.NOW,
            base_offset=self.offset,
            leader_epoch=0,
        )
        self.offset += 1
        return made


def fill(kit, log) -> list[AbortedTxn]:
    """Two producers whose transactions overlap, over several segments, one left open."""
    feed, expected = Feed(kit), []
    for n in range(12):
        first = feed.offset
        log.append_as_follower(feed.data(1), kit.NOW)
        log.append_as_follower(feed.data(2), kit.NOW)
        assert log.first_unstable_offset == first
        if n % 2:
            expected.append(AbortedTxn(1, first, feed.offset, first + 2))
        log.append_as_follower(feed.marker(1, ABORT if n % 2 else COMMIT), kit.NOW)
        assert log.first_unstable_offset == first + 2
        if n % 3 == 0:
            expected.append(AbortedTxn(2, first + 2, feed.offset, feed.offset + 1))
        log.append_as_follower(feed.marker(2, ABORT if n % 3 == 0 else COMMIT), kit.NOW)
        assert log.first_unstable_offset is None
    log.append_as_follower(feed.data(1), kit.NOW)
    log.write()
    assert log.first_unstable_offset == feed.offset - 2
    return expected
