"""What the handlers of transactional APIs share: from a request to its id's core, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.common.shard import coordinator_error
from kept.node.coordinator.transactions import events as ev
from kept.node.runtime.completable_future import CompletableFuture
from kept.storage.errors import KeptError, NetworkException

if TYPE_CHECKING:
    from kept.node.kafka.api import RequestContext

FENCED_FROM: Final = {
    ApiKey.INIT_PRODUCER_ID: 4,
    ApiKey.ADD_PARTITIONS_TO_TXN: 2,
    ApiKey.ADD_OFFSETS_TO_TXN: 2,
    ApiKey.END_TXN: 2,
}
"""The version from which clients know PRODUCER_FENCED; before it INVALID_PRODUCER_EPOCH says so."""


def result_of(
    ctx: RequestContext,
    submit: Callable[[], CompletableFuture[Any]],
    failed: Callable[[ErrorCode], Any],
) -> CompletableFuture[Any]:
    """The result that ``submit`` brings, or ``failed`` with the code of what it raises; its error
    is one that the request's version knows.

    It is NetworkException where the client has come again over a newer connection: this one is to
    be closed without a word.
    """
    try:
        submitted = submit()
    except KeptError as error:
        code = coordinator_error(error, "request to a coordinator failed", api=ctx.api_key)
        submitted = CompletableFuture.completed(failed(code))
    return submitted.map(partial(_as_known, ctx))


def _as_known(ctx: RequestContext, result: Any) -> Any:
    if isinstance(result, ev.StaleConnection):
        raise NetworkException("the producer has come again over a newer connection")
    fenced_from = FENCED_FROM.get(ApiKey(ctx.api_key), 0)
    if result.error is ErrorCode.producer_fenced and ctx.api_version < fenced_from:
        return replace(result, error=ErrorCode.invalid_producer_epoch)
    return result
