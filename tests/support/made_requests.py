"""Requests of every API that say something in each field, made from the schemas."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from tests.node.largest_requests import NUMBERS


def made(cls: Any, name: str) -> dict[str, Any]:
    """Values of a message with one element in each array, whose texts are ``name``."""
    hints = get_type_hints(cls)
    values = {}
    for field in fields(cls):
        kind = str(field.metadata.get("kafka_type", "entity"))
        hint = hints[field.name]
        inner = next((arg for arg in (hint, *get_args(hint)) if get_origin(arg) is tuple), None)
        if inner is not None:
            element = get_args(inner)[0]
            values[field.name] = [
                made(element, name)
                if hasattr(element, "__dataclass_fields__")
                else _value(field.name, kind, name)
            ]
        elif "tag" not in field.metadata and kind != "entity":
            values[field.name] = _value(field.name, kind, name)
    return values


def about_each(values: Any, name: str, names: tuple[str, ...]) -> Any:
    """What was made of ``name``, of each of ``names`` in their order: in each array, alike within
    an element.
    """

    def named(value: Any, other: str) -> Any:
        if isinstance(value, list):
            return about_each(value, name, names)
        return other if value == name else value

    if isinstance(values, list) and "'" + name + "'" in repr(values):
        (one,) = values
        if not isinstance(one, dict):
            return list(names)
        return [{key: named(value, other) for key, value in one.items()} for other in names]
    if isinstance(values, dict):
        return {key: named(value, names[0]) for key, value in values.items()}
    return values


def _value(field: str, kind: str, name: str) -> Any:
    if kind == "string":
        return name
    if kind == "uuid":
        return None
    if kind == "bool":
        return False
    if kind in ("bytes", "records"):
        return b"none"
    return NUMBERS.get(field, 0)
