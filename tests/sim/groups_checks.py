"""What clients of groups may be told, judged by what they were told before.

- ``offset-lost``: a commit was acknowledged, or a value read, and later there is none;
- ``offset-back``: a later read finds a value that an acknowledged commit, or a read, had replaced;
- ``offset-unknown``: a value that nobody committed, or whose commit was refused;
- ``two-owners``: two members are given one partition in one generation;
- ``zombie-commit``: a commit of a generation is acknowledged that began after a newer one was
  known to have begun;
- ``member-back``: a member is in a group that it left last, and which was acknowledged empty.

Where rule 33 gives records of a group's partition up, all promises of the group end with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tests.sim.world import Violation

NOBODY_KNOWS: Final = float("inf")
UNORDERED: Final = 1 << 40
"""The generation of a commit of which nothing is known any more."""


@dataclass(eq=False)
class Commit:
    """One value of one partition. Times are the loop's, in seconds.

    ``over_s``: when its answer came; a request without one may still take effect, while its
    generation lasts. ``certain_s``: from when on it was known to be committed.
    """

    value: int
    generation: int
    started_s: float
    over_s: float = NOBODY_KNOWS
    certain_s: float = NOBODY_KNOWS
    refused: bool = False

    def comes_before(self, later: Commit) -> bool:
        """Whether it took effect before another one did, if it took effect at all."""
        if self is later or UNORDERED in {self.generation, later.generation}:
            return False
        if self.generation != later.generation:
            return self.generation < later.generation
        return self.over_s <= later.started_s


@dataclass
class _Group:
    """What is known of a group."""

    give_ups: int
    commits: dict[int, dict[int, Commit]] = field(default_factory=dict)
    """Partition -> value -> its commit."""
    owners: dict[int, dict[int, str]] = field(default_factory=dict)
    """Generation -> partition -> member."""
    generation: int = -1
    began_s: float = NOBODY_KNOWS
    """When a member was first known to have its part in ``generation``."""
    present: dict[str, str] = field(default_factory=dict)
    """Client -> its member id, if it has one: whoever may be a member."""
    dead: set[str] = field(default_factory=set)
    """Clients that say nothing any more, and were not seen to be expelled."""
    left: dict[str, float] = field(default_factory=dict)
    """Member -> when its leave was acknowledged, and the group empty."""


class GroupChecks:
    """One per history; see the module. ``give_ups``: how often a group's partition gave records up;
    ``now_s``: the time.
    """

    def __init__(self, give_ups: Callable[[str], int], now_s: Callable[[], float]) -> None:
        self._give_ups = give_ups
        self._now_s = now_s
        self._groups: dict[str, _Group] = {}

    def _group(self, name: str) -> _Group:
        """A group; what was promised of it ends with what is given up."""
        give_ups = self._give_ups(name)
        group = self._groups.get(name)
        if group is None or group.give_ups != give_ups:
            before, group = group, _Group(give_ups)
            if before is not None:
                group.present, group.dead = before.present, before.dead
                for partition, commits in before.commits.items():
                    group.commits[partition] = {
                        value: Commit(value, UNORDERED, commit.started_s, refused=commit.refused)
                        for value, commit in commits.items()
                    }
            self._groups[name] = group
        return group

    # Offsets.

    def commit_begins(self, name: str, generation: int, values: dict[int, int]) -> list[Commit]:
        """A member sends a commit: partition -> a value that is sent once."""
        group, made = self._group(name), []
        for partition, value in values.items():
            commit = Commit(value, generation, self._now_s())
            group.commits.setdefault(partition, {})[value] = commit
            made.append(commit)
        return made

    def commit_acknowledged(self, name: str, commits: list[Commit]) -> None:
        """Its answer says that it is committed."""
        group, now_s = self._group(name), self._now_s()
        for commit in commits:
            if commit.generation < group.generation and group.began_s < commit.started_s:
                raise Violation(
                    "zombie-commit",
                    f"{name}: a commit of generation {commit.generation} is acknowledged; "
                    f"{group.generation} began before it was sent",
                )
            commit.over_s = commit.certain_s = now_s

    def commit_failed(self, commits: list[Commit], *, refused: bool) -> None:
        """Its answer says that it was not taken, or not that it was."""
        for commit in commits:
            commit.over_s, commit.refused = self._now_s(), refused

    def read(self, name: str, who: str, since_s: float, found: dict[int, int]) -> None:
        """A read that began at a time found values, -1 where there is none."""
        group = self._group(name)
        for partition, value in found.items():
            commits = group.commits.get(partition, {})
            where = f"{name}, partition {partition}: {who} reads {value}"
            before = [c for c in commits.values() if c.certain_s <= since_s]
            if value < 0:
                if before:
                    raise Violation("offset-lost", f"{where}; committed: {before[-1]}")
                continue
            commit = commits.get(value)
            if commit is None or commit.refused:
                raise Violation("offset-unknown", f"{where}: {commit}")
            for later in before:
                if commit.comes_before(later):
                    raise Violation("offset-back", f"{where}: {commit}, after {later}")
            commit.certain_s = min(commit.certain_s, self._now_s())

    # Members.

    def joins(self, name: str, client: str) -> None:
        """A client may be a member from now on."""
        self._group(name).present.setdefault(client, "")

    def member(self, name: str, client: str, member_id: str) -> None:
        """It is one, and is called that."""
        self._group(name).present[client] = member_id

    def assigned(self, name: str, generation: int, owner: str, partitions: list[int]) -> None:
        """A member is given its part. ``owner``: its name, also if its member id changes."""
        group = self._group(name)
        owners = group.owners.setdefault(generation, {})
        for partition in partitions:
            known = owners.setdefault(partition, owner)
            if known != owner:
                raise Violation(
                    "two-owners",
                    f"{name}, generation {generation}: partition {partition} is {known}'s "
                    f"and {owner}'s",
                )
        if generation > group.generation:
            group.generation, group.began_s = generation, self._now_s()

    def died(self, name: str, client: str) -> None:
        """A client says nothing any more; its session has to end."""
        self._group(name).dead.add(client)

    def members(self, name: str, members: list[str]) -> None:
        """A generation has begun with these."""
        group = self._group(name)
        for client in sorted(group.dead):
            if group.present[client] not in members:
                group.dead.remove(client)
                del group.present[client]

    def left(self, name: str, client: str) -> None:
        """A client's leave is acknowledged."""
        group = self._group(name)
        member_id = group.present.pop(client)
        if not group.present:
            group.left[member_id] = self._now_s()

    def described(self, name: str, who: str, since_s: float, members: list[str]) -> None:
        """Who is in a group, as its present coordinator describes it."""
        left = self._group(name).left
        for member in members:
            if left.get(member, NOBODY_KNOWS) <= since_s:
                raise Violation("member-back", f"{name}: {who} has {member}, which left last")
