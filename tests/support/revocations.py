"""How often it is asked whether work may go on: by counts, since machines may be slow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kept.node.security.revocation import CHECK_S, run_while_allowed


class Checks:
    """The questions that ``module`` asks of what it serves, one every second at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        assert CHECK_S <= 1.0
        self.asked = 0
        self._taken_after = 0

        def counted(work: Awaitable[Any], is_allowed: Callable[[], bool]) -> Any:
            def ask() -> bool:
                self.asked += 1
                return is_allowed()

            return run_while_allowed(work, ask)

        monkeypatch.setattr(module, "run_while_allowed", counted)

    def taken(self) -> None:
        """The right was taken away just now."""
        self._taken_after = self.asked

    @property
    def since(self) -> int:
        """So many were asked since."""
        return self.asked - self._taken_after
