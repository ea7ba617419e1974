"""Why one of a host's addresses cannot be connected to, where that says nothing of the host."""

from __future__ import annotations

import errno
from typing import Final

UNUSABLE_ADDRESS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH})
"""This machine has no use of the address, as of ``::1`` in a container without IPv6: that says less
than what came of another one. EADDRNOTAVAIL also means that no local port is free; then it comes of
each address, and is told.
"""
