"""SCRAM: the RFCs' vectors, both sides against each other, and messages that must be refused.

Anchors: ScramSaslServerTest, ScramMessagesTest, ScramFormatterTest of Kafka 4.3.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest

from kept.client.security.scram import (
    ScramClient,
    ScramServer,
    password_matches,
)
from kept.cluster.security.credentials import ScramCredential
from kept.storage.errors import SaslAuthenticationFailed
from tests.support.credentials import credential

SHA_256, SHA_512 = "SCRAM-SHA-256", "SCRAM-SHA-512"
CLIENT_NONCE, SERVER_NONCE = "rOprNGfwEbeRWgbNEkqO", "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
DECOY = ScramCredential(b"salt of nobody", bytes(32), bytes(32), 4096)


def stored(
    mechanism: str, password: str, salt: bytes = SALT, iterations: int = 4096
) -> ScramCredential:
    return credential(password, mechanism, salt, iterations)


KEYS = {mechanism: stored(mechanism, "pencil") for mechanism in (SHA_256, SHA_512)}


def a_server(mechanism: str = SHA_256, user: str = "user", nonce: str = "") -> ScramServer:
    users = {user: KEYS[mechanism]}
    return ScramServer(mechanism, users.get, lambda _: DECOY, nonce=nonce)


def test_the_exchange_of_rfc_7677_byte_by_byte() -> None:
    client = ScramClient(SHA_256, "user", "pencil", nonce=CLIENT_NONCE)
    server = a_server(nonce=SERVER_NONCE)
    first = client.step(None)
    assert first == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    challenge = server.step(first)
    nonce = CLIENT_NONCE + SERVER_NONCE
    assert challenge == f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    final = client.step(challenge)
    proof = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert final == f"c=biws,r={nonce},p={proof}".encode()
    answer = server.step(final)
    assert answer == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert client.step(answer) is None
    assert client.done
    assert server.done
    assert server.user == "user"


@pytest.mark.parametrize("mechanism", [SHA_256, SHA_512])
@pytest.mark.parametrize("user", ["user", "a=b,c", "=2C", "Jürgen", "with blank"])
def test_names_are_escaped_and_each_exchange_has_nonces_of_its_own(
    mechanism: str, user: str
) -> None:
    nonces = set()
    for _ in range(2):
        client, server = ScramClient(mechanism, user, "pencil"), a_server(mechanism, user)
        challenge = server.step(client.step(None))
        assert challenge is not None
        nonces.add(challenge.partition(b",")[0])
        assert client.step(server.step(client.step(challenge))) is None
        assert client.done
        assert server.user == user
    assert len(nonces) == 2


def test_a_password_is_compared_with_what_is_stored() -> None:
    assert password_matches(SHA_512, "pencil", KEYS[SHA_512])
    assert not password_matches(SHA_512, "pencils", KEYS[SHA_512])
    assert not password_matches(SHA_256, "pencil", KEYS[SHA_512])


def test_nothing_secret_is_shown() -> None:
    shown = repr(KEYS[SHA_256]) + repr(ScramClient(SHA_256, "user", "pencil"))
    assert "pencil" not in shown
    assert repr(SALT) not in shown


def test_an_unknown_user_fails_at_the_end_as_a_wrong_password_does() -> None:
    ends = []
    for name, password in (("user", "wrong"), ("nobody", "pencil")):
        client, server = ScramClient(SHA_256, name, password), a_server()
        challenge = server.step(client.step(None))
        with pytest.raises(SaslAuthenticationFailed) as refused:
            server.step(client.step(challenge))
        ends.append((str(refused.value), challenge is not None, server.done))
    assert ends[0] == ends[1]


def test_an_answer_takes_a_known_user_as_long_as_an_unknown_one() -> None:
    """What is made up costs some microseconds: it is made for everybody."""
    made: list[str] = []

    def decoy(user: str) -> ScramCredential:
        made.append(user)
        return DECOY

    for name, shown in (("user", KEYS[SHA_256]), ("nobody", DECOY)):
        server = ScramServer(SHA_256, {"user": KEYS[SHA_256]}.get, decoy)
        challenge = server.step(ScramClient(SHA_256, name, "pencil").step(None))
        assert challenge is not None and base64.b64encode(shown.salt) in challenge
    assert made == ["user", "nobody"]


def test_who_knows_what_is_made_up_for_an_unknown_user_still_fails() -> None:
    """The decoy's keys may be guessed: the exchange fails because there is no such user."""
    server = ScramServer(SHA_256, lambda _: None, lambda _: KEYS[SHA_256])
    client = ScramClient(SHA_256, "nobody", "pencil")
    final = client.step(server.step(client.step(None)))
    with pytest.raises(SaslAuthenticationFailed, match="no such user"):
        server.step(final)


