"""Bugs on purpose: each breaks one rule in the running code, and a checker must say which.

A plant is a set of replacements (as ``mock.patch``) that hold while one history runs. Each has a
stage, the checks that may fire, and the seed from which one is looked for that finds it, and is
clean without it (``test_planted.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any
from unittest import mock

Patch = tuple[str, Callable[[Any], Any]]
"""(dotted name of what is replaced, its replacement made from the original)."""


@dataclass(frozen=True)
class Bug:
    """One planted bug. ``rule``: what it breaks, in words; ``seed``, or one soon after,
    shows it.
    """

    name: str
    stage: str
    seed: int
    checks: tuple[str, ...]
    rule: str
    patches: tuple[Patch, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the code while this is open."""
        with ExitStack() as stack:
            for name, make in self.patches:
                target, attribute, original = resolved(name)
                stack.enter_context(mock.patch.object(target, attribute, make(original)))
            yield


def resolved(name: str) -> tuple[Any, str, Any]:
    """The holder of what a patch replaces, its attribute, and what it is.

    Raises ImportError, AttributeError or KeyError where nothing has that name (any more).
    """
    holder, _, attribute = name.rpartition(".")
    target = resolve_name(holder)
    return target, attribute, target.__dict__[attribute]


PLANTED: dict[str, Bug] = {}


def plant(
    name: str, stage: str, seed: int, checks: str, rule: str, *patches: Patch, **options: Any
) -> None:
    """Register a bug. A name that was changed since is noticed here."""
    for patched, _ in patches:
        resolved(patched)
    PLANTED[name] = Bug(name, stage, seed, tuple(checks.split()), rule, patches, options)


from tests.sim import (  # noqa: E402
    planted_compaction,
    planted_coordinators,
    planted_groups,
    planted_node,
    planted_raft,
    planted_replicas,
    planted_security,
    planted_transactions,
)

__all__ = [
    "PLANTED",
    "Bug",
    "plant",
    "planted_compaction",
    "planted_coordinators",
    "planted_groups",
    "planted_node",
    "planted_raft",
    "planted_replicas",
    "planted_security",
    "planted_transactions",
]
