"""Starts the parts of a node that are not on every request's way: groups, cleaner, metrics."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.server import Node


def start(node: Node) -> None:
    """Start what is there."""
    if importlib.util.find_spec("kept.node.metrics") is not None:
        from kept.node import metrics

        node.metrics = metrics.Metrics(node)
    if importlib.util.find_spec("kept.node.groups.coordinator") is not None:
        from kept.node.groups.coordinator import Coordinator

        node.groups = Coordinator(node)
        node.groups.start()
