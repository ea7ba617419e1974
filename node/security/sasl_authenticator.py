"""How a client says who it is on a SASL listener: Kafka's exchange as a state machine.

START takes ApiVersions or SaslHandshake; an ApiVersions that was answered leads to VERSIONS, which
takes a SaslHandshake only. SaslHandshake names the mechanism and leads to TOKENS, where the
mechanism's own messages come: inside SaslAuthenticate after SaslHandshake v1, bare after v0. While
a password or an access token is checked the state is CHECKING, and nothing is read. A token that is
not believed leads to REFUSED: it was answered with the mechanism's own error, which the client
acknowledges (RFC 7628). It ends in DONE or FAILED. Anything else fails, unparsed. Source:
``SaslServerAuthenticator`` of Kafka 4.3, KIP-43, KIP-152, KIP-255.

With ``renews`` it is a re-authentication (KIP-368): the connection has a session already, whose
mechanism and user must stay the same.

The shell reads requests and gives them as events; it sends responses in the order of the effects.
A client hears one text for whatever was wrong: the reason is for the log.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Protocol

from msgspec import Struct

from kept.client.security.oauthbearer import INVALID_TOKEN, parse_bearer_message
from kept.client.security.oauthbearer import MECHANISM as OAUTHBEARER
from kept.client.security.plain import parse_plain
from kept.client.security.scram import HASHES as SCRAM_MECHANISMS
from kept.client.security.scram import ScramServer, ScramVerifier
from kept.storage.errors import InvariantViolation, SaslAuthenticationFailed


class SaslState(Enum):
    """Where a connection stands."""

    START = auto()
    VERSIONS = auto()
    TOKENS = auto()
    CHECKING = auto()
    REFUSED = auto()
    DONE = auto()
    FAILED = auto()


class Credentials(Protocol):
    """What is stored about users of SCRAM, at this moment."""

    def find(self, mechanism: str, user: str) -> ScramVerifier | None:
        """What is stored about a user, None if nothing."""

    def decoy(self, mechanism: str, user: str) -> ScramVerifier:
        """What a user who does not exist is shown: the same each time."""


# Events.


class ApiVersionsAnswered(Struct, frozen=True):
    """An ApiVersions was answered without an error."""


class HandshakeReceived(Struct, frozen=True):
    """A SaslHandshake. ``nonce`` is new and random, for mechanisms that need one."""

    mechanism: str
    nonce: str


class TokenReceived(Struct, frozen=True):
    """A message of the mechanism."""

    token: bytes

    def __repr__(self) -> str:
        return f"TokenReceived([{len(self.token)} bytes])"


class PasswordChecked(Struct, frozen=True):
    """What came of :class:`CheckPassword`."""

    matches: bool


class AccessTokenChecked(Struct, frozen=True):
    """What came of :class:`CheckAccessToken`: whom it names, and when it expires in seconds since
    1970; or ``why`` it is not believed.
    """

    user: str = ""
    expires_at_s: float = 0.0
    why: str = ""


class OtherRequestReceived(Struct, frozen=True):
    """Any other request, or bytes that are none."""

    what: str


SaslEvent = (
    ApiVersionsAnswered
    | HandshakeReceived
    | TokenReceived
    | PasswordChecked
    | AccessTokenChecked
    | OtherRequestReceived
)


# Effects.


class HandshakeAnswer(Struct, frozen=True):
    """Answer the SaslHandshake: the mechanism is enabled."""


class Challenge(Struct, frozen=True):
    """Answer the token with the mechanism's next message."""

    token: bytes


