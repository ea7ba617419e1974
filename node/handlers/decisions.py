"""One decision at a time: from the image that it is made on to the entry that makes it true.

The metadata log takes records that fit its newest image; two decisions on the same image could
contradict each other. So whoever changes metadata decides in :func:`decide`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from kept.cluster.image import Image
    from kept.cluster.records import MetadataRecord
    from kept.node.server import Node

T = TypeVar("T")

_LOCKS: Final[WeakKeyDictionary[Node, asyncio.Lock]] = WeakKeyDictionary()


async def decide(node: Node, decision: Callable[[Image], tuple[T, Sequence[MetadataRecord]]]) -> T:
    """Run ``decision`` on the newest image, make its records durable and applied, give its answer.

    ``decision`` returns (answer, records); without records nothing is written. Its errors pass
    through, as do those of the disk.
    """
    async with _LOCKS.setdefault(node, asyncio.Lock()):
        answer, records = decision(node.image)
        if records:
            await node.propose(list(records))
    return answer
