"""Decisions of a real node's controller that a test takes itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.cluster.metadata.records import MetadataRecord
    from kept.node.node import Node


def propose(node: Node, records: Sequence[MetadataRecord]) -> asyncio.Task[None]:
    """Make records true; done when they are acted on, down to the logs that they create."""
    return asyncio.ensure_future(node.parts.metadata_changes.decide(lambda _: (None, records)))
