"""Plans that replace the segments of a log."""

from __future__ import annotations

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.log.log import Log
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.types import LogConfig

CONFIG = LogConfig(
    segment_bytes=900, index_interval_bytes=100, cleanup_policy=frozenset({"compact"})
)


def fill(kit, disk: Disk, directory: str = "/d/t-0"):
    """A flushed log of seven segments or more."""
    log = kit.open_log(disk, directory, config=CONFIG)
    for n in range(30):
        kit.append(log, kit.batch(2, mark=n, size=60, pid=3, epoch=0, sequence=2 * n))
    log.flush()
    assert len(log.segments) >= 7
    return log


def clean(disk: Disk, log) -> tuple[SwapPlan, set[int]]:
    """Write outputs that keep every third batch; the plan and the base offsets that survive.

    Three groups: two inputs to one output, one to one, three to two.
    """
    bases = [s.base_offset for s in log.segments[:-1]]
    groups = (
        SwapGroup((bases[0],), tuple(bases[:2])),
        SwapGroup((bases[2],), (bases[2],)),
        SwapGroup((bases[3], bases[4]), tuple(bases[3:6])),
    )
    survivors: set[int] = set()
    for group in groups:
        inputs = [s for s in log.segments if s.base_offset in group.input_bases]
        outputs: dict[int, bytearray] = {base: bytearray() for base in group.output_bases}
        for segment in inputs:
            base = max(b for b in group.output_bases if b <= segment.base_offset)
            for position, size, first, _, _ in segment.walk(0, segment.size_bytes):
                if first // 2 % 3 == 0:
                    survivors.add(first)
                    outputs[base] += segment.read(position, size)
        for base, data in outputs.items():
            write_output(disk, log, base, data)
    end = log.segments[6].base_offset
    survivors |= {2 * n for n in range(30) if 2 * n >= end}
    disk.fsync_dir(log.directory)
    return SwapPlan(groups), survivors


def copy(disk: Disk, log) -> SwapPlan:
    """Write an output for each closed segment, which is as it was."""
    closed = log.segments[:-1]
    for segment in closed:
        write_output(disk, log, segment.base_offset, segment.read(0, segment.size_bytes))
    disk.fsync_dir(log.directory)
    return SwapPlan(tuple(SwapGroup((s.base_offset,), (s.base_offset,)) for s in closed))


def write_output(disk: Disk, log, base: int, data: bytes | bytearray) -> None:
    file = disk.open_new(layout.segment_file(log.directory, base, layout.LOG, layout.CLEANED))
    if data:
        disk.writev(file, [data], 0)
    disk.fsync(file)


def replace_segments(log: Log, plan: SwapPlan, now_ms: int) -> None:
    """All steps of a replacement at once."""
    replacement = log.begin_replacement(plan)
    try:
        replacement.prepare()
        while replacement.place_next(now_ms):
            pass
        replacement.finish()
    finally:
        replacement.end()


def bases_of(kit, log) -> list[int]:
    return [base for base, _, _ in kit.contents(log)]
