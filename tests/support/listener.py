"""A node that writes down what a partition asks of it."""

from __future__ import annotations

from typing import Any


class RecordedListener:
    """A :class:`kept.replication.replica.PartitionListener`: effects and reports, in order."""

    def __init__(self, effects: list[Any] | None = None) -> None:
        self.effects: list[Any] = [] if effects is None else effects
        self.errors: list[Any] = []

    def perform(self, effect: Any) -> None:
        self.effects.append(effect)

    def machine_failed(self, error: Any) -> None:
        self.errors.append(error)

    def check_cut(self) -> None:
        pass

    def prepare_cut(self, preparation: Any) -> None:
        preparation.run()
