"""The live half of a swap: :mod:`kept.storage.swap` has the protocol and what a start does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kept.storage import layout, recovery, retention, swap
from kept.storage.errors import InvariantViolation
from kept.storage.segment import Segment
from kept.storage.swap import SwapGroup, SwapPlan

if TYPE_CHECKING:
    from kept.storage.log import Log

logger = logging.getLogger(__name__)


def replace(log: Log, plan: SwapPlan, now_ms: int) -> None:
    """See :meth:`Log.replace_segments`. Raises InvariantViolation when the plan does not fit the
    log.
    """
    by_base = {s.base_offset: s for s in log.segments[:-1]}
    _check(log, plan, by_base)
    interval = log.config.index_interval_bytes
    outputs: dict[int, Segment] = {}
    for group in plan.groups:
        mtime_ms = by_base[group.input_bases[-1]].mtime_ms
        for base in group.output_bases:
            segment = swap.build_indexes(log.disk, log.directory, base, interval)
            segment.mtime_ms = mtime_ms
            log.disk.set_mtime(segment.path(layout.LOG, layout.CLEANED), mtime_ms)
            segment.flushed = True
            outputs[base] = segment
    log.disk.reach("swap.cleaned")
    for base in sorted(outputs, reverse=True):
        outputs[base].rename(layout.CLEANED, layout.SWAP)
        log.disk.reach("swap.renamed")
    log.disk.fsync_dir(log.directory)
    log.disk.reach("swap.prepared")
    for group in plan.groups:
        _swap_group(log, group, by_base, outputs, now_ms)
    log.disk.fsync_dir(log.directory)
    log.disk.reach("swap.done")


def _check(log: Log, plan: SwapPlan, by_base: dict[int, Segment]) -> None:
    last = -1
    for group in plan.groups:
        if not group.input_bases or not group.output_bases:
            raise InvariantViolation(f"{log}: {group} replaces nothing")
        for base in group.input_bases:
            if base not in by_base or base <= last:
                raise InvariantViolation(f"{log}: {group} does not fit the segments")
            last = base
        if group.output_bases[0] < group.input_bases[0]:
            raise InvariantViolation(f"{log}: {group} starts below its inputs")


def _swap_group(
    log: Log,
    group: SwapGroup,
    by_base: dict[int, Segment],
    outputs: dict[int, Segment],
    now_ms: int,
) -> None:
    old = [by_base[base] for base in group.input_bases]
    new = [outputs[base] for base in group.output_bases]
    after = log.segments.floor(group.input_bases[-1])
    end = log.segments.next_base(after, log.log_end_offset)
    retention.retire(log, old, now_ms)
    log.disk.reach("swap.deleted")
    for segment in new:
        swap.place(log.disk, log.directory, segment.base_offset)
    for i, segment in enumerate(new):
        segment.next_offset = new[i + 1].base_offset if i + 1 < len(new) else end
        segment.index.unload()
        segment.time_index.unload()
    log.segments.replace(old, new)
    stale = set(group.input_bases) - set(group.output_bases)
    recovery.remove_snapshots(log.disk, log.directory, sorted(stale))
    log.disk.reach("swap.group")
