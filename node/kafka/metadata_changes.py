"""Changes of the metadata, decided on the newest image: for handlers that change metadata.

Two decisions on the same image could contradict each other, so a decision is a function that the
controller calls when its turn has come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kept.cluster.controller import features
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import MetadataRecord
from kept.steps import Steps

if TYPE_CHECKING:
    from kept.node.controller.controller import Controller
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.log_lifecycle import LogLifecycle

T = TypeVar("T")
Decided = tuple[T, Sequence[MetadataRecord]]
"""(answer, records)"""


@dataclass(frozen=True, slots=True)
class MetadataChanges:
    """Proposes decisions to this node's controller; ``logs`` come and go with the metadata."""

    controller: Controller
    metadata: MetadataLog
    logs: LogLifecycle

    def check_security(self, image: Image) -> None:
        """Raises UnsupportedVersion, which names the nodes that are in the way, unless ACLs, SCRAM
        credentials and client quotas may be written: for decisions.
        """
        lacking = self.controller.sessions.brokers_without_feature(features.SECURITY, 1)
        features.check_security(image, lacking)

    async def decide(self, decision: Callable[[Image], Decided[T] | Steps[Decided[T]]]) -> T:
        """Run ``decision`` on the newest image, make its records durable, applied, and acted on
        here, down to the logs that they create or delete; give its answer.

        ``decision`` returns (answer, records), as a generator where it decides on many things;
        without records nothing is written. Its errors pass through, as do those of the disk.
        """
        answers: list[T] = []

        def change(image: Image) -> Sequence[MetadataRecord] | Steps[Sequence[MetadataRecord]]:
            outcome = decision(image)
            if isinstance(outcome, Generator):
                return in_steps(outcome)
            answer, records = outcome
            answers.append(answer)
            return records

        def in_steps(steps: Steps[Decided[T]]) -> Steps[Sequence[MetadataRecord]]:
            answer, records = yield from steps
            answers.append(answer)
            return records

        index = await self.controller.decide(change)
        await self.metadata.acted(index)
        await self.logs.done(index)
        return answers[-1]
