"""The process that applies a manifest: ``python -m kept.compaction.manifest.follow_worker``.

As :mod:`kept.compaction.cleaner.worker` in all things, but for what it does: the job is a
:class:`.follow.FollowJob`, whose manifest comes along, and the work :func:`.follow.follow`. A
record that is missing is told with its offset::

    {"error": "...", "kind": "LogsDiffer", "client_message": "...", "offset": 17}
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final

from kept.compaction.cleaner import worker
from kept.compaction.cleaner.cleaner_run import Result, read_manifest
from kept.compaction.cleaner.job import Source, config_fields, config_from
from kept.compaction.cleaner.worker import (
    Throttle,
    init_worker,
    lower_io_priority,
    report_uncompiled,
    write_message,
)
from kept.compaction.manifest import manifest_store
from kept.compaction.manifest.follow import FollowJob, LogsDiffer, Piece, follow
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, InvariantViolation
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import Generation

COMMAND: Final = (sys.executable, "-P", "-m", "kept.compaction.manifest.follow_worker")
"""How the node starts it."""


def encode(job: FollowJob, previous: Generation | None, max_bytes_per_second: float) -> str:
    """The job as one line of JSON. ``previous`` is read from its file by who does the job."""
    return json.dumps(
        {
            "directory": job.directory,
            "manifest": base64.b64encode(manifest_store.encode(job.manifest)).decode(),
            "pieces": [
                {
                    "base_offset": piece.base_offset,
                    "sources": [asdict(source) for source in piece.sources],
                    "covered": piece.output is not None,
                }
                for piece in job.pieces
            ],
            "config": config_fields(job.config),
            "previous": previous,
            "aborted": job.aborted,
            "chunk_bytes": job.chunk_bytes,
            "check_keys": job.check_keys,
            "check_seed": job.check_seed.hex(),
            "max_bytes_per_second": max_bytes_per_second,
        }
    )


def decode(fields: Mapping[str, Any], disk: Disk) -> FollowJob:
    """The job in a line of JSON."""
    directory = fields["directory"]
    manifest_read = manifest_store.decode("the job", base64.b64decode(fields["manifest"]))
    generation = fields["previous"]
    previous = _previous(directory, None if generation is None else Generation(*generation), disk)
    pieces = []
    for piece in fields["pieces"]:
        base = piece["base_offset"]
        sources = tuple(Source(**source) for source in piece["sources"])
        pieces.append(
            Piece(base, sources, _output(manifest_read, base) if piece["covered"] else None)
        )
    return FollowJob(
        directory,
        manifest_read,
        tuple(pieces),
        config_from(fields["config"]),
        previous,
        tuple(AbortedTxn(*entry) for entry in fields["aborted"]),
        fields["chunk_bytes"],
        fields["check_keys"],
        bytes.fromhex(fields["check_seed"]),
    )


def _previous(directory: str, generation: Generation | None, disk: Disk) -> Manifest | None:
    """The manifest applied before; without it more is read."""
    if generation is not None:
        with suppress(FileNotFoundError, DamagedData):
            return read_manifest(directory, generation, disk)
    return None


def run_here(job: FollowJob, previous: Generation | None, disk: Disk) -> Result:
    """The job in this process. Raises as :func:`.follow.follow`."""
    return follow(replace(job, previous=_previous(job.directory, previous, disk)), disk)


def _output(manifest: Manifest, base_offset: int) -> OutputSegment:
    """The output, or the part of one, that begins at an offset."""
    for output in manifest.segments:
        if output.base_offset == base_offset:
            return output
        if output.base_offset < base_offset < output.end_offset:
            return output.part(base_offset, output.end_offset)
    raise InvariantViolation(f"generation {manifest.generation} says nothing about {base_offset}")


def source_bytes(job: FollowJob) -> int:
    """Bytes of all that the job may read."""
    return sum(source.size_bytes for piece in job.pieces for source in piece.sources)


def error_message(error: Exception) -> dict[str, Any]:
    """As :func:`kept.compaction.cleaner.worker.error_message`, with the record that is missing."""
    message = worker.error_message(error)
    if isinstance(error, LogsDiffer):
        message["offset"] = error.offset
    return message


def main() -> int:
    """Run the job on stdin; the exit code is 0 when its result was written."""
    line = init_worker()
    if not line:
        return 3
    fields, disk = json.loads(line), Disk()
    lower_io_priority()
    out = sys.stdout
    report_uncompiled(out)
    try:
        job = decode(fields, disk)
        throttle = Throttle(out, 2 * source_bytes(job), fields["max_bytes_per_second"])
        result = follow(job, disk, throttle)
    except Exception as error:  # noqa: BLE001 - a strategy may raise anything
        write_message(out, error_message(error))
        return 1
    write_message(out, {"result": asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
