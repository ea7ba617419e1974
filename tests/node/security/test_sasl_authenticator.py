"""The states of a login. Anchors: SaslServerAuthenticatorTest, SaslAuthenticatorTest."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from msgspec import structs

from kept.client.security.scram import ScramClient
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
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
from tests.support.credentials import credential

ADA = credential("pencil")
STORED = StoredCredentials(lambda: {("ada", ScramMechanism.SCRAM_SHA_256): ADA})

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


def test_what_an_unknown_user_is_shown_looks_stored_and_does_not_change() -> None:
    other = ScramCredential(b"\xff" * 24, b"k" * 32, b"s" * 32, 8192)
    users = {("ada", ScramMechanism.SCRAM_SHA_256): ADA}
    stored = StoredCredentials(lambda: users)
    shown = stored.decoy("SCRAM-SHA-256", "bob")
    assert (len(shown.salt), shown.iterations) == (len(ADA.salt), ADA.iterations)
    assert shown.salt not in (ADA.salt, stored.decoy("SCRAM-SHA-256", "eve").salt)
    users = {**users, ("joe", ScramMechanism.SCRAM_SHA_256): other}
    assert stored.decoy("SCRAM-SHA-256", "bob") == shown
    assert StoredCredentials(lambda: users).decoy("SCRAM-SHA-256", "bob") == shown
    assert stored.for_password("bob").exists is False
    assert stored.for_password("bob").mechanism == "SCRAM-SHA-256"
    nobody = StoredCredentials(dict)
    assert nobody.decoy("SCRAM-SHA-512", "bob") == nobody.decoy("SCRAM-SHA-512", "bob")
    assert nobody.for_password("bob").exists is False


def test_nodes_that_have_users_in_another_order_show_the_same() -> None:
    """Also where a script gave all users one salt."""
    users = {
        (f"u{number}", ScramMechanism.SCRAM_SHA_256): structs.replace(
            ADA, server_key=bytes([number]) * 32
        )
        for number in range(3)
    }
    backwards = dict(reversed(users.items()))
    shown = [
        StoredCredentials(mapping.copy).decoy("SCRAM-SHA-256", "bob")
        for mapping in (users, backwards)
    ]
    assert shown[0] == shown[1]


def test_unknown_users_are_shown_what_known_ones_are() -> None:
    """Each count of iterations and each kind of salt, as often as users have it; a user who joins
    changes what few of them are shown, and then as a new password does.
    """
    sha_256, sha_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
    users = {}
    for number in range(90):
        salt = bytes([200, number]) * 12
        users[f"u{number}", sha_256] = ScramCredential(salt, b"k" * 32, b"s" * 32, 8192)
    for number in range(9):
        salt = b"1dkf3mmgpzk3qj2x7b5y8w6v%d" % (10 + number)
        users[f"k{number}", sha_256] = ScramCredential(salt, b"k" * 32, b"s" * 32, 4096)
    long = ScramCredential(b"\x01" * 200, b"k" * 32, b"secret" * 6, 16_384)
    users["long", sha_256] = long
    names = [f"nobody-{number}" for number in range(3000)]
    shown = {name: StoredCredentials(lambda: users).decoy("SCRAM-SHA-256", name) for name in names}
    counts = Counter(credential.iterations for credential in shown.values())
    assert 2600 < counts[8192] < 2800 and 200 < counts[4096] < 340 and 10 < counts[16_384] < 60
    assert {len(one.salt) for one in shown.values() if one.iterations == 8192} == {24}
    assert {len(one.salt) for one in shown.values() if one.iterations == 16_384} == {200}
    for one in shown.values():
        if one.iterations == 4096:
            assert re.fullmatch(rb"[1-9a-z][0-9a-z]+", one.salt) and int(one.salt, 36) < 1 << 130
    assert len({one.salt for one in shown.values()}) == len(names)

    more = {**users, ("new", sha_256): ScramCredential(b"\xfa" * 24, b"k" * 32, b"t" * 32, 8192)}
    changed = 0
    for name in names:
        other = StoredCredentials(lambda: more).decoy("SCRAM-SHA-256", name)
        if other != shown[name]:
            changed += 1
            assert other.iterations != shown[name].iterations
            assert other.salt[:8] != shown[name].salt[:8]
    assert changed < 60

    # A password takes as long as that of a user whose only credential is the weaker one.
    users = {("ada", sha_256): ADA, ("joe", sha_512): long, ("joe", sha_256): long}
    stored = StoredCredentials(lambda: users)
    found = Counter(stored.for_password(name)[:1] for name in names)
    assert 1300 < found["SCRAM-SHA-256",] < 1700, "joe's stronger one counts"
