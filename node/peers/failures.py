"""Errors between nodes: a KeptError travels as the name of its class and its message.

At the caller it is raised as that class again, so that a forwarded request fails with the same
Kafka error code as at the controller. Attributes of an error do not travel, but for the leader
that NotController names.
"""

from __future__ import annotations

from typing import Final

from kept.node.peers.calls import Failure
from kept.storage import errors
from kept.storage.errors import InvariantViolation, KeptError

MAX_MESSAGE_CHARS: Final = 1_000
"""Longer messages are cut: they travel in HTTP/2 headers, which 8 KiB limit."""


def failure_of(error: BaseException) -> Failure:
    """An error as it travels; one that is not ours is InvariantViolation, a bug of that node."""
    if isinstance(error, KeptError):
        return Failure(type(error).__name__, str(error)[:MAX_MESSAGE_CHARS])
    return Failure(
        InvariantViolation.__name__, f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
    )


def error_of(failure: Failure) -> KeptError:
    """The error again. A class that is not known here (a newer node's) becomes KeptError."""
    cls = getattr(errors, failure.error, None)
    if not (isinstance(cls, type) and issubclass(cls, KeptError)):
        return KeptError(f"{failure.error}: {failure.message}")
    if cls.__init__ is KeptError.__init__:
        return cls(failure.message)
    error = cls.__new__(cls, failure.message)
    KeptError.__init__(error, failure.message)
    return error
