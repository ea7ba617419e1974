"""Async tests, each on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Final, ParamSpec

DEADLINE_S: Final = 60

P = ParamSpec("P")


def run(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test, which fails after :data:`DEADLINE_S`."""

    @wraps(test)
    def sync(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), DEADLINE_S))

    return sync


async def result(future: Awaitable[Any]) -> Any:
    """What it becomes, by :data:`DEADLINE_S`."""
    return await asyncio.wait_for(future, DEADLINE_S)


async def until(condition: Callable[[], Any]) -> None:
    """Give the loop its turns until something is true; :func:`run` has a deadline."""
    while not condition():
        await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Give the loop so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)
