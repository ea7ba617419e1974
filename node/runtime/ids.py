"""New ids of topics, directories and clusters."""

from __future__ import annotations

import uuid

from kept.storage.layout import encode_uuid


def new_id() -> uuid.UUID:
    """A random id whose text does not begin with a dash, as Kafka's."""
    while True:
        candidate = uuid.uuid4()
        if not encode_uuid(candidate).startswith("-"):
            return candidate
