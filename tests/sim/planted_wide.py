"""Planted bugs of what compaction meets beside faults: transactions, producers' state, log starts
that move, damaged files (rules 1, 4, 8, 9, 13, 14, 19, 43).

Not here: *groups in descending order* (11, C12) and *HW below b* (12, C13), which
``tests/replication/manifests`` plants: what a swap half done could show is gone since the pass
before, for a tombstone goes one pass after what it deletes. *Aborted transactions forgotten where a
segment is split* (9, 18) shows in ``tests/compaction/manifest/test_follow.py``: replicas here
mostly roll at the same offsets.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from tests.sim.planted import plant
from tests.sim.planted_compaction import always

WIDE = "compaction-wide"
PRODUCERS = "kept.storage.producers.producer_states.ProducerStates"
SHOWS = "resurrection value-lost prefix"


def marker_is_enough(_: Any) -> Any:
    """A marker ends its transaction before it is committed."""

    def first_undecided_offset(self: Any, high_watermark: int, log_start_offset: int) -> Any:
        return self.first_unstable_offset

    return first_undecided_offset


def to_its_end(original: Any) -> Any:
    """A pass maps all that its manifest must cover."""

    def cleanable_range(log: Any, now_ms: int) -> Any:
        found = original(log, now_ms)
        return replace(found, end_offset=max(found.end_offset, log.state.end_offset))

    return cleanable_range


def starts_anew(original: Any) -> Any:
    """A follower that applies a manifest takes its first segment for its start."""

    def job_for(log: Any, *args: Any) -> Any:
        log.log_start_offset = log.segments[0].base_offset
        return original(log, *args)

    return job_for


def nobody_is_active(_: Any) -> Any:
    """No batch stays for its producer's sake."""
    return lambda job: array("q")


class Whatever(int):
    """Equal to everything."""

    def __ne__(self, other: object) -> bool:
        return False

    __eq__, __hash__ = int.__eq__, int.__hash__


def believed(original: Any) -> Any:
    """The checksums of manifests are not compared."""
    return lambda *args: Whatever(original(*args))


plant(
    "open-is-mapped", WIDE, 1, SHOWS,
    "nothing above the last stable offset is mapped (1)",
    (f"{PRODUCERS}.first_undecided_offset", always(None)),
    transactions=True,
)  # fmt: skip
plant(
    "marker-is-enough", WIDE, 12, SHOWS,
    "a transaction has ended when its marker is committed (1)",
    (f"{PRODUCERS}.first_undecided_offset", marker_is_enough),
    transactions=True,
)  # fmt: skip
plant(
    "base-is-mapped", WIDE, 16, SHOWS,
    "what a base generation covers of an open transaction is not mapped (1, 19)",
    ("kept.compaction.cleaner.planner.cleanable_range", to_its_end),
    transactions=True,
)  # fmt: skip
plant(
    "aborted-is-mapped", WIDE, 1, SHOWS,
    "aborted data supersedes nothing (4, 9)",
    ("kept.compaction.cleaner.scan_stats.AbortedIndex.has", always(False)),
    transactions=True,
)  # fmt: skip
plant(
    "producer-forgotten", WIDE, 1, "producer-state sequence",
    "the last batch of an active producer stays, empty (8)",
    ("kept.compaction.cleaner.survey.producers_by_last_offset", nobody_is_active),
    unclean=False,
)  # fmt: skip
plant(
    "start-goes-back", WIDE, 1, "log-start-back",
    "a replica's log start does not go back (43)",
    ("kept.compaction.manifest.follow.job_for", starts_anew),
    moves=True,
)  # fmt: skip
plant(
    "damage-believed", WIDE, 1, f"{SHOWS} generation-differs survivor-missing crash invariants "
    "liveness older-needed tombstones",
    "a damaged manifest is noticed (13, 14)",
    ("kept.compaction.manifest.manifest._crc", believed),
    rots=True,
)  # fmt: skip
