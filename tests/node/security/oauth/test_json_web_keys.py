"""Which keys of an issuer's set are used, and why the others are not."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from kept.node.security.oauth.json_web_keys import MAX_KEYS_TRIED, RSA_ALGORITHMS, parse_keys
from tests.fuzz.mutation import retyped
from tests.support.token_issuer import Issuer

ALL = Issuer()
for name in ("RS256", "ES384", "ES512", "EdDSA"):
    ALL.add_key(name, name)


def encoded(*keys: Any) -> bytes:
    return json.dumps({"keys": keys}).encode()


def test_each_key_has_the_algorithms_of_its_type():
    keys = parse_keys(json.dumps(ALL.key_set()).encode())
    assert {key.key_id: key.algorithms for key in keys.keys} == {
        "k1": ("ES256",),
        "RS256": RSA_ALGORITHMS,
        "ES384": ("ES384",),
        "ES512": ("ES512",),
        "EdDSA": ("EdDSA",),
    }
    assert keys.passed_over == ()


def test_alg_narrows_what_a_key_may_be_used_with():
    (key,) = parse_keys(encoded(ALL.public("RS256") | {"alg": "PS256"})).keys
    assert key.algorithms == ("PS256",)
    (key,) = parse_keys(encoded(ALL.public("EdDSA") | {"alg": "Ed25519"})).keys
    assert key.algorithms == ("EdDSA",)


def weak() -> dict[str, Any]:
    public = rsa.generate_private_key(65537, 1024).public_key()
    maker: Any = jwt.get_algorithm_by_name("RS256")
    return dict(maker.to_jwk(public, as_dict=True))


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}, "symmetric"),
        (ALL.public("k1") | {"d": "AQAB"}, "it is private"),
        (ALL.public("k1") | {"use": "enc"}, "not for signatures"),
        (ALL.public("k1") | {"key_ops": ["encrypt"]}, "not to verify"),
        (ALL.public("k1") | {"key_ops": 5}, "its key_ops is no list of texts"),
        (ALL.public("k1") | {"key_ops": True}, "its key_ops is no list of texts"),
        (ALL.public("k1") | {"key_ops": "verify"}, "its key_ops is no list of texts"),
        (ALL.public("k1") | {"key_ops": ["verify", {}]}, "its key_ops is no list of texts"),
        (ALL.public("k1") | {"crv": []}, "its crv is no text"),
        (ALL.public("k1") | {"crv": {}}, "its crv is no text"),
        (ALL.public("EdDSA") | {"crv": 5}, "its crv is no text"),
        (ALL.public("k1") | {"alg": []}, "its alg"),
        (ALL.public("k1") | {"alg": "HS256"}, "its alg"),
        (ALL.public("k1") | {"alg": "ES384"}, "its alg"),
        (ALL.public("k1") | {"crv": "secp256k1"}, "its type or curve"),
        (ALL.public("k1") | {"x": "!"}, "missing or malformed"),
        ({"kty": "EC", "crv": "P-256"}, "missing or malformed"),
        ({"kty": "RSA", "n": "AQ", "e": "AQAB"}, "missing or malformed"),
        (ALL.public("k1") | {"kid": 7}, "its kid"),
        (ALL.public("k1") | {"kid": "k" * 256}, "its kid"),
        (weak(), "RSA of 1024 bits; 2048 to 8192"),
        ({"kty": "AKP"}, "its type or curve"),
        ("k1", "not a JSON object"),
    ],
)
def test_a_key_that_cannot_be_used_is_passed_over_with_the_reason(key, why):
    with pytest.raises(ValueError, match=rf"no key in it can be used: key 1: .*{why}"):
        parse_keys(encoded(key))
    keys = parse_keys(encoded(key, ALL.public("ES512")))
    assert [one.key_id for one in keys.keys] == ["ES512"]
    assert len(keys.passed_over) == 1 and why in keys.passed_over[0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"<html>log in</html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", 'no list of "keys"'),
        (b'{"keys": {}}', 'no list of "keys"'),
        (b'{"keys": []}', "it is empty"),
        (encoded(*[{}] * 257), "257 keys; 256 at most"),
        (b" " * 1024 * 1024 + b"{}", "larger than"),
    ],
)
def test_what_is_no_key_set_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        parse_keys(data)


def test_a_token_that_names_no_key_must_leave_no_choice():
    keys = parse_keys(json.dumps(ALL.key_set()).encode())
    assert keys.has(None) and keys.has("k1") and not keys.has("k2") and not keys.has("")
    assert keys.find(None, "ES384") == keys.find("ES384", "ES384") == (keys.keys[2],)
    assert keys.find("ES384", "ES256") == ()
    twice = parse_keys(encoded(ALL.public("k1"), ALL.public("k1") | {"kid": "k2"}))
    assert twice.find(None, "ES256") == () and twice.find("k2", "ES256") == (twice.keys[1],)


def test_keys_of_one_name_are_all_found_but_not_without_end():
    same = [ALL.public(name) | {"kid": "k"} for name in ("k1", "ES384", "k1")]
    keys = parse_keys(encoded(*same))
    assert keys.find("k", "ES256") == (keys.keys[0], keys.keys[2])
    many = parse_keys(encoded(*same * 20))
    assert len(many.find("k", "ES256")) == MAX_KEYS_TRIED


def test_values_of_other_types_are_keys_that_cannot_be_used():
    given = {"keys": [ALL.public("k1") | {"use": "sig", "key_ops": ["verify"], "alg": "ES256"}]}
    for seed in range(500):
        with suppress(ValueError):
            parse_keys(json.dumps(retyped(given, Random(seed))).encode())
