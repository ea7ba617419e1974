"""Which of many alike cases run with ``make test``, and which with ``make test-slow`` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(values: Iterable[Any], fast: int) -> list[Any]:
    """Parameters of which all but the first ``fast`` are marked slow."""
    return [
        value if at < fast else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]
