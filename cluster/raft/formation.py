"""A new cluster's founders find each other; a node with an empty disk finds out that it is none.

``controller.quorum.voters`` is read only while the metadata log is empty. A listed node with an
empty log asks every other listed node (:class:`.messages.Observe`, :class:`LeaderHint`). If one of
them has a log, the cluster exists: this node follows it without a vote, unless the log says that
this very disk votes. If all of them answered, all have empty logs and the same list, they are the
founders, and each knows the disk that each of the others votes from: a first start needs every
voter. From the first entry on the voters are in the log.

Why all and not a majority: the answers of some cannot tell a first start from the loss of a disk.
"""

from __future__ import annotations

from kept.cluster.metadata.voters import Voter
from kept.cluster.raft.messages import LeaderHint


class Formation:
    """What one listed node with an empty log has learned from the others."""

    def __init__(self, me: Voter, listed: tuple[Voter, ...]) -> None:
        self._me = me
        self._listed = {voter.node_id: voter for voter in listed}
        self._answers: dict[int, Voter] = {}
        self.joins = False
        """Another node has a log: this one follows."""
        self.refusal: str | None = None
        """Why no cluster can be founded so."""

    @property
    def founders(self) -> tuple[Voter, ...] | None:
        """All voters with their disks, once every one has answered."""
        answers = {**self._answers, self._me.node_id: self._me}
        if self.joins or self.refusal is not None or answers.keys() != self._listed.keys():
            return None
        return tuple(answers[node_id] for node_id in sorted(answers))

    def learn(self, hint: LeaderHint) -> None:
        """Another node replied."""
        listed = self._listed.get(hint.sender)
        if listed is None:
            return
        if hint.last_index > 0:
            self.joins = True
            return
        here, there = sorted(self._listed), sorted(hint.voters)
        if here != there:
            self.refusal = (
                f"controller.quorum.voters names the nodes {here} here and {there} at node "
                f"{hint.sender}: the first start of a cluster needs one list everywhere"
            )
            return
        self._answers[hint.sender] = Voter(
            listed.node_id, hint.directory_id, listed.host, listed.port
        )
