"""Errors between nodes: a KeptError travels as the name of its class and its message.

At the caller it is raised as that class again, so that a forwarded request fails with the same
Kafka error code as at the controller. Of attributes only the leader that NotController names comes
along. What another machine's disk did (MachineError, DamagedData) arrives as KafkaStorageError:
nobody may take it for a fault of this one.
"""

from __future__ import annotations

from typing import Final

from kept.node.internode.controller_rpc import Failure
from kept.storage import errors
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotController,
)

MAX_MESSAGE_CHARS: Final = 1_000
"""Longer messages are cut: they travel in HTTP/2 headers, which 8 KiB limit."""


def failure_of(error: BaseException) -> Failure:
    """An error as it travels; one that is not ours is InvariantViolation, a bug of that node."""
    if isinstance(error, KeptError):
        leader_id = error.leader_id if isinstance(error, NotController) else -1
        return Failure(type(error).__name__, str(error)[:MAX_MESSAGE_CHARS], leader_id)
    text = f"{type(error).__name__}: {error}"
    return Failure(InvariantViolation.__name__, text[:MAX_MESSAGE_CHARS])


def error_of(failure: Failure) -> KeptError:
    """The error again. A class that is not known here (a newer node's) becomes KeptError."""
    cls = getattr(errors, failure.error, None)
    if not (isinstance(cls, type) and issubclass(cls, KeptError)):
        return KeptError(f"{failure.error}: {failure.message}")
    if issubclass(cls, MachineError | DamagedData):
        return KafkaStorageError(failure.message)
    if issubclass(cls, NotController):
        return cls(failure.message, failure.leader_id)
    return cls(failure.message)
