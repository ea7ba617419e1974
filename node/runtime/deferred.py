"""Results that come now or later, and go on at once.

The callbacks of a future are called in a later turn of the loop, each hand that a result goes
through takes another turn, and a coroutine that awaits it is a task. That is most of what a small
request costs whose result comes from elsewhere. A :class:`Deferred` calls within the call that sets
its result. So whoever adds a callback must bear to be called in the middle of what others do:
nothing that is served may be waiting for this very call to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, cast

from kept.node.runtime.logging import log

T = TypeVar("T")
Result = TypeVar("Result")


class Deferred(Generic[T]):
    """A result, or an error, that is set once; names are those of ``asyncio.Future``."""

    __slots__ = ("_callbacks", "_error", "_is_done", "_value")

    def __init__(self) -> None:
        self._is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Deferred[T]], None]] = []

    @classmethod
    def of(cls, value: T) -> Deferred[T]:
        """A result that is there."""
        deferred = cls()
        deferred._is_done, deferred._value = True, value
        return deferred

    def done(self) -> bool:
        """Whether the result, or an error, is there."""
        return self._is_done

    @staticmethod
    def cancelled() -> bool:
        """Never: whoever needs it no more forgets it."""
        return False

    def result(self) -> T:
        """The result. Raises the error. It must be there."""
        assert self._is_done
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def exception(self) -> BaseException | None:
        """The error; None where there is a result. One of both must be there."""
        assert self._is_done
        return self._error

    def set_result(self, value: T) -> None:
        """Here it is: call whoever waits."""
        self._value = value
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        """There is none."""
        self._error = error
        self._finish()

    def add_done_callback(self, callback: Callable[[Deferred[T]], None]) -> None:
        """Call with this when it is done: at once if it is, else within the call that sets it."""
        if self._is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def map(self, convert: Callable[[T], Result]) -> Deferred[Result]:
        """What ``convert`` makes of the result; its error is one of this."""
        made: Deferred[Result] = Deferred()

        def finish(finished: Deferred[T]) -> None:
            try:
                value = convert(finished.result())
            except Exception as error:  # noqa: BLE001 - it is for whoever gets the result
                made.set_exception(error)
            else:
                made.set_result(value)

        self.add_done_callback(finish)
        return made

    def __await__(self) -> Generator[Any, None, T]:
        if not self._is_done:
            woken = asyncio.get_running_loop().create_future()

            def wake(_: Deferred[T]) -> None:
                if not woken.done():
                    woken.set_result(None)

            self.add_done_callback(wake)
            yield from woken.__await__()
        return self.result()

    def _finish(self) -> None:
        assert not self._is_done
        self._is_done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001 - a bug of who waits, not of who has this
                log.exception("callback failed", error)


def all_of(deferreds: Sequence[Deferred[T]]) -> Deferred[list[T]]:
    """The results of all, in order, when the last one is there; the first error, if any has one."""
    missing = len(deferreds)
    together: Deferred[list[T]] = Deferred()

    def one_done(_: Deferred[T]) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            finish()

    def finish() -> None:
        errors = [error for each in deferreds if (error := each.exception()) is not None]
        if errors:
            together.set_exception(errors[0])
        else:
            together.set_result([each.result() for each in deferreds])

    for each in deferreds:
        each.add_done_callback(one_done)
    if not deferreds:
        finish()
    return together
