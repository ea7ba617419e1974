"""A future whose callbacks run within the call that completes it, as Java's CompletableFuture.

The callbacks of an ``asyncio.Future`` are called in a later turn of the loop, each further one that
a result goes through takes another turn, and a coroutine that awaits it is a task. That is most of
what a small request costs whose result comes from elsewhere. A :class:`CompletableFuture` calls
within the call that sets its result. So whoever adds a callback must bear to be called in the
middle of what others do: nothing that is served may be waiting for this very call to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, cast

from kept.node.runtime.logging import log

T = TypeVar("T")
Result = TypeVar("Result")


class CompletableFuture(Generic[T]):
    """A result, or an error, that is set once; names are those of ``asyncio.Future``."""

    __slots__ = ("_callbacks", "_error", "_is_done", "_value")

    def __init__(self) -> None:
        self._is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[CompletableFuture[T]], None]] = []

    @classmethod
    def completed(cls, value: T) -> CompletableFuture[T]:
        """A future that has its result."""
        future = cls()
        future._is_done, future._value = True, value
        return future

    def done(self) -> bool:
        """Whether it has a result or an error."""
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
        """Complete it: the callbacks are called now."""
        self._value = value
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        """Complete it with an error."""
        self._error = error
        self._finish()

    def add_done_callback(self, callback: Callable[[CompletableFuture[T]], None]) -> None:
        """Call with this when it is done: at once if it is, else within the call that sets it."""
        if self._is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def map(self, convert: Callable[[T], Result]) -> CompletableFuture[Result]:
        """A future of what ``convert`` makes of the result. It fails as this one or ``convert``."""
        mapped: CompletableFuture[Result] = CompletableFuture()

        def finish(finished: CompletableFuture[T]) -> None:
            try:
                value = convert(finished.result())
            except Exception as error:  # noqa: BLE001 - it is for whoever gets the result
                mapped.set_exception(error)
            else:
                mapped.set_result(value)

        self.add_done_callback(finish)
        return mapped

    def __await__(self) -> Generator[Any, None, T]:
        if not self._is_done:
            woken = asyncio.get_running_loop().create_future()

            def wake(_: CompletableFuture[T]) -> None:
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


def all_of(futures: Sequence[CompletableFuture[T]]) -> CompletableFuture[list[T]]:
    """The results of all, in order, when the last one is there; the first error, if any has one."""
    missing = len(futures)
    together: CompletableFuture[list[T]] = CompletableFuture()

    def one_done(_: CompletableFuture[T]) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            finish()

    def finish() -> None:
        errors = [error for each in futures if (error := each.exception()) is not None]
        if errors:
            together.set_exception(errors[0])
        else:
            together.set_result([each.result() for each in futures])

    for each in futures:
        each.add_done_callback(one_done)
    if not futures:
        finish()
    return together
