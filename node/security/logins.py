"""What logins need on any listener: settings, stored credentials, checks of passwords and access
tokens, delays.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kept.client.security.plain import MECHANISM as PLAIN
from kept.client.security.scram import HASHES as SCRAM_MECHANISMS
from kept.cluster.security.addresses import network_of
from kept.node.config.sasl import SaslSettings, sasl_settings
from kept.node.runtime.logging import log
from kept.node.security.failed_logins import FailedLogins
from kept.node.security.password_checks import PasswordChecks, TooManyLogins
from kept.node.security.stored_credentials import StoredCredentials
from kept.storage.errors import SaslAuthenticationFailed

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.config.live_config import LiveConfig
    from kept.node.config.node_config import NodeConfig
    from kept.node.runtime.counters import Counters
    from kept.node.security.oauth.token_checks import TokenChecks
    from kept.node.security.sasl_authenticator import AccessTokenChecked
    from kept.node.security.session import Session

NOISE_INTERVAL_S: Final = 10.0
"""At most one line about logins of one kind (refused, not checked) in this time."""
MIN_TOKEN_SESSION_MS: Final = 2_000
"""A session by a token that ends now lasts so long: by the issuer's clock, which may be behind, it
goes on, and its client may log in again once a second."""
MAX_TOKEN_SESSION_MS: Final = 366 * 86_400_000
"""One by a token that never ends lasts so long."""


class Logins:
    """Made and used on the node's loop. ``image`` gives the metadata of the moment."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: LiveConfig,
        counters: Counters,
        image: Callable[[], Image],
        tokens: TokenChecks,
    ) -> None:
        self._loop = loop
        self._counters = counters
        self._config = config
        self._settings: dict[str, tuple[NodeConfig, SaslSettings]] = {}
        self.credentials = StoredCredentials(image)
        self.passwords = PasswordChecks(loop, self.credentials)
        self.tokens = tokens
        self.on_ended: list[Callable[[Session], None]] = []
        """Called with a session that is over: its connection is to be closed."""
        self.on_refused: Callable[[str, str, str, str | None], None] = _nothing
        """Called with address, listener, mechanism and user of a login that failed; None in place
        of a name that is no user's: people type passwords there."""
        self._failed = FailedLogins()
        self._quiet_until: dict[str, float] = {}
        self._unreported = Counter[str]()
        """By what the log's line says."""

    def settings(self, listener: str) -> SaslSettings:
        """Those of a listener, as they are now."""
        current = self._config.current
        of, settings = self._settings.get(listener, (None, None))
        if settings is None or of is not current:
            settings = sasl_settings(current, listener)
            self._settings[listener] = current, settings
        return settings

    def refused(self, listener: str, host: str, mechanism: str, user: str, why: str) -> float:
        """A login failed, of ``user`` ("" where no name was told): how long its answer waits, in
        seconds.
        """
        self._counters.failed_logins += 1
        self.report("login refused", host=host, listener=listener, mechanism=mechanism, error=why)
        known = user if user and self._exists(listener, user) else None
        self.on_refused(host, listener, mechanism, known)
        base_ms = self.settings(listener).failed_delay_ms
        now_ms = int(self._loop.time() * 1000)
        return self._failed.delay_ms(network_of(host), base_ms, now_ms) / 1000

    def not_checked(self, listener: str, host: str, mechanism: str, error: TooManyLogins) -> float:
        """A password was not checked: how long its connection waits until it hears so, in seconds;
        the same each time, since it may be right.
        """
        self._counters.unchecked_logins += 1
        fields = {"host": host, "listener": listener, "mechanism": mechanism}
        self.report("login not checked", **fields, error=str(error))
        return self.settings(listener).failed_delay_ms / 1000

    async def check_token(self, listener: str, token: str) -> AccessTokenChecked:
        """Whom an access token names, by the keys of ``listener``; or why it is not believed."""
        from kept.node.security.sasl_authenticator import AccessTokenChecked

        try:
            accepted = await self.tokens.verify(listener, token)
        except SaslAuthenticationFailed as error:
            return AccessTokenChecked(why=str(error))
        return AccessTokenChecked(accepted.user, accepted.expires_at_s)

    def lifetime_ms(self, listener: str, token_expires_at_s: float | None) -> int:
        """How long a session that begins now lasts, 0: as long as its connection. One by an access
        token ends with that (seconds since 1970), or before.
        """
        longest_ms = self.settings(listener).max_reauth_ms
        if token_expires_at_s is None:
            return longest_ms
        left_ms = min(MAX_TOKEN_SESSION_MS, 1000 * (token_expires_at_s - time.time()))
        token_ms = max(MIN_TOKEN_SESSION_MS, int(left_ms))
        return min(token_ms, longest_ms) if longest_ms else token_ms

    def _exists(self, listener: str, user: str) -> bool:
        plain_users = self.settings(listener).plain_users
        return user in plain_users or self.credentials.for_password(user).exists

    def report(self, why: str, **fields: Any) -> None:
        """Say in the log that somebody did not get in, and ``why``, one of few texts; each at most
        once in a while.
        """
        now = self._loop.time()
        self._unreported[why] += 1
        if now >= self._quiet_until.get(why, 0.0):
            self._quiet_until[why] = now + NOISE_INTERVAL_S
            log.warning(why, **fields, times=self._unreported.pop(why))

    def is_revoked(self, session: Session) -> bool:
        """Whether the credential by which a session was begun was deleted. (A changed one is not:
        whoever logged in by the password of then stays.)
        """
        mechanism, user = session.mechanism, session.user
        if mechanism in SCRAM_MECHANISMS:
            return self.credentials.find(mechanism, user) is None
        settings = self.settings(session.listener)
        if mechanism != PLAIN or user in settings.plain_users:
            return False
        return not self.credentials.for_password(user, settings.stored_over_http).exists

    def end_session(self, session: Session) -> None:
        """Close the connection that a session speaks on."""
        for call in self.on_ended:
            call(session)

    async def password_matches(
        self, listener: str, host: str, user: str, password: str, *, plain: bool = True
    ) -> bool:
        """Whether ``user`` may log in by ``password`` from ``host``: by PLAIN, or (not ``plain``)
        by HTTP Basic, which the users of any enabled mechanism may. Raises TooManyLogins.
        """
        from hmac import compare_digest

        settings = self.settings(listener)
        expected = settings.plain_users.get(user)
        right = expected is not None and compare_digest(expected.encode(), password.encode())
        stored = settings.stored_over_http
        if right or not stored or (plain and not settings.stored_passwords):
            return right
        # Also for a user of the file: a wrong password takes as long whoever it is for.
        matches = await self.passwords.matches(host, user, password, stored)
        return matches and expected is None


def _nothing(*_: object) -> None:
    """Nobody wants to know."""


def parse_basic(header: bytes) -> tuple[str, str]:
    """User and password of an Authorization header (RFC 7617); both empty where it has none."""
    scheme, _, encoded = header.partition(b" ")
    try:
        user, _, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return "", ""
    return (user, password) if scheme.lower() == b"basic" else ("", "")
