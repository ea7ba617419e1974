"""Values that stand elsewhere: ``${file:PATH:KEY}`` in a file of properties,
``${directory:DIR:NAME}`` in a file of its own, ``${env:NAME}`` in the environment.

These are Kafka's three built-in providers (``FileConfigProvider``, ``DirectoryConfigProvider``,
``EnvVarConfigProvider``) under the names that its documentation gives them, without
``config.providers``. A mounted secret of Kubernetes, one file for each key, fits as it is. What
they name is read anew at each call.
"""

from __future__ import annotations

import os
import re
from typing import Final

from kept.client.security.properties import parse_properties
from kept.storage.errors import ConfigurationError

MAX_FILE_BYTES: Final = 1 << 20

_REFERENCE: Final = re.compile(r"\$\{(?P<provider>\w+):(?P<path>[^:}]*)(?::(?P<key>[^}]*))?\}")


def resolve(setting: str, text: str) -> str:
    """``text`` with the values that it refers to. Raises ConfigurationError, which names
    ``setting`` and the reference, and never a value.
    """

    def value(match: re.Match[str]) -> str:
        try:
            return _value(match["provider"], match["path"], match["key"])
        except (OSError, ValueError, LookupError) as error:
            why = error.strerror if isinstance(error, OSError) else error.args[0]
            raise ConfigurationError(f"{setting}: {match[0]}: {why}") from None

    return _REFERENCE.sub(value, text) if "${" in text else text


def _value(provider: str, path: str, key: str | None) -> str:
    if provider == "env" and key is None:
        if path not in os.environ:
            raise LookupError("there is no such environment variable")
        return os.environ[path]
    if provider == "file" and key:
        found = parse_properties(_text(path), path)
        if key not in found:
            raise LookupError(f"{path} has no {key}")
        return found[key]
    if provider == "directory" and key:
        if key in (".", "..") or "/" in key:
            raise ValueError("a name of a file in that directory is wanted")
        return _text(os.path.join(path, key))
    raise ValueError("${file:PATH:KEY}, ${directory:DIR:NAME} or ${env:NAME} is wanted")


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as source:
        text = source.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return text
