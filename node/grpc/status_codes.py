"""kept's errors as gRPC statuses: the one place where they meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

from google.protobuf.message import DecodeError

from kept.client.core import broker_errors as failures
from kept.client.core.authorization_errors import NotAuthorized
from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.internode.parse_limits import check_counts
from kept.node.runtime.logging import bugs
from kept.storage import errors
from kept.storage.errors import CorruptMessage, InvalidRequest

# isort: split
import grpc

Status = grpc.StatusCode

MAX_ITEMS: Final = 5_000
"""Headers of a record, settings of a topic: of a message of more than 64 KiB, that is."""
MAX_FIELDS: Final = 2 * MAX_ITEMS

_STATUSES: Final[tuple[tuple[type[errors.KeptError], Any], ...]] = (
    (errors.UnknownTopicOrPartition, Status.NOT_FOUND),
    (errors.UnknownTopicId, Status.NOT_FOUND),
    (errors.TopicAlreadyExists, Status.ALREADY_EXISTS),
    (errors.OffsetOutOfRange, Status.OUT_OF_RANGE),
    (NotAuthorized, Status.PERMISSION_DENIED),
    (errors.PolicyViolation, Status.FAILED_PRECONDITION),
    (errors.RequestTimedOut, Status.DEADLINE_EXCEEDED),
    (failures.NoResponse, Status.DEADLINE_EXCEEDED),
    (errors.PeerError, Status.INVALID_ARGUMENT),
    (errors.DamagedData, Status.DATA_LOSS),
    (errors.ThrottlingQuotaExceeded, Status.RESOURCE_EXHAUSTED),
    (errors.RetriableError, Status.UNAVAILABLE),
    (errors.MachineError, Status.UNAVAILABLE),
)
"""The first that fits counts."""

MAX_MESSAGE_BYTES: Final = 4096
"""Of a status' message on the wire: with 8 KiB of metadata a client makes another status of it."""
PUSHBACK: Final = "grpc-retry-pushback-ms"
"""How long a client's retries wait (gRFC A6)."""

Handler = Callable[[Any, Any], Awaitable[Any]]


def status_of(error: errors.KeptError) -> Any:
    """The status of an error of kept."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return Status.INTERNAL


def shortened(message: str) -> str:
    """A status' message that arrives, whatever of a client's request it names: on the wire a byte
    that is not printable ASCII, or is ``%``, is three.
    """
    size = 0
    for number, letter in enumerate(message):
        is_plain = " " <= letter <= "~" and letter != "%"
        size += 1 if is_plain else 3 * len(letter.encode("utf-8", "replace"))
        if size > MAX_MESSAGE_BYTES:
            return f"{message[:number]}... ({len(message)} characters)"
    return message


async def end_with(context: Any, error: Exception) -> NoReturn:
    """End a call with an error; what is a bug of ours is logged, and not told."""
    status, message = Status.INTERNAL, "internal error; the node's log has the details"
    if isinstance(error, errors.KeptError) and not errors.is_bug(error):
        status, message = status_of(error), error.client_message
    if status is Status.INTERNAL:
        bugs.report("call failed", error)
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, errors.ThrottlingQuotaExceeded):
        trailing = ((PUSHBACK, str(error.throttle_ms)),)
    await context.abort(status, shortened(message), trailing)
    raise errors.InvariantViolation("abort came back")


def parsed(kind: Any, data: bytes) -> Any:
    """A request from its bytes. Raises InvalidRequest, also for more items than are taken: millions
    of empty headers fit into one message.
    """
    try:
        check_counts(kind.DESCRIPTOR, data, MAX_ITEMS, MAX_FIELDS)
        return kind.FromString(data)
    except CorruptMessage as error:
        raise InvalidRequest(str(error)) from None
    except DecodeError as error:
        raise InvalidRequest(f"this is no {kind.DESCRIPTOR.full_name}: {error}") from error


def with_statuses(handler: Handler, kind: Any) -> Handler:
    """A handler of requests of a kind, as gRPC calls it with bytes: errors become statuses."""

    async def handle(data: bytes, context: Any) -> Any:
        try:
            return await handler(parsed(kind, data), context)
        except grpc.aio.AbortError:
            raise
        # The one place that reports our own bugs.
        except Exception as error:  # noqa: BLE001
            await end_with(context, error)

    return handle
