"""The states of a login. Anchors: SaslServerAuthenticatorTest, SaslAuthenticatorTest."""

from __future__ import annotations

import pytest

from kept.client.security.scram import ScramClient
from kept.cluster.security.credentials import ScramMechanism
from kept.node.security.sasl_authenticator import (
    AccessTokenChecked,
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
from kept.node.security.stored_credentials import StoredCredentials
from kept.storage.errors import InvariantViolation
from tests.support.credentials import credential, image_of

ADA = credential("pencil")
STORED = StoredCredentials(lambda: image_of({("ada", ScramMechanism.SCRAM_SHA_256): ADA}))

PLAIN, SCRAM = HandshakeReceived("PLAIN", "n"), HandshakeReceived("SCRAM-SHA-256", "n")
TOKEN = TokenReceived(b"\0ada\0pencil")
OTHER, VERSIONS = OtherRequestReceived("API 3"), ApiVersionsAnswered()
CHECK, RIGHT, WRONG = CheckPassword("ada", "pencil"), PasswordChecked(True), PasswordChecked(False)
IN = Authenticated("ada", "PLAIN", b"")
TEXT = "Authentication failed during authentication due to invalid credentials with SASL mechanism "
OUT = AuthenticationFailed(TEXT + "PLAIN", "no such user, or another password", "ada")


OAUTH = HandshakeReceived("OAUTHBEARER", "n")
BEARER = TokenReceived(b"n,,\x01auth=Bearer secret-token\x01\x01")
AS_EVE = TokenReceived(b"n,a=eve,\x01auth=Bearer secret-token\x01\x01")
BELIEVED, REFUSED = AccessTokenChecked("ada", 7.0), AccessTokenChecked(why="it has expired")
ERROR = b'{"status":"invalid_token"}'
NOT_NEW = AuthenticationFailed(TEXT + "OAUTHBEARER", "the access token was refused", "", False)


def authenticator(renews: tuple[str, str] | None = None) -> SaslAuthenticator:
    return SaslAuthenticator(("PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"), STORED, renews=renews)


def step(login: SaslAuthenticator, event: SaslEvent) -> tuple[SaslEffect, ...]:
    effects = login.step(event)
    login.check_invariants()
    return effects


def illegal(what: str, state: str) -> IllegalRequest:
    return IllegalRequest(f"{what} in state {state} of SASL authentication")


@pytest.mark.parametrize(
    ("history", "last"),
    [
        ([PLAIN, TOKEN, RIGHT], IN),
        ([VERSIONS, PLAIN, TOKEN, RIGHT], IN),
        ([PLAIN], HandshakeAnswer()),
        ([PLAIN, TOKEN], CHECK),
        ([PLAIN, TOKEN, WRONG], OUT),
        (
            [PLAIN, TokenReceived(b"\0ada")],
            AuthenticationFailed(TEXT + "PLAIN", "a SASL PLAIN message of 2 fields, not 3"),
        ),
        ([HandshakeReceived("GSSAPI", "n")], MechanismRefused("GSSAPI")),
        ([HandshakeReceived("plain", "n")], MechanismRefused("plain")),
        (
            [SCRAM, TokenReceived(b"junk")],
            AuthenticationFailed(
                TEXT + "SCRAM-SHA-256", "the client's first SCRAM message is malformed"
            ),
        ),
        ([OTHER], illegal("API 3", "START")),
        ([TOKEN], illegal("TokenReceived", "START")),
        ([VERSIONS, VERSIONS], illegal("ApiVersionsAnswered", "VERSIONS")),
        ([VERSIONS, TOKEN], illegal("TokenReceived", "VERSIONS")),
        ([PLAIN, PLAIN], illegal("HandshakeReceived", "TOKENS")),
        ([PLAIN, OTHER], illegal("API 3", "TOKENS")),
        ([PLAIN, VERSIONS], illegal("ApiVersionsAnswered", "TOKENS")),
        ([PLAIN, TOKEN, TOKEN], illegal("TokenReceived", "CHECKING")),
        ([PLAIN, TOKEN, WRONG, TOKEN], illegal("TokenReceived", "FAILED")),
        ([PLAIN, TOKEN, RIGHT, TOKEN], illegal("TokenReceived", "DONE")),
        ([HandshakeReceived("GSSAPI", "n"), PLAIN], illegal("HandshakeReceived", "FAILED")),
        ([OAUTH, BEARER], CheckAccessToken("secret-token")),
        ([OAUTH, BEARER, BELIEVED], Authenticated("ada", "OAUTHBEARER", b"", 7.0)),
        ([OAUTH, BEARER, BEARER], illegal("TokenReceived", "CHECKING")),
        ([OAUTH, BEARER, REFUSED], AccessTokenRefused(ERROR, "it has expired")),
        ([OAUTH, BEARER, REFUSED, TokenReceived(b"\x01")], NOT_NEW),
        ([OAUTH, BEARER, REFUSED, BEARER], NOT_NEW),
        ([OAUTH, BEARER, REFUSED, OAUTH], illegal("HandshakeReceived", "REFUSED")),
        (
            [OAUTH, AS_EVE, BELIEVED],
            AccessTokenRefused(
                ERROR, "the client asks to act as another user than its token names", "ada"
            ),
        ),
        (
            [OAUTH, TokenReceived(b"\x01")],
            AuthenticationFailed(TEXT + "OAUTHBEARER", "a malformed OAUTHBEARER message"),
        ),
    ],
)
def test_what_comes_of_a_history(history: list[SaslEvent], last: SaslEffect) -> None:
    login = authenticator()
    effects: tuple[SaslEffect, ...] = ()
    for event in history:
        effects = step(login, event)
    assert effects == (last,)
    ends = isinstance(
        last, Authenticated | AuthenticationFailed | MechanismRefused | IllegalRequest
    )
    assert login.ended is ends
    assert (login.state is SaslState.DONE) is isinstance(last, Authenticated)
    assert login.tick(1) == ()


def test_nothing_is_shown_of_passwords() -> None:
    assert "pencil" not in repr(TOKEN) + repr(CHECK) + repr(ADA)
    assert "secret" not in repr(BEARER) + repr(CheckAccessToken("secret-token"))


def _scram(login: SaslAuthenticator, user: str, password: str) -> SaslEffect:
    client = ScramClient("SCRAM-SHA-256", user, password)
    (effect,) = step(login, TokenReceived(client.step(None) or b""))
    assert isinstance(effect, Challenge)
    (effect,) = step(login, TokenReceived(client.step(effect.token) or b""))
    if isinstance(effect, Authenticated):
        client.step(effect.token)
        assert client.done
    return effect


@pytest.mark.parametrize(
    ("user", "password", "fits"),
    [("ada", "pencil", True), ("ada", "Pencil", False), ("bob", "pencil", False)],
)
def test_scram_says_who_it_is_or_one_text_for_whatever_was_wrong(
    user: str, password: str, *, fits: bool
) -> None:
    login = authenticator()
    step(login, SCRAM)
    effect = _scram(login, user, password)
    if fits:
        assert isinstance(effect, Authenticated)
        assert (effect.user, effect.mechanism) == ("ada", "SCRAM-SHA-256")
    else:
        why = "no such user, or another password"
        assert effect == AuthenticationFailed(TEXT + "SCRAM-SHA-256", why, user)


@pytest.mark.parametrize(
    ("renews", "mechanism", "why"),
    [
        (("SCRAM-SHA-256", "ada"), SCRAM, ""),
        (("SCRAM-SHA-256", "bob"), SCRAM, "the session is another user's"),
        (("PLAIN", "ada"), SCRAM, "the session is of mechanism PLAIN"),
        (("PLAIN", "ada"), PLAIN, ""),
        (("PLAIN", "bob"), PLAIN, "the session is another user's"),
        (("SCRAM-SHA-512", "ada"), PLAIN, "the session is of mechanism SCRAM-SHA-512"),
        (("OAUTHBEARER", "ada"), OAUTH, ""),
        (("OAUTHBEARER", "bob"), OAUTH, "the session is another user's"),
        (("OAUTHBEARER", "ada"), PLAIN, "the session is of mechanism OAUTHBEARER"),
    ],
)
def test_who_logs_in_again_stays_who_he_is(
    renews: tuple[str, str], mechanism: HandshakeReceived, why: str
) -> None:
    login = authenticator(renews)
    (effect,) = step(login, mechanism)
    if isinstance(effect, HandshakeAnswer) and mechanism is SCRAM:
        effect = _scram(login, "ada", "pencil")
    elif isinstance(effect, HandshakeAnswer):
        step(login, BEARER if mechanism is OAUTH else TOKEN)
        (effect,) = step(login, BELIEVED if mechanism is OAUTH else RIGHT)
    assert (effect.why if isinstance(effect, AuthenticationFailed) else "") == why
    assert (login.state is SaslState.DONE) is not why


def test_a_result_without_a_check_is_a_bug_of_ours() -> None:
    with pytest.raises(InvariantViolation, match="state START"):
        authenticator().step(RIGHT)
    with pytest.raises(InvariantViolation, match="state START"):
        authenticator().step(BELIEVED)
