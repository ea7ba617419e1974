"""Events and effects of :class:`kept.client.core.client_core.ClientCore`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kept.client.core.calls import Call
from kept.client.core.metadata import Endpoint
from kept.storage.errors import KeptError

# Events.


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection stands, with TLS where that is wanted."""

    connection: int


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes have come."""

    connection: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Filled:
    """So many bytes came into the buffer that
    :meth:`kept.client.core.client_core.ClientCore.receive_buffer` gave.
    """

    connection: int
    count: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection could not be made, or broke. ``mistrusted``: because one side does not believe
    who the other one is, by TLS, which trying again does not mend. ``refused``: nobody listens.
    """

    connection: int
    why: str
    mistrusted: bool = False
    refused: bool = False


Event = Connected | Received | Filled | Lost


# Effects.


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection."""

    connection: int
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Send:
    """Send bytes."""

    connection: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A call has ended: with a response (None where none is sent) or with an error."""

    call: Call
    response: Any
    error: KeptError | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call has been tried for a while and goes on; ``why`` it could not be done. Once a call."""

    call: Call
    why: KeptError


Effect = Connect | Send | Close | Finished | Waiting
