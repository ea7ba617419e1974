"""Which transaction markers may go (rule 9; Apache Kafka: ``CleanedTransactionMetadata``).

A marker goes only when no data of its transaction is left and its horizon has passed; the horizon
is set by the first pass that finds the data gone. An aborted transaction stays in the transaction
index of the segment that holds its marker as long as there is data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyroaring import BitMap

from kept.compaction.cleaner.job import Job, Producer
from kept.compaction.cleaner.scan_stats import EMPTY, Control, ScanStats
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.segments.txn_index import AbortedTxn


@dataclass(slots=True)
class Markers:
    """The control batches of one source segment, offsets relative to its base.

    ``kept``: markers that stay; ``removed``: that go; ``horizons``: (first, horizon) of those that
    stay with one; ``empties``: control batches that stay without their marker; ``aborted``: index
    entries.
    """

    kept: BitMap = field(default_factory=BitMap)
    removed: BitMap = field(default_factory=BitMap)
    horizons: list[tuple[int, int]] = field(default_factory=list)
    empties: list[int] = field(default_factory=list)
    aborted: list[AbortedTxn] = field(default_factory=list)


def decide(job: Job, facts: Iterable[ScanStats], clean_to: int) -> dict[int, Markers]:
    """Markers by the base of their source segment; above ``clean_to`` everything stays as it is."""
    horizon_ms = job.horizon_ms
    producers = {producer.producer_id: producer for producer in job.producers}
    entries = {(txn.producer_id, txn.last_offset): txn for txn in job.aborted}
    with_data: set[int] = set()
    by_producer: dict[int, Markers] = {}
    for segment in facts:
        base = segment.source.base_offset
        markers = by_producer[base] = Markers()
        for event in segment.events:
            if isinstance(event, int):
                with_data.add(event)
                continue
            has_data = event.producer_id in with_data
            if event.kind in (ABORT, COMMIT):
                with_data.discard(event.producer_id)
            entry = entries.get((event.producer_id, base + event.first))
            if job.horizons_only:
                has_data = event.horizon_ms < 0
            untouched = base + event.first >= clean_to
            if entry is not None and (has_data or untouched):
                markers.aborted.append(entry)
            stays_empty = _holds_state(producers, event) or base + event.last + 1 == job.end_offset
            _note_marker(
                markers,
                event,
                has_data=has_data,
                untouched=untouched,
                stays_empty=stays_empty,
                now_ms=job.now_ms,
                horizon_ms=horizon_ms,
            )
    return by_producer


def _note_marker(
    markers: Markers,
    event: Control,
    *,
    has_data: bool,
    untouched: bool,
    stays_empty: bool,
    now_ms: int,
    horizon_ms: int,
) -> None:
    if event.kind == EMPTY:
        if untouched or stays_empty:
            markers.empties.append(event.first)
        return
    can_discard = event.kind in (ABORT, COMMIT) and not has_data and not untouched
    if can_discard and event.horizon_ms != -1 and event.horizon_ms <= now_ms:
        markers.removed.add(event.first)
        if stays_empty:
            markers.empties.append(event.first)
        return
    markers.kept.add(event.first)
    if event.horizon_ms != -1:
        markers.horizons.append((event.first, event.horizon_ms))
    elif can_discard:
        markers.horizons.append((event.first, horizon_ms))


def _holds_state(producers: dict[int, Producer], event: Control) -> bool:
    """The batch is the last of an active producer that has no data left, for its epoch's sake."""
    producer = producers.get(event.producer_id)
    return (
        producer is not None
        and producer.last_data_offset < 0
        and producer.epoch == event.producer_epoch
    )
