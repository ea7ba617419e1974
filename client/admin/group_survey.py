"""Many groups at a glance: members, committed offsets and lag. Operations without I/O (see
:mod:`kept.client.admin.topics`).

Coordinators are asked for the descriptions of :data:`GROUPS_TOGETHER` groups at a time and for the
offsets of one group in a request, leaders once for the ends of all partitions. Who does not answer
in time is done without: what it would have said is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kept.client.admin.group_lag import GroupLag, group_lag, partition_lag
from kept.client.admin.groups import (
    CLASSIC,
    CONSUMER,
    GroupDescription,
    GroupListing,
    consumer_groups_call,
    describe_groups_call,
    descriptions,
    offsets_call,
    offsets_of,
)
from kept.client.admin.topics import Operation, metadata_call
from kept.client.consume.leader_offsets import known_ends
from kept.client.core.calls import Call, ToNode
from kept.client.core.metadata import ClusterMetadata
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

_T = TypeVar("_T")

GROUPS_TOGETHER: Final = 100


@dataclass(frozen=True, slots=True)
class SurveyedGroup:
    """A group with what was found out about it; None: its coordinator did not say it."""

    listing: GroupListing
    description: GroupDescription | None
    committed: dict[TopicPartition, int] | None
    lag: GroupLag

    @property
    def members(self) -> int | None:
        """How many members it has."""
        return None if self.description is None else len(self.description.members)

    @property
    def topics(self) -> list[str]:
        """Topics that it has committed offsets of, or is assigned partitions of."""
        return sorted({tp.topic for tp in partitions_of(self.description, self.committed)})


def survey_groups(
    view: ClusterMetadata, listings: Sequence[GroupListing], patience_ms: int
) -> Operation[list[SurveyedGroup]]:
    """What coordinators and leaders say of these groups; each is waited for so long at most."""
    described, committed = yield from groups_and_offsets(listings, patience_ms)
    partitions = {
        each.group: partitions_of(described.get(each.group), committed.get(each.group))
        for each in listings
    }
    ends = yield from led_ends(view, set().union(*partitions.values()), patience_ms)
    return [
        SurveyedGroup(
            listing,
            described.get(listing.group),
            committed.get(listing.group),
            group_lag(
                partition_lag(committed.get(listing.group, {}).get(tp), ends.get(tp))
                for tp in partitions[listing.group]
            ),
        )
        for listing in listings
    ]


def groups_and_offsets(
    listings: Sequence[GroupListing], patience_ms: int
) -> Operation[tuple[dict[str, GroupDescription], dict[str, dict[TopicPartition, int]]]]:
    """Descriptions and committed offsets of groups, by name, as far as their coordinators say."""
    described: dict[str, GroupDescription] = {}
    committed: dict[str, dict[TopicPartition, int]] = {}
    for calls in _hundreds(_describe_calls(listings)):
        for response in (yield _without_waiting(calls, patience_ms)):
            if not isinstance(response, KeptError):
                described.update({each.group: each for each in descriptions(response)})
    for some in _hundreds(listings):
        fetches = [offsets_call(each.group, None, ToNode(each.coordinator)) for each in some]
        responses = yield _without_waiting(fetches, patience_ms)
        for listing, response in zip(some, responses, strict=True):
            if not isinstance(response, KeptError):
                committed[listing.group] = offsets_of(response)
    return described, committed


def partitions_of(
    description: GroupDescription | None, committed: Iterable[TopicPartition] | None
) -> set[TopicPartition]:
    """Partitions that a group has a committed offset of, or that a member is assigned."""
    members = () if description is None else description.members
    return {*(committed or ()), *(tp for member in members for tp in member.partitions)}


def led_ends(
    view: ClusterMetadata, partitions: set[TopicPartition], patience_ms: int
) -> Operation[dict[TopicPartition, int]]:
    """The high watermarks of partitions that exist and have a leader that answers."""
    if not partitions:
        return {}
    names = sorted({tp.topic for tp in partitions})
    (response,) = yield [metadata_call(names)]
    view.update(response, tuple(names))
    led = sorted(tp for tp in partitions if view.leader(*tp) is not None)
    return (yield from known_ends(view, led, patience_ms))


def _describe_calls(listings: Iterable[GroupListing]) -> list[Call]:
    """Of groups whose type has a description that is known here."""
    by_coordinator: dict[tuple[int, str], list[str]] = {}
    for listing in listings:
        if listing.type in (CLASSIC, CONSUMER):
            by_coordinator.setdefault((listing.coordinator, listing.type), []).append(listing.group)
    calls = []
    for (coordinator, kind), names in by_coordinator.items():
        for some in _hundreds(names):
            make = consumer_groups_call if kind == CONSUMER else describe_groups_call
            calls.append(make(some, ToNode(coordinator)))
    return calls


def _hundreds(items: Sequence[_T]) -> list[Sequence[_T]]:
    return [items[at : at + GROUPS_TOGETHER] for at in range(0, len(items), GROUPS_TOGETHER)]


def _without_waiting(calls: Iterable[Call], patience_ms: int) -> list[Any]:
    given = list(calls)
    for call in given:
        call.optional, call.timeout_ms = True, patience_ms
    return given
