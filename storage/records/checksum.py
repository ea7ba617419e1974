"""CRC-32C for the paths that both kernels share.

The compiled kernel has its own; the ``crc32c`` package serves where there is none. It is imported
at first use, because its import costs 20 ms.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

from kept.storage.records.header import Buffer


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of ``data``, continuing ``crc``."""
    return _chosen()(data, crc)


@cache
def _chosen() -> Callable[[Buffer, int], int]:
    if os.environ.get("KEPT_KERNEL") != "python":
        try:
            from kept.storage.records._kernel import crc32c as compiled
        except ImportError:
            pass  # no compiler at install time
        else:
            return compiled
    return package_crc32c


def package_crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of ``data``, continuing ``crc``, by the ``crc32c`` package."""
    from crc32c import crc32c as package

    return package(data, crc)
