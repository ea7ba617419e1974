"""A JSON Web Key Set (RFC 7517): the public keys by which an issuer's tokens are believed.

Only keys for signatures of RSA, ECDSA and EdDSA are taken. Others (symmetric ones, keys for
encryption, private ones, weak ones) are passed over with the reason, and a set without a key that
can be used is refused. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import jwt
from msgspec import Struct

MAX_SET_BYTES: Final = 1024 * 1024
MAX_KEYS: Final = 256
MAX_KEY_ID_CHARACTERS: Final = 255
MAX_KEYS_TRIED: Final = 8
"""Of those with one name: each costs a token that names it one check of its signature."""
MIN_RSA_BITS: Final = 2048
"""As Kafka's library, jose4j, has it."""
MAX_RSA_BITS: Final = 8192
"""A signature of a longer key takes the loop milliseconds to check."""

RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
EC_ALGORITHMS: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
EDDSA: Final = "EdDSA"
EDDSA_CURVES: Final = ("Ed25519", "Ed448")
ALGORITHMS: Final = frozenset((*RSA_ALGORITHMS, *EC_ALGORITHMS.values(), EDDSA))
"""Algorithms of tokens that are believed: all by public keys. HS* would take what everybody knows,
the public key, for a secret; ``none`` has no signature."""

_PRIVATE: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})
_REASONS_SHOWN: Final = 3


class JsonWebKey(Struct, frozen=True, eq=False):
    """A public key, and the algorithms that it may be used with. ``key_id`` is "" where it has
    none.
    """

    key_id: str
    public: Any
    algorithms: tuple[str, ...]


class JsonWebKeys(Struct, frozen=True, eq=False):
    """Those of a set that can be used. ``passed_over``: why each of the others cannot."""

    keys: tuple[JsonWebKey, ...] = ()
    passed_over: tuple[str, ...] = ()

    def has(self, key_id: str | None) -> bool:
        """Whether a token that names this key (None: it names none) may be signed by one of it."""
        return any(self._named(key_id))

    def find(self, key_id: str | None, algorithm: str) -> tuple[JsonWebKey, ...]:
        """The keys by which a token may be signed, of one name :data:`MAX_KEYS_TRIED` at most. One
        that names no key must leave no choice.
        """
        fitting = tuple(key for key in self._named(key_id) if algorithm in key.algorithms)
        if key_id is None and len(fitting) != 1:
            return ()
        return fitting[:MAX_KEYS_TRIED]

    def _named(self, key_id: str | None) -> tuple[JsonWebKey, ...]:
        if key_id is None:
            return self.keys
        return tuple(key for key in self.keys if key.key_id == key_id)


def parse_keys(data: bytes) -> JsonWebKeys:
    """The set that ``data`` holds. Raises ValueError, which says why it is none, or why no key of
    it can be used.
    """
    if len(data) > MAX_SET_BYTES:
        raise ValueError(f"larger than {MAX_SET_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("not JSON: a JSON Web Key Set is wanted") from None
    listed = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise ValueError('no JSON Web Key Set: it has no list of "keys"')
    if len(listed) > MAX_KEYS:
        raise ValueError(f"{len(listed)} keys; {MAX_KEYS} at most are taken")
    keys: list[JsonWebKey] = []
    passed_over: list[str] = []
    for number, one in enumerate(listed, 1):
        try:
            keys.append(_key(one))
        except ValueError as error:
            passed_over.append(f"key {number}: {error}")
    if not keys:
        shown = "; ".join(passed_over[:_REASONS_SHOWN]) or "it is empty"
        raise ValueError(f"no key in it can be used: {shown}")
    return JsonWebKeys(tuple(keys), tuple(passed_over))


def _key(given: object) -> JsonWebKey:
    """One key. Raises ValueError with what is wrong, and nothing of its values."""
    if not isinstance(given, dict):
        raise ValueError("not a JSON object")
    key_id = given.get("kid", "")
    if not isinstance(key_id, str) or len(key_id) > MAX_KEY_ID_CHARACTERS:
        raise ValueError(f"its kid is no text of at most {MAX_KEY_ID_CHARACTERS} characters")
    if given.get("kty") == "oct":
        raise ValueError("it is symmetric: whoever knows it could make tokens")
    if not _PRIVATE.isdisjoint(given):
        raise ValueError("it is private: the issuer alone may know it")
    if given.get("use", "sig") != "sig":
        raise ValueError("it is not for signatures (use)")
    operations = given.get("key_ops")
    if operations is not None and not _is_list_of_texts(operations):
        raise ValueError("its key_ops is no list of texts")
    if operations and "verify" not in operations:
        raise ValueError("it is not to verify signatures (key_ops)")
    algorithms = _algorithms(given)
    try:
        public = jwt.PyJWK(given, algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise ValueError("its numbers are missing or malformed") from None
    if given["kty"] == "RSA" and not MIN_RSA_BITS <= public.key_size <= MAX_RSA_BITS:
        raise ValueError(f"RSA of {public.key_size} bits; {MIN_RSA_BITS} to {MAX_RSA_BITS} may be")
    return JsonWebKey(key_id, public, algorithms)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _algorithms(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that a key's type, its curve and its ``alg`` allow. Raises ValueError."""
    curve = given.get("crv")
    if curve is not None and not isinstance(curve, str):
        raise ValueError("its crv is no text")
    possible: tuple[str, ...] = ()
    if given.get("kty") == "RSA":
        possible = RSA_ALGORITHMS
    elif given.get("kty") == "EC" and curve in EC_ALGORITHMS:
        possible = (EC_ALGORITHMS[curve],)
    elif given.get("kty") == "OKP" and curve in EDDSA_CURVES:
        possible = (EDDSA,)
    if not possible:
        raise ValueError("its type or curve is none of RSA, P-256, P-384, P-521, Ed25519, Ed448")
    only = given.get("alg")
    if only is None or (possible == (EDDSA,) and only == curve):  # RFC 9864
        return possible
    if only not in possible:
        raise ValueError("its alg is not one that its type can have, or not taken here")
    return (only,)
