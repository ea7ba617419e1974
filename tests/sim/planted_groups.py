"""Planted bugs of the group coordinator: what it says before it is certain, or when it is another's
to say (stage ``groups``).
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kept.node.coordinator.groups.events import NO_ERROR, CommitResult, LeaveResult, Response
from kept.node.coordinator.groups.pending_append import Assignment
from kept.node.coordinator.groups.records import OffsetCommitKey
from tests.sim.planted import plant

CORE = "kept.node.coordinator.groups.core.GroupCore"
SHARD = "kept.node.coordinator.common.shard.Shard"
OFFSETS = "kept.node.coordinator.groups.offset_requests.OffsetRequests"
STAGE = "groups"
OFTEN = 0.3
"""How often a coordinator is struck at an answer."""


def left_at_once(original: Any) -> Any:
    """A leave is answered while the record of the empty group is on its way."""

    def respond_when_committed(self: Any, request: int, result: Any) -> None:
        if isinstance(result, LeaveResult):
            self.respond(request, result)
        else:
            original(self, request, result)

    return respond_when_committed


def committed_at_once(original: Any) -> Any:
    """A commit is answered while its records are on their way."""

    def append(self: Any, records: Any, sequel: Any = None, **more: Any) -> None:
        if isinstance(sequel, Response) and isinstance(sequel.result, CommitResult):
            self.respond(sequel.request, sequel.result)
            sequel = None
        original(self, records, sequel, **more)

    return append


def assigned_at_once(original: Any) -> Any:
    """Members get their parts while the record of the generation is on its way."""

    def append(self: Any, records: Any, sequel: Any = None, **more: Any) -> None:
        if not isinstance(sequel, Assignment):
            original(self, records, sequel, **more)
            return
        original(self, records, None, **more)
        self.membership.assigned(sequel, NO_ERROR)

    return append


def appended_is_read(_: Any) -> Any:
    """Readers see what is appended, though it is not committed."""

    def committed_of(self: Any, group_id: str) -> Any:
        return self.appended.of_group(group_id) if group_id in self.groups else {}

    return committed_of


def loads_at_once(_: Any) -> Any:
    """A new coordinator reads below its own high watermark, which is older than its log."""

    async def await_committed(self: Any, end_offset: int) -> None:
        return None

    return await_committed


def always_leads(_: Any) -> Any:
    """A coordinator that hears nobody needs no proof that it still is one."""
    return property(lambda _: False)


def whoever_commits(original: Any) -> Any:
    """A commit is taken whatever its generation and its member are."""

    def commit(self: Any, event: Any) -> None:
        group = self._core.groups.get(event.group)
        if group is not None and group.members:
            member = event.member if event.member in group.members else next(iter(group.members))
            instance = group.members[member].group_instance_id
            event = replace(
                event, member=member, generation=group.generation, group_instance_id=instance
            )
        original(self, event)

    return commit


def read_as_another(original: Any) -> Any:
    """Records are read as those of another partition."""

    def replay(self: Any, record: Any, *args: Any) -> None:
        if isinstance(record.key, OffsetCommitKey):
            key = replace(record.key, partition=1 - min(record.key.partition, 1))
            record = replace(record, key=key)
        original(self, record, *args)

    return replay


plant(
    "groups-left-at-once",
    STAGE,
    9,
    "member-back",
    "a leave is answered when the record of the empty group is committed",
    (f"{CORE}.respond_when_committed", left_at_once),
    strikes=OFTEN,
)
plant(
    "groups-committed-at-once",
    STAGE,
    2,
    "offset-lost offset-back",
    "a commit is answered when it is committed",
    (f"{CORE}.append", committed_at_once),
    strikes=OFTEN,
)
plant(
    "groups-assigned-at-once",
    STAGE,
    1,
    "two-owners",
    "members get their parts when the record of the generation is committed",
    (f"{CORE}.append", assigned_at_once),
    strikes=OFTEN,
)
plant(
    "groups-appended-is-read",
    STAGE,
    5,
    "offset-lost offset-back",
    "readers see committed offsets",
    (f"{CORE}.committed_of", appended_is_read),
    strikes=OFTEN,
)
plant(
    "groups-loads-at-once",
    STAGE,
    1,
    "offset-lost offset-back two-owners",
    "a new coordinator waits until the high watermark reaches the end of its log",
    (f"{SHARD}._await_committed", loads_at_once),
    strikes=OFTEN,
)
plant(
    "groups-deposed",
    STAGE,
    1,
    "offset-lost offset-back",
    "a coordinator that no controller hears answers offsets only with proof that it leads",
    ("kept.node.metadata.cluster_link.ClusterLink.may_be_fenced", always_leads),
    trial="depose",
)
plant(
    "groups-whoever-commits",
    STAGE,
    2,
    "zombie-commit",
    "a commit of an old generation is refused",
    (f"{OFFSETS}.commit", whoever_commits),
)
plant(
    "groups-read-as-another",
    STAGE,
    1,
    "offset-unknown",
    "a new coordinator has the offsets that are in its log",
    (f"{CORE}.replay", read_as_another),
    strikes=OFTEN,
)
