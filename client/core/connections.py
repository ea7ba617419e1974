"""One connection of a client: how far it is, and which responses are outstanding."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from kept.client.core.broker_errors import NoController, api_name
from kept.client.core.calls import Call, ToController, Waiting
from kept.client.core.metadata import Endpoint
from kept.client.protocol.frame_reader import FrameReader
from kept.client.protocol.messages import encode_request, versions
from kept.storage.errors import InvalidRequest, UnsupportedVersion

DEAD_MS: Final = 10_000
"""A connection that was silent for so long while answers were awaited is not used again."""


@dataclass(slots=True)
class Connection:
    """Connecting, then agreeing on versions, then ready.

    ``in_flight`` has a call for each response that is to come, None where nobody waits for it.
    ``last_response_ms``: nothing is owed that was sent before. ``doubts``: how often other nodes
    were tried since then because of its silence.
    """

    id: int
    endpoint: Endpoint
    since_ms: int
    last_response_ms: int
    doubts: int = 0
    established: bool = False
    ready: bool = False
    requested_version: int = 0
    incoming: FrameReader = field(default_factory=FrameReader)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    in_flight: dict[int, Call | None] = field(default_factory=dict)
    in_flight_versions: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def owes_responses(self) -> bool:
        """Whether somebody waits for it."""
        return not self.ready or any(call is not None for call in self.in_flight.values())

    def repeatable_calls(self) -> list[tuple[int, Call]]:
        """Calls under way, by correlation id, that may be sent again elsewhere."""
        return [(n, call) for n, call in self.in_flight.items() if call and call.repeatable]

    @property
    def _with_controller(self) -> list[Call]:
        """Calls that the node passes to the controller: it waits for one to be elected. Those of
        which it was told that they wait are left out.
        """
        flying = [call for call in self.in_flight.values() if call]
        calls = [call for call in flying if isinstance(call.route, ToController)]
        return [call for call in calls if not call.reported and call.needed_for is None]

    def next_notices_ms(self, notice_ms: int) -> list[int]:
        """When :meth:`awaits_controller` has something to tell."""
        return [call.started_ms + notice_ms for call in self._with_controller]

    def awaits_controller(self, started_ms: int) -> list[Waiting]:
        """Of calls begun by then that wait for a controller, each once."""
        waiting = []
        for call in self._with_controller:
            if call.is_to_be_reported(started_ms):
                call.reported = True
                why = f"{self.endpoint}: {call.name}: no controller has answered yet"
                waiting.append(Waiting(call, NoController(why)))
        return waiting

    def request_sent(self, now_ms: int) -> None:
        """A request is about to leave."""
        if not self.in_flight:
            self.last_response_ms = now_ms

    def response_received(self, now_ms: int) -> bool:
        """An answer has come; whether after it was doubted that one would."""
        doubted = self.ready and self.doubts > 0
        self.last_response_ms, self.doubts = now_ms, 0
        return doubted

    def is_silent(self, now_ms: int, patience_ms: int) -> bool:
        """Whether it has said nothing for so long although it was asked."""
        owes = not self.ready or bool(self.in_flight)
        return owes and now_ms - self.last_response_ms >= patience_ms

    def is_given_up(self, now_ms: int) -> bool:
        """Whether all who asked have waited in vain: what stands between may have forgotten the
        connection, without a word to either side, and only a new one would tell.
        """
        waits = any(call is not None for call in self.in_flight.values())
        return self.ready and not waits and self.is_silent(now_ms, DEAD_MS)

    def next_doubt_ms(self, patience_ms: int) -> int:
        """When others are asked in its place, if nothing comes until then: ever more seldom."""
        return self.last_response_ms + (patience_ms << self.doubts)

    def version_for(self, call: Call) -> int:
        """The newest version of a call's API that both sides know. Raises UnsupportedVersion."""
        ours = versions(call.api_key)
        theirs = self.versions.get(call.api_key)
        if theirs is None:
            raise UnsupportedVersion(
                f"{self.endpoint}: {call.name}: the broker does not serve {api_name(call.api_key)}"
            )
        version = min(max(ours, default=-1), theirs[1], call.max_version)
        if version < max(min(ours, default=0), theirs[0]):
            raise UnsupportedVersion(
                f"{self.endpoint}: {call.name}: the broker serves versions "
                f"{theirs[0]} to {theirs[1]} of {api_name(call.api_key)}, none is known here"
            )
        return version

    def encoded(self, call: Call, correlation: int, client_id: str) -> bytes:
        """A call's request, in the newest version that both sides know. Raises UnsupportedVersion,
        and InvalidRequest for values that have no room in it.
        """
        call.version = version = self.version_for(call)
        try:
            values = call.values(version) if callable(call.values) else call.values
            return encode_request(call.api_key, version, correlation, client_id, values)
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{call.name}: not a request: {error}") from error
