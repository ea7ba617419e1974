"""What a node says about compiled kernels that it lacks.

The node and the workers of its cleaner are separate processes. Each finds out for itself which
kernels it lacks, and the node tells both: once in its log, in ``/api/v1/cleaner`` (from there on
the console and in ``kept cluster status``) and as the metric ``kept_uncompiled_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kept.kernels import FALLBACKS, python_is_chosen, uncompiled
from kept.node.runtime.logging import log


class Kernels:
    """The kernels that this node or a worker of it lacks, or runs as plain Python."""

    def __init__(self) -> None:
        self.uncompiled = uncompiled()
        """Names as in :data:`kept.kernels.NAMES`, sorted."""

    def warn(self) -> None:
        """Name what is missing, in one line of the log."""
        if self.uncompiled:
            why = "there are no compiled ones; see the README"
            if python_is_chosen():
                why = "KEPT_KERNEL=python"
            log.warning("slow Python kernels", why=why, uncompiled=",".join(self.uncompiled))
        if missing := [name for name in self.uncompiled if name not in FALLBACKS]:
            why = "kernels that nothing stands in for are not compiled; see the README"
            log.error("no log is compacted here", why=why, uncompiled=",".join(missing))

    def worker_lacks(self, names: Sequence[str]) -> None:
        """A worker runs these kernels as plain Python; the first that says so is logged."""
        unknown = sorted(set(names) - set(self.uncompiled))
        if not unknown:
            return
        self.uncompiled = tuple(sorted({*self.uncompiled, *unknown}))
        log.warning(
            "slow Python kernels in the cleaner's worker",
            why="the node has them compiled: they do not load, or the worker runs other code",
            uncompiled=",".join(unknown),
        )
