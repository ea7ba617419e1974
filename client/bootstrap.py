"""How a cluster is reached: by which addresses, and secured how."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from kept.client.security.properties import read_properties
from kept.client.security.security import PLAINTEXT, Security
from kept.storage.errors import ConfigurationError


class Bootstrap(NamedTuple):
    """``host:port[,…]`` of some of its nodes, and the security of all its clients.
    ``command_config``: the file that says so, for whoever has to read it again elsewhere.
    """

    servers: str
    security: Security = PLAINTEXT
    command_config: str = ""

    def __str__(self) -> str:
        return self.servers

    @classmethod
    def of(cls, given: str | Bootstrap) -> Bootstrap:
        """Addresses alone mean no security."""
        return given if isinstance(given, Bootstrap) else cls(given)


def read_security(path: str) -> Security:
    """The security that a file of properties says. Raises ConfigurationError with its path."""
    properties = read_properties(path)
    try:
        return Security(properties)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def other_readers(path: str) -> str:
    """Whom the mode of a file lets read it besides its owner: ``its group``, ``everybody``, or
    ``""``.
    """
    mode = os.stat(path).st_mode
    if mode & stat.S_IROTH:
        return "everybody"
    return "its group" if mode & stat.S_IRGRP else ""
