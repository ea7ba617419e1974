"""IP addresses, which are compared as addresses, not as text."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address


@lru_cache(maxsize=4096)
def canonical_address(text: str) -> str:
    """The one spelling of an address: one of IPv6 in its shortest form, an IPv4 address that is
    written as IPv6 as IPv4. Raises ValueError for what is no address.
    """
    address = ip_address(text)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)
