"""OAUTHBEARER's messages. Anchors: RFC 7628, OAuthBearerClientInitialResponseTest and
OAuthBearerSaslClientTest of Kafka 4.3.
"""

from __future__ import annotations

import pytest

from kept.client.security.oauthbearer import (
    INVALID_TOKEN,
    BearerMessage,
    OAuthBearerClient,
    parse_bearer,
    parse_bearer_message,
)
from kept.storage.errors import SaslAuthenticationFailed

TOKEN = "vF9dft4qmT-_.~+/="


@pytest.mark.parametrize(
    ("message", "authzid"),
    [
        (f"n,,\x01auth=Bearer {TOKEN}\x01\x01", ""),
        (f"y,,\x01auth=bearer   {TOKEN}\x01\x01", ""),
        (f"n,a=user@example.com,\x01auth=Bearer {TOKEN}\x01\x01", "user@example.com"),
        (f"n,a=a=2Cb=3D,\x01host=server\x01port=143\x01auth=BEARER {TOKEN}\x01\x01", "a,b="),
        (f"n,,\x01auth=Bearer {TOKEN}\x01traceId=123 4\x01\x01", ""),
    ],
)
def test_a_message(message, authzid):
    assert parse_bearer_message(message.encode()) == BearerMessage(TOKEN, authzid)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x01",
        b"n,,",
        b"n,,\x01\x01",
        b"n,,\x01auth=Bearer t",
        b"n,,\x01auth=Bearer t\x01",
        b"p=tls-unique,,\x01auth=Bearer t\x01\x01",
        b"N,,\x01auth=Bearer t\x01\x01",
        b"n,a=b,c,\x01auth=Bearer t\x01\x01",
        b"n,a=\xff,\x01auth=Bearer t\x01\x01",
        b"n,,\x01auth=Bearer t\x01auth=Bearer u\x01\x01",
        b"n,,\x01auth=Bearer\x01\x01",
        b"n,,\x01auth=Bearer t u\x01\x01",
        b"n,,\x01auth=Bearer t\xc3\xa4\x01\x01",
        b"n,,\x01auth=Basic dTpw\x01\x01",
        b"n,,\x01Auth=Bearer t\x01\x01",
        b"n,,\x01a1=x\x01auth=Bearer t\x01\x01",
        b"n,,\x01x=\x01auth=Bearer t\x01\x01",
        b"n,,\x01auth=Bearer t\x01x=\0\x01\x01",
        b"n,,\x01auth=Bearer " + b"t" * (16 * 1024 + 1) + b"\x01\x01",
        b"n,,\x01auth=Bearer t\x01x=" + b"y" * 40_000 + b"\x01\x01",
    ],
)
def test_a_message_that_is_refused(message):
    with pytest.raises(SaslAuthenticationFailed):
        parse_bearer_message(message)


def test_a_token_is_shown_nowhere():
    assert TOKEN not in repr(parse_bearer_message(OAuthBearerClient(TOKEN).step(None)))
    with pytest.raises(SaslAuthenticationFailed) as refused:
        parse_bearer(b"Bearer not a token")
    assert "not a" not in str(refused.value)


def test_the_clients_side():
    client = OAuthBearerClient(TOKEN)
    assert client.step(None) == f"n,,\x01auth=Bearer {TOKEN}\x01\x01".encode()
    assert client.step(b"") is None and client.done
    client = OAuthBearerClient(TOKEN)
    client.step(None)
    assert client.step(INVALID_TOKEN) == b"\x01" and not client.done
    with pytest.raises(SaslAuthenticationFailed, match="said yes"):
        client.step(b"")
    with pytest.raises(SaslAuthenticationFailed):
        OAuthBearerClient("")
