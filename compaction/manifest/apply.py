"""Putting a finished pass into place, and finding out after a crash how far that came (rules 11 to
13).

The steps, each durable before the next:

1. :func:`commit_files`: ``removals-…`` and ``manifest-…`` lose their ``.tmp``: from now on the pass
   can be completed;
2. :func:`begin`, and the steps of a :class:`kept.storage.log.segment_swapper.SegmentSwapper`: the
   segments of the manifest's plan are swapped. Until the first group is placed :func:`withdraw`
   takes all of it back;
3. :func:`conclude`: the mark ``manifest-applied`` names the generation; older manifests go.

:mod:`kept.node.replicas.manifests.install` takes them. :func:`begin` and ``place_next`` belong to
the log's thread; all others touch nothing that is in use and run in a pool. Before step 1 the
closed segments are durable, those that stay as they are, too, and so is a recovery point above
them: once a manifest is applied a start takes a gap below its end for the work of compaction. The
high watermark has been raised to ``end_offset`` and checkpointed. Only after step 3 may
``clean_to`` be written to Kafka's ``cleaner-offset-checkpoint``.

:func:`load_state` reads it back. A manifest newer than the mark is one whose swap may not have
ended:

- ``.cleaned`` files are left: not all outputs had become ``.swap``; start-up undoes such a swap,
  so the manifest goes first;
- otherwise the swap was complete or will be completed by ``Log.open`` from the plan: it counts as
  applied.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kept.compaction.cleaner import removal_log
from kept.compaction.cleaner.cleaner_run import Result, discard
from kept.compaction.manifest import manifest
from kept.compaction.manifest.manifest import Manifest
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, InvariantViolation
from kept.storage.segments.swap import SwapPlan
from kept.storage.types import Generation, decimal_number

if TYPE_CHECKING:
    from kept.storage.log.log import Log
    from kept.storage.log.segment_swapper import SegmentSwapper

MARK: Final = "manifest-applied"
"""Name of the mark in the partition's directory; ``<epoch> <generation>`` and a newline."""
DEFAULT_HISTORY_BYTES: Final = 16 << 20
"""kept.compaction.history.bytes: the removal journal of one partition."""


@dataclass(frozen=True, slots=True)
class CompactionState:
    """What compaction has come to in one log.

    ``clean_to`` and ``end_offset`` are of the applied manifest (0 without one); ``horizons`` has
    the smallest delete horizon by segment, ``tombstones`` how many wait for theirs. ``unfinished``
    is to be given to ``Log.open``, and ``log_start``, once that is durable: what a start found on
    its way out tells that retention had taken all below.
    """

    applied: Generation | None = None
    clean_to: int = 0
    end_offset: int = 0
    horizons: dict[int, int] = field(default_factory=dict)
    last_ms: int = -1
    unfinished: SwapPlan | None = None
    tombstones: dict[int, int] = field(default_factory=dict)
    log_start: int = 0

    def tombstones_from(self, base_offset: int) -> int:
        """How many tombstones wait in the segments from one on."""
        return sum(count for base, count in self.tombstones.items() if base >= base_offset)


def state_of(found: Manifest, unfinished: SwapPlan | None = None) -> CompactionState:
    """The state once a manifest is applied."""
    horizons = {
        segment.base_offset: next_ms
        for segment in found.segments
        if (next_ms := segment.next_horizon_ms(found.now_ms)) is not None
    }
    return CompactionState(
        found.generation,
        found.clean_to,
        found.end_offset,
        horizons,
        found.now_ms,
        unfinished,
        {s.base_offset: len(s.tombstones) for s in found.segments if s.tombstones},
    )


@dataclass(frozen=True, slots=True)
class Installable:
    """A manifest that is durable under its own name, and the swap it asks for."""

    manifest: Manifest
    plan: SwapPlan