class CheckPassword(Struct, frozen=True):
    """Check a password, which may take a while; then comes :class:`PasswordChecked`."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"CheckPassword({self.user!r}, [hidden])"


class CheckAccessToken(Struct, frozen=True):
    """Check an access token, which may take a while; then comes :class:`AccessTokenChecked`."""

    access_token: str

    def __repr__(self) -> str:
        return f"CheckAccessToken([{len(self.access_token)} characters])"


class AccessTokenRefused(Struct, frozen=True):
    """Answer the token with ``token``, late as any failed login, and take the acknowledgement of
    that. ``why`` and ``user`` are for the log, now: not everybody comes back to acknowledge.
    """

    token: bytes
    why: str
    user: str = ""


class Authenticated(Struct, frozen=True):
    """Answer the last token with ``token``: the client is ``user``, at most until ``expires_at_s``
    (seconds since 1970; None: what it showed has no end).
    """

    user: str
    mechanism: str
    token: bytes
    expires_at_s: float | None = None


class MechanismRefused(Struct, frozen=True):
    """Answer the SaslHandshake with UNSUPPORTED_SASL_MECHANISM and the list, and close."""

    mechanism: str


class AuthenticationFailed(Struct, frozen=True):
    """Answer the token with SASL_AUTHENTICATION_FAILED and ``message``, and close. ``why`` and
    ``user`` ("" where it is not known) are for the log. Not ``is_new``: an AccessTokenRefused has
    told of it already, so that it is answered at once.
    """

    message: str
    why: str
    user: str = ""
    is_new: bool = True


class IllegalRequest(Struct, frozen=True):
    """Close without a response."""

    why: str


SaslEffect = (
    HandshakeAnswer
    | Challenge
    | CheckPassword
    | CheckAccessToken
    | AccessTokenRefused
    | Authenticated
    | MechanismRefused
    | AuthenticationFailed
    | IllegalRequest
)

_ENDED: Final = frozenset({SaslState.DONE, SaslState.FAILED})


class SaslAuthenticator:
    """Authenticates one client; a :class:`kept.state_machine.StateMachine`."""

    def __init__(
        self,
        mechanisms: tuple[str, ...],
        credentials: Credentials,
        *,
        renews: tuple[str, str] | None = None,
    ) -> None:
        """``mechanisms``: those enabled. ``renews``: mechanism and user of the session so far."""
        self.state = SaslState.START
        self.mechanism = ""
        self._mechanisms = mechanisms
        self._credentials = credentials
        self._renews = renews
        self._scram: ScramServer | None = None
        self._user = ""
        self._authzid = ""
        self._expires_at_s: float | None = None

    def step(self, event: SaslEvent, now_ms: int = 0) -> tuple[SaslEffect, ...]:  # noqa: ARG002
        """Take one event; returns what the shell must do, in order."""
        match self.state, event:
            case SaslState.START, ApiVersionsAnswered():
                self.state = SaslState.VERSIONS
                return ()
            case SaslState.START | SaslState.VERSIONS, HandshakeReceived():
                return self._begin(event)
            case SaslState.TOKENS, TokenReceived():
                try:
                    return self._take_token(event.token)
                except SaslAuthenticationFailed as error:
                    return self._fail(str(error))
            case SaslState.CHECKING, PasswordChecked():
                if event.matches:
                    return self._finish(b"")
                return self._fail("no such user, or another password")
            case SaslState.CHECKING, AccessTokenChecked():
                return self._take_checked(event)
            case SaslState.REFUSED, TokenReceived():
                return self._fail("the access token was refused", is_new=False)
            case _, PasswordChecked() | AccessTokenChecked():
                raise InvariantViolation(f"{type(event).__name__} in state {self.state.name}")
        what = event.what if isinstance(event, OtherRequestReceived) else type(event).__name__
        state, self.state = self.state, SaslState.FAILED
        return (IllegalRequest(f"{what} in state {state.name} of SASL authentication"),)

    def tick(self, now_ms: int) -> tuple[SaslEffect, ...]:  # noqa: ARG002
        """Nothing happens by time alone: the listener bounds how long it may take."""
        return ()

    def check_invariants(self) -> None:
        """Raise InvariantViolation if the state contradicts itself."""
        begun = self.state not in (SaslState.START, SaslState.VERSIONS, SaslState.FAILED)
        if begun and self.mechanism not in self._mechanisms:
            raise InvariantViolation(f"{self.state.name} with mechanism {self.mechanism!r}")
        if self.state is SaslState.DONE and not self._user:
            raise InvariantViolation("done without a user")
        if self._expires_at_s is not None and self.mechanism != OAUTHBEARER:
            raise InvariantViolation(f"an access token in an exchange of {self.mechanism!r}")
        if (self._scram is not None) != (self.mechanism in SCRAM_MECHANISMS):
            raise InvariantViolation(f"an exchange of another mechanism than {self.mechanism!r}")

    @property
    def ended(self) -> bool:
        """Whether it is known who the client is, or that it will not be."""
        return self.state in _ENDED

    def _begin(self, event: HandshakeReceived) -> tuple[SaslEffect, ...]:
        mechanism = event.mechanism
        if mechanism not in self._mechanisms:
            self.state = SaslState.FAILED
            return (MechanismRefused(mechanism),)
        self.mechanism = mechanism
        if mechanism in SCRAM_MECHANISMS:
            self._scram = ScramServer(
                mechanism,
                lambda user: self._credentials.find(mechanism, user),
                lambda user: self._credentials.decoy(mechanism, user),
                nonce=event.nonce,
            )
        if self._renews is not None and self._renews[0] != mechanism:
            return self._fail(f"the session is of mechanism {self._renews[0]}")
        self.state = SaslState.TOKENS
        return (HandshakeAnswer(),)

    def _take_token(self, token: bytes) -> tuple[SaslEffect, ...]:
        if self.mechanism == OAUTHBEARER:
            message = parse_bearer_message(token)
            self._authzid = message.authzid
            self.state = SaslState.CHECKING
            return (CheckAccessToken(message.token),)
        if self._scram is None:
            login = parse_plain(token)
            self._user = login.user
            self.state = SaslState.CHECKING
            return (CheckPassword(login.user, login.password),)
        try:
            answer = self._scram.step(token) or b""
        finally:
            self._user = self._scram.user
        return self._finish(answer) if self._scram.done else (Challenge(answer),)

    def _take_checked(self, checked: AccessTokenChecked) -> tuple[SaslEffect, ...]:
        why, self._user = checked.why, checked.user
        if not why and self._authzid not in ("", checked.user):
            why = "the client asks to act as another user than its token names"
        if why:
            self.state = SaslState.REFUSED
            return (AccessTokenRefused(INVALID_TOKEN, why, checked.user),)
        self._expires_at_s = checked.expires_at_s
        return self._finish(b"")

    def _finish(self, answer: bytes) -> tuple[SaslEffect, ...]:
        if self._renews is not None and self._renews[1] != self._user:
            return self._fail("the session is another user's")
        self.state = SaslState.DONE
        return (Authenticated(self._user, self.mechanism, answer, self._expires_at_s),)

    def _fail(self, why: str, *, is_new: bool = True) -> tuple[SaslEffect, ...]:
        self.state = SaslState.FAILED
        message = (
            "Authentication failed during authentication due to invalid credentials with SASL "
            f"mechanism {self.mechanism}"
        )
        return (AuthenticationFailed(message, why, self._user, is_new),)
