"""In which order a node starts its parts, where another order loses something."""

from __future__ import annotations

import asyncio

from kept.node.node import Node
from tests.support.given import Given


def test_the_controller_watches_the_metadata_log_before_it_ticks() -> None:
    """A node that is elected at once, by the first tick, would not know that it is to control."""
    started: list[str] = []

    async def start(part: str) -> None:
        started.append(part)

    node = Node.__new__(Node)
    node.parts = Given(  # type: ignore[assignment]
        controller__start=lambda: started.append("controller"),
        cluster_link__start=lambda: start("cluster link"),
        cluster_link__cluster_id=lambda: start("cluster id"),
        maintenance__start_job=lambda name: started.append(name),
    )
    asyncio.run(node._meet(Given(start=lambda: start("listener"))))  # type: ignore[arg-type]
    assert started == ["controller", "cluster link", "listener", "idle connections", "cluster id"]
