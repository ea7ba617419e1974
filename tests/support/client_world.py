"""Brokers, network and clock of a client's core."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable

from kio.static.constants import EntityType

from kept.client.core.calls import Call, ToLeader
from kept.client.core.client_core import (
    ClientCore,
)
from kept.client.core.events import (
    Close,
    Connect,
    Connected,
    Finished,
    Lost,
    Received,
    Send,
    Waiting,
)
from kept.client.core.metadata import Endpoint
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import (
    decode_request,
    encode_response,
    header_is_flexible,
    message_type,
    skip_tags,
    versions,
)

A, B = Endpoint("a", 1), Endpoint("b", 2)


class World:
    """Two brokers, a network that does what a test says, and a clock."""

    def __init__(self, bootstrap=(A,), served=None):
        self.core = ClientCore(bootstrap, "test")
        self.now = 1000
        self.down: set[Endpoint] = set()
        self.mute: set[Endpoint] = set()
        self.leader = 0
        self.nodes = (A, B)
        self.replicas: dict[str, list[int]] = {}
        self.waited: list[Waiting] = []
        self.coordinator = 0
        self.topic_error = 0
        self.answers: dict[int, Callable] = {}
        self.served = served or {}
        self.connections: dict[int, Endpoint] = {}
        self.requests: list[tuple[Endpoint, int, int]] = []
        self.unanswered: list[Send] = []
        self.finished: dict[int, Finished] = {}

    def call(self, **kwargs) -> Call:
        call = Call(**{"api_key": ApiKey.LIST_OFFSETS, "values": {}, **kwargs})
        self.do(self.core.call(call, self.now))
        return call

    def step(self, event) -> None:
        self.do(self.core.step(event, self.now))

    def tick(self) -> None:
        self.do(self.core.tick(self.now))

    def do(self, effects) -> None:
        self.core.check_invariants()
        for effect in effects:
            if isinstance(effect, Connect):
                self.connections[effect.connection] = effect.endpoint
                if effect.endpoint in self.down:
                    self.step(Lost(effect.connection, "connection refused", refused=True))
                else:
                    self.step(Connected(effect.connection))
            elif isinstance(effect, Send):
                self.deliver(effect)
            elif isinstance(effect, Close):
                del self.connections[effect.connection]
            elif isinstance(effect, Waiting):
                self.waited.append(effect)
            else:
                assert effect.call.id not in self.finished, "finished twice"
                self.finished[effect.call.id] = effect

    def deliver(self, sent: Send) -> None:
        endpoint = self.connections[sent.connection]
        api, version, correlation, name = struct.unpack_from(">hhih", sent.data, 4)
        self.requests.append((endpoint, api, version))
        if endpoint in self.mute:
            self.unanswered.append(sent)
            return
        position = 14 + max(name, 0)
        if header_is_flexible(message_type(api, version, EntityType.request)):
            position = skip_tags(sent.data, position)
        request = decode_request(api, version, sent.data, position)
        answer = self.answers.get(api, self.default)(api, version, endpoint, request)
        if isinstance(answer, bytes):
            self.step(Received(sent.connection, answer))
        elif answer is not None:
            frame = encode_response(api, version, correlation, answer)
            for start in range(0, len(frame), 7):  # networks cut where they like
                self.step(Received(sent.connection, frame[start : start + 7]))

    def default(self, api, version, endpoint, request):
        if api == ApiKey.API_VERSIONS:
            return {"error_code": 0, "api_keys": self.table()}
        if api == ApiKey.METADATA:
            return {
                "brokers": [
                    {"node_id": n, "host": e.host, "port": e.port} for n, e in enumerate(self.nodes)
                ],
                "controller_id": 1,
                "cluster_id": "c",
                "topics": [self.topic(t.name) for t in request.topics],
                "error_code": 0,
            }
        if api == ApiKey.FIND_COORDINATOR:
            where = (A, B)[self.coordinator]
            one = {"node_id": self.coordinator, "host": where.host, "port": where.port}
            one |= {"error_code": 0, "error_message": None, "key": "g"}
            return {**one, "coordinators": [one]}
        if api == ApiKey.LIST_OFFSETS:
            partition = {"partition_index": 0, "error_code": 0, "offset": 7}
            return {"topics": [{"name": "t", "partitions": [partition]}]}
        if api == ApiKey.HEARTBEAT:
            return {"error_code": 0}
        if api == ApiKey.DELETE_TOPICS:
            return {"responses": [{"name": "t", "topic_id": None, "error_code": 0}]}
        raise AssertionError(api)

    def table(self):
        known = {
            k: versions(k)
            for k in (
                ApiKey.API_VERSIONS,
                ApiKey.METADATA,
                ApiKey.FIND_COORDINATOR,
                ApiKey.LIST_OFFSETS,
                ApiKey.HEARTBEAT,
                ApiKey.DELETE_TOPICS,
            )
        }
        table = {k: (v[0], v[-1]) for k, v in known.items()} | self.served
        return [
            {"api_key": k, "min_version": v[0], "max_version": v[1]} for k, v in table.items() if v
        ]

    def topic(self, name):
        leader = {"error_code": 0, "partition_index": 0, "leader_id": self.leader}
        leader |= self.replicas
        return {
            "error_code": self.topic_error,
            "name": name,
            "topic_id": uuid.uuid4(),
            "partitions": [] if self.topic_error else [leader],
        }

    def run(self, until_ms=120_000) -> None:
        """Let time pass until nothing is left to do."""
        while (due := self.core.next_tick_ms()) is not None and due <= until_ms:
            self.now = max(self.now, due)
            self.tick()

    def result(self, call: Call):
        finished = self.finished[call.id]
        if finished.error is not None:
            raise finished.error
        return finished.response

    def sent_to(self, api):
        return [endpoint for endpoint, asked, _ in self.requests if asked == api]


VALUES = {
    "replica_id": -1,
    "isolation_level": 0,
    "topics": [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
    "timeout": 1000,
}


def offsets(world, **kwargs):
    given = {"values": VALUES, "route": ToLeader("t", 0), "what": "ListOffsets of t:0"} | kwargs
    return world.call(**given)
