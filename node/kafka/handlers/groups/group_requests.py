"""What the handlers of group APIs share: from a request to its group's core, and back.

A handler gives its event and says how a result and how a refusal look in its API; the answer is
made at once where the core has answered at once, else when it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from kept.node.coordinator.common.shard import coordinator_error
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.coordinator.common.shard import MakeEvent
    from kept.node.coordinator.common.shards import Shards
    from kept.node.kafka.api import RequestContext

HandlerResult = dict[str, Any] | asyncio.Future[dict[str, Any]]
GiveUp = Callable[[asyncio.Future[Any]], None]


class Waiting:
    """A request whose answer its connection waits for."""

    __slots__ = ("_given_up", "_result")

    def __init__(self, result: asyncio.Future[Any], given_up: GiveUp) -> None:
        self._result = result
        self._given_up = given_up

    def cancel(self) -> None:
        """The connection is gone."""
        if not self._result.done():
            self._given_up(self._result)


def submit(  # noqa: PLR0917
    shards: Shards[Any],
    ctx: RequestContext,
    key: str,
    make_event: MakeEvent,
    answer: Callable[[Any], dict[str, Any]],
    refuse: Callable[[ErrorCode], dict[str, Any]],
    *,
    needs_name: bool = True,
    given_up: GiveUp | None = None,
) -> HandlerResult:
    """Give an event to a group's core and answer with its result.

    ``needs_name``: the empty group id is refused. It is legal where Kafka knows it from old times:
    commits, fetches, descriptions. ``given_up`` is called with the result that was waited for when
    the connection goes before it is there.
    """
    if needs_name and not key:
        return refuse(ErrorCode.invalid_group_id)
    try:
        result = shards.submit(key, make_event)
    except KeptError as error:
        return refuse(coordinator_error(error, "request to a coordinator failed", key=key))
    if given_up is not None and ctx.parked is not None and not result.done():
        parked, waiting = ctx.parked, Waiting(result, given_up)
        parked[waiting] = None
        result.add_done_callback(lambda _: parked.pop(waiting, None))
    return then(result, answer)


def then(result: asyncio.Future[Any], convert: Callable[[Any], dict[str, Any]]) -> HandlerResult:
    """What ``convert`` makes of a future's result: now, or when it is there."""
    if result.done():
        return convert(result.result())
    answer: asyncio.Future[dict[str, Any]] = result.get_loop().create_future()

    def done(finished: asyncio.Future[Any]) -> None:
        if answer.done():
            return
        if finished.cancelled():
            answer.cancel()
        else:
            answer.set_result(convert(finished.result()))

    result.add_done_callback(done)
    return answer
