"""What a request of HTTP says besides its path."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from kept.client.protocol.bounds import check_string
from kept.node.http.messages import HttpRequest
from kept.storage.errors import InvalidRequest
from kept.storage.types import MAX_INT64, TopicPartition


class Parameters:
    """The parameters of a request: its query's, or its body's where it is a POST."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.given: Mapping[str, Any] = request.body if request.method == "POST" else request.query

    def check_names(self, known: Sequence[str]) -> None:
        """Raise InvalidRequest where one is none of ``known``."""
        for name in self.given:
            if name not in known:
                raise InvalidRequest(
                    f"unknown parameter {name}; there are {', '.join(known) or 'none'}"
                )

    def text(self, name: str) -> str:
        """A text that has to be there. Raises InvalidRequest, as the others do."""
        value = self.given.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} is missing")
        check_string(name, value)
        return value

    def optional_number(self, name: str) -> int | None:
        """A number from 0 on, if it is there."""
        return None if self.given.get(name) is None else self.number(name)

    def number(self, name: str) -> int:
        """A number from 0 on that has to be there. Raises InvalidRequest."""
        value = self.given.get(name)
        if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 20:
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT64:
            return value
        raise InvalidRequest(f"{name} must be a number, 0 or more")

    def flag(self, name: str) -> bool:
        """A yes or no; no where it is not there. Raises InvalidRequest."""
        value = self.given.get(name, False)
        if value in (True, "true", "1"):
            return True
        if value in (False, "false", "0"):
            return False
        raise InvalidRequest(f"{name} must be true or false")

    def partition(self) -> TopicPartition:
        """``topic`` and ``partition``, which have to be there."""
        return TopicPartition(self.text("topic"), self.number("partition"))

    def key(self) -> bytes | None:
        """A record's key as text (``key``) or base64 (``key_base64``), if it is there."""
        return self.data("key")

    def data(self, name: str) -> bytes | None:
        """Bytes as text (``name``) or base64 (``name_base64``), if they are there; null: none."""
        return _data(self.given, name)

    def texts(self, name: str) -> list[str]:
        """A list of texts; an empty one where it is not there. Raises InvalidRequest."""
        value = self.given.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise InvalidRequest(f"{name} must be a list of texts")
        for text in value:
            check_string(name, text)
        return value

    def settings(self, name: str) -> dict[str, str]:
        """Settings with their values, which are texts; none where it is not there. Raises
        InvalidRequest.
        """
        value = self.given.get(name) or {}
        if not isinstance(value, dict):
            raise InvalidRequest(f'{name} must be an object such as {{"segment.bytes": "1048576"}}')
        for setting, text in value.items():
            check_string(f"{name}: a setting's name", setting)
            if not isinstance(text, str):
                raise InvalidRequest(f"{name}: the value of {setting} must be a text")
        return value

    def headers(self, name: str, most: int) -> tuple[tuple[str, bytes | None], ...]:
        """Headers of a record: objects with ``name`` and ``value`` or ``value_base64``. Raises
        InvalidRequest.
        """
        value = self.given.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise InvalidRequest(f"{name} must be a list of objects with name and value")
        if len(value) > most:
            raise InvalidRequest(f"{name}: {len(value)} headers are more than {most}")
        for header in value:
            unknown = header.keys() - {"name", "value", "value_base64"}
            if unknown or not isinstance(header.get("name"), str):
                raise InvalidRequest(f"{name} must be a list of objects with name and value")
        return tuple((header["name"], _data(header, "value")) for header in value)


def _data(given: Mapping[str, Any], name: str) -> bytes | None:
    text, base = given.get(name), given.get(f"{name}_base64")
    if text is not None and base is not None:
        raise InvalidRequest(f"{name} and {name}_base64 are both given; use one of them")
    if base is not None:
        try:
            return base64.b64decode(base, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise InvalidRequest(f"{name}_base64 is not base64: {error}") from error
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a text")
    return None if text is None else text.encode()
