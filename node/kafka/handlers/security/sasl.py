"""SaslHandshake and SaslAuthenticate of a client that is known already: logging in again (KIP-368).

Where ``connections.max.reauth.ms`` or an access token bounds a session, a client begins anew on the
same connection before it ends, at most once a second, as the same user by the same mechanism.
Elsewhere both are answered with ILLEGAL_SASL_STATE, as Kafka does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import Values
from kept.client.security.scram import new_nonce
from kept.node.runtime import error_codes
from kept.node.security.password_checks import TooManyLogins
from kept.node.security.sasl_authenticator import (
    AccessTokenRefused,
    Authenticated,
    AuthenticationFailed,
    Challenge,
    CheckAccessToken,
    CheckPassword,
    HandshakeAnswer,
    HandshakeReceived,
    MechanismRefused,
    PasswordChecked,
    SaslAuthenticator,
    SaslEffect,
    SaslState,
    TokenReceived,
)
from kept.node.security.session import Renewal, Session
from kept.storage.errors import IllegalSaslState, InvariantViolation

if TYPE_CHECKING:
    from kept.node.kafka.api import RequestContext
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.logins import Logins

MIN_INTERVAL_S: Final = 1.0
"""Between two beginnings of one client."""
_TAKES_TOKENS: Final = frozenset({SaslState.TOKENS, SaslState.REFUSED})


class SaslHandler:
    """Serves SaslHandshake and SaslAuthenticate of clients that log in again."""

    def __init__(self, runtime: Runtime, logins: Logins, counters: Counters) -> None:
        self._runtime = runtime
        self._logins = logins
        self._counters = counters

    def sasl_handshake(self, context: RequestContext, request: Any) -> Values:
        """Begin again."""
        session = context.session
        now = self._runtime.loop.time()
        last = session.renewal
        if last is not None and last.authenticator.state is SaslState.FAILED:
            raise IllegalSaslState("logging in again has failed")
        if (
            not session.mechanism
            or math.isinf(session.expires_at)
            or context.api_version == 0
            or (last is not None and now < last.begun_at + MIN_INTERVAL_S)
        ):
            return {"error_code": error_codes.ILLEGAL_SASL_STATE, "mechanisms": ()}
        mechanisms = self._logins.settings(session.listener).mechanisms
        authenticator = SaslAuthenticator(
            mechanisms, self._logins.credentials, renews=(session.mechanism, session.user)
        )
        session.renewal = Renewal(authenticator, now)
        nonce = new_nonce()
        (effect,) = authenticator.step(HandshakeReceived(request.mechanism, nonce))
        match effect:
            case HandshakeAnswer():
                code = error_codes.NONE
            case MechanismRefused():
                code = error_codes.UNSUPPORTED_SASL_MECHANISM
            case _:
                code = error_codes.SASL_AUTHENTICATION_FAILED
        if code:
            self._end(session)
        return {"error_code": code, "mechanisms": mechanisms}

    def sasl_authenticate(
        self, context: RequestContext, request: Any
    ) -> Values | Coroutine[Any, Any, Values]:
        """Take the mechanism's next message."""
        session = context.session
        renewal = session.renewal
        if renewal is None or renewal.authenticator.state not in _TAKES_TOKENS:
            return _response(
                error_codes.ILLEGAL_SASL_STATE,
                "SaslAuthenticate request received after successful authentication",
            )
        (effect,) = renewal.authenticator.step(TokenReceived(request.auth_bytes))
        if isinstance(effect, Challenge):
            return _response(token=effect.token)
        return self._finish(session, renewal.authenticator, effect)

    async def _finish(
        self, session: Session, authenticator: SaslAuthenticator, effect: SaslEffect
    ) -> Values:
        """Raises TooManyLogins, which closes the connection: its client connects anew."""
        if isinstance(effect, CheckPassword):
            try:
                matches = await self._logins.password_matches(
                    session.listener, session.host, effect.user, effect.password
                )
            except TooManyLogins as error:
                listener, host, mechanism = session.listener, session.host, session.mechanism
                delay_s = self._logins.not_checked(listener, host, mechanism, error)
                await asyncio.sleep(delay_s)
                raise
            (effect,) = authenticator.step(PasswordChecked(matches))
        elif isinstance(effect, CheckAccessToken):
            checked = await self._logins.check_token(session.listener, effect.access_token)
            (effect,) = authenticator.step(checked)
        match effect:
            case Authenticated():
                lifetime_ms = self._logins.lifetime_ms(session.listener, effect.expires_at_s)
                now = self._runtime.loop.time()
                session.expires_at = now + lifetime_ms / 1000 if lifetime_ms else math.inf
                self._counters.logins += 1
                return _response(token=effect.token, lifetime_ms=lifetime_ms)
            case AccessTokenRefused():
                await self._wait_as_refused(session, effect.user, effect.why)
                return _response(token=effect.token)
            case AuthenticationFailed():
                if effect.is_new:
                    await self._wait_as_refused(session, effect.user, effect.why)
                self._end(session)
                return _response(error_codes.SASL_AUTHENTICATION_FAILED, effect.message)
        raise InvariantViolation(f"{type(effect).__name__} where a token was expected")

    async def _wait_as_refused(self, session: Session, user: str, why: str) -> None:
        delay_s = self._logins.refused(session.listener, session.host, session.mechanism, user, why)
        await asyncio.sleep(delay_s)

    def _end(self, session: Session) -> None:
        """The connection is closed once the response has had its time to leave."""
        session.expires_at = -math.inf
        self._runtime.loop.call_later(0.1, self._logins.end_session, session)


def _response(
    code: int = error_codes.NONE,
    message: str | None = None,
    token: bytes = b"",
    lifetime_ms: int = 0,
) -> Values:
    return {
        "error_code": code,
        "error_message": message,
        "auth_bytes": token,
        "session_lifetime": lifetime_ms,
    }
