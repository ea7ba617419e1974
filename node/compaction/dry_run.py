"""Dry runs of compaction, in a process of their own: ``python -m kept.node.compaction.dry_run``.

A dry run reads a whole log, which belongs neither on the node's loop nor in its memory. The
process gets one line of JSON on stdin and answers with one on stdout, ``{"result": …}`` or
``{"error": …}``.
It is exec'ed, niced, ends when its stdin does, and writes no file. One runs at a time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime.subprocess import ChildFailed, ChildProcess, spawn
from kept.storage.errors import KeptError, RequestTimedOut, RetriableError

if TYPE_CHECKING:
    from kept.compaction.cleaner.job import Job, Source
    from kept.compaction.manifest.manifest import Identity
    from kept.storage.types import LogConfig

COMMAND: Final = (sys.executable, "-P", "-m", "kept.node.compaction.dry_run")
"""Code comes from where kept is installed, never from the working directory (``-P``)."""
ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Longest answer: a key with a quarter of a million records."""
TIMEOUT_S: Final = 600.0
MAX_WAITING: Final = 8
"""Dry runs that wait for their turn; more are refused."""
MAX_RECORDS: Final = 100_000
"""Records of one key that are told; the oldest are left out beyond."""
CHUNK_BYTES: Final = 1 << 20


class DryRunFailed(KeptError):
    """The process said why it could not do it."""


class DryRunsBusy(RetriableError):
    """Too many dry runs at once."""


# In the node.


class DryRuns:
    """The dry runs of a node: one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore()
        self._waiting = 0

    async def run(self, job: Job, key: bytes | None, above: Sequence[Source]) -> Mapping[str, Any]:
        """``dry_run``: what the job would do; ``key``: the life of a key. Raises DryRunFailed."""
        from kept.compaction.cleaner import job as jobs

        return await self._submit(
            {
                "job": jobs.encode(job),
                "key": None if key is None else base64.b64encode(key).decode(),
                "above": [asdict(source) for source in above],
            },
        )

    async def find_key(
        self,
        directory: str,
        config: LogConfig,
        *,
        key: bytes,
        sources: Sequence[Source],
        clean_to: int,
        applied: Identity | None,
    ) -> list[Mapping[str, Any]]:
        """Every record of a key in these segments, in order. Raises DryRunFailed."""
        answer = await self._submit(
            {
                "directory": directory,
                "strategy": {"compaction_strategy": config.compaction_strategy, "raw": config.raw},
                "key": base64.b64encode(key).decode(),
                "above": [asdict(source) for source in sources],
                "clean_to": clean_to,
                "applied": applied,
            },
        )
        records: list[Mapping[str, Any]] = answer["key"]
        return records

    async def verify(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """What :func:`kept.compaction.manifest.verify.answer` says. Raises DryRunFailed."""
        return await self._submit({"verify": question})

    async def _submit(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._waiting > MAX_WAITING:
            raise DryRunsBusy(f"{self._waiting} dry runs are under way; try again later")
        self._waiting += 1
        try:
            return await self._in_turn(question)
        finally:
            self._waiting -= 1

    async def _in_turn(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        async with self._turn:
            child = await spawn(COMMAND, ANSWER_BYTES)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await _talk(child, question)
            except TimeoutError as error:
                raise RequestTimedOut(f"the dry run took more than {TIMEOUT_S:.0f} s") from error


async def _talk(child: ChildProcess, question: Mapping[str, Any]) -> Mapping[str, Any]:
    heard: list[Mapping[str, Any]] = [{}]
    try:
        _, words = await child.converse(json.dumps(question), heard.append)
    except ChildFailed as error:
        raise DryRunFailed(f"the dry run went wrong: {error}") from error
    if "result" in heard[-1]:
        result: Mapping[str, Any] = heard[-1]["result"]
        return result
    raise DryRunFailed(heard[-1].get("error") or f"the dry run died: {words}")


# In the process.


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Do it. Raises KeptError, OSError."""
    from kept.compaction.cleaner.cleaner_run import read_manifest
    from kept.compaction.cleaner.explain import explain, life_of_key
    from kept.compaction.cleaner.job import Source, decode
    from kept.storage.disk import Disk

    disk = Disk()
    if "verify" in question:
        from kept.compaction.manifest import verify as verifying

        return verifying.answer(question["verify"], disk)
    key = None if question["key"] is None else base64.b64decode(question["key"])
    above = [Source(**source) for source in question["above"]]
    if "job" not in question:
        assert key is not None
        return {"key": _search(question, disk, key, above)}
    job = decode(question["job"])
    previous = None if job.previous is None else read_manifest(job.directory, job.previous, disk)
    explanation, found = explain(job, disk, previous=previous)
    said: dict[str, Any] = {"dry_run": asdict(explanation)}
    if key is not None:
        life = life_of_key(job, disk, key, found, above)
        said["key"] = [asdict(record) for record in life[-MAX_RECORDS:]]
    return said


def _search(
    question: Mapping[str, Any], disk: Any, key: bytes, sources: Sequence[Source]
) -> list[dict[str, Any]]:
    """The records of a key, below ``clean_to`` as survivors."""
    from kept.compaction.cleaner.cleaner_run import read_manifest
    from kept.compaction.cleaner.explain import KeyRecord, removable_at_ms
    from kept.compaction.cleaner.job import INFLATE_LIMIT
    from kept.compaction.cleaner.scan_stats import whole_batches
    from kept.compaction.manifest.manifest import Identity
    from kept.compaction.strategy import resolve
    from kept.storage.records import records
    from kept.storage.types import LogConfig

    strategy = resolve(replace(LogConfig(), **question["strategy"]))
    applied, manifest = question["applied"], None
    if applied is not None:
        manifest = read_manifest(question["directory"], Identity(*applied), disk)
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
    from kept.compaction.cleaner.worker import begin, give_way

    line = begin()
    if not line:
        return 3
    give_way()
    try:
        message: dict[str, Any] = {"result": answer(json.loads(line))}
    except (KeptError, OSError, MemoryError) as error:
        message = {"error": str(error) or type(error).__name__}
    print(json.dumps(message), flush=True)
    return 0 if "result" in message else 1


if __name__ == "__main__":
    sys.exit(main())
