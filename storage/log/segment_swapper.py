"""The live half of a swap; :mod:`kept.storage.segments.swap` has the protocol and recovery.

A :class:`SegmentSwapper` goes in steps, so that the thread of the log is held for renames only:

1. :meth:`Log.begin_replacement`, there: the plan fits the log, and from now on retention waits;
2. :meth:`SegmentSwapper.prepare`, any thread: indexes, then every output becomes ``.swap``,
durably;
3. :meth:`SegmentSwapper.place_next`, there, group by group; between two of them the log may be
used;
4. :meth:`SegmentSwapper.finish`, any thread: the directory is fsynced;
5. :meth:`SegmentSwapper.end`, there.

Until the first group is placed :meth:`SegmentSwapper.withdraw` takes everything back; after that
all groups must be. A truncation withdraws one that was not begun and completes one that was.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from kept.storage import layout
from kept.storage.errors import InvariantViolation
from kept.storage.segments import swap
from kept.storage.segments.segment import Segment
from kept.storage.segments.swap import SwapGroup, SwapPlan

if TYPE_CHECKING:
    from kept.storage.log.log import Log


class SegmentSwapper:
    """One swap in steps; see the module. Raises InvariantViolation when the plan does not fit."""

    def __init__(self, log: Log, plan: SwapPlan) -> None:
        if log.replacement is not None:
            raise InvariantViolation(f"{log}: another replacement is in progress")
        self._log = log
        self._disk, self._directory = log.disk, log.directory
        self._interval = log.config.index_interval_bytes
        self._inputs = {s.base_offset: s for s in log.segments[:-1]}
        self._outputs: dict[int, Segment] = {}
        self._waiting = deque(plan.groups)
        self._renaming = Lock()
        self._prepared = self._withdrawn = False
        self.begun = False
        """A group was placed: there is no way back."""
        _check(log, plan, self._inputs)

    def prepare(self) -> None:
        """Make all outputs ``.swap``; any thread, blocks. Nothing that is in use is touched.

        Raises InvariantViolation when it was withdrawn meanwhile or a file is missing, DamagedData
        when an output is not whole, MachineError.
        """
        outputs: dict[int, Segment] = {}
        for group in self._waiting:
            mtime_ms = self._inputs[group.input_bases[-1]].mtime_ms
            for base in group.output_bases:
                outputs[base] = self._open(base, mtime_ms)
        with self._renaming:
            if self._withdrawn:
                raise InvariantViolation(f"{self._directory}: the swap was withdrawn")
            self._disk.reach("swap.cleaned")
            self._outputs = outputs
            for base in sorted(outputs, reverse=True):
                outputs[base].rename(layout.CLEANED, layout.SWAP)
                self._disk.reach("swap.renamed")
            if outputs:
                self._disk.fsync_dir(self._directory)
            self._prepared = True
        self._disk.reach("swap.prepared")

    def _open(self, base: int, mtime_ms: int) -> Segment:
        try:
            segment = swap.open_output(self._disk, self._directory, base, self._interval)
        except FileNotFoundError as error:
            raise InvariantViolation(f"{self._directory}: output {base} is gone") from error
        segment.mtime_ms = mtime_ms
        self._disk.set_mtime(segment.path(layout.LOG, layout.CLEANED), mtime_ms)
        return segment

    def place_next(self, now_ms: int) -> bool:
        """Put the next group into place: renames only. Returns whether there are more.

        Raises InvariantViolation when it was withdrawn; then nothing was placed.
        """
        if self._withdrawn or not self._prepared:
            raise InvariantViolation(f"{self._log}: the swap was withdrawn")
        if self._waiting:
            self.begun = True
            _swap_group(self._log, self._waiting.popleft(), self._inputs, self._outputs, now_ms)
        return bool(self._waiting)

    def finish(self) -> None:
        """Make the names durable; any thread, blocks. Raises MachineError; after ResourceExhausted
        it is to be called again.
        """
        if self._outputs:
            self._disk.fsync_dir(self._directory)
        self._disk.reach("swap.done")

    def withdraw(self) -> None:
        """Back to ``.cleaned``, which the next start or pass discards; any thread, blocks.

        The lowest output first: from then on a start undoes all of it.
        """
        with self._renaming:
            if self.begun:
                raise InvariantViolation(f"{self._log}: half a swap cannot be withdrawn")
            self._withdrawn = True
            for base in sorted(self._outputs):
                self._outputs[base].rename(layout.SWAP, layout.CLEANED)
                self._disk.reach("swap.withdrawn")
            if self._outputs:
                self._disk.fsync_dir(self._directory)
                self._outputs = {}

    def conclude(self, now_ms: int) -> None:
        """The log is about to be cut: withdraw, or place what is left."""
        if self.begun:
            while self._waiting:
                self.place_next(now_ms)
        else:
            self.withdraw()

    def end(self) -> None:
        """It is over, however it ended: retention goes on."""
        if self._log.replacement is self:
            self._log.replacement = None


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
    log.retire(old, now_ms)
    log.disk.reach("swap.deleted")
    for segment in new:
        swap.place(log.disk, log.directory, segment.base_offset)
    for i, segment in enumerate(new):
        segment.next_offset = new[i + 1].base_offset if i + 1 < len(new) else end
        segment.index.unload()
        segment.time_index.unload()
    log.segments.replace(old, new)
    stale = set(group.input_bases) - set(group.output_bases)
    log.producer_state.remove_snapshots(sorted(stale))
    log.disk.reach("swap.group")
