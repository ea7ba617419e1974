"""Opens and creates logs in the threads of their directories. Changes no table: who asked does.

A log that compaction left half swapped is completed on the way (:mod:`.manifests.recover`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from kept.node.replicas.local_replica import LocalDirectory
from kept.node.replicas.manifests import recover
from kept.node.replicas.manifests.status import ManifestStatus
from kept.storage.directory import ClosedLog, NewLog
from kept.storage.errors import MachineError, ResourceExhausted
from kept.storage.types import LogConfig, TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.records import PartitionRecord
    from kept.compaction.manifest.apply import CompactionState
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime
    from kept.storage.log.log import Log

LOGS_A_JOB: Final = 64
"""Logs that a thread opens or creates before the loop hears of them."""


@dataclass(slots=True, eq=False)
class Opening:
    """A log to open or create. ``stray``: the name of its directory, while it is set aside."""

    tp: TopicPartition
    topic_id: uuid.UUID
    record: PartitionRecord
    config: LogConfig
    directory: LocalDirectory = field(init=False)
    exists: bool = False
    stray: str | None = None

    @property
    def closed_log(self) -> ClosedLog:
        """What is on the disk of it, while it is not open."""
        directory = self.directory.directory
        path = directory.log_path(self.tp)
        if self.stray is not None:
            path = f"{directory.path}/{self.stray}"
        return ClosedLog(self.tp, self.topic_id, path, self.config)


Opened: TypeAlias = "tuple[Log, CompactionState | None, ManifestStatus]"
Job: TypeAlias = "tuple[list[Opening], asyncio.Future[list[Opened | Exception]]]"


class LogOpener:
    """Opens and creates logs in the threads of their directories."""

    def __init__(self, runtime: Runtime, config: LiveConfig, identity: NodeIdentity) -> None:
        self._runtime = runtime
        self._config = config
        self._identity = identity

    def begin(
        self, openings: Sequence[Opening], directories: Sequence[LocalDirectory]
    ) -> list[Job]:
        """Open or create logs, :data:`LOGS_A_JOB` in each job of a thread: one by one they would
        cost the loop more than the disk. A job has an outcome for each of its openings, in order.
        """
        jobs: list[Job] = []
        for directory in directories:
            mine = [opening for opening in openings if opening.directory is directory]
            for at in range(0, len(mine), LOGS_A_JOB):
                several = mine[at : at + LOGS_A_JOB]
                jobs.append((several, directory.pool.run_apart(self._open_several, several)))
        return jobs

    def _open_several(self, several: list[Opening]) -> list[Opened | Exception]:
        """Open or create logs of one directory; in a thread."""
        outcomes: list[Opened | Exception] = []
        new = [opening for opening in several if not opening.exists]
        created: list[Opened | Exception]
        try:
            created = [(log_, None, ManifestStatus()) for log_ in self._create(new)] if new else []
        except ResourceExhausted as error:
            created = self._one_by_one(new) if len(new) > 1 else [error]
        except MachineError as error:
            created = [error] * len(new)
        except Exception as error:  # noqa: BLE001 - a directory that was removed meanwhile, too
            created = self._one_by_one(new) if len(new) > 1 else [error]
        made = iter(created)
        for opening in several:
            try:
                outcomes.append(self._open(opening) if opening.exists else next(made))
            except Exception as error:  # noqa: BLE001 - the loop says so
                outcomes.append(error)
        return outcomes

    def _one_by_one(self, new: list[Opening]) -> list[Opened | Exception]:
        """One of several cannot be created: which one, and why?"""
        return [self._open_several([opening])[0] for opening in new]

    def _create(self, new: list[Opening]) -> list[Log]:
        new_logs = []
        for opening in new:
            leads = opening.record.leader == self._identity.node_id
            epoch = opening.record.leader_epoch if leads else None
            new_logs.append(NewLog(opening.tp, opening.topic_id, opening.config, epoch))
        return new[0].directory.directory.create_logs(
            new_logs,
            now_ms=self._runtime.now_ms(),
            producer_id_expiration_ms=self._config.current.producer_id_expiration_ms,
        )

    def _open(self, opening: Opening) -> Opened:
        directory = opening.directory.directory
        if opening.stray is not None:
            directory.put_back(opening.stray, opening.tp)
            opening.stray = None
        path = directory.log_path(opening.tp)
        alone = opening.record.replicas == (self._identity.node_id,)
        disk = self._runtime.disk
        state, known = recover.before_opening(path, disk, alone)
        if state is not None and state.log_start:
            # What tells of it goes as the log is opened.
            directory.raise_log_start(opening.tp, state.log_start)
        opened = directory.open_log(
            opening.tp,
            opening.topic_id,
            opening.config,
            now_ms=self._runtime.now_ms(),
            unfinished_swap=None if state is None else state.unfinished,
            compacted_to=None if state is None or state.applied is None else state.end_offset,
            replicated=any(member != self._identity.node_id for member in opening.record.isr),
            producer_id_expiration_ms=self._config.current.producer_id_expiration_ms,
        )
        if state is not None:
            state, known = recover.after_opening(path, disk, state, alone, opened)
        return opened, state, known
