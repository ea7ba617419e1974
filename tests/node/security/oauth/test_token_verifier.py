"""Which access tokens are believed. Anchors: BrokerJwtValidatorTest, ClaimValidationUtilsTest and
JwtValidatorTest of Kafka 4.3.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from msgspec.structs import replace

from kept.node.config.sasl import TokenSettings
from kept.node.security.oauth.json_web_keys import RSA_ALGORITHMS, parse_keys
from kept.node.security.oauth.token_verifier import AcceptedToken, read_header, verify
from kept.storage.errors import SaslAuthenticationFailed
from tests.support.token_issuer import AUDIENCE, ISSUER, Issuer

SETTINGS = TokenSettings(
    jwks_url="file:///keys",
    truststore_path=None,
    refresh_ms=1000,
    retry_backoff_ms=10,
    retry_backoff_max_ms=100,
    audiences=("other", AUDIENCE),
    issuer=ISSUER,
    skew_s=30,
    subject_claim="sub",
    scope_claim="scope",
)
OURS = Issuer("k1", "k2")
OURS.add_key("rsa", "RS256")
KEYS = parse_keys(json.dumps(OURS.key_set()).encode())


def check(token: str, **settings: Any) -> AcceptedToken:
    header = read_header(token)
    keys = KEYS.find(header.key_id, header.algorithm)
    if not keys:
        raise SaslAuthenticationFailed(f"no key {header.key_id} for {header.algorithm}")
    return verify(token, header, keys, replace(SETTINGS, **settings))


def refusal(token: str, **settings: Any) -> str:
    with pytest.raises(SaslAuthenticationFailed) as refused:
        check(token, **settings)
    return str(refused.value)


def raw(header: object, claims: object, signature: bytes = b"s") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(one).rstrip(b"=").decode() for one in parts)


@pytest.mark.parametrize("algorithm", RSA_ALGORITHMS)
def test_a_key_of_rsa_is_used_with_any_of_its_algorithms(algorithm):
    assert check(OURS.token(key_id="rsa", algorithm=algorithm)).user == "ada"


@pytest.mark.parametrize("algorithm", ["ES384", "ES512", "EdDSA"])
def test_other_kinds_of_keys(algorithm):
    other = Issuer()
    other.add_key("x", algorithm)
    keys = parse_keys(json.dumps({"keys": [other.public("x")]}).encode()).keys
    token = other.token("bob", key_id="x")
    assert verify(token, read_header(token), keys, SETTINGS).user == "bob"


def test_each_key_of_the_name_is_tried():
    same = [OURS.public(name) | {"kid": "k"} for name in ("k1", "k2")]
    keys = parse_keys(json.dumps({"keys": same}).encode()).keys
    for signer in ("k1", "k2"):
        token = OURS.token(key_id=signer, headers={"kid": "k"})
        assert verify(token, read_header(token), keys, SETTINGS).user == "ada"
    expired = OURS.token(key_id="k2", headers={"kid": "k"}, life_s=-60)
    with pytest.raises(SaslAuthenticationFailed, match="expired"):
        verify(expired, read_header(expired), keys, SETTINGS)
    strange = Issuer("k1").token(headers={"kid": "k"})
    with pytest.raises(SaslAuthenticationFailed, match="signature does not fit"):
        verify(strange, read_header(strange), keys, SETTINGS)


def test_whom_a_token_names_and_until_when():
    now = time.time()
    accepted = check(OURS.token("ada", life_s=60))
    assert accepted.user == "ada"
    assert now + 59 < accepted.expires_at_s < now + 62
    assert check(OURS.token(client_id="svc"), subject_claim="client_id").user == "svc"
    assert check(OURS.token(aud=["x", AUDIENCE])).user == "ada"
    assert check(OURS.token(scope=["a", "b"])).user == "ada"
    assert check(OURS.token(iss=None, aud=None), issuer=None, audiences=()).user == "ada"
    assert check(OURS.token(aud="whoever"), audiences=()).user == "ada"


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"life_s": -31}, "the token has expired"),
        ({"nbf": time.time() + 3600}, "not valid yet"),
        ({"iat": time.time() + 3600}, "not valid yet"),
        ({"exp": None}, "no exp"),
        ({"iat": None}, "no iat"),
        ({"exp": "99999999999"}, "no number"),
        ({"exp": True}, "expired"),
        ({"exp": 1e400}, "malformed"),
        ({"exp": []}, "malformed"),
        ({"iat": "x"}, "malformed"),
        ({"iss": "https://issuer.test/"}, "iss is not"),
        ({"iss": [ISSUER]}, "malformed|iss is not"),
        ({"iss": None}, "no iss"),
        ({"aud": "kafk"}, "aud is none of"),
        ({"aud": "KAFKA"}, "aud is none of"),
        ({"aud": [7, AUDIENCE]}, "aud is none of"),
        ({"aud": {AUDIENCE: 1}}, "aud is none of"),
        ({"aud": None}, "no aud"),
        ({"user": ""}, "names nobody"),
        ({"user": "  "}, "names nobody"),
        ({"sub": None}, "names nobody"),
        ({"sub": 7}, "malformed|names nobody"),
        ({"user": "ada\n"}, "control characters"),
        ({"user": "ada\0"}, "control characters"),
        ({"user": "a\ud800"}, "control characters"),
        ({"user": "ä" * 128}, "more than 255 bytes"),
        ({"scope": 7}, "no list of texts"),
        ({"scope": [7]}, "no list of texts"),
        ({"scope": {"a": 1}}, "no list of texts"),
    ],
)
def test_claims_that_are_refused(claims, why):
    said = refusal(OURS.token(**claims))
    assert re.search(why, said), said


def test_clocks_may_differ_by_the_skew_and_no_more():
    assert check(OURS.token(life_s=-20)).user == "ada"
    assert "expired" in refusal(OURS.token(life_s=-20), skew_s=10)
    assert check(OURS.token(nbf=time.time() + 20)).user == "ada"


def public_pem() -> bytes:
    return (
        OURS.keys["rsa"][0]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def by_public_key() -> str:
    """HS256 whose secret is what everybody knows: the public key. (PyJWT would not make it.)"""
    unsigned = raw({"alg": "HS256", "kid": "rsa"}, {"sub": "ada", "exp": 4e9, "iat": 1}, b"")
    digest = hmac.digest(public_pem(), unsigned.rstrip(".").encode(), hashlib.sha256)
    return unsigned + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (raw({"alg": "none", "kid": "k1"}, {"sub": "ada"}, b""), "by none algorithm"),
        (raw({"alg": "NONE"}, {"sub": "ada"}, b""), "by NONE algorithm"),
        (raw({"alg": ""}, {"sub": "ada"}), "by  algorithm"),
        (raw({"kid": "k1"}, {"sub": "ada"}), "by no algorithm"),
        (raw({"alg": ["ES256"]}, {"sub": "ada"}), "by no algorithm"),
        (by_public_key(), "by HS256 algorithm"),
        (raw({"alg": "RSA-OAEP", "enc": "A256GCM"}, {}), "by RSA-OAEP algorithm"),
        (raw({"alg": "ES256", "kid": 7}, {}), "no JSON Web Token"),
        (raw({"alg": "ES256", "kid": "k" * 256}, {}), "256 characters"),
        (raw({"alg": "ES256", "kid": "k1", "crit": ["exp"]}, {}), "has crit|no JSON Web"),
        (raw({"alg": "ES256", "kid": "../../etc/passwd"}, {}), "no key"),
        (raw({"alg": "ES256", "kid": "' OR 1=1 --"}, {}), "no key"),
        (raw({"alg": "RS256", "kid": "k1"}, {}), "no key k1 for RS256"),
        (raw({"alg": "ES256", "kid": "k1"}, {"sub": "ada"}), "signature does not fit"),
        (raw({"alg": "ES256", "kid": "k1"}, {"sub": "ada"}, b"\0" * 64), "signature does not fit"),
        (raw({"alg": "ES256", "kid": "k1", "b64": False}, {}), "malformed|signature"),
        (raw(["ES256"], {}), "no JSON Web Token"),
        ("a.b", "no JSON Web Token"),
        ("", "no JSON Web Token"),
        ("...", "no JSON Web Token"),
        ("\u00e4.b.c", "no JSON Web Token"),
        ("A" * (16 * 1024 + 1), "a token of 16385 bytes"),
        (base64.urlsafe_b64encode(b"[" * 9000).decode() + ".e30.cw", "no JSON Web Token"),
    ],
)
def test_tokens_that_are_refused(token, why):
    said = refusal(token)
    assert re.search(why, said), said
    assert "sub" not in said and "ada" not in said


def test_another_key_than_the_one_that_is_named_is_not_taken():
    token = OURS.token(key_id="k1", headers={"kid": "k2"})
    assert "signature does not fit" in refusal(token)
    stranger = Issuer("k1")
    assert "signature does not fit" in refusal(stranger.token())


def test_a_header_that_says_where_a_key_is_means_nothing():
    stranger = Issuer("k1")
    elsewhere = {"jku": "https://evil.test/k", "x5u": "https://evil.test/c"}
    elsewhere |= {"jwk": stranger.public("k1")}
    assert "signature does not fit" in refusal(stranger.token(headers=elsewhere))
    assert check(OURS.token(headers=elsewhere)).user == "ada"


def test_a_deep_payload_is_refused():
    key, _ = OURS.keys["k1"]
    payload = b'{"sub":' + b"[" * 5000 + b"]" * 5000 + b"}"
    token = jwt.PyJWS().encode(payload, key, "ES256", {"kid": "k1"})
    assert refusal(token) in ("a malformed token", "the token has no exp")
