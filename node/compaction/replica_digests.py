"""What this node's replica of a partition has on disk, for ``kept compact verify``.

The reading is a dry run's (``kept.node.compaction.dry_run``): in a process of its own, one at a
time. Answers count only if nothing was put into place or cut meanwhile
(``kept.node.compaction.consistent_read``); else whoever asks begins again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from kept.compaction.cleaner.job_builder import sources_from
from kept.node.compaction.consistent_read import ConcurrentlyModified, generation, read_once
from kept.storage.errors import InvalidRequest

if TYPE_CHECKING:
    from kept.node.compaction.dry_run import DryRuns
    from kept.node.replicas.local_replica import LocalReplica

MAX_PARTS: Final = 4096


class ReplicaState(Struct, frozen=True):
    """How far a replica is. ``generation`` is the one applied, None before the first."""

    node: int
    leads: bool
    generation: str | None
    log_start_offset: int
    high_watermark: int


def state(node_id: int, hosted: LocalReplica) -> ReplicaState:
    """Where this replica stands."""
    partition = hosted.partition
    return ReplicaState(
        node_id,
        partition.is_leader,
        generation(hosted),
        partition.log_start_offset,
        partition.high_watermark,
    )


class Wanted(Struct, frozen=True):
    """Digests of ``start..end`` at a generation; with ``parts`` of so many equal parts of it."""

    generation: str | None
    start: int
    end: int
    parts: int | None = None


async def digests(
    dry_runs: DryRuns, node_id: int, hosted: LocalReplica, wanted: Wanted
) -> dict[str, Any]:
    """What the files of this replica come to.

    Raises InvalidRequest for a range that is not here, ConcurrentlyModified, DryRunFailed.
    """
    partition, start, end = hosted.partition, wanted.start, wanted.end
    if not partition.log_start_offset <= start <= end <= partition.log.written_end_offset:
        raise InvalidRequest(
            f"{partition.topic_partition.place} has {partition.log_start_offset}.."
            f"{partition.log.written_end_offset} on node {node_id}, not {start}..{end}"
        )
    if wanted.parts is not None and not 0 < wanted.parts <= MAX_PARTS:
        raise InvalidRequest(f"parts must be 1 to {MAX_PARTS}, not {wanted.parts}")
    known = hosted.compaction
    if generation(hosted) != wanted.generation:
        raise ConcurrentlyModified(
            f"{partition.topic_partition.place}: generation {generation(hosted)} is here now"
        )
    question = {
        "directory": partition.log.directory,
        "sources": [
            asdict(source)
            for source in sources_from(hosted.partition.log, hosted.partition.last_stable_offset, 0)
        ],
        "applied": None if known is None or known.applied is None else tuple(known.applied),
        "start": start,
        "end": end,
        "parts": wanted.parts,
    }
    return dict(await read_once(hosted, lambda: dry_runs.verify(question)))
