"""Whether an access token is believed: a JSON Web Token (RFC 7519) that an issuer has signed.

PyJWT decodes it and checks signature, times, issuer and audience; what is asked besides is that it
has an ``exp`` and an ``iat``, which are numbers, and names somebody. Headers that say where a key
is to be found (``jku``, ``x5u``, ``jwk``) mean nothing here, and one that says that others must be
understood (``crit``) is refused. Source: ``BrokerJwtValidator`` and ``ClaimValidationUtils`` of
Kafka 4.3. Messages are for the log, and have nothing of the token in them but the name of its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jwt
from msgspec import Struct

from kept.client.security.oauthbearer import MAX_TOKEN_BYTES
from kept.node.config.sasl import TokenSettings
from kept.node.security.oauth.json_web_keys import ALGORITHMS, MAX_KEY_ID_CHARACTERS, JsonWebKey
from kept.storage.errors import SaslAuthenticationFailed

MAX_USER_BYTES: Final = 255
"""Of the name that a token gives, as for PLAIN and SCRAM."""

_WHY: Final[tuple[tuple[type[Exception], str], ...]] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidAudienceError, "the token's aud is none of sasl.oauthbearer.expected.audience"),
    (jwt.InvalidIssuerError, "the token's iss is not sasl.oauthbearer.expected.issuer"),
    (jwt.InvalidSignatureError, "the token's signature does not fit the key that it names"),
)
_MALFORMED: Final = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)
"""What PyJWT raises for what strangers may send."""


class TokenHeader(Struct, frozen=True):
    """By which key a token says that it is signed (None: it does not say), and how."""

    key_id: str | None
    algorithm: str


class AcceptedToken(Struct, frozen=True):
    """Whom a token names, and when it expires, in seconds since 1970."""

    user: str
    expires_at_s: float


def read_header(token: str) -> TokenHeader:
    """What a token's header says, which nobody has signed yet. Raises SaslAuthenticationFailed."""
    if len(token) > MAX_TOKEN_BYTES:
        raise SaslAuthenticationFailed(f"a token of {len(token)} bytes")
    try:
        header = jwt.get_unverified_header(token)
    except _MALFORMED:
        raise SaslAuthenticationFailed("no JSON Web Token with a signature") from None
    key_id, algorithm = header.get("kid"), header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        shown = algorithm[:20] if isinstance(algorithm, str) else "no"
        raise SaslAuthenticationFailed(f"a token signed by {shown} algorithm, which is not taken")
    if "crit" in header:
        raise SaslAuthenticationFailed("a token whose header has crit, of which none is understood")
    if key_id is not None and len(key_id) > MAX_KEY_ID_CHARACTERS:
        raise SaslAuthenticationFailed(f"a token whose kid has {len(key_id)} characters")
    return TokenHeader(key_id, algorithm)


def verify(
    token: str, header: TokenHeader, keys: Sequence[JsonWebKey], settings: TokenSettings
) -> AcceptedToken:
    """Whom a token names, now, that one of ``keys`` has signed: several may have the name that it
    gives. Raises SaslAuthenticationFailed.
    """
    try:
        claims = _signed_claims(token, header, keys, settings)
        if not _is_number(claims["exp"]) or not _is_number(claims["iat"]):
            raise SaslAuthenticationFailed("the token's exp or iat is no number")
        return AcceptedToken(_user(claims, settings), float(claims["exp"]))
    except jwt.MissingRequiredClaimError as error:
        raise SaslAuthenticationFailed(f"the token has no {error.claim}") from None
    except _MALFORMED as error:
        why = next((text for kind, text in _WHY if isinstance(error, kind)), "a malformed token")
        raise SaslAuthenticationFailed(why) from None


def _signed_claims(
    token: str, header: TokenHeader, keys: Sequence[JsonWebKey], settings: TokenSettings
) -> dict[str, Any]:
    """The claims, by the first key that has signed them. Raises what PyJWT does."""
    options: Any = {"require": ["exp", "iat"], "verify_aud": bool(settings.audiences)}
    for key in keys:
        try:
            return jwt.decode(
                token,
                key.public,
                algorithms=[header.algorithm],
                audience=list(settings.audiences) or None,
                issuer=settings.issuer,
                leeway=settings.skew_s,
                options=options,
            )
        except jwt.InvalidSignatureError:
            continue
    raise jwt.InvalidSignatureError


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _user(claims: Mapping[str, Any], settings: TokenSettings) -> str:
    """The name that a token gives. Raises SaslAuthenticationFailed."""
    user = claims.get(settings.subject_claim)
    if not isinstance(user, str) or not user.strip():
        raise SaslAuthenticationFailed(f"the token names nobody ({settings.subject_claim})")
    if len(user.encode("utf-8", "replace")) > MAX_USER_BYTES or not user.isprintable():
        raise SaslAuthenticationFailed(
            f"the token's {settings.subject_claim} has more than {MAX_USER_BYTES} bytes, or control"
            " characters"
        )
    scopes = claims.get(settings.scope_claim, "")
    if not isinstance(scopes, str | list) or not all(isinstance(one, str) for one in scopes):
        raise SaslAuthenticationFailed(f"the token's {settings.scope_claim} is no list of texts")
    return user
