"""The manifests that a replica has and has not applied (rule 14), as files.

- ``held-manifest``: the newest that it holds, and has acknowledged, and whether the log is complete
  for it. Without the file it holds the one that it has applied.
- ``told-manifest``: one that the leader called published, while a newer one is held. Nothing
  depends on it after a start: the replica asks again.

Both are manifests as they travel (``docs/formats/manifest.md``): without a plan, which is about one
replica's files. They are replaced by renames, so that a crash leaves the one or the other.
"""

from __future__ import annotations

from contextlib import suppress

from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import manifest
from kept.compaction.manifest.manifest import Manifest
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, InvariantViolation
from kept.storage.segments.swap import SwapPlan
from kept.storage.types import Generation


class MarkedLost(DamagedData):
    """What was held was given up before (:func:`mark_lost`), and nothing is in its place yet: the
    leader says what is to be held. No damage of this start, though nothing is known of it, either.
    """

    def __init__(self, path: str) -> None:
        why = "what it held was given up, and nothing is in its place yet"
        super().__init__(path, -1, -1, why)
        self.args = (f"{path}: {why}",)


def encode(found: Manifest) -> bytes:
    """A manifest as it travels."""
    return manifest.encode(found, SwapPlan(()))


def decode(where: str, data: bytes) -> Manifest:
    """What :func:`encode` made; ``where`` it came from is for the error.

    Raises DamagedData, DirectoryRefused when it is a newer kept's.
    """
    return manifest.decode(where, data)[0]


def store(
    directory: str,
    disk: Disk,
    held: Manifest | None,
    published: Manifest | None,
    *,
    complete: bool = False,
) -> None:
    """Make ``held`` what this replica holds, durably, before an acknowledgement of it leaves, and
    with it whether the log is ``complete`` for it; ``published``, which the leader called so, is
    kept too. What is applied needs no file. Blocks.
    """
    _put(directory, disk, layout.PUBLISHED_MANIFEST, published)
    disk.reach("held.told")
    applied = applying.read_mark(directory, disk)
    if held is not None and held.generation == applied:
        held = None
    elif held is None and applied is not None:
        raise InvariantViolation(f"{directory}: {applied} is applied, so something is held")
    _put(directory, disk, layout.HELD_MANIFEST, held, complete=complete)
    disk.reach("held.held")


def _put(
    directory: str, disk: Disk, name: str, found: Manifest | None, *, complete: bool = False
) -> None:
    path = f"{directory}/{name}"
    if found is not None:
        disk.write_atomic(path, manifest.encode(found, SwapPlan(()), complete=complete))
    elif disk.exists(path):
        disk.unlink(path)
        disk.fsync_dir(directory)


def load(directory: str, disk: Disk) -> Manifest | None:
    """What this replica holds; None for nothing.

    Raises DamagedData when that cannot be read: then nothing is known of what is held, and the
    leader must be asked; MarkedLost, which is one, when an earlier start found that and said so.
    DirectoryRefused when it is a newer kept's.
    """
    path = f"{directory}/{layout.HELD_MANIFEST}"
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return _applied(directory, disk)
    if not data:
        raise MarkedLost(path)
    return decode(path, data)


def is_complete(directory: str, disk: Disk) -> bool:
    """Whether the log has everything below the end of what is held and not applied, because it had
    that before anybody acted on it (rule 15). Raises DamagedData, DirectoryRefused.
    """
    path = f"{directory}/{layout.HELD_MANIFEST}"
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return False
    return manifest.is_log_complete(path, data)


def clear_complete(directory: str, disk: Disk) -> None:
    """The log was cut below the end of what is held: what comes there next may have gaps. Blocks.

    A file that is damaged says nothing, and stays.
    """
    path = f"{directory}/{layout.HELD_MANIFEST}"
    with suppress(FileNotFoundError, DamagedData):
        _put(directory, disk, layout.HELD_MANIFEST, decode(path, disk.read(path)))


def _applied(directory: str, disk: Disk) -> Manifest | None:
    generation = applying.read_mark(directory, disk)
    if generation is None:
        return None
    path = layout.manifest_file(directory, *generation)
    try:
        return decode(path, disk.read(path))
    except FileNotFoundError as error:
        raise DamagedData(path, -1, -1, "it is missing, and the mark names it") from error


def read_manifest(directory: str, disk: Disk, generation: Generation) -> Manifest:
    """One that is held, published, or applied. Raises FileNotFoundError, DamagedData."""
    damage: DamagedData | None = None
    for name in (
        layout.HELD_MANIFEST,
        layout.PUBLISHED_MANIFEST,
        *(f"{layout.MANIFEST_PREFIX}{e}-{g}" for e, g in (generation,)),
    ):
        path = f"{directory}/{name}"
        try:
            held = decode(path, disk.read(path))
        except FileNotFoundError:
            continue
        except DamagedData as error:
            damage = error  # perhaps it is in another file
            continue
        if held.generation == generation:
            return held
    if damage is not None:
        raise damage
    raise FileNotFoundError(f"{directory}: no manifest {generation}")


def remove_applied(directory: str, disk: Disk, generation: Generation) -> None:
    """After the mark names ``generation``: remove the copies of it that are not needed any more.

    One that is damaged stays: what it was is not known, and a start says so.
    """
    for name in (layout.HELD_MANIFEST, layout.PUBLISHED_MANIFEST):
        path = f"{directory}/{name}"
        with suppress(FileNotFoundError, DamagedData):
            if decode(path, disk.read(path)).generation == generation:
                _put(directory, disk, name, None)


def clear_applied(directory: str, disk: Disk) -> None:
    """The log was cut below the applied manifest (rule 19): it is held still, and not applied."""
    if not disk.exists(f"{directory}/{layout.HELD_MANIFEST}"):
        _put(directory, disk, layout.HELD_MANIFEST, _applied(directory, disk))
        disk.reach("held.kept")
    applying.clear(directory, disk)


def mark_lost(directory: str, disk: Disk) -> None:
    """What was held cannot be read: that is kept on disk, too, until the leader has said what is to
    be held. An empty file is no manifest, so :func:`load` goes on raising DamagedData.
    """
    disk.write_atomic(f"{directory}/{layout.HELD_MANIFEST}", b"")
    disk.reach("held.lost")
    applying.clear(directory, disk)


def store_base(directory: str, disk: Disk, base: Generation) -> None:
    """A leader that had to begin anew has ``base`` in place (rule 19): it is what it holds."""
    store(directory, disk, read_manifest(directory, disk, base), None)


def remove_all(directory: str, disk: Disk) -> None:
    """Nothing is held, published, or applied: for a replica of which there is no other."""
    _put(directory, disk, layout.HELD_MANIFEST, None)
    _put(directory, disk, layout.PUBLISHED_MANIFEST, None)
    applying.clear(directory, disk)
