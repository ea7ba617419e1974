"""The cleaner, imported when it is first needed: a node is ready before.

What concerns a cleaner that does not run yet is dropped here: it looks at all logs when it starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.compaction.cleaner import Cleaner
    from kept.node.compaction.context import CleanerContext
    from kept.storage.types import TopicPartition


class LazyCleaner:
    """Imports the cleaner when it is first needed, and passes calls on to it."""

    def __init__(self, context: CleanerContext) -> None:
        self._context = context
        self._cleaner: Cleaner | None = None

    @property
    def started(self) -> Cleaner:
        """The cleaner; the first to use it has it imported and started."""
        if self._cleaner is None:
            from kept.node.compaction.cleaner import Cleaner

            self._cleaner = Cleaner(self._context)
            self._cleaner.start()
        return self._cleaner

    def renew(self, tp: TopicPartition) -> None:
        """What is applied cannot be read, and others need it: make another manifest."""
        self.started.renew(tp)

    def generation_applied(self, tp: TopicPartition) -> None:
        """A generation was applied, whoever computed it."""
        if self._cleaner is not None:
            self._cleaner.generation_applied(tp)

    def forget(self, tp: TopicPartition, error: BaseException | None) -> None:
        """The partition is gone from here; ``error`` is why, if its directory failed."""
        if self._cleaner is not None:
            self._cleaner.forget(tp, error)

    async def stop(self, close_manifests: Callable[[], Awaitable[None]]) -> None:
        """End the workers, then whatever is put into place, by ``close_manifests``."""
        if self._cleaner is not None:
            await self._cleaner.stop(close_manifests)
        await close_manifests()
