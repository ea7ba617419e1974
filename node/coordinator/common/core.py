"""The shape of a core: one partition of an internal topic, whose records are all that it keeps."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kept.state_machine import StateMachine
from kept.steps import Steps

Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)


class ShardCore(StateMachine[Event_contra, Effect_co], Protocol[Event_contra, Effect_co]):
    """A state machine that is loaded from its log, and unloaded when another node leads.

    Its events include :data:`~.events.AppendEvent`, its effects :class:`~.events.AppendRecords` and
    :class:`~.events.Response`. The shell carries out effects as they come; appends commit in their
    order.
    """

    wall_offset_ms: int
    """What the shell adds to ``now_ms`` for the wall clock, which goes into records."""

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call :meth:`tick` next; None: not before an event. If that leaves some of many
        timers that are due, it is in the past.
        """
        ...

    def loaded(self, now_ms: int) -> Steps[tuple[Effect_co, ...]]:
        """All records are replayed: timeouts begin, and requests may come once this has ended."""
        ...

    def unload(self) -> tuple[Effect_co, ...]:
        """Another node leads now, or this one failed: whoever waits gets NOT_COORDINATOR."""
        ...

    def release(self) -> Steps[None]:
        """After :meth:`unload`, which nothing but this follows: give all back that is held."""
        ...

    def restart_timeouts(self, now_ms: int) -> tuple[Effect_co, ...]:
        """This process did not run for a while: give those back who could not be heard the time."""
        ...
