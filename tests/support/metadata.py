"""The metadata that a part of a node follows, as the test sets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kept.cluster.metadata.image import Image


class KnownMetadata:
    """An image and a controller that change when the test changes them; all is acted on at once."""

    def __init__(self, image: Image | None = None, leader_id: int | None = 1) -> None:
        self.image = image or Image()
        self.leader_id = leader_id

    async def acted(self, index: int) -> None:
        """There is nothing to wait for."""


class HeldBarrier:
    """A leadership barrier that confirms when the test calls what is in ``waiting``."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[bool], Any]] = []

    def confirm(self, then: Callable[[bool], Any]) -> None:
        self.waiting.append(then)

    async def wait(self) -> None:
        confirmed = False
        while not confirmed:
            answer = asyncio.get_running_loop().create_future()
            self.confirm(lambda value, to=answer: to.done() or to.set_result(value))
            confirmed = await answer


class FollowedChanges:
    """Logs that come and go with the metadata: they all have, at once."""

    async def done_up_to(self, index: int) -> None:
        """There is nothing to wait for."""
