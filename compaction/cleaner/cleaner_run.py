"""A whole pass in this process: survey, build, and the files that the node will put into place.

The worker process runs this, and so do tests and the simulator. All that it leaves are new files
in the partition's directory: ``<base>.*.cleaned``, and as ``.tmp`` the manifest and the record of
what was removed. Only the node renames (``kept.compaction.manifest.apply``); :func:`discard`
removes them instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kept.compaction.cleaner import removal_log, self_check
from kept.compaction.cleaner.build import build
from kept.compaction.cleaner.build import discard as discard_outputs
from kept.compaction.cleaner.job import Job
from kept.compaction.cleaner.scan_stats import Progress, no_progress
from kept.compaction.cleaner.survey import survey
from kept.compaction.manifest import manifest
from kept.compaction.manifest.manifest import Manifest
from kept.compaction.strategy import resolve
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.types import Generation


@dataclass(frozen=True, slots=True)
class Result:
    """What a pass did, in numbers.

    ``records_examined`` counts the segments whose records were looked at (those carried over from
    the pass before are not); ``bytes_before`` and ``bytes_after`` are of the segments it rewrote.
    ``keys_checked``: so many were proved to be right before anything was put into place. In the
    operator's API the generation is called ``identity``.
    """

    generation: Generation = field(metadata={"json": "identity"})
    clean_to: int
    end_offset: int
    records_examined: int
    records_removed: int
    bytes_before: int
    bytes_after: int
    segments_before: int
    segments_after: int
    scans: int
    keys: int
    map_bytes: int
    removed: dict[str, int]
    keys_checked: int = 0


def read_manifest(directory: str, generation: Generation, disk: Disk) -> Manifest:
    """A manifest from its file. Raises DamagedData, FileNotFoundError, DirectoryRefused."""
    path = layout.manifest_file(directory, *generation)
    return manifest.decode(path, disk.read(path))[0]


def run_pass(job: Job, disk: Disk, progress: Progress = no_progress) -> Result:
    """Do the job; see the module. On an error the files are left for :func:`discard`.

    Raises CheckFailed, DamagedData, MachineError, NoSpace and ConfigurationError.
    """
    previous = None
    if job.previous is not None:
        try:
            previous = read_manifest(job.directory, job.previous, disk)
        except (FileNotFoundError, DamagedData):
            if job.horizons_only:
                raise
    strategy = resolve(job.config)
    drawn = self_check.sample_records(job, disk, strategy)
    keys = [record.key for record in drawn]
    surveyed = survey(job, disk, progress, previous, strategy=strategy, keys=keys)
    disk.reach("compaction.surveyed")
    built = build(
        surveyed.manifest,
        surveyed.groups,
        job.directory,
        job.config,
        disk,
        chunk_bytes=job.chunk_bytes,
        progress=progress,
        cached=frozenset(f.source.base_offset for f in surveyed.facts if f.cached),
    )
    disk.reach("compaction.built")
    checked = self_check.check(job, drawn, surveyed, built, disk, strategy=strategy)
    removed = removal_log.removals(surveyed)
    path = removal_log.new_path(job.directory, disk, job.generation)
    write_new(disk, path, removal_log.encode(removed))
    path = layout.manifest_file(job.directory, *job.generation)
    write_new(disk, path, manifest.encode(built.manifest, built.plan))
    disk.fsync_dir(job.directory)
    disk.reach("compaction.written")
    rewritten = {base for group in built.plan.groups for base in group.input_bases}
    return Result(
        generation=job.generation,
        clean_to=built.manifest.clean_to,
        end_offset=built.manifest.end_offset,
        records_examined=sum(facts.records for facts in surveyed.facts),
        records_removed=sum(removed.counts().values()),
        bytes_before=sum(s.size_bytes for s in job.sources if s.base_offset in rewritten),
        bytes_after=built.bytes_written,
        segments_before=len(job.sources),
        segments_after=len(built.manifest.segments),
        scans=surveyed.scans,
        keys=surveyed.keys,
        map_bytes=surveyed.map_bytes,
        removed=removed.counts(),
        keys_checked=checked,
    )


def write_new(disk: Disk, path: str, content: bytes) -> None:
    """A new file that a pass leaves, under its temporary name, durably."""
    file = disk.open_new(path + layout.TEMPORARY)
    disk.writev(file, [content], 0)
    disk.fsync(file)


def discard(directory: str, disk: Disk) -> int:
    """Remove what a pass left that is not going to be applied; returns how many files went.

    Call it before a pass too: its files are created exclusively.
    """
    gone = discard_outputs(directory, disk)
    for name in disk.listdir(directory):
        ours = name.startswith((layout.MANIFEST_PREFIX, removal_log.PREFIX))
        if ours and name.endswith(layout.TEMPORARY):
            disk.unlink(f"{directory}/{name}")
            gone += 1
    return gone
