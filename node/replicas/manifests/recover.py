"""What a start finds of a replica's manifests (rules 11, 12 and 14).

Before the log is opened, which swap is to be completed; after, what the replica has applied and
what it holds. Blocks: for the threads that open logs. A log without a manifest imports nothing of
``kept.compaction``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.node.replicas.manifests.status import ManifestStatus, ref_of
from kept.node.runtime.logging import log
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData

if TYPE_CHECKING:
    from kept.compaction.manifest.apply import CompactionState
    from kept.compaction.manifest.manifest import Manifest
    from kept.storage.log.log import Log


def before_opening(
    path: str, disk: Disk, alone: bool
) -> tuple[CompactionState | None, ManifestStatus]:
    """What compaction left in a log's directory. ``alone``: there are no other replicas.

    Raises DamagedData where a swap was under way and its plan cannot be read.
    """
    names = disk.listdir(path)
    if not any(name.startswith((layout.MANIFEST_PREFIX, layout.HELD_MANIFEST)) for name in names):
        return None, ManifestStatus()
    from kept.compaction.manifest import apply

    try:
        return apply.load_state(path, disk), ManifestStatus()
    except DamagedData as error:
        if any(name.endswith(layout.SWAP) for name in names):
            raise
        log.error("manifest given up", path=path, error=str(error))
        return None, _lost(path, disk, alone)


def after_opening(
    path: str,
    disk: Disk,
    state: CompactionState,
    alone: bool,
    opened: Log,
) -> tuple[CompactionState | None, ManifestStatus]:
    """The log was opened, and a swap completed: make the mark say so, and read what is held.

    A log that ends below what is held lost its tail in a power cut, or was not fetched so far.
    Whatever comes there next may not be what was compacted: the manifest counts no more (C15).
    Nor does it where a segment is shorter than it was left: it was cut since. With the manifest
    that its leader sends the replica finds which records are to be fetched again.
    """
    from kept.compaction.manifest import apply, manifest_store

    log_end_offset = opened.log_end_offset
    state = apply.complete_swap(path, disk, state)
    try:
        if state.applied is None:
            applied = None
        else:
            manifest_store.remove_applied(path, disk, state.applied)
            body = manifest_store.read_manifest(path, disk, state.applied)
            _check_sizes(path, body, opened)
            applied = ref_of(body)
        newest = manifest_store.load(path, disk)
        complete = manifest_store.is_complete(path, disk)
    except manifest_store.MarkedLost:
        log.info(
            "manifest awaited",
            path=path,
            reason="what was held was given up before; "
            + ("it is cleaned anew" if alone else "the leader says what is to be held"),
        )
        return None, _lost(path, disk, alone)
    except DamagedData as error:
        log.error("manifest given up", path=path, error=str(error))
        return None, _lost(path, disk, alone)
    held = None if newest is None else ref_of(newest)
    status = ManifestStatus(held, applied, complete=complete and held != applied)
    to = max((ref.end_offset for ref in (status.held, applied) if ref is not None), default=0)
    if to > log_end_offset:
        log.warning(
            "log ends below its manifest",
            path=path,
            end=log_end_offset,
            manifest_end=to,
            why="it was not fetched that far, or its tail was lost; "
            + ("it is cleaned anew" if alone else "the leader says what is to be held"),
        )
        return None, _lost(path, disk, alone)
    return (None if applied is None else state), status


def _check_sizes(path: str, body: Manifest, opened: Log) -> None:
    """Raises DamagedData for a segment that has less than the applied manifest recorded: a file
    that was cut between two batches, or removed, shows it in no other way where compaction may have
    left gaps. Retention takes the oldest segments only, nobody misses what lies below the log
    start, and what a cut of the log took is above its end, which is looked at for itself.
    """
    sizes = {segment.base_offset: segment.size_bytes for segment in opened.segments}
    first = min(sizes, default=body.end_offset)
    start, end = opened.log_start_offset, opened.log_end_offset
    for output in body.segments:
        size = sizes.get(output.base_offset, 0)
        is_in_log = first <= output.base_offset and start < output.end_offset <= end
        if is_in_log and size < output.size_bytes:
            why = (
                f"it has {size} bytes, and compaction left {output.size_bytes} in generation "
                f"{body.generation}: records are lost here"
            )
            log_file = layout.segment_file(path, output.base_offset, layout.LOG)
            raise DamagedData(log_file, size, -1, why)


def _lost(path: str, disk: Disk, alone: bool) -> ManifestStatus:
    """No manifest is relied on. A lone replica cleans anew; one of several asks its leader."""
    from kept.compaction.manifest import manifest_store

    if alone:
        manifest_store.remove_all(path, disk)
    else:
        manifest_store.mark_lost(path, disk)
    return ManifestStatus(lost=not alone)
