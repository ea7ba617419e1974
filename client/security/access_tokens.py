"""Where a client's access token comes from, and when it is got anew.

``sasl.oauthbearer.token.endpoint.url`` is a file with the token, or the address where an OAuth
server gives one to who shows an id and a secret (RFC 6749, section 4.4). A token is got anew after
0.8 of its life, as by Java's clients; where that fails, the one of before serves as long as it
lasts. What gets it may block, so a shell calls :meth:`AccessTokens.refresh` where it may wait, and
the exchange uses what is there. A token is not checked here: the broker does that. Only ``exp`` is
read, to know when it ends.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote_plus, unquote, urlencode, urlsplit

from msgspec import Struct

from kept.client.connect import connect
from kept.client.security.oauthbearer import MAX_TOKEN_BYTES, parse_bearer
from kept.storage.errors import ConfigurationError, KeptError, SaslAuthenticationFailed

TOKEN_URL: Final = "sasl.oauthbearer.token.endpoint.url"

REFRESHED_FROM: Final = 0.8
"""A token is got anew after this part of its life (``sasl.login.refresh.window.factor``)."""
REREAD_S: Final = 10.0
"""A file is read anew after so long at the latest: whoever writes it may do so early."""
UNKNOWN_LIFE_S: Final = 60.0
"""A token that does not say when it ends is got anew after so long."""
RETRY_S: Final = 1.0
"""After a failure it is tried again no sooner."""
TIMEOUT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 256 * 1024


class NoAccessToken(KeptError):
    """No token could be got; names the file or the address, and never a secret."""


class FetchedToken(Struct, frozen=True):
    """A token, and how long it lasts from now on, None: it does not say."""

    token: str
    life_s: float | None

    def __repr__(self) -> str:
        return f"FetchedToken([{len(self.token)} characters], {self.life_s})"


class AccessTokens:
    """The token of one client."""

    def __init__(self, fetch: Callable[[], FetchedToken], reread_s: float | None = None) -> None:
        """``fetch`` raises NoAccessToken. ``reread_s``: a token is got anew after so long, whatever
        its life is.
        """
        self._fetch = fetch
        self._reread_s = reread_s
        self._token = ""
        self._expires_at = self._refresh_at = 0.0
        self._failure: NoAccessToken | None = None

    def refresh(self) -> None:
        """Get the token anew if it is time. May block; what fails is said by :meth:`current`."""
        now = time.time()
        if now < self._refresh_at:
            return
        try:
            fetched = self._fetch()
        except NoAccessToken as error:
            self._failure, self._refresh_at = error, now + RETRY_S
            return
        life_s = UNKNOWN_LIFE_S if fetched.life_s is None else fetched.life_s
        self._token, self._failure = fetched.token, None
        self._expires_at = float("inf") if fetched.life_s is None else now + life_s
        pause_s = max(RETRY_S, REFRESHED_FROM * life_s)
        self._refresh_at = now + (
            pause_s if self._reread_s is None else min(pause_s, self._reread_s)
        )

    def current(self) -> str:
        """The token as it was got last. Raises NoAccessToken where that failed, and the one of
        before has ended.
        """
        if self._failure is not None and time.time() >= self._expires_at:
            raise self._failure
        return self._token


def access_tokens(
    url: str,
    client: tuple[str, str] | None,
    scope: str,
    *,
    urlencoded: bool = False,
    authorities: str = "",
) -> AccessTokens:
    """The tokens at ``url``, for ``client`` (id and secret; None for a file). ``urlencoded``: both
    are encoded before they go into HTTP's Basic, as RFC 6749 has it (KAFKA-16345).
    ``authorities``: certificates, as PEM, that are trusted besides those of the system. Raises
    ConfigurationError.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.hostname in (None, "localhost"):
        path = unquote(parts.path)
        return AccessTokens(lambda: read_token(path), REREAD_S)
    is_here = parts.hostname is not None and is_this_machine(parts.hostname)
    if not parts.hostname or parts.username is not None:
        raise ConfigurationError(f"{TOKEN_URL}: https://HOST/PATH or file:///PATH is wanted")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_here):
        raise ConfigurationError(
            f"{TOKEN_URL}: https:// or file:/// is wanted (http:// on this machine alone): the "
            "client's secret goes there"
        )
    if client is None:
        raise ConfigurationError(
            f"{TOKEN_URL} needs sasl.oauthbearer.client.credentials.client.id and "
            "sasl.oauthbearer.client.credentials.client.secret"
        )
    names = [quote_plus(one) for one in client] if urlencoded else list(client)
    basic = base64.b64encode(":".join(names).encode()).decode()
    form = urlencode({"grant_type": "client_credentials", **({"scope": scope} if scope else {})})
    return AccessTokens(lambda: _request_token(url, basic, form, authorities))


def is_this_machine(host: str) -> bool:
    """Whether what is sent to ``host`` stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: str) -> FetchedToken:
    """The token that a file holds, with or without blanks around it. Raises NoAccessToken."""
    place = f"{TOKEN_URL}=file://{path}"
    try:
        with open(path, "rb") as source:
            data = source.read(MAX_TOKEN_BYTES + 1024)
    except OSError as error:
        raise NoAccessToken(f"{place}: {error.strerror}") from None
    return _fetched(data.strip(), None, place)


def _request_token(url: str, basic: str, form: str, authorities: str) -> FetchedToken:
    """A token by the client's credentials. Redirects are not followed: they would take the secret
    along. Raises NoAccessToken.
    """
    import http.client
    import ssl

    parts = urlsplit(url)
    host, place = parts.hostname or "", f"{TOKEN_URL}={url}"
    connection = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        if authorities:
            tls.load_verify_locations(cadata=authorities)
        connection = http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=tls)
    headers = {
        "Accept": "application/json",
        "Authorization": f"Basic {basic}",
        "Content-Type": "application/x-www-form-urlencoded",
    }
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.sock = connect(host, connection.port, TIMEOUT_S)
        if tls is not None:
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=host)
        connection.request("POST", target, form, headers)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise NoAccessToken(f"{place}: {why}") from None
    finally:
        connection.close()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    said: Mapping[str, Any] = value if isinstance(value, dict) else {}
    if answer.status != 200:
        error_code = said.get("error")
        told = f" ({error_code[:80]!r})" if isinstance(error_code, str) else ""
        raise NoAccessToken(f"{place}: it answered with status {answer.status}{told}")
    token, life_s = said.get("access_token"), said.get("expires_in")
    if not isinstance(token, str):
        raise NoAccessToken(f"{place}: its answer has no access_token")
    is_number = isinstance(life_s, int | float) and not isinstance(life_s, bool)
    return _fetched(token.encode(), life_s if is_number else None, place)


def _fetched(data: bytes, life_s: float | None, place: str) -> FetchedToken:
    try:
        token = parse_bearer(b"Bearer " + data)
    except SaslAuthenticationFailed as error:
        raise NoAccessToken(f"{place}: {error}") from None
    expires_at = _expires_at(token)
    return FetchedToken(token, life_s if expires_at is None else expires_at - time.time())


def _expires_at(token: str) -> float | None:
    """``exp`` of a JSON Web Token, unchecked; None where it is none, or has none."""
    try:
        _, payload, _ = token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        expires_at = claims["exp"]
    except (ValueError, binascii.Error, RecursionError, TypeError, LookupError):
        return None
    is_number = isinstance(expires_at, int | float) and not isinstance(expires_at, bool)
    return float(expires_at) if is_number else None
