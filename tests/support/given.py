"""Collaborators of a node's parts, for tests that give one part a few of them."""

from __future__ import annotations

from typing import Any


class Given:
    """Exactly what a test gave, by name; anything else is missing with a clear message.

    A name may be a path: ``Given(runtime__loop=loop, config__current=config)`` has ``runtime.loop``
    and ``config.current``.
    """

    def __init__(self, **names: Any) -> None:
        for path, value in names.items():
            *parents, last = path.split("__")
            place = self
            for parent in parents:
                place = vars(place).setdefault(parent, Given())
            setattr(place, last, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the test gave no {name}, only {', '.join(vars(self)) or 'nothing'}")

    def __repr__(self) -> str:
        return f"Given({', '.join(vars(self))})"
