"""Certificates and keys in PEM: from files or as text, checked before OpenSSL sees them.

Stores are PEM only. Java's own formats (JKS, PKCS12) are refused with the command line that turns
them into PEM. Kafka's rules for PEM hold (``DefaultSslEngineFactory.PemStore``): a key store has
one private key and the chain that belongs to it, a trust store certificates.
"""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from msgspec import Struct

from kept.client.security.certificates import Certificate, parse_certificate
from kept.storage.errors import ConfigurationError

MAX_STORE_BYTES: Final = 1 << 20
"""A file of certificates is a few kilobytes; the roots of all browsers are 200."""

_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_CERTIFICATE: Final = ("CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE")
_JKS: Final = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")


class Place(Struct, frozen=True):
    """Where PEM comes from: the setting, and the file that it names ("": it is the text)."""

    setting: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.setting}={self.path}" if self.path else self.setting

    def refuse(self, why: str) -> NoReturn:
        """Raise ConfigurationError."""
        raise ConfigurationError(f"{self}: {why}")


class KeyStore(Struct, frozen=True):
    """What one side shows of itself: ``key`` and ``chain``, its certificate first, as PEM."""

    key: str
    chain: str
    leaf: Certificate
    key_password: str
    place: Place

    def __repr__(self) -> str:
        return f"KeyStore({self.place}, subject={self.leaf.subject.hex()})"


class TrustStore(Struct, frozen=True):
    """Certificates that are trusted, and sign others, as PEM."""

    certificates: str
    place: Place

    def __repr__(self) -> str:
        return f"TrustStore({self.place})"


def read_store(place: Place, store_type: str, kind: str) -> str:
    """The text of a PEM file. ``kind`` is "keystore" or "truststore", as the settings have it.

    Raises ConfigurationError for a file that cannot be read, and for JKS and PKCS12.
    """
    check_store_type(place, store_type, kind)
    try:
        with open(place.path, "rb") as source:
            data = source.read(MAX_STORE_BYTES + 1)
    except OSError as error:
        where = "" if os.path.isabs(place.path) else f" (a relative path begins at {os.getcwd()})"
        place.refuse(f"{error.strerror}{where}")
    if len(data) > MAX_STORE_BYTES:
        place.refuse(f"larger than {MAX_STORE_BYTES} bytes; not a file of certificates")
    if data.startswith(_JKS):
        place.refuse(f"this is a Java key store (JKS); {_converting(place.path, 'JKS', kind)}")
    if data.startswith((b"\x30\x82", b"\x30\x80")):
        place.refuse(f"this is DER or PKCS12, not PEM; {_converting(place.path, 'PKCS12', kind)}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        place.refuse("not PEM: it is no text")


def check_store_type(place: Place, store_type: str, kind: str) -> None:
    """Raises ConfigurationError for any type but PEM."""
    if store_type.upper() != "PEM":
        raise ConfigurationError(
            f"ssl.{kind}.type={store_type}: only PEM is read; "
            f"{_converting(place.path or 'store', store_type.upper(), kind)}, and set "
            f"ssl.{kind}.type=PEM"
        )


def _converting(path: str, store_type: str, kind: str) -> str:
    stem = path.removesuffix(".jks").removesuffix(".p12").removesuffix(".pfx")
    if kind == "truststore":
        return f"convert it with: keytool -list -rfc -keystore {path} > {stem}.pem"
    if store_type == "PKCS12":
        return f"convert it with: openssl pkcs12 -in {path} -out {stem}.pem"
    return (
        f"convert it with: keytool -importkeystore -srckeystore {path} -destkeystore {stem}.p12 "
        f"-deststoretype PKCS12 && openssl pkcs12 -in {stem}.p12 -out {stem}.pem"
    )


def key_store(
    key: str, chain: str, key_password: str, key_place: Place, chain_place: Place
) -> KeyStore:
    """The key and the chain of two texts, which may be the same one. Raises ConfigurationError."""
    keys = [body for label, body in _blocks(key, key_place) if label.endswith("PRIVATE KEY")]
    if len(keys) != 1:
        key_place.refuse(f"{len(keys) or 'no'} private keys in it; one is wanted, in PKCS#8 PEM")
    encrypted = "ENCRYPTED" in keys[0]
    if encrypted and not key_password:
        key_place.refuse("the private key is encrypted, and ssl.key.password is not set")
    certificates = _certificates(chain, chain_place)
    return KeyStore(
        keys[0],
        "".join(text for text, _ in certificates),
        certificates[0][1],
        key_password,
        chain_place,
    )


def trust_store(text: str, place: Place) -> TrustStore:
    """The certificates of a text. Raises ConfigurationError."""
    return TrustStore("".join(pem for pem, _ in _certificates(text, place)), place)


def _certificates(text: str, place: Place) -> list[tuple[str, Certificate]]:
    found = []
    for label, pem in _blocks(text, place):
        if label in _CERTIFICATE:
            try:
                found.append((pem, parse_certificate(_der(pem))))
            except ValueError as error:
                place.refuse(f"certificate {len(found) + 1} cannot be read: {error}")
    if not found:
        place.refuse("no certificate in it (-----BEGIN CERTIFICATE-----)")
    return found


def _blocks(text: str, place: Place) -> Iterator[tuple[str, str]]:
    """Label and PEM text of each block; text that was folded into one line is laid out again."""
    blocks = _BLOCK.findall(text)
    if not blocks:
        place.refuse("not PEM: there is no -----BEGIN …----- with its -----END …-----")
    for label, body in blocks:
        lines = body
        if ":" not in body:  # else the old encryption's header, whose lines count
            packed = "".join(body.split())
            lines = "\n".join(["", *(packed[i : i + 64] for i in range(0, len(packed), 64)), ""])
        yield label, f"-----BEGIN {label}-----{lines}-----END {label}-----\n"


def _der(pem: str) -> bytes:
    body = "".join(pem.splitlines()[1:-1])
    try:
        return binascii.a2b_base64(body, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(f"its Base64 is damaged ({error})") from None


@contextmanager
def as_file(text: str, place: Place) -> Iterator[str]:
    """A path under which ``text`` can be read while the context lasts, though it is on no disk."""
    if not hasattr(os, "memfd_create"):  # not Linux
        if not place.path:
            place.refuse("given as text, which this system has no file in memory for; give a file")
        yield place.path
        return
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode())
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