def commit_files(
    directory: str, disk: Disk, result: Result, based_on: Generation | None
) -> Installable:
    """Step 1: from now on the pass can be completed after a crash.

    ``based_on`` is the generation that was applied when the pass began: if it is not any more the
    pass is thrown away. Raises InvariantViolation then, and when a file of the pass is missing;
    DamagedData, MachineError.
    """
    if read_mark(directory, disk) != based_on:
        discard(directory, disk)
        raise InvariantViolation(f"{directory}: another generation was applied meanwhile")
    removals = removal_log.find(directory, disk, result.generation, layout.TEMPORARY)
    if removals is None:
        raise InvariantViolation(f"{directory}: the pass {result.generation} left no journal")
    path = layout.manifest_file(directory, *result.generation)
    manifest_read, plan = manifest.decode(path, disk.read(path + layout.TEMPORARY))
    known = removal_log.find(directory, disk, result.generation)
    if known is not None and removal_log.gives_reasons_of(disk, known, removals + layout.TEMPORARY):
        disk.unlink(removals + layout.TEMPORARY)  # its maker died before anything was placed
    else:
        disk.rename(removals + layout.TEMPORARY, removals)
    disk.rename(path + layout.TEMPORARY, path)
    disk.fsync_dir(directory)
    disk.reach("compaction.manifest")
    return Installable(manifest_read, plan)


def begin(log: Log, installable: Installable) -> SegmentSwapper:
    """Start of step 2. A plan that does not fit the log raises InvariantViolation."""
    check_fits(log, installable.manifest, installable.plan)
    return log.begin_replacement(installable.plan)


def conclude(
    directory: str,
    disk: Disk,
    installable: Installable,
    *,
    history_bytes: int = DEFAULT_HISTORY_BYTES,
) -> CompactionState:
    """Step 3: the mark; older manifests and the journal's surplus go."""
    generation = installable.manifest.generation
    disk.reach("compaction.swapped")
    write_mark(directory, disk, generation)
    disk.reach("compaction.marked")
    _remove_older(directory, disk, generation)
    removal_log.trim(directory, disk, history_bytes)
    return state_of(installable.manifest)


def withdraw(
    directory: str, disk: Disk, installable: Installable, replacement: SegmentSwapper | None = None
) -> None:
    """Take back a manifest of which nothing was placed, and its outputs.

    A crash on the way leaves ``.cleaned`` files first, so that :func:`load_state` forgets the
    manifest, and the manifest is gone before they are.
    """
    if replacement is not None:
        replacement.withdraw()
    _forget(directory, disk, installable.manifest.generation)
    discard(directory, disk)


def _forget(
    directory: str, disk: Disk, generation: Generation, *, but_removals: bool = False
) -> None:
    removals = None if but_removals else removal_log.find(directory, disk, generation)
    if removals is not None:
        disk.unlink(removals)
    disk.unlink(layout.manifest_file(directory, *generation))
    disk.fsync_dir(directory)


def _holds(directory: str, disk: Disk, generation: Generation) -> bool:
    """Whether a replica holds this manifest, and is to apply it if it is published."""
    path = f"{directory}/{layout.HELD_MANIFEST}"
    with suppress(FileNotFoundError, DamagedData):
        return manifest.decode(path, disk.read(path))[0].generation == generation
    return False


def check_fits(log: Log, found: Manifest, plan: SwapPlan) -> None:
    """The segments that the plan replaces must be there, and closed. Raises InvariantViolation."""
    bases = {segment.base_offset for segment in log.segments}
    wanted = {base for group in plan.groups for base in group.input_bases}
    if not wanted <= bases or log.active_segment.base_offset in wanted:
        raise InvariantViolation(
            f"{log.directory}: generation {found.generation} replaces segments that are gone: "
            f"{sorted(wanted - bases)}"
        )
    if found.end_offset > log.log_end_offset:
        raise InvariantViolation(
            f"{log.directory}: generation {found.generation} ends above the log's end"
        )


def read_mark(directory: str, disk: Disk) -> Generation | None:
    """The generation that this replica has applied; None for none."""
    path = f"{directory}/{MARK}"
    try:
        text = disk.read(path).decode("ascii", "replace").split()
    except FileNotFoundError:
        return None
    if len(text) != 2 or not all(part.isdigit() for part in text):
        raise DamagedData(path, 0, -1, "not an epoch and a generation")
    return Generation(int(text[0]), int(text[1]))


def write_mark(directory: str, disk: Disk, generation: Generation) -> None:
    """Make the mark durable."""
    disk.write_atomic(
        f"{directory}/{MARK}", f"{generation.leader_epoch} {generation.number}\n".encode()
    )


def clear(directory: str, disk: Disk) -> None:
    """Forget what was applied (truncation, rule 19): the next pass cleans from the log's start."""
    disk.unlink(f"{directory}/{MARK}")
    for generation in manifests(directory, disk):
        disk.unlink(layout.manifest_file(directory, *generation))
    discard(directory, disk)
    disk.fsync_dir(directory)


