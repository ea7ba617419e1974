"""Who votes, changed by the active controller: one voter joins or leaves (rule 34).

A node votes from a disk. One whose metadata disk was replaced follows as an observer; to add it
again removes the voter that its id names, which votes from a disk that is gone, and then adds it.
Two steps, because as one the old disk and the new could be in two majorities that do not meet; if
the second fails, the same call does the rest.

A change is refused when it would leave the voters without a living majority: it could never be
committed, and nothing after it either. (etcd calls that strict reconfiguration check.)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn

from kept.cluster.metadata.voters import Voter
from kept.node.controller.proposals import check_leads
from kept.node.internode.controller_rpc import ChangeVotersReply, ChangeVotersRequest
from kept.node.runtime.logging import log
from kept.storage.errors import (
    ClusterAuthorizationFailed,
    DuplicateVoter,
    InvalidRequest,
    PolicyViolation,
    VoterNotFound,
)

if TYPE_CHECKING:
    from kept.cluster.metadata.metadata_node import MetadataNode
    from kept.cluster.raft.progress import Progress
    from kept.node.config.node_config import NodeConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime

CATCH_UP_S: Final = 10.0
"""How long an observer that is to vote may take to have what was committed when that was asked."""
POLL_S: Final = 0.02


def refuse_alone(config: NodeConfig) -> None:
    """Raises PolicyViolation where there is nobody else who could vote."""
    if config.alone:
        raise PolicyViolation(
            f"node {config.node_id} runs alone, as its own voter: to add others, start it with a "
            "controller.quorum.voters that names them too"
        )


def refuse_strangers(addresses: AddressBook) -> NoReturn:
    """Raises ClusterAuthorizationFailed: the request came in where everybody can ask."""
    endpoint = addresses.own_node_address()
    where = "" if endpoint is None else f", {endpoint[0]}:{endpoint[1]}"
    raise ClusterAuthorizationFailed(
        "voters are changed from a node's own machine, over Kafka's protocol or HTTP, through the "
        f"listener between nodes{where}, or by a client that has logged in and may alter the "
        "cluster (authorizer.class.name)"
    )


class QuorumReconfiguration:
    """Adds and removes voters of the metadata log, one at a time."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        identity: NodeIdentity,
        addresses: AddressBook,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._identity = identity
        self._addresses = addresses
        self._under_way = ""

    @property
    def _member(self) -> MetadataNode:
        return self._metadata.raft_node

    async def change(self, request: ChangeVotersRequest) -> ChangeVotersReply:
        """Add or remove a voter; done when committed. Raises NotController, InvalidRequest."""
        what = f"node {request.node_id} is being {'added' if request.add else 'removed'}"
        if self._under_way:
            raise InvalidRequest(f"one voter at a time: {self._under_way}; try again when it is")
        self._under_way = what
        try:
            index = await (self._add(request) if request.add else self._remove(request))
        finally:
            self._under_way = ""
        ids = ",".join(str(voter.node_id) for voter in self._member.voters)
        log.info("voters changed", what=what, voters=ids, index=index)
        return ChangeVotersReply(index)

    async def _remove(self, request: ChangeVotersRequest) -> int:
        check_leads(self._metadata)
        node_id, voters = request.node_id, self._member.voters
        rest = tuple(voter for voter in voters if voter.node_id != node_id)
        if len(rest) == len(voters):
            raise VoterNotFound(f"node {node_id} does not vote; the voters are {_ids(voters)}")
        (removed,) = set(voters) - set(rest)
        if request.directory_id not in (None, removed.directory_id):
            raise VoterNotFound(
                f"node {node_id} votes from directory {removed.directory_id}, "
                f"not {request.directory_id}"
            )
        if not rest:
            raise InvalidRequest(f"node {node_id} is the last voter: add another one first")
        self._refuse_without_majority(rest)
        return await self._metadata.change_voters(rest)

    async def _add(self, request: ChangeVotersRequest) -> int:
        check_leads(self._metadata)
        node_id = request.node_id
        present = next((v for v in self._member.voters if v.node_id == node_id), None)
        if node_id == self._identity.node_id:
            raise InvalidRequest(f"node {node_id} votes already: it is the active controller")
        follows = self._live_follower(node_id)
        wanted = request.directory_id
        if wanted is not None and wanted != follows.directory_id:
            raise InvalidRequest(
                f"node {node_id} follows from directory {follows.directory_id}, not {wanted}"
            )
        if present is not None and present.directory_id == follows.directory_id:
            raise DuplicateVoter(f"node {node_id} votes already, from this very disk")
        host, port = self._address(request, present)
        voter = Voter(node_id, follows.directory_id, host, port)
        await self._wait_until_caught_up(voter)
        others = tuple(v for v in self._member.voters if v.node_id != node_id)
        self._refuse_without_majority((*others, voter))
        if present is not None:
            await self._remove(ChangeVotersRequest(False, node_id))
        together = sorted((*others, voter), key=lambda one: one.node_id)
        return await self._metadata.change_voters(tuple(together))

    def _live_follower(self, node_id: int) -> Progress:
        progress = self._member.progress.get(node_id)
        if progress is None or not self._member.is_alive(node_id):
            raise InvalidRequest(
                f"node {node_id} does not follow the metadata log: start it with "
                "process.roles=broker,controller and a controller.quorum.voters that names a "
                "voter, and add it when kept cluster status shows it as an observer"
            )
        return progress

    def _address(self, request: ChangeVotersRequest, known: Voter | None) -> tuple[str, int]:
        """Where other nodes reach it: as asked, as it registered, as it was before."""
        if request.host:
            return request.host, request.port
        address = self._addresses.node_address(request.node_id)
        if address is None and known is not None and known.host:
            address = known.host, known.port
        if address is None:
            raise InvalidRequest(
                f"the address of node {request.node_id} is not known, because it is no broker: "
                "give the host and port of its listener for nodes with --address"
            )
        return address

    async def _wait_until_caught_up(self, voter: Voter) -> None:
        goal = self._member.commit_index
        deadline = self._runtime.loop.time() + CATCH_UP_S
        while (follower := self._live_follower(voter.node_id)).match_index < goal:
            if self._runtime.loop.time() > deadline:
                raise InvalidRequest(
                    f"node {voter.node_id} lacks {goal - follower.match_index} entries of the "
                    "metadata log: add it when it has caught up"
                )
            await asyncio.sleep(POLL_S)
            check_leads(self._metadata)

    def _refuse_without_majority(self, voters: tuple[Voter, ...]) -> None:
        member = self._member
        alive = [
            voter
            for voter in voters
            if (voter.node_id, voter.directory_id) == (member.node_id, member.directory_id)
            or (
                (follower := member.progress.get(voter.node_id)) is not None
                and follower.directory_id == voter.directory_id
                and member.is_alive(voter.node_id)
            )
        ]
        if 2 * len(alive) <= len(voters):
            raise InvalidRequest(
                f"of the voters {_ids(voters)} only {_ids(tuple(alive))} would be alive, and no "
                "majority: start the others first"
            )


def _ids(voters: tuple[Voter, ...]) -> list[int]:
    return sorted(voter.node_id for voter in voters)
