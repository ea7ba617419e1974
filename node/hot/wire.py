"""The varints and tagged fields of :mod:`kept.client.wire`."""

from kept.client.wire import read_uvarint, skip_tags, tags, uvarint

__all__ = ["read_uvarint", "skip_tags", "tags", "uvarint"]
