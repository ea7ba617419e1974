"""What a start finds of a replica's manifests (rules 11, 12 and 14).

Before the log is opened, which swap is to be completed; after, what the replica has applied and
what it holds. Blocks: for the threads that open logs. A log without a manifest imports nothing of
``kept.compaction``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.node.logging import log
from kept.node.manifests.replica import Known
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData

if TYPE_CHECKING:
    from kept.compaction.apply import CompactionState


def before(path: str, disk: Disk, alone: bool) -> tuple[CompactionState | None, Known]:
    """What compaction left in a log's directory. ``alone``: there are no other replicas.

    Raises DamagedData where a swap was under way and its plan cannot be read.
    """
    names = disk.listdir(path)
    if not any(name.startswith((layout.MANIFEST_PREFIX, layout.HELD_MANIFEST)) for name in names):
        return None, Known()
    from kept.compaction import apply

    try:
        return apply.load_state(path, disk), Known()
    except DamagedData as error:
        if any(name.endswith(layout.SWAP) for name in names):
            raise
        return None, _lost(path, disk, alone, error)


def after(
    path: str, disk: Disk, state: CompactionState, alone: bool
) -> tuple[CompactionState | None, Known]:
    """The log was opened, and a swap completed: make the mark say so, and read what is held."""
    from kept.compaction import apply, held
    from kept.node.manifests.files import ref_of

    state = apply.settle(path, disk, state)
    try:
        if state.applied is None:
            applied = None
        else:
            held.applied(path, disk, state.applied)
            applied = ref_of(held.body(path, disk, state.applied))
        newest = held.load(path, disk)
    except DamagedData as error:
        return None, _lost(path, disk, alone, error)
    known = Known(None if newest is None else ref_of(newest), applied)
    return (None if applied is None else state), known


def _lost(path: str, disk: Disk, alone: bool, error: DamagedData) -> Known:
    """A manifest cannot be read. A lone replica cleans anew; one of several asks its leader."""
    from kept.compaction import held

    log.error("manifest given up", path=path, error=str(error))
    if alone:
        held.forget(path, disk)
    else:
        held.lose(path, disk)
    return Known(lost=not alone)
