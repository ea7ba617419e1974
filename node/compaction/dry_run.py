"""Dry runs of compaction: a node has them done by processes, one at a time.

A dry run reads a whole log, which belongs neither on the node's loop nor in its memory.
:mod:`kept.node.compaction.dry_run_worker` is the process.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime.logging import log
from kept.node.runtime.subprocess import ChildFailed, ChildProcess, spawn
from kept.storage.errors import DETAILS_IN_LOG, KeptError, RequestTimedOut, RetriableError

if TYPE_CHECKING:
    from kept.compaction.cleaner.job import Job, Source
    from kept.storage.types import Generation, LogConfig

COMMAND: Final = (sys.executable, "-P", "-m", "kept.node.compaction.dry_run_worker")
"""Code comes from where kept is installed, never from the working directory (``-P``)."""
ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Longest answer: a key with a quarter of a million records."""
TIMEOUT_S: Final = 600.0
MAX_WAITING: Final = 8
"""Dry runs that wait for their turn; more are refused."""


class DryRunFailed(KeptError):
    """The process said why it could not do it; ``client_message``: what clients may know of it."""

    def __init__(self, message: str, client_message: str = "") -> None:
        super().__init__(message)
        self._client_message = client_message or f"the dry run failed{DETAILS_IN_LOG}"
        log.warning("dry run failed", error=message)

    @property
    def client_message(self) -> str:
        """See :attr:`KeptError.client_message`."""
        return self._client_message


class DryRunsBusy(RetriableError):
    """Too many dry runs at once."""


class DryRuns:
    """The dry runs of a node: one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore()
        self._waiting = 0

    async def run(self, job: Job, key: bytes | None, above: Sequence[Source]) -> Mapping[str, Any]:
        """``dry_run``: what the job would do; ``key``: the life of a key. Raises DryRunFailed."""
        from kept.compaction.cleaner import job as jobs  # with the cleaner, after "ready"

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
        applied: Generation | None,
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
        """What :func:`kept.compaction.manifest.verify.digest_ranges` says. Raises DryRunFailed."""
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
    messages: list[Mapping[str, Any]] = [{}]
    try:
        _, words = await child.converse(json.dumps(question), messages.append)
    except ChildFailed as error:
        raise DryRunFailed(f"the dry run went wrong: {error}") from error
    if "result" in messages[-1]:
        result: Mapping[str, Any] = messages[-1]["result"]
        return result
    last = messages[-1]
    raise DryRunFailed(
        last.get("error") or f"the dry run died: {words}", last.get("client_message", "")
    )
