"""Async tests, each on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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
