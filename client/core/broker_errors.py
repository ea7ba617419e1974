"""Kafka error codes as our errors, with a message that names what was asked of whom.

An error code whose name is a class of :mod:`kept.storage.errors` becomes that class; another one
becomes :class:`BrokerError` or :class:`RetriableBrokerError`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Final

from kio.schema.errors import ErrorCode

from kept.client.core.authorization_errors import NotAuthorized, is_about_authorization
from kept.storage import errors
from kept.storage.errors import KeptError, NetworkException, NoNode, PeerError, RetriableError

_TEXTS: Final = {
    "unknown_topic_or_partition": "no such topic or partition",
    "unknown_topic_id": "no topic has that id",
    "topic_already_exists": "a topic of that name exists",
    "invalid_topic_exception": "a name has up to 249 letters, digits, '.', '_' and '-'",
    "leader_not_available": "the partition has no leader",
    "not_leader_or_follower": "that node does not lead the partition",
    "offset_out_of_range": "the offset is below the log start or above the log end",
    "group_id_not_found": "no such group",
    "transactional_id_not_found": "no such transactional id",
    "non_empty_group": "the group has members; stop them first",
    "message_too_large": "the batch is above max.message.bytes",
    "record_list_too_large": "the batch is above segment.bytes",
    "invalid_record": "the topic refuses the record; a compacted topic needs a key",
    "not_enough_replicas": "fewer replicas in sync than min.insync.replicas",
    "coordinator_not_available": "the coordinator is not available yet",
    "unsupported_version": "that version of the API is not served",
    "kafka_storage_error": "the log directory of the partition is offline",
    "transactional_id_authorization_failed": "not authorized for the transactional id",
    "invalid_transaction_timeout": "the timeout is above the node's transaction.max.timeout.ms",
}


class BrokerError(PeerError):
    """The broker answered with an error code that trying again does not mend."""


class RetriableBrokerError(RetriableError):
    """The broker answered with a retriable error code."""


class ConnectionFailed(RetriableError):
    """No connection, or one that broke: names host, port and what was being asked."""


class ConnectionRefused(ConnectionFailed):
    """Nobody listens at that port of that host."""


class NoNodeAnswers(NoNode, ConnectionRefused):
    """All bootstrap addresses refuse connections."""


class NotReached(NetworkException):
    """No connection, so no request was sent."""


class NoResponse(RetriableError):
    """No answer within the time given."""


class NoController(NoResponse):
    """The node that was asked waits itself for a controller, as far as one can tell."""


class NotKafka(PeerError):
    """The other side does not speak the Kafka protocol."""


class AuthenticationFailed(PeerError):
    """One side does not believe who the other one is, by TLS or SASL. Nothing is tried again."""


def lost_connection(
    *, mistrusted: bool, refused: bool
) -> type[ConnectionFailed | AuthenticationFailed]:
    """The error for a connection that could not be made, or broke."""
    if mistrusted:
        return AuthenticationFailed
    return ConnectionRefused if refused else ConnectionFailed


def unreachable(name: str, error: KeptError, tried: Collection[ConnectionFailed]) -> KeptError:
    """What to say of a call that found no node: ``error``, or all that were tried where they are
    several; a NoNode where all of them refused the connection.
    """
    if not tried or not isinstance(error, ConnectionFailed):
        return error
    several = f"{name}: no node answers: {'; '.join(map(str, tried))}"
    text = str(error) if len(tried) == 1 else several
    if all(isinstance(each, ConnectionRefused) for each in tried):
        return NoNodeAnswers(text)
    return ConnectionFailed(text)


@cache
def error_class(code: int) -> type[KeptError]:
    """The class for an error code."""
    name = ErrorCode(code).name if code in _CODES else ""
    cls = getattr(errors, name.title().replace("_", ""), None)
    if isinstance(cls, type) and issubclass(cls, KeptError):
        return cls
    return RetriableBrokerError if code in _CODES and ErrorCode(code).retriable else BrokerError


def failure(
    code: int,
    what: str,
    message: str | None = None,
    *,
    key: str = "",
    is_explained: bool = False,
) -> KeptError | None:
    """The error for ``code``, None for 0.

    ``what`` names the request (``Fetch of orders:0``); ``message`` is the broker's own text;
    ``key`` the group or transactional id that the request names, where an error may be about it:
    ``what`` does not tell where one ends. ``is_explained``: where an authorization failed the
    broker's text, if there is one, says why, and no right is what is missing.
    """
    if code == 0:
        return None
    name = ErrorCode(code).name if code in _CODES else f"error code {code}"
    if is_about_authorization(code) and not (message and is_explained):
        return NotAuthorized(code, name.upper(), what, key=key)
    text = message or _TEXTS.get(name, "")
    said = f"{name.upper()} ({text})" if text else name.upper()
    return error_class(code)(f"{what}: {said}")


def api_name(api_key: int) -> str:
    """An API's name as Kafka writes it: ``CreateTopics``."""
    from kio.schema.index import api_key_map

    name = api_key_map.get(api_key)
    return name.title().replace("_", "") if name else f"API {api_key}"


_CODES: Final = frozenset(code.value for code in ErrorCode)
