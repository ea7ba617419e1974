"""Decide on the newest image and make it true: for handlers that change metadata.

Two decisions on the same image could contradict each other, so a decision is a function that the
node calls when its turn has come (``Node.propose``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kept.cluster.image import Image
from kept.cluster.records import MetadataRecord

if TYPE_CHECKING:
    from kept.node.server import Node

T = TypeVar("T")


async def decide(node: Node, decision: Callable[[Image], tuple[T, Sequence[MetadataRecord]]]) -> T:
    """Run ``decision`` on the newest image, make its records durable and applied, give its answer.

    ``decision`` returns (answer, records); without records nothing is written. Its errors pass
    through, as do those of the disk.
    """
    answers: list[T] = []

    def change(image: Image) -> Sequence[MetadataRecord]:
        answer, records = decision(image)
        answers.append(answer)
        return records

    await node.propose(change)
    return answers[0]
