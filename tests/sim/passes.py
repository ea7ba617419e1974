"""Passes of compaction in a simulated history: what a node has a worker process do runs on its own
loop as a job of a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING
from unittest import mock

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner import worker
from kept.compaction.cleaner.cleaner_run import Result, run_pass
from kept.compaction.manifest import follow_worker
from kept.compaction.manifest.follow import follow
from kept.node.replicas.manifests.errors import PassFailed
from kept.node.replicas.manifests.workers import ManifestWork, failure
from kept.storage.errors import KeptError
from tests.sim.process import PROCESS

if TYPE_CHECKING:
    from kept.storage.disk import Disk
    from tests.sim.nodes_history import NodesHistory


@contextmanager
def passes_run_here(history: NodesHistory) -> Iterator[None]:
    """Worker processes of all nodes of a history are jobs of its loop."""

    async def run(self: ManifestWork, command: Sequence[str], question: str) -> Result:
        process = PROCESS.get()
        disk = next(machine.disk for machine in history.machines if machine.process is process)
        do = do_pass if command is worker.COMMAND else do_follow
        if self.cancelled:
            raise PassFailed("the worker process was ended", "Worker")
        try:
            result = await history.loop.run_in_executor(None, do, question, disk)
        except (KeptError, OSError, MemoryError) as error:
            message = json.loads(json.dumps(follow_worker.error_message(error)))
            raise failure(message, cancelled=self.cancelled) from error
        if self.cancelled:
            raise PassFailed("the worker process was ended", "Worker")
        return worker.result_from(json.loads(json.dumps({"result": asdict(result)})))

    with mock.patch.object(ManifestWork, "run", run):
        yield


def do_pass(question: str, disk: Disk) -> Result:
    """A pass, as the worker process does it."""
    return run_pass(jobs.decode(question), disk, _progress)


def do_follow(question: str, disk: Disk) -> Result:
    """The outputs of a manifest, as the worker process builds them."""
    return follow(follow_worker.decode(json.loads(question), disk), disk, _progress)


def _progress(_: int) -> None:
    pass
