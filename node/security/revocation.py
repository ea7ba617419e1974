"""Work that goes on only for as long as whoever wants it may have it: streams of HTTP and gRPC, and
calls that take long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from kept.storage.errors import KeptError

T = TypeVar("T")

CHECK_S: Final = 1.0
"""How often it is asked anew whether work may go on."""


class Revoked(KeptError):
    """The right to something was taken away, or the session ended, while it was done."""


async def run_while_allowed(work: Awaitable[T], is_allowed: Callable[[], bool]) -> T:
    """What comes of ``work``. Where ``is_allowed()`` is false meanwhile it is cancelled, within
    :data:`CHECK_S` seconds, and Revoked raised; nobody is asked once it is done.
    """
    running = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({running}, timeout=CHECK_S))[0]:
            if not is_allowed():
                raise Revoked("the right to do this was taken away")
        return await running
    finally:
        running.cancel()
