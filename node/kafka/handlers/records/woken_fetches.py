"""Consumers' fetches that were parked, and whose partitions have moved.

One batch may wake thousands, each of which takes 50 us to be read and answered: the first are in
the next turn of the loop, the others in slices. A fetch that is read again looks at all that has
moved by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kept.node.runtime.logging import bugs

if TYPE_CHECKING:
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps


class WokenFetches:
    """Those of a node, in the order in which they were woken."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._woken: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add(self, read_again: Callable[[], None]) -> None:
        """Call ``read_again`` soon, not within this call."""
        self._woken.append(read_again)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._runtime.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._runtime.slices.run(self._read())

    def _read(self) -> Steps[None]:
        while self._woken:
            try:
                self._woken.popleft()()
            except Exception as error:  # noqa: BLE001 - the others are answered
                bugs.report("fetch not read again", error)
            yield
        self._is_scheduled = False
