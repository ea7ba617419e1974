"""What no range expresses: checks of single settings. Each raises ValueError for a wrong value."""

from __future__ import annotations

import re
from typing import Final

BUILT_IN_STRATEGIES: Final = ("latest", "latest-n", "highest-version", "by-key-prefix")
"""Compaction strategies that need no entry point."""

STANDARD_AUTHORIZER: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
"""The one value of ``authorizer.class.name`` that there is, besides none."""

_THROTTLE: Final = re.compile(r"[0-9]+:[0-9]+")
_PREFIX_ITEM: Final = re.compile(r"[^=,]+=(latest|latest-n:[1-9][0-9]*|highest-version(:[^,:=]+)?)")


def check_throttled(value: tuple[str, ...]) -> None:
    """Replicas as ``partition:broker``, or ``*`` for all. Raises ValueError."""
    if value != ("*",) and any(not _THROTTLE.fullmatch(item) for item in value):
        raise ValueError("Must be the literal '*' or a list of replicas [partitionId]:[brokerId]")


def parse_prefixes(text: str) -> tuple[tuple[str, str], ...]:
    """``"user.=latest-n:3,cfg.=latest"`` as ((prefix, strategy), ...). Raises ValueError."""
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not _PREFIX_ITEM.fullmatch(item):
            raise ValueError(
                f"{item!r} is not PREFIX=STRATEGY with a strategy of latest, latest-n:N, "
                "highest-version or highest-version:HEADER"
            )
    pairs = tuple((item[: item.index("=")], item[item.index("=") + 1 :]) for item in items)
    if len({prefix for prefix, _ in pairs}) != len(pairs):
        raise ValueError("a prefix is given twice")
    return pairs


def check_strategy_name(value: str) -> None:
    """A name that an entry point may have; whether one is installed is known later."""
    if not re.fullmatch(r"[A-Za-z0-9_.\-]+", value):
        raise ValueError(f"not a strategy's name; built in: {', '.join(BUILT_IN_STRATEGIES)}")


def check_not_blank(value: str) -> None:
    """A text of at least one character. Raises ValueError."""
    if not value:
        raise ValueError("must not be empty")


def parse_super_users(text: str) -> frozenset[str]:
    """``User:admin;User:CN=a,OU=b`` as principals. Raises ValueError."""
    principals = frozenset(filter(None, (part.strip() for part in text.split(";"))))
    for principal in principals:
        if not principal.partition(":")[2]:
            raise ValueError(
                f"{principal!r} has no type: write principals as User:name, with ; between them"
            )
    return principals


def check_authorizer_class(text: str) -> None:
    """Raises ValueError for a class of Java's that is not Kafka's own authorizer."""
    if text not in ("", STANDARD_AUTHORIZER):
        raise ValueError(f"kept runs no Java classes: leave it empty, or set {STANDARD_AUTHORIZER}")


def check_super_users(text: str) -> None:
    """Raises ValueError where :func:`parse_super_users` does."""
    parse_super_users(text)
