"""Two leaders that change the voters, the second while the first one is cut off.

Of four voters the leader lets a fifth node in and is cut off with it: nobody else has that entry.
The other three elect one of them, who at once puts the first leader out, and hears only one of the
two that elected it. By its own change two of three are a majority; by the other one the first
leader, the fifth node, and the voter that the second leader does not reach are three of five. The
two majorities do not meet, unless a leader changes voters only behind an entry of its own term,
which needs a majority of the voters before ("bug in single-server membership changes", raft-dev,
2015).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kept.cluster.metadata.voters import Voter
from kept.cluster.raft.progress import ProgressState
from tests.sim.world import MS

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.raft_cluster import RaftHistory

VOTERS: Final = 4
LOOK_MS: Final = 100
FAULTS_S: Final = 15
"""Long enough for the changes that come before, and for two elections."""


def voter(node_id: int) -> Voter:
    """A node of a history as a voter."""
    return Voter(node_id, UUID(int=node_id + 1), "sim", 1000 + node_id)


class Split:
    """One history's. :meth:`elected` is called as a node begins to lead."""

    def __init__(self, history: RaftHistory) -> None:
        self._history = history
        self._first = -1
        """The leader that is cut off."""
        self._others: frozenset[int] = frozenset()
        """The voters on the other side; once one of them leads, nobody."""

    def prepare(self) -> None:
        """Change voters until there are four, and a node that follows; then cut the leader off."""
        history = self._history
        if history.nemesis.healed:
            return
        leader = history.leader()
        if leader is None or not self._cut_off(leader):
            history.world.after(LOOK_MS * MS, self.prepare)

    def _cut_off(self, leader: Machine) -> bool:
        """Whether it has come to that."""
        history = self._history
        app: Any = leader.app
        ids = {one.node_id for one in app.member.voters}
        following = [
            node_id
            for node_id, progress in sorted(app.member.progress.items())
            if node_id not in ids and progress.state is ProgressState.REPLICATE
        ]
        if len(ids) > VOTERS:
            gone = max(ids - {leader.node_id})
            leader.deliver("change_voters_safely", tuple(map(voter, sorted(ids - {gone}))))
        elif following:
            if len(ids) == VOTERS:
                self._first, self._others = leader.node_id, frozenset(ids - {leader.node_id})
                history.network.isolate({leader.node_id, following[0]}, set(self._others))
                history.world.counts["leaders cut off with a new voter"] += 1
            leader.deliver("change_voters_safely", tuple(map(voter, sorted({*ids, following[0]}))))
        return bool(self._others)

    def elected(self, leader: Machine) -> None:
        """If it is of the others, it puts the first leader out, and hears one of them no more."""
        history = self._history
        if leader.node_id not in self._others:
            return
        unheard, heard = sorted(self._others - {leader.node_id})
        voters = tuple(map(voter, sorted(self._others)))
        self._others = frozenset()
        network = history.network
        network.cuts -= {pair for pair in network.cuts if unheard in pair}
        network.isolate({unheard}, {leader.node_id, heard})
        history.world.counts["voters changed by both of two leaders"] += 1
        history.world.after(0, leader.deliver, "change_voters_safely", voters)