def manifests(directory: str, disk: Disk) -> list[Generation]:
    """The manifests in a directory."""
    identities = []
    for name in disk.listdir(directory):
        epoch, dash, generation = name.removeprefix(layout.MANIFEST_PREFIX).partition("-")
        named = name.startswith(layout.MANIFEST_PREFIX) and dash
        parts = decimal_number(epoch), decimal_number(generation)
        if named and parts[0] is not None and parts[1] is not None:
            identities.append(Generation(parts[0], parts[1]))
    return identities


def _remove_older(directory: str, disk: Disk, current: Generation) -> None:
    for generation in manifests(directory, disk):
        if generation != current:
            disk.unlink(layout.manifest_file(directory, *generation))


def load_state(directory: str, disk: Disk) -> CompactionState:
    """The state of a log that is about to be opened; see the module.

    Raises DamagedData when the manifest is damaged or missing (the caller then forgets all of it
    with :func:`clear`), DirectoryRefused when it is a newer kept's.
    """
    try:
        names = disk.listdir(directory)
    except FileNotFoundError:
        return CompactionState()
    applied = read_mark(directory, disk)
    parsed = [p for name in names if (p := layout.parse_segment_file(name))]
    states = {p.state for p in parsed}
    present: dict[int, int] = {}
    retired: dict[int, int] = {}
    for p in parsed:
        if p.kind == layout.LOG and p.state != layout.CLEANED:
            sizes = retired if p.state == layout.DELETED else present
            path = layout.segment_file(directory, p.base_offset, layout.LOG, p.state)
            with suppress(FileNotFoundError):  # a thread may be removing what went before
                sizes[p.base_offset] = disk.stat(path).size_bytes
    pending = [generation for generation in manifests(directory, disk) if generation != applied]
    newest = _newest(pending, applied)
    if newest is not None and layout.CLEANED in states:
        # The ``.cleaned`` stay: they tell Log.open to undo it. What is held is applied again, by
        # its manifest, which does not say why records go.
        _forget(directory, disk, newest, but_removals=_holds(directory, disk, newest))
        newest = None
    if newest is not None:
        path = layout.manifest_file(directory, *newest)
        decoded, plan = manifest.decode(path, disk.read(path))
        unfinished = plan if layout.SWAP in states else None
        log_start = _log_start(decoded, present, retired)
        return replace(state_of(decoded, unfinished), log_start=log_start)
    if applied is None:
        return CompactionState()
    path = layout.manifest_file(directory, *applied)
    try:
        decoded, _ = manifest.decode(path, disk.read(path))
    except FileNotFoundError as error:
        raise DamagedData(path, -1, -1, f"it is missing, and {MARK} names it") from error
    return replace(state_of(decoded), log_start=_log_start(decoded, present, retired))


def _log_start(found: Manifest, present: dict[int, int], retired: dict[int, int]) -> int:
    """Where the log starts by what retention was taking; 0: nothing tells. The segments are given
    with their bytes by base offset.

    It renames the oldest segments, and nothing syncs their names at once: after a power cut those
    below one that it took may be back, and the gap would be taken for a loss. What it took is what
    compaction left there, and so is what came back; anything else below is a log that was begun
    anew since. It leaves what is above: a log that ends below was cut since. An input of a swap is
    of another size, but where only delete horizons were set. Its output is in place then, or waits
    as ``.swap``, and missing it is a loss.
    """
    left = {output.base_offset: output.size_bytes for output in found.segments}
    start = max(
        (
            output.end_offset
            for output in found.segments
            if retired.get(output.base_offset) == output.size_bytes
            and output.base_offset not in present
        ),
        default=0,
    )
    below = {base: size for base, size in present.items() if base < start}
    was_cut = 0 < len(below) == len(present)
    return 0 if was_cut or not below.items() <= left.items() else start


def complete_swap(directory: str, disk: Disk, state: CompactionState) -> CompactionState:
    """After ``Log.open`` has completed a swap: make the mark say so."""
    if state.applied is not None:
        if read_mark(directory, disk) != state.applied:
            write_mark(directory, disk, state.applied)
        _remove_older(directory, disk, state.applied)
    return replace(state, unfinished=None, log_start=0)


def _newest(pending: list[Generation], applied: Generation | None) -> Generation | None:
    """The manifest whose swap may not have ended.

    What one replica applies ascends by (epoch, generation), though not by generation alone: the
    base that an unclean leader publishes may count from less, and its epoch is new (rule 19).
    """
    return max((i for i in pending if applied is None or i > applied), default=None)
