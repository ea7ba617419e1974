"""Reading a log's files while compaction may replace them.

A reader in another process opens segments by name. If one was put into place or cut meanwhile, its
result or failure means nothing, and the files are read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from kept.storage.errors import KeptError, RetriableError

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalReplica

_T = TypeVar("_T")

TRIES: Final = 20
RETRY_S: Final = 0.25


class ConcurrentlyModified(RetriableError):
    """The log was compacted or cut while it was read, or has another generation than was asked."""


def generation(hosted: LocalReplica) -> str | None:
    """The generation that was applied last; None before the first."""
    known = hosted.compaction
    return None if known is None or known.applied is None else str(known.applied)


async def read_once(hosted: LocalReplica, read: Callable[[], Awaitable[_T]]) -> _T:
    """What ``read`` comes to while the files stay. Raises ConcurrentlyModified when they do not."""
    log = hosted.partition.log
    before = generation(hosted), log.truncations
    failed: KeptError | None = None
    if not hosted.manifests.busy:
        try:
            value = await read()
        except KeptError as error:
            failed = error
        if not hosted.manifests.busy and (generation(hosted), log.truncations) == before:
            if failed is not None:
                raise failed
            return value
    tp = hosted.partition.topic_partition
    raise ConcurrentlyModified(f"{tp.place}: it is being compacted; try again") from failed


async def read_consistently(hosted: LocalReplica, read: Callable[[], Awaitable[_T]]) -> _T:
    """As :func:`read_once`, tried for some seconds."""
    for _ in range(TRIES - 1):
        try:
            return await read_once(hosted, read)
        except ConcurrentlyModified:
            await asyncio.sleep(RETRY_S)
    return await read_once(hosted, read)