@pytest.mark.parametrize(
    "first",
    [
        "p=tls-unique,,n=user,r=abc",
        "n,n=user,r=abc",
        "n,,m=ext,n=user,r=abc",
        "n,,r=abc,n=user",
        "n,,n=,r=abc",
        "n,,n=user,r=",
        "n,,n=us=er,r=abc",
        "n,,n=us=3der,r=abc",
        "n,a=other,n=user,r=abc",
        "n,,n=user,r=a\x7fb\x01",
        "n,,n=us\0er,r=abc",
        "n,,n=user,r=abc,tokenauth=true",
        "n,,n=user,r=abc,broken",
        "n,,n=" + "u" * 2**20 + ",r=abc",
        "",
    ],
)
def test_a_first_message_that_is_refused(first: str) -> None:
    with pytest.raises(SaslAuthenticationFailed):
        a_server().step(first.encode())


@pytest.mark.parametrize("gs2", ["n,,", "y,,", "n,a=user,", "y,a=user,"])
def test_headers_that_are_taken(gs2: str) -> None:
    challenge = a_server().step(f"{gs2}n=user,r=abc,x=ignored".encode())
    assert challenge is not None
    assert challenge.startswith(b"r=abc")


def _final(change: Callable[[str], str], gs2: str = "n,,", mechanism: str = SHA_256) -> None:
    client = ScramClient(mechanism, "user", "pencil", nonce=CLIENT_NONCE)
    server = a_server(mechanism, nonce=SERVER_NONCE)
    first = client.step(None)
    assert first is not None
    final = client.step(server.step(first.replace(b"n,,", gs2.encode())))
    assert final is not None
    server.step(change(final.decode()).encode())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.replace(SERVER_NONCE, "other"), id="nonce of another exchange"),
        pytest.param(lambda m: m.replace(SERVER_NONCE, SERVER_NONCE + "x"), id="nonce extended"),
        pytest.param(lambda m: m.replace(SERVER_NONCE, SERVER_NONCE[:-1]), id="nonce shortened"),
        pytest.param(lambda m: m.replace(CLIENT_NONCE, ""), id="only our part of the nonce"),
        pytest.param(lambda m: m.replace("c=biws", "c=eSws"), id="another header"),
        pytest.param(lambda m: m.replace("c=biws,", ""), id="no header"),
        pytest.param(lambda m: ",".join(reversed(m.split(","))), id="fields reordered"),
        pytest.param(lambda m: m.rpartition(",")[0], id="no proof"),
        pytest.param(lambda m: m[:-4], id="proof shortened"),
        pytest.param(lambda m: m.replace(",p=", ",p=!"), id="proof not base64"),
        pytest.param(lambda m: m.replace(",p=", ",x=y,p="), id="an extension"),
        pytest.param(lambda m: m.replace(",p=d", ",p=e"), id="another proof"),
        pytest.param(lambda m: m + "," + "x" * 2**20, id="a megabyte"),
        pytest.param(
            lambda _: "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), id="junk"
        ),
    ],
)
def test_a_last_message_that_is_refused(change: Callable[[str], str]) -> None:
    _final(lambda m: m)
    with pytest.raises(SaslAuthenticationFailed):
        _final(change)


def test_the_header_of_the_last_message_is_that_of_the_first() -> None:
    with pytest.raises(SaslAuthenticationFailed, match="header"):
        _final(lambda m: m, gs2="y,,")


def test_the_proof_of_another_mechanism_is_refused() -> None:
    client, server = ScramClient(SHA_512, "user", "pencil"), a_server(SHA_256)
    with pytest.raises(SaslAuthenticationFailed, match="size"):
        server.step(client.step(server.step(client.step(None))))


def test_a_message_after_the_end_is_refused() -> None:
    server, client = a_server(), ScramClient(SHA_256, "user", "pencil")
    end = server.step(client.step(server.step(client.step(None))))
    with pytest.raises(SaslAuthenticationFailed):
        server.step(b"n,,n=user,r=abc")
    client.step(end)
    with pytest.raises(SaslAuthenticationFailed):
        client.step(end)


@pytest.mark.parametrize(
    ("challenge", "why"),
    [
        ("r=rOprNGfwEbeRWgbNEkqO,s=AAAA,i=4096", "nonce"),
        ("r=otherNonce,s=AAAA,i=4096", "nonce"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,s=AAAA,i=1", "iterations"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,s=AAAA,i=4095", "iterations"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,s=AAAA,i=1000000000", "iterations"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,s=AAAA,i=99999999999", "malformed"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,s=A!AA,i=4096", "malformed"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,s=AAA,i=4096", "base64"),
        ("r=rOprNGfwEbeRWgbNEkqOxyz,i=4096,s=AAAA", "malformed"),
        ("m=ext,r=rOprNGfwEbeRWgbNEkqOxyz,s=AAAA,i=4096", "malformed"),
    ],
)
def test_a_challenge_that_our_client_refuses(challenge: str, why: str) -> None:
    client = ScramClient(SHA_256, "user", "pencil", nonce=CLIENT_NONCE)
    client.step(None)
    with pytest.raises(SaslAuthenticationFailed, match=why):
        client.step(challenge.encode())


@pytest.mark.parametrize(
    "final",
    [b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G5=", b"e=other-error", b"", b"v=!", b"v="],
)
def test_our_client_refuses_a_server_that_does_not_know_the_user(final: bytes) -> None:
    client, server = ScramClient(SHA_256, "user", "pencil"), a_server()
    server.step(client.step(server.step(client.step(None))))
    with pytest.raises(SaslAuthenticationFailed):
        client.step(final)
    assert not client.done
