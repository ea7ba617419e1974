"""What is read of an X.509 certificate: its subject, its names, and when it is valid.

A walker over DER (X.690) of our own: ``SSLSocket.getpeercert()`` gives the parts of a subject
without their types, and none for a certificate that it has not verified. Lengths and numbers of
elements are bounded; nothing recurses. Signatures are OpenSSL's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Final

from msgspec import Struct

MAX_CERTIFICATE_BYTES: Final = 64 * 1024
MAX_ELEMENTS: Final = 1024
"""Elements of one sequence or set: names, extensions."""

SEQUENCE: Final = 0x30
SET: Final = 0x31
OID: Final = 0x06
_OCTETS: Final = 0x04
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_VERSION: Final = 0xA0
_EXTENSIONS: Final = 0xA3
_SUBJECT_ALT_NAME: Final = b"\x55\x1d\x11"
_DNS_NAME: Final = 0x82
_IP_ADDRESS: Final = 0x87


class Certificate(Struct, frozen=True):
    """``subject`` is the distinguished name as DER (``kept.client.security.distinguished_names``);
    ``names`` are the DNS names and addresses that it is for; the times are seconds since 1970.
    """

    subject: bytes
    names: tuple[str, ...]
    not_before: float
    not_after: float


def element(data: bytes, position: int, end: int) -> tuple[int, int, int]:
    """Tag, start and end of the value of the element at ``position``. Raises ValueError."""
    if position + 2 > end:
        raise ValueError("DER ends inside an element")
    tag, length = data[position], data[position + 1]
    start = position + 2
    if tag & 0x1F == 0x1F:
        raise ValueError("DER with a tag of several bytes")
    if length >= 0x80:
        count = length & 0x7F
        if not 1 <= count <= 4 or start + count > end:
            raise ValueError("DER with a length that is none")
        length = int.from_bytes(data[start : start + count], "big")
        start += count
    if start + length > end:
        raise ValueError("DER ends inside an element")
    return tag, start, start + length


def elements(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Tag, start and end of the value, and start of the whole, of each element of a value."""
    for _ in range(MAX_ELEMENTS):
        if start >= end:
            return
        tag, value, stop = element(data, start, end)
        yield tag, value, stop, start
        start = stop
    if start < end:
        raise ValueError(f"DER with more than {MAX_ELEMENTS} elements")


def _inside(data: bytes, position: int, end: int, tag: int) -> tuple[int, int]:
    found, start, stop = element(data, position, end)
    if found != tag:
        raise ValueError(f"DER has tag {found:#x} where {tag:#x} is wanted")
    return start, stop


def parse_certificate(data: bytes) -> Certificate:
    """A certificate in DER. Raises ValueError."""
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"larger than {MAX_CERTIFICATE_BYTES} bytes")
    start, end = _inside(data, 0, len(data), SEQUENCE)
    start, end = _inside(data, start, end, SEQUENCE)
    fields = list(elements(data, start, end))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    # Serial number, signature, issuer, validity, subject.
    if len(fields) < 6 or fields[3][0] != SEQUENCE or fields[4][0] != SEQUENCE:
        raise ValueError("not an X.509 certificate")
    times = [_time(data, *one[:3]) for one in elements(data, fields[3][1], fields[3][2])]
    if len(times) != 2:
        raise ValueError("not an X.509 certificate: two times are wanted")
    names: tuple[str, ...] = ()
    for tag, value, stop, _ in fields[5:]:
        if tag == _EXTENSIONS:
            names = _alternative_names(data, value, stop)
    subject = data[fields[4][3] : fields[4][2]]
    return Certificate(subject, names, times[0], times[1])


def _time(data: bytes, tag: int, start: int, end: int) -> float:
    text = data[start:end].decode("ascii", "replace")
    if tag == _UTC_TIME and len(text) == 13:
        # RFC 5280: years 50 to 99 are the last century's.
        text = ("19" if text >= "5" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("a time of validity is none")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _alternative_names(data: bytes, start: int, end: int) -> tuple[str, ...]:
    start, end = _inside(data, start, end, SEQUENCE)
    for _, value, stop, _ in elements(data, start, end):
        parts = list(elements(data, value, stop))
        if not parts or data[parts[0][1] : parts[0][2]] != _SUBJECT_ALT_NAME:
            continue
        tag, inner, inner_end, _ = parts[-1]
        if tag != _OCTETS:
            raise ValueError("subjectAltName is no octet string")
        inner, inner_end = _inside(data, inner, inner_end, SEQUENCE)
        return tuple(_name(data, *one[:3]) for one in elements(data, inner, inner_end))
    return ()


def _name(data: bytes, tag: int, start: int, end: int) -> str:
    raw = data[start:end]
    if tag == _DNS_NAME:
        return raw.decode("latin-1").lower()
    if tag == _IP_ADDRESS and len(raw) in (4, 16):
        return str(ip_address(raw))
    return f"{tag:#x}:{raw.hex()}"
