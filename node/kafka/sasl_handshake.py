"""An accepted socket of a SASL listener until it is known who speaks.

It is a protocol of its own, so that nothing of a client who has not logged in reaches
:mod:`kept.node.kafka.connection`. It knows ApiVersions, SaslHandshake and SaslAuthenticate; what
they mean is decided by :class:`~kept.node.security.sasl_authenticator.SaslAuthenticator`. Once the
client is known, the transport and the bytes behind the last token go to a connection with his
session. Bounds: ``max.connections`` as for all, ``kept.silent.ms`` for the whole login and
``kept.silent.max.connections`` of them at a time, ``sasl.server.max.receive.size`` for a request, a
buffer that grows as bytes come, and that draws on :attr:`NodeMemory.logins` beyond what an idle
connection has; who finds that used up is closed. Failures are answered late, later for each
(``FailedLogins``), and nothing is read meanwhile.

HTTP and gRPC have logins of their own with each request or call (``kept.node.http.server``,
``kept.node.grpc.call_authorizer``), and are given to their servers at once.
"""

from __future__ import annotations

import asyncio

# SCRAM needs it at the first login. Where that found no descriptor for its compiled part, it would
# be without pbkdf2_hmac until the node ends.
import hashlib  # noqa: F401
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.wire import skip_tags
from kept.client.security.scram import new_nonce
from kept.cluster.security.addresses import network_of
from kept.node.kafka import api
from kept.node.kafka.connection import BASE_BUFFER_BYTES
from kept.node.kafka.listener import HTTP2, HTTP_METHODS, Listener, Pending
from kept.node.runtime import error_codes
from kept.node.runtime.logging import bugs
from kept.node.security.password_checks import TooManyLogins
from kept.node.security.sasl_authenticator import (
    AccessTokenRefused,
    ApiVersionsAnswered,
    Authenticated,
    AuthenticationFailed,
    Challenge,
    CheckAccessToken,
    CheckPassword,
    HandshakeAnswer,
    HandshakeReceived,
    IllegalRequest,
    MechanismRefused,
    OtherRequestReceived,
    PasswordChecked,
    SaslAuthenticator,
    SaslEffect,
    SaslEvent,
    SaslState,
    TokenReceived,
)
from kept.storage.errors import CorruptMessage, InvalidRequest, UnsupportedVersion

if TYPE_CHECKING:
    from kept.node.security.session import Session

FIRST_BUFFER_BYTES: Final = 256
"""What a socket holds that has not spoken yet."""
MAX_ENTRIES: Final = 16
"""Elements of a request's arrays: those of logins have none."""

_CARRY_LOGINS: Final = frozenset((*HTTP_METHODS, HTTP2))
_SIZE: Final = struct.Struct(">i").unpack_from
_HEADER: Final = struct.Struct(">hhih").unpack_from

MAX_VERSIONS_REFUSED: Final = 2
"""librdkafka and Java try one other version."""


