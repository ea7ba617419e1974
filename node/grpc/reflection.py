"""What reflection looks names up in: protobuf's own pool, and in it methods and fields, too.

Python's pool finds the files of services and messages alone; ``grpcurl describe`` and other clients
ask for ``broker.Broker.Produce`` as well, which reflection's protocol allows.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool


class Symbols:
    """A descriptor pool as reflection uses one."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - the pool's name
        """The file that defines a symbol. Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            owner, _, member = symbol.rpartition(".")
            file = self._pool.FindFileContainingSymbol(owner)
            if member in self._members(owner):
                return file
            raise

    def _members(self, owner: str) -> Any:
        try:
            return self._pool.FindServiceByName(owner).methods_by_name
        except KeyError:
            return self._pool.FindMessageTypeByName(owner).fields_by_name
