"""IP addresses, which are compared as addresses, not as text, and shared out by networks."""

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


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Where an address counts when places are shared out: an IPv4 address by itself, one of IPv6 in
    its network of 64 bits, since whoever has one of those has them all. Text that is no address
    counts by itself.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"
