"""One connection of a client: how far it is, and which responses are outstanding."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final

from kept.client.core.broker_errors import NoController, api_name, failure
from kept.client.core.calls import Call, ToController
from kept.client.core.events import Waiting
from kept.client.core.login import HandshakeRequest, Login, renew_at_ms
from kept.client.core.metadata import Endpoint
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.frame_reader import FrameReader
from kept.client.protocol.messages import decode_response, encode_request, versions
from kept.client.security.security import Security
from kept.storage.errors import (
    CorruptMessage,
    InvalidRequest,
    InvariantViolation,
    UnsupportedVersion,
)

UNSUPPORTED_VERSION: Final = 35

DEAD_MS: Final = 10_000
"""A connection that was silent for so long while answers were awaited is not used again."""


@dataclass(slots=True)
class Connection:
    """Connecting, then agreeing on versions, then logging in where that is wanted, then ready; and
    from ready to logging in again when the session is to be renewed.

    ``in_flight`` has a call for each response that is to come, None where nobody waits for it.
    ``served``: a call was answered. ``last_response_ms``: nothing is owed that was sent before.
    ``doubts``: how often other nodes were tried since then because of its silence.
    """

    id: int
    endpoint: Endpoint
    since_ms: int
    last_response_ms: int
    doubts: int = 0
    established: bool = False
    ready: bool = False
    served: bool = False
    requested_version: int = 0
    login: Login | None = None
    renew_at_ms: int | None = None
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

    def bytes_received(self, now_ms: int) -> None:
        """Bytes of a response have come: what waits for them has as long again."""
        for call in self.in_flight.values():
            if call is not None and call.while_heard:
                call.deadline_ms = now_ms + call.timeout_ms

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

    def request_versions(self, software: tuple[str, str], newest: int = 32767) -> HandshakeRequest:
        """ApiVersions, in our newest version up to ``newest``; ``software``: name and version."""
        self.requested_version = min(newest, max(versions(ApiKey.API_VERSIONS)))
        values = {"client_software_name": software[0], "client_software_version": software[1]}
        return HandshakeRequest(ApiKey.API_VERSIONS, self.requested_version, values)

    def versions_came(
        self, frame: bytes | memoryview, software: tuple[str, str]
    ) -> HandshakeRequest | None:
        """The answer to ApiVersions; None when both sides know their versions now. KIP-511: an
        unknown version is answered in version 0 with error 35. Raises CorruptMessage.
        """
        (code,) = struct.unpack_from(">h", frame, 4)
        version = 0 if code == UNSUPPORTED_VERSION else self.requested_version
        _, response = decode_response(ApiKey.API_VERSIONS, version, frame)
        table = {
            int(k.api_key): (int(k.min_version), int(k.max_version)) for k in response.api_keys
        }
        if code == UNSUPPORTED_VERSION and self.requested_version > 0:
            newest = table.get(ApiKey.API_VERSIONS, (0, 0))[1]
            return self.request_versions(software, min(newest, self.requested_version - 1))
        error = failure(code, f"{self.endpoint}: ApiVersions")
        if error is not None:
            raise CorruptMessage(str(error))
        self.versions = table
        return None

    def begin_login(self, security: Security, now_ms: int) -> HandshakeRequest | None:
        """The first request of a login, the first one or another; None where none is wanted. Raises
        AuthenticationFailed.
        """
        if not security.mechanism:
            self.ready = True
            return None
        self.ready, self.since_ms = False, now_ms
        self.login = Login(security, self.versions)
        return self.login.begin()

    def login_answered(
        self, api_key: int, response: Any, spread: float, now_ms: int
    ) -> HandshakeRequest | None:
        """The next request of the login; None when it is done, and the connection ready."""
        assert self.login is not None
        request = self.login.handle_response(api_key, response)
        if request is None:
            self.renew_at_ms = renew_at_ms(now_ms, self.login.lifetime_ms, spread)
            self.login, self.ready = None, True
        return request

    def is_to_be_renewed(self, now_ms: int) -> bool:
        """Whether no more is to be sent before the session is renewed; that begins once all is
        answered.
        """
        return self.ready and self.renew_at_ms is not None and self.renew_at_ms <= now_ms

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

    def check_invariants(self) -> None:
        """Raises InvariantViolation; for tests."""
        if self.in_flight.keys() != self.in_flight_versions.keys():
            raise InvariantViolation(f"{self.endpoint}: requests without a version")
        if not self.ready and any(self.in_flight.values()):
            raise InvariantViolation(f"{self.endpoint}: calls before it is ready")