class SaslHandshake(Pending):
    """Authenticates the client of an accepted socket before anything else is served."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.context = listener.context
        self._settings = self.context.logins.settings(listener.name)
        self._authenticator = SaslAuthenticator(
            self._settings.mechanisms, self.context.logins.credentials
        )
        self._buffer = bytearray(FIRST_BUFFER_BYTES)
        self._start = self._end = 0
        self._account = self.context.memory.logins
        """What this peer's network may hold of the budget of logins."""
        self._reserved_bytes = 0
        """What the buffer has drawn on it."""
        self._fresh = True
        self._waits = False
        """Nothing is read: what a client shows is checked, or the answer to a failure waits."""
        self._bare = False
        self._versions_refused = 0
        """Tokens come without a request around them: after SaslHandshake v0."""
        self._request = (0, 0, 0)
        """Key, version and correlation id of the request that is being answered."""
        self._check: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # Life.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted: it takes a place among the listener's connections."""
        self.transport = transport
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple) and len(peer) > 1:
            self.host, self.peer = peer[0], f"{peer[0]}:{peer[1]}"
        self._account = self.context.memory.logins.account(network_of(self.host))
        sock = transport.get_extra_info("socket")
        if not self.listener.admit(self, -1 if sock is None else sock.fileno()):
            self.transport = None
            transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer is gone, or we closed."""
        self.transport = None
        if self._check is not None:
            self._check.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.listener.leave(self)
        self._drop_buffer()

    def eof_received(self) -> bool:
        """The peer sends no more: close."""
        return False

    def abort(self) -> None:
        """Close at once."""
        self._waits = True
        super().abort()

    # Reading.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go (asyncio.BufferedProtocol)."""
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """``nbytes`` arrived: serve every whole request, and make room for more."""
        self._end += nbytes
        self._serve_whole()
        transport = self.transport
        if self._end == len(self._buffer) and transport and not transport.is_closing():
            self._make_room()

    def _make_room(self) -> None:
        """Twice what is not served yet; closes where there is no memory for that."""
        unread = self._buffer[self._start : self._end]
        size = len(unread) + max(len(unread), FIRST_BUFFER_BYTES)
        more = size - BASE_BUFFER_BYTES - self._reserved_bytes
        if more > 0:
            if not self._account.acquire(more):
                self._report("closed, since logins hold all the memory that they may have")
                self.abort()
                self._start = self._end = 0
                return
            self._reserved_bytes += more
        self._start, self._end = 0, len(unread)
        self._buffer = unread + bytes(size - len(unread))

    def _drop_buffer(self) -> None:
        """It is needed no more; this object may stay until garbage is collected."""
        self._buffer = bytearray()
        self._start = self._end = 0
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        if reserved:
            self._account.release(reserved)

    def _serve_whole(self) -> None:
        """Serve the requests that are there whole."""
        if self._fresh and not self._check_first_bytes():
            return
        if self._end - self._start > self._settings.max_receive_bytes + 4 and self._waits:
            self.abort()
        while not self._waits and self.transport is not None:
            have = self._end - self._start
            if have < 4:
                return
            (size,) = _SIZE(self._buffer, self._start)
            if not 0 <= size <= self._settings.max_receive_bytes:
                self._step(OtherRequestReceived(f"a request of {size} bytes"))
                return
            if have < size + 4:
                return
            start = self._start + 4
            self._start = start + size
            self._serve(bytes(memoryview(self._buffer)[start : self._start]))

    def _check_first_bytes(self) -> bool:
        """Whether Kafka's protocol is spoken; HTTP and gRPC are given to their servers."""
        if self._end < 4:
            return False
        first = bytes(memoryview(self._buffer)[: self._end])
        if not self.listener.is_expected(self.transport, first[:4]):
            self.abort()
            return False
        if first[:4] in _CARRY_LOGINS and first[:4] in self.listener.protocols:
            is_probe = True if self.over_limit is None else self.listener.is_probe(first)
            if is_probe is False:
                self.abort()
            elif is_probe:
                self.over_limit = None  # the connection notes it anew
                self._open(self.listener.session(self.transport), logged_in=False)
            return False
        if self.over_limit is not None:
            self.abort()
            return False
        self._fresh = False
        return True

    def _serve(self, frame: bytes) -> None:
        """One request, or one bare token."""
        if self._bare:
            self._step(TokenReceived(frame))
            return
        event: SaslEvent | None
        try:
            event = self._read(frame)
        except (CorruptMessage, UnsupportedVersion, InvalidRequest) as error:
            event = OtherRequestReceived(str(error))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            event = OtherRequestReceived(f"no request: {error!r}")
        if event is not None:
            self._step(event)

    def _read(self, frame: bytes) -> SaslEvent | None:
        """What a request is to the authenticator, if anything. Raises what decoding does."""
        key, version, correlation_id, client = _HEADER(frame)
        position = 10 + max(client, 0)
        served = self.listener.served.get(key)
        if served is None or key not in api.BEFORE_LOGIN:
            return OtherRequestReceived(f"API {key}")
        self._request = key, version, correlation_id
        if key == ApiKey.API_VERSIONS:
            return self._answer_api_versions(frame, version, position)
        if not served.min_version <= version <= served.max_version:
            return OtherRequestReceived(f"{served.name} v{version}")
        if version >= served.flexible_from:
            position = skip_tags(frame, position)
        request = protocol.decode_request(key, version, memoryview(frame), position, MAX_ENTRIES)
        if key == ApiKey.SASL_HANDSHAKE:
            return HandshakeReceived(request.mechanism, new_nonce())
        return TokenReceived(request.auth_bytes)

    def _answer_api_versions(self, frame: bytes, version: int, position: int) -> SaslEvent | None:
        """An ApiVersions that is answered with an error changes nothing; but answers wait in memory
        until they are taken, so a client has :data:`MAX_VERSIONS_REFUSED` of these.
        """
        if self._authenticator.state is not SaslState.START:
            return OtherRequestReceived("ApiVersions")
        if 3 <= version <= self.listener.served[ApiKey.API_VERSIONS].max_version:
            position = skip_tags(frame, position)
        image = self.context.metadata.image
        body = api.api_versions_response(version, memoryview(frame)[position:], image)
        accepted = body[:2] == b"\0\0"
        self._versions_refused += not accepted
        if self._versions_refused > MAX_VERSIONS_REFUSED:
            return OtherRequestReceived("ApiVersions in one more version that is not served")
        self._write(struct.pack(">ii", len(body) + 4, self._request[2]) + body)
        return ApiVersionsAnswered() if accepted else None

    # Doing what the authenticator decides.

    def _step(self, event: SaslEvent) -> None:
        for effect in self._authenticator.step(event):
            self._perform(effect)

    def _perform(self, effect: SaslEffect) -> None:
        match effect:
            case HandshakeAnswer():
                self._bare = self._request[1] == 0
                self._answer(error_code=error_codes.NONE, mechanisms=self._settings.mechanisms)
            case Challenge():
                self._answer_token(effect.token)
            case CheckPassword() | CheckAccessToken():
                self._wait()
                self._check = self.context.runtime.loop.create_task(self._check_login(effect))
            case AccessTokenRefused():
                self._wait()
                self._refused_later(effect.why, effect.user, self._answer_refusal, effect.token)
            case Authenticated():
                self._finish(effect)
            case MechanismRefused():
                self._fail(
                    f"mechanism {effect.mechanism!r} is not enabled",
                    "",
                    error_code=error_codes.UNSUPPORTED_SASL_MECHANISM,
                    mechanisms=self._settings.mechanisms,
                )
            case AuthenticationFailed():
                self._fail(
                    effect.why if effect.is_new else None,
                    effect.user,
                    error_code=error_codes.SASL_AUTHENTICATION_FAILED,
                    error_message=effect.message,
                    auth_bytes=b"",
                    session_lifetime=0,
                )
            case IllegalRequest():
                self._report("not a request of a client that logs in", error=effect.why)
                self.abort()

    async def _check_login(self, asked: CheckPassword | CheckAccessToken) -> None:
        """Go on with whether what a client has shown is right. Where that is not looked at it is
        closed without an answer: after any error code clients give up, after a connection that was
        closed they try again. After a bug of ours, too: it would wait for an answer that never
        comes.
        """
        logins = self.context.logins
        event: SaslEvent
        try:
            if isinstance(asked, CheckPassword):
                matches = await logins.password_matches(
                    self.listener.name, self.host, asked.user, asked.password
                )
                event = PasswordChecked(matches)
            else:
                event = await logins.check_token(self.listener.name, asked.access_token)
            self._check = None
            self._waits = False
            self._step(event)
        except TooManyLogins as error:
            mechanism, self._check = self._authenticator.mechanism, None
            delay_s = logins.not_checked(self.listener.name, self.host, mechanism, error)
            self._timer = self.context.runtime.loop.call_later(delay_s, self._close)
        except Exception as error:  # noqa: BLE001
            bugs.report("login failed", error, host=self.host, listener=self.listener.name)
            self.abort()

    def _answer_refusal(self, token: bytes) -> None:
        """The client may acknowledge now that its access token is refused."""
        if self.transport is None or self.transport.is_closing():
            return
        self._answer_token(token)
        self._waits = False
        self.transport.resume_reading()
        self.buffer_updated(0)

    def _finish(self, login: Authenticated) -> None:
        logins = self.context.logins
        lifetime_ms = logins.lifetime_ms(self.listener.name, login.expires_at_s)
        self._answer_token(login.token, lifetime_ms)
        session = self.listener.session(self.transport, f"User:{login.user}", login.mechanism)
        if lifetime_ms:
            session.expires_at = self.context.runtime.loop.time() + lifetime_ms / 1000
        self.context.counters.logins += 1
        self._wait()
        # The response leaves with this turn of the loop, before what a connection writes by itself.
        self.context.runtime.loop.call_soon(self._open, session)

    def _open(self, session: Session, *, logged_in: bool = True) -> None:
        """A connection serves the transport from now on."""
        transport, self.transport = self.transport, None
        if transport is None or transport.is_closing():
            return
        if logged_in and self.context.logins.is_revoked(session):  # while it logged in
            transport.abort()
            return
        unread = bytes(memoryview(self._buffer)[self._start : self._end])
        self._drop_buffer()
        self.listener.leave(self)
        transport.resume_reading()
        self.listener.open(transport, session, unread, logged_in=logged_in)

    def _fail(self, why: str | None, user: str, **response: Any) -> None:
        """Answer late, and close; at once where the failure was told already (no ``why``)."""
        self._wait()
        if why is None:
            self._close_with(response)
        else:
            self._refused_later(why, user, self._close_with, response)

    def _refused_later(
        self, why: str, user: str, answer: Callable[[Any], None], response: object
    ) -> None:
        """A login failed: tell of it now, and answer after the delay."""
        mechanism = self._authenticator.mechanism or "none"
        delay_s = self.context.logins.refused(self.listener.name, self.host, mechanism, user, why)
        self._timer = self.context.runtime.loop.call_later(delay_s, answer, response)

    def _close_with(self, response: dict[str, Any]) -> None:
        if not self._bare:
            self._answer(**response)
        self._close()

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _wait(self) -> None:
        self._waits = True
        with suppress(RuntimeError):  # closing already
            self.transport.pause_reading()

    def _report(self, why: str, **fields: Any) -> None:
        self.context.logins.report(
            why,
            host=self.host,
            listener=self.listener.name,
            **fields,
        )

    # Answering.

    def _answer_token(self, token: bytes, lifetime_ms: int = 0) -> None:
        if self._bare:
            self._write(struct.pack(">i", len(token)) + token)
        else:
            self._answer(
                error_code=error_codes.NONE,
                error_message=None,
                auth_bytes=token,
                session_lifetime=lifetime_ms,
            )

    def _answer(self, **values: Any) -> None:
        key, version, correlation_id = self._request
        self._write(protocol.encode_response(key, version, correlation_id, values))

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)
