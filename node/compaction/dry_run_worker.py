"""The process of a dry run: ``python -m kept.node.compaction.dry_run_worker``.

It gets one line of JSON on stdin and answers with one on stdout: ``{"result": ...}`` or why it
failed (:func:`kept.compaction.cleaner.worker.error_message`). It is exec'ed, niced, ends when its
stdin does, and writes no file.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from kept.compaction.cleaner.cleaner_run import read_manifest
from kept.compaction.cleaner.explain import KeyRecord, explain, life_of_key, removable_at_ms
from kept.compaction.cleaner.job import INFLATE_LIMIT, Source, decode
from kept.compaction.cleaner.scan_stats import whole_batches
from kept.compaction.cleaner.worker import error_message, init_worker, lower_io_priority
from kept.compaction.manifest import verify
from kept.compaction.strategy import resolve
from kept.storage.disk import Disk
from kept.storage.records import records
from kept.storage.types import Generation, LogConfig

MAX_RECORDS: Final = 100_000
"""Records of one key that are listed; the oldest are left out beyond."""
CHUNK_BYTES: Final = 1 << 20


def run(question: Mapping[str, Any]) -> dict[str, Any]:
    """What one message of a node asks for. Raises KeptError, OSError."""
    disk = Disk()
    if "verify" in question:
        return verify.digest_ranges(question["verify"], disk)
    key = None if question["key"] is None else base64.b64decode(question["key"])
    above = [Source(**source) for source in question["above"]]
    if "job" not in question:
        assert key is not None
        return {"key": _search(question, disk, key, above)}
    job = decode(question["job"])
    previous = None if job.previous is None else read_manifest(job.directory, job.previous, disk)
    explanation, survey = explain(job, disk, previous=previous)
    said: dict[str, Any] = {"dry_run": asdict(explanation)}
    if key is not None:
        life = life_of_key(job, disk, key, survey, above)
        said["key"] = [asdict(record) for record in life[-MAX_RECORDS:]]
    return said


def _search(
    question: Mapping[str, Any], disk: Disk, key: bytes, sources: Sequence[Source]
) -> list[dict[str, Any]]:
    """The records of a key, below ``clean_to`` as survivors."""

    strategy = resolve(replace(LogConfig(), **question["strategy"]))
    applied, manifest = question["applied"], None
    if applied is not None:
        manifest = read_manifest(question["directory"], Generation(*applied), disk)
    life: list[KeyRecord] = []
    for source in sources:
        file = disk.open_read(source.path(question["directory"]))
        for data in whole_batches(disk, file, source.size_bytes, CHUNK_BYTES):
            for record in records(data, inflate_limit=INFLATE_LIMIT):
                if record.key is None or strategy.key(record) != key:
                    continue
                fate = "survives" if record.offset < question["clean_to"] else "not cleanable yet"
                size, goes = len(record.value or b""), None
                if record.value is None and manifest is not None:
                    goes = removable_at_ms(manifest, record.offset)
                life.append(
                    KeyRecord(
                        record.offset, record.timestamp, record.value is None, size, fate, goes
                    )
                )
        del life[:-MAX_RECORDS]
    return [asdict(record) for record in life]


def main() -> int:
    """Answer the question on stdin; the exit code is 0 when that went well."""

    line = init_worker()
    if not line:
        return 3
    lower_io_priority()
    try:
        message: dict[str, Any] = {"result": run(json.loads(line))}
    except Exception as error:  # noqa: BLE001 - a strategy may raise anything
        message = error_message(error)
    print(json.dumps(message), flush=True)
    return 0 if "result" in message else 1


if __name__ == "__main__":
    sys.exit(main())
