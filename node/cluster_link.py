"""A node among several: its peers, its part as controller and as broker, whom it follows.

Made only where there are other nodes; a lone node imports none of this (gRPC alone is 22 MB). It
joins the parts: messages of the metadata's Raft go out and in through the peers, evidence of a
dead process goes to Raft and to the sessions of brokers, admin requests to the active controller.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.client import protocol
from kept.client.failures import failure
from kept.cluster.controller.brokers import Registration
from kept.node.config import listeners
from kept.node.controller.controller import Controller
from kept.node.internode import controller_rpc
from kept.node.internode.peers import Peers
from kept.node.kafka import api
from kept.node.kafka.forward_errors import UNANSWERED, refusal
from kept.node.metadata import directory_ids, quorum_check
from kept.node.metadata.broker_lifecycle import BrokerLifecycleManager
from kept.node.metadata.failure_suspicions import FailureSuspicions
from kept.node.metadata.join_timeout import Joining
from kept.node.metadata.leadership_barrier import LeadershipBarrier
from kept.node.replicas.alter_partition import AlterPartitionQueue
from kept.node.replicas.fetch_loop import Fetchers
from kept.node.replicas.manifests.notify import ManifestNotifier
from kept.node.replicas.manifests.replicate import Answers, ManifestReplicator
from kept.node.runtime.logging import log
from kept.storage.errors import NetworkException, NotController

# isort: split
from kio.static.constants import EntityType

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.cluster.metadata.records import Endpoint
    from kept.cluster.metadata.voters import Voter
    from kept.node.node import Node

CREATE_TOPICS: Final = 19
CREATE_TOPICS_VERSION: Final = 7
MOVES_LOGS: Final = frozenset({CREATE_TOPICS, 20, 37})
"""Requests that create or delete logs: CreateTopics, DeleteTopics, CreatePartitions."""
FORWARD_S: Final = 15.0
"""How long an admin request may take at the controller, or wait for one to be elected."""
RETRY_S: Final = 0.05
LOOK_S: Final = 0.01
ELECTIONS: Final = 3
"""A node that stops gives up on a controller after the time of this many elections."""
FOLLOW_S: Final = 1.0
"""How long a forwarded request waits for its effect to be seen at this node, too."""


class ClusterLink:
    """See the module."""

    def __init__(self, node: Node) -> None:
        self._node = node
        config = node.config
        self.incarnation = uuid.uuid4()
        self.peers = Peers(
            node.node_id,
            node.metadata.member.cluster_id or "",
            self.incarnation,
            node.loop,
            node.peer_addresses,
            voters=config.controller_quorum_voters,
            has_log=node.metadata.member.last_index > 0,
            directory_id=node.metadata.member.directory_id,
            own_address=node.node_endpoint() or ("", 0),
        )
        self.controller = Controller(node)
        self.broker_lifecycle: BrokerLifecycleManager | None = None
        self.fetchers = Fetchers(node)
        self.alter_partition = AlterPartitionQueue(node)
        self.leadership_barrier = LeadershipBarrier(node)
        self.manifests = ManifestReplicator(node)
        self.news = ManifestNotifier(node)
        self._departures = FailureSuspicions()
        self._joining = Joining(node, self.peers)
        self._voters: tuple[Voter, ...] = ()
        self._brokers: Mapping[int, Any] = {}
        """Those of the image that leaders were told of."""
        self._moved = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Life.

    async def start(self) -> None:
        """Speak with the others, and take part in the metadata log."""
        node, peers, metadata = self._node, self.peers, self._node.metadata
        await peers.start()
        metadata.send = peers.send
        metadata.probe = self._look
        metadata.on_applied = self._metadata_moved
        peers.on_message = metadata.receive
        peers.believes = metadata.member.core.knows
        peers.on_peer_down = self._peer_down
        peers.serve("Forward", self._answer_forwarded)
        answers = Answers(node)
        peers.serve("PullManifests", answers.pull)
        peers.serve("ManifestChunk", answers.chunk)
        peers.serve("ManifestNews", self.manifests.news)
        peers.serve("Ask", self._answer_question)
        self.controller.start()
        metadata.start_ticking()
        metadata.pump()
        log.info("joining", voters=",".join(map(str, node.config.controller_quorum_voters)))

    async def cluster_id(self) -> str:
        """The cluster's id; waits until a controller was elected for the first time, and the image
        is no older than what this node acted on before it started: logs of topics that are not in
        an older one would be deleted. Raises as :meth:`Joining.until`.
        """
        member = self._node.metadata.member
        while (found := self._node.image.cluster_id) is None or not member.recovered:
            self._moved.clear()
            await self._joining.until(self._moved)
        node = self._node
        path = node.config.metadata_log_dir
        directory_ids.remember_cluster(node.disk, path, node.node_id, found)
        vote = {voter.node_id for voter in member.voters}
        await quorum_check.compare(self.peers, found, node.config.controller_quorum_voters, vote)
        return found

    async def register(self, endpoints: tuple[Endpoint, ...], clean_epoch: int) -> None:
        """Take part as a broker; done when this node serves. Raises as :meth:`Joining.until`."""
        node = self._node
        registration = Registration(
            node.node_id,
            self.incarnation,
            endpoints,
            node.config.broker_rack,
            clean_epoch,
            tuple(d.directory.directory_id for d in node.log_directories if d.offline is None),
        )
        self.broker_lifecycle = BrokerLifecycleManager(node, registration)
        self.broker_lifecycle.controller_is(node.metadata.leader_id)
        self.broker_lifecycle.start()
        self.broker_lifecycle.image_acted_on(node.image)
        self.broker_lifecycle.logs_opened()
        await self._joining.until(self.broker_lifecycle.registered)
        await self.broker_lifecycle.running.wait()

    async def leave(self) -> None:
        """Hand over what is led here, the partitions and then the metadata; done when the process
        may end.
        """
        if self.broker_lifecycle is not None:
            watching = self._node.loop.create_task(self._watch_controller(self.broker_lifecycle))
            await self.broker_lifecycle.shut_down()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._hand_over()

    async def _hand_over(self) -> None:
        """Another voter leads before this one ends: nobody waits for an election."""
        metadata = self._node.metadata
        member, led = metadata.member, metadata.leads
        patience_s = ELECTIONS * self._node.config.controller_quorum_fetch_timeout_ms / 1000
        try:
            async with asyncio.timeout(patience_s):
                while member.hand_over():
                    metadata.pump()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            log.warning("nobody took over as controller", waited_s=patience_s)
        if led and metadata.leader_id is not None:
            log.info("controller handed over", to=metadata.leader_id)

    async def _watch_controller(self, broker_lifecycle: BrokerLifecycleManager) -> None:
        """The last nodes to stop have nobody to hand over to: they don't wait for an answer."""
        loop, metadata = self._node.loop, self._node.metadata
        patience_s = ELECTIONS * self._node.config.controller_quorum_fetch_timeout_ms / 1000
        known_at = loop.time()
        while True:
            if metadata.member.majority_is_gone:
                broker_lifecycle.no_controller(
                    "no majority of the controllers is left to hand over to"
                )
            if metadata.leader_id is not None:
                known_at = loop.time()
            elif loop.time() - known_at > patience_s:
                broker_lifecycle.no_controller(
                    f"no controller for {patience_s:g} s to hand over to"
                )
            await asyncio.sleep(RETRY_S)

    async def _answer_question(self, request: controller_rpc.AskRequest) -> controller_rpc.AskReply:
        from kept.node.http.peer_requests import answer

        return await answer(self._node, request)

    async def stop(self) -> None:
        """Speak with nobody any more."""
        if self.broker_lifecycle is not None:
            await self.broker_lifecycle.close()
        await self.alter_partition.close()
        await self.leadership_barrier.close()
        await self.fetchers.stop()
        await self.manifests.stop()
        await self.news.stop()
        await self.controller.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.stop()

    @property
    def broker_epoch(self) -> int:
        """Epoch of this node's registration; -1 before it."""
        return -1 if self.broker_lifecycle is None else self.broker_lifecycle.broker_epoch

    # What is heard.

    def acted_on(self, image: Image) -> None:
        """The node is what ``image`` says."""
        self._departures.image_moved(image, self._node.loop.time())
        if self.broker_lifecycle is not None:
            self.broker_lifecycle.image_acted_on(image)

    def _metadata_moved(self) -> None:
        metadata, peers = self._node.metadata, self.peers
        self._moved.set()
        self._node.metrics.cluster.controller_is(
            metadata.leader_id, metadata.member.term, self._node.loop.time()
        )
        peers.cluster_id = metadata.member.cluster_id or ""
        peers.has_log = metadata.member.last_index > 0
        if metadata.image.voters is not self._voters:
            self._voters = metadata.image.voters
            peers.voters = self._addressed(self._voters)
            self._tell_of_vote()
        if metadata.image.brokers is not self._brokers:
            # At once, not when it is acted on: a follower that restarted fetches with its new
            # broker epoch, and leaders refuse it until they know that.
            self._brokers = metadata.image.brokers
            self._node.replica_manager.roles.brokers_changed()
        self.controller.metadata_moved()
        self._node.readiness.on_move()
        if self.broker_lifecycle is not None:
            self.broker_lifecycle.controller_is(metadata.leader_id)

    def _tell_of_vote(self) -> None:
        """A voter whose disk was replaced should not stay an observer unnoticed."""
        node_id, directory_id = self._node.node_id, self._node.metadata.member.directory_id
        mine = [voter for voter in self._voters if voter.node_id == node_id]
        if mine and mine[0].directory_id != directory_id:
            what = f"its vote belongs to another disk, {mine[0].directory_id}"
            why = f"{what}: kept cluster voter add {node_id} gives it to this one"
            log.warning("this node only observes the metadata", reason=why)

    def _addressed(self, voters: tuple[Voter, ...]) -> tuple[listeners.Voter, ...]:
        """Voters as a Hello tells them: the log of a node that was alone has no address of it."""
        found = []
        for voter in voters:
            known = (voter.host, voter.port) if voter.host else None
            address = known or self._node.peer_address(voter.node_id)
            if address is not None:
                found.append(listeners.Voter(voter.node_id, *address))
        return tuple(found)

    def _peer_down(self, node_id: int) -> None:
        log.warning("node is gone", node=node_id)
        now = self._node.loop.time()
        self._node.metrics.cluster.node_gone(node_id, now)
        self._departures.doubt(node_id, self._node.image, now)
        self._node.metadata.peer_down(node_id)
        self.controller.peer_down(node_id)

    def connection_broke(self, node_id: int) -> None:
        """A connection to a leader broke: its process may be gone, and a probe will tell."""
        if not self.seems_gone(node_id):
            self._departures.doubt(node_id, self._node.image, self._node.loop.time())
            self._look(node_id)

    @property
    def doubts_anybody(self) -> bool:
        """Whether :meth:`seems_gone` may be true of some node."""
        return self._departures.doubts_anybody

    def seems_gone(self, node_id: int) -> bool:
        """Whether there is evidence that a node died, though the image does not say so yet."""
        now = self._node.loop.time()
        return self._departures.is_doubted(node_id, self._node.image, now)

    def lingers(self, node_id: int) -> bool:
        """Whether a broker was fenced a moment ago."""
        return self._departures.lingers(node_id, self._node.loop.time())

    def _look(self, node_id: int) -> None:
        task = self._node.loop.create_task(self._examine(node_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examine(self, node_id: int) -> None:
        if await self.peers.probe(node_id) is None:
            self._peer_down(node_id)
        else:
            self._departures.believe(node_id)

    # Admin requests.

    async def answered(
        self, context: api.RequestContext, api_key: int, version: int, body: bytes, request: Any
    ) -> bytes | protocol.Values:
        """What :meth:`forward` brings, or the response that says that no controller answered."""
        try:
            return await self.forward(context, api_key, version, body)
        except UNANSWERED as error:
            log.warning("no controller answers", api=api.served()[api_key].name, error=str(error))
            return refusal(api_key, request, error)

    async def forward(
        self, context: api.RequestContext, api_key: int, version: int, body: bytes
    ) -> bytes:
        """The response's body to an admin request, from whoever is the active controller.

        Raises NotController, NetworkException after :data:`FORWARD_S`.
        """
        tries: list[uuid.UUID] = []

        def request() -> controller_rpc.ForwardRequest:
            tries.append(uuid.uuid4())
            return controller_rpc.ForwardRequest(
                api_key,
                version,
                body,
                context.listener_name,
                context.client_id,
                context.client_host,
                tuple(tries),
            )

        reply = await self._call_controller("Forward", request, logs=api_key in MOVES_LOGS)
        found: bytes = reply.body
        return found

    async def _call_controller(
        self, method: str, request: Callable[[], Any], *, logs: bool = False
    ) -> Any:
        """Ask whoever is the active controller, and follow as far as it answered; with ``logs``
        down to the logs that come and go with it. ``request`` is called for each try.

        Raises what it raises, NotController, NetworkException after :data:`FORWARD_S`.
        """
        loop = self._node.loop
        deadline = loop.time() + FORWARD_S
        while True:
            try:
                controller = self._node.metadata.leader_id
                if controller is None:
                    raise NotController("no controller is elected")
                reply = await self._while_it_leads(
                    controller, self.peers.call(controller, method, request(), FORWARD_S)
                )
            except (NotController, NetworkException):
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(FOLLOW_S):
                    await self._node.metadata.acted(reply.index)
                    if logs:
                        await self._node.replica_manager.changes.done_up_to(reply.index)
            except TimeoutError:
                log.warning("metadata lags behind the controller", index=reply.index)
            return reply

    async def _while_it_leads(self, controller: int, call: Coroutine[Any, Any, Any]) -> Any:
        """The answer to a call. Raises what it raises, and NotController once another one leads:
        one that stands still answers nothing, and whoever asked need not wait for it.
        """
        answer = self._node.loop.create_task(call)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=RETRY_S)
                if not answer.done() and self._node.metadata.leader_id not in (controller, None):
                    raise NotController(f"node {controller} is the controller no more")
            return answer.result()
        finally:
            answer.cancel()

    async def change_voters(self, request: controller_rpc.ChangeVotersRequest) -> None:
        """Let a node vote, or no longer. Raises InvalidRequest with what would be right, and as
        :meth:`forward`.
        """
        await self._call_controller("ChangeVoters", lambda: request)

    async def ask_controller(self, api_key: int, version: int, values: protocol.Values) -> Any:
        """An admin request of this node's own; kio's typed response. Raises as :meth:`forward`."""
        cls = protocol.message_type(api_key, version, EntityType.request)
        body = protocol.encode(protocol.build(cls, values))
        name = self._node.listeners[0].name
        context = api.RequestContext(self._node, None, api_key, version, 0, None, name)
        answer = await self.forward(context, api_key, version, body)
        response = protocol.message_type(api_key, version, EntityType.response)
        return protocol.decode(response, answer)[0]

    async def _answer_forwarded(
        self, request: controller_rpc.ForwardRequest
    ) -> controller_rpc.ForwardReply:
        """Answer an admin request as the active controller. Raises NotController."""
        node = self._node
        if not node.metadata.leads:
            raise NotController(f"node {node.node_id} is not the active controller")
        key, version = request.api_key, request.version
        context = api.RequestContext(
            node,
            None,
            key,
            version,
            0,
            request.client_id,
            request.listener,
            request.client_host,
            request.tries,
        )
        limit = node.config.request_max_entries
        message = protocol.decode_request(key, version, request.body, 0, limit)
        answer: Any = api.handler(key)(context, message)
        while inspect.isawaitable(answer):  # a sliced handler's result may be one itself
            answer = await answer
        body = await node.slices.finish(protocol.body_steps(key, version, answer))
        return controller_rpc.ForwardReply(body, node.image.index)

    async def create_topic(self, name: str, fields: Mapping[str, Any]) -> None:
        """Ask the controller for a topic. Raises the error of its answer."""
        configs: Mapping[str, str] = fields.get("configs", {})
        topic = {
            "name": name,
            "num_partitions": fields.get("num_partitions", -1),
            "replication_factor": fields.get("replication_factor", -1),
            "assignments": (),
            "configs": [{"name": key, "value": value} for key, value in configs.items()],
        }
        values = {"topics": [topic], "timeout": 30_000, "validate_only": False}
        answer = await self.ask_controller(CREATE_TOPICS, CREATE_TOPICS_VERSION, values)
        (created,) = answer.topics
        error = failure(int(created.error_code), f"CreateTopics of {name}", created.error_message)
        if error is not None:
            raise error

    async def producer_ids(self) -> range:
        """A block of producer ids that nobody else has. Raises KeptError."""
        node = self._node
        controller = node.metadata.leader_id
        if controller is None:
            raise NotController("no controller is elected")
        request = controller_rpc.AllocateProducerIdsRequest(node.node_id, self.broker_epoch)
        reply = await self.peers.call(controller, "AllocateProducerIds", request)
        return range(reply.first, reply.first + reply.count)
