"""The one shape of what decides: events in, effects out, nothing else.

Everything in kept that decides without doing (leadership of a partition, following, manifests, the
controller's sessions, a broker's life, consumer groups) is a :class:`StateMachine`. It reads no
clock, file or socket, draws no random numbers, and keeps nothing that can be called. Time is an
argument. What must happen is returned as data, and the shell does it in the order returned: an
effect that makes something durable stands before the one that tells others of it.

A step either is taken as a whole or raises: :class:`~kept.storage.errors.InvariantViolation` is a
bug of ours, any other error of ``kept.storage.errors`` refuses the event and changes nothing.

``docs/architecture.md`` lists the state machines with their shells. The shape is that of
etcd/raft's ``RawNode`` and of dask.distributed's worker state machine.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)


class StateMachine(Protocol[Event_contra, Effect_co]):
    """Decides: events go in, effects come out. Used by one thread; ``now_ms`` is of a clock that
    never goes back.
    """

    def step(self, event: Event_contra, now_ms: int) -> tuple[Effect_co, ...]:
        """Take one event at ``now_ms``; returns what the shell must do, in order."""
        ...

    def tick(self, now_ms: int) -> tuple[Effect_co, ...]:
        """Time has passed, and nothing else; returns what the shell must do, in order."""
        ...

    def check_invariants(self) -> None:
        """Raise InvariantViolation if the state contradicts itself. Tests call it after each."""
        ...
