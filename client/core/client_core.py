"""The client without I/O: which request goes where in which version, and what to do when it fails.

:meth:`ClientCore.step` takes an event and returns effects; a shell (:mod:`kept.client.sockets`)
opens the sockets. There are no clocks here: every call is given ``now_ms``.

The shell's duties: perform the effects in their order; report what became of a Connect by Connected
or Lost; call ``tick(now_ms)`` when :meth:`ClientCore.next_tick_ms` comes. After Close and
after Lost nothing more is said of that connection.

Guarantees: every Call ends in exactly one Finished, at its deadline at the latest; before that, one
that has been tried for a while, or waits for a controller, is told of by one Waiting. Responses are
matched by correlation id. A call is sent again after a retriable error, and after a broken
connection only if it is ``repeatable``.

Long because the whole way of a call, from waiting to its end, is one state machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from kept.client.core.broker_errors import (
    AuthenticationFailed,
    ConnectionFailed,
    NoResponse,
    NotKafka,
    api_name,
    failure,
    lost_connection,
    unreachable,
)
from kept.client.core.calls import (
    PERHAPS_EXECUTED,
    Anywhere,
    Call,
    ToController,
    ToCoordinator,
    ToLeader,
    ToNode,
)
from kept.client.core.connections import Connection
from kept.client.core.events import (
    Close,
    Connect,
    Connected,
    Effect,
    Event,
    Filled,
    Finished,
    Received,
    Send,
    Waiting,
)
from kept.client.core.leader_errors import offline_grace_ms, why_no_leader
from kept.client.core.login import HandshakeRequest
from kept.client.core.metadata import ClusterMetadata, Endpoint
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import Values, decode_response, encode_request
from kept.client.security.security import PLAINTEXT, Security
from kept.storage.errors import CorruptMessage, InvariantViolation, KeptError, RetriableError
from kept.storage.types import MAX_INT64, TopicPartition

CONNECT_TIMEOUT_MS: Final = 10_000
"""For connecting and agreeing on versions."""
SLOW_MS: Final = 1_000
"""A node that is silent for so long is not waited for where another one will do."""
UNVERSED: Final = (
    "ApiVersions; is it a Kafka listener, and of this security.protocol (of --command-config)?"
)
UNKNOWN: Final = " before it answered anything; does it want a login by SASL (security.protocol)?"
NOTICE_MS: Final = 2_000
"""A call that is still tried after so long is told of by Waiting."""


class ClientCore:
    """All decisions of a client; see the module."""

    def __init__(
        self,
        bootstrap: Sequence[Endpoint],
        client_id: str,
        software: tuple[str, str] = ("kept", "0"),
        security: Security = PLAINTEXT,
        spread: float = 0.5,
    ) -> None:
        """``spread``, drawn from 0 to 1 by the shell, says when sessions are renewed."""
        self.bootstrap = tuple(bootstrap)
        self.client_id = client_id
        self.software = software
        self.security = security
        self._spread = spread
        self.view = ClusterMetadata()
        self._connections: dict[int, Connection] = {}
        self._by_endpoint: dict[Endpoint, int] = {}
        self._waiting: list[Call] = []
        self._next_connection = 0
        self._next_correlation = 0
        self._next_call = 0
        self._turn = 0
        self._patience_ms = SLOW_MS  # more where answers come late
        self.reached = False  # or known to be there: a cluster that does not answer may come back
        self._refused: dict[Endpoint, ConnectionFailed] = {}
        self._requested: set[tuple[object, ...]] = set()

    # The three things a shell does.

    def call(self, call: Call, now_ms: int) -> tuple[Effect, ...]:
        """Begin a call."""
        self._next_call += 1
        call.id = self._next_call
        call.begin(now_ms)
        self._waiting.append(call)
        return tuple(self._advance(now_ms))

    def step(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event and say what is to be done."""
        effects: list[Effect] = []
        if isinstance(event, Connected):
            self._connected(event.connection, effects)
        elif isinstance(event, Received):
            connection = self._connections.get(event.connection)
            if connection is not None:
                connection.bytes_received(now_ms)
                connection.incoming.feed(event.data)
                self._received(connection, now_ms, effects)
        elif isinstance(event, Filled):
            connection = self._connections.get(event.connection)
            if connection is not None:
                connection.bytes_received(now_ms)
                connection.incoming.fill(event.count)
                self._received(connection, now_ms, effects)
        else:
            kind = lost_connection(mistrusted=event.mistrusted, refused=event.refused)
            self._lost(event.connection, event.why, now_ms, effects, kind)
        return (*effects, *self._advance(now_ms))

    def tick(self, now_ms: int) -> tuple[Effect, ...]:
        """Time has passed: what is late ends, and what waited for its time goes on."""
        effects: list[Effect] = []
        self._expire(now_ms, effects)
        return (*effects, *self._advance(now_ms))

    def receive_buffer(self, connection: int) -> memoryview | None:
        """Where the rest of a large response goes, then say Filled; None: say Received."""
        one = self._connections.get(connection)
        return None if one is None else one.incoming.receive_buffer()

    def abandon(self, calls: Sequence[Call]) -> None:
        """Nobody waits for these any more: what is not sent is not, and nothing is sent again."""
        for call in calls:
            call.repeatable = False
        self._waiting = [one for one in self._waiting if not any(one is call for call in calls)]

    def next_tick_ms(self) -> int | None:
        """When the next :meth:`tick` is due."""
        connections = self._connections.values()
        times = [c.since_ms + CONNECT_TIMEOUT_MS for c in connections if not c.ready]
        times += [c.next_doubt_ms(self._patience_ms) for c in connections if c.owes_responses]
        times += [call.deadline_ms for call in self._calls()]
        times += [at for c in connections for at in c.next_notices_ms(NOTICE_MS)]
        times.extend(c.not_before_ms for c in self._waiting if c.not_before_ms)
        return min(times, default=None)

    def check_invariants(self) -> None:
        """What is always so; for tests."""
        ids = [c.id for c in self._calls()]
        if len(ids) != len(set(ids)):
            raise InvariantViolation(f"a call is in two places: {ids}")
        for endpoint, number in self._by_endpoint.items():
            if self._connections[number].endpoint != endpoint:
                raise InvariantViolation(f"connection {number} is not to {endpoint}")
        for connection in self._connections.values():
            connection.check_invariants()

    # Placing calls.

    def _calls(self) -> list[Call]:
        flying = [c for n in self._connections.values() for c in n.in_flight.values() if c]
        return flying + self._waiting

    def _advance(self, now_ms: int) -> list[Effect]:
        """Send every waiting call that can be sent; ask for what the others need."""
        effects: list[Effect] = []
        while True:
            before = (len(effects), self._next_call)
            for call in list(self._waiting):
                if call.last_error is not None and call.is_to_be_reported(now_ms - NOTICE_MS):
                    call.reported = True
                    effects.append(Waiting(call, call.last_error))
                if call.not_before_ms > now_ms:
                    continue
                call.not_before_ms = 0
                if self._place(call, now_ms, effects):
                    self._waiting.remove(call)
            if (len(effects), self._next_call) == before:
                return effects

    def _place(self, call: Call, now_ms: int, effects: list[Effect]) -> bool:
        """Send the call or end it; False when it has to wait."""
        endpoint = self._resolve(call, now_ms)
        if endpoint is None:
            return False
        connection = self._connection_to(endpoint, now_ms, effects)
        if not connection.ready:
            return False
        if connection.is_to_be_renewed(now_ms):
            if not connection.in_flight:
                login = connection.begin_login(self.security, now_ms)
                assert login is not None
                self._send_handshake(connection, login, effects)
            return False
        try:
            self._send(call, connection, now_ms, effects)
        except KeptError as error:  # nothing was sent
            self._finish(call, error, effects)
        return True

    def _resolve(self, call: Call, now_ms: int) -> Endpoint | None:
        """Where the call goes now; None when that has to be found out first."""
        route, view = call.route, self.view
        if isinstance(route, Anywhere):
            return self._any_endpoint(now_ms)
        if isinstance(route, ToLeader):
            endpoint = view.leader(route.topic, route.partition)
            if endpoint is None:
                self._request_metadata(now_ms, call, (route.topic,), route.auto_create)
            return endpoint
        if isinstance(route, ToCoordinator):
            node = view.coordinators.get((route.kind, route.key))
            if node is None:
                self._find_coordinator(now_ms, call, route)
                return None
        else:
            node = view.controller_id if isinstance(route, ToController) else route.node_id
        endpoint = view.nodes.get(node)
        if endpoint is None:
            if isinstance(route, ToController) and view.nodes:
                return self._any_endpoint(now_ms)
            self._request_metadata(now_ms, call, (), False)
        return endpoint

    def _any_endpoint(self, now_ms: int) -> Endpoint:
        """Who answers what anybody may: not one that stands still, where there is another."""
        connections = self._connections.values()
        silent = {c.endpoint for c in connections if c.is_silent(now_ms, self._patience_ms)}
        for connection in connections:
            if connection.ready and connection.endpoint not in silent:
                return connection.endpoint
        endpoints = (
            *self.bootstrap,
            *(e for e in self.view.nodes.values() if e not in self.bootstrap),
        )
        fresh = [e for e in endpoints if e not in self._refused] or list(endpoints)
        fresh = [e for e in fresh if e not in silent] or fresh
        return fresh[self._turn % len(fresh)]

    def _connection_to(self, endpoint: Endpoint, now_ms: int, effects: list[Effect]) -> Connection:
        number = self._by_endpoint.get(endpoint)
        if number is None:
            self._next_connection += 1
            number = self._next_connection
            self._connections[number] = Connection(number, endpoint, now_ms, now_ms)
            self._by_endpoint[endpoint] = number
            effects.append(Connect(number, endpoint))
        return self._connections[number]

    def _send(self, call: Call, connection: Connection, now_ms: int, effects: list[Effect]) -> None:
        correlation = self._correlation()
        data = connection.encoded(call, correlation, self.client_id)
        call.tries += 1
        effects.append(Send(connection.id, data))
        if call.expects_response:
            connection.request_sent(now_ms)
            connection.in_flight[correlation] = call
            connection.in_flight_versions[correlation] = (call.api_key, call.version)
        else:
            effects.append(Finished(call, None, None))

    def _correlation(self) -> int:
        self._next_correlation = (self._next_correlation + 1) & 0x7FFFFFFF
        return self._next_correlation

    # Finding out what a call needs.

    def _request_metadata(
        self, now_ms: int, needed_by: Call, topics: tuple[str, ...], create: bool
    ) -> None:
        values = {
            "topics": [{"name": name, "topic_id": None} for name in topics],
            "allow_auto_topic_creation": create,
        }
        self._request(needed_by.needs, ApiKey.METADATA, values, needed_by, now_ms)

    def _find_coordinator(self, now_ms: int, needed_by: Call, route: ToCoordinator) -> None:
        values = {
            "key": route.key,
            "key_type": route.kind,
            "coordinator_keys": (route.key,),
        }
        self._request(needed_by.needs, ApiKey.FIND_COORDINATOR, values, needed_by, now_ms)

    def _request(
        self, key: tuple[object, ...], api_key: int, values: Values, needed_by: Call, now_ms: int
    ) -> None:
        """Begin an internal call, unless it is under way."""
        if key in self._requested:
            return
        self._requested.add(key)
        self._next_call += 1
        call = Call(api_key, values, what=f"{api_name(api_key)} for {needed_by.name}")
        call.needed_for = key
        call.id, call.started_ms, call.deadline_ms = self._next_call, now_ms, needed_by.deadline_ms
        self._waiting.append(call)

    def _finish_internal(self, call: Call, response: Any, now_ms: int) -> bool:
        """Take over an answer that we asked for ourselves; True when it was one."""
        key = call.needed_for
        if key is None:
            return False
        self._requested.discard(key)
        if key[0] == "metadata":
            asked = key[1]
            assert isinstance(asked, tuple)
            self.view.update(response, asked)
        else:
            self._coordinator_found(key, response, now_ms)
        self._leave_silent(key, now_ms)
        if key[0] == "metadata":
            self._judge_waiting(now_ms)
        return True

    def _doubt(self, connection: Connection, now_ms: int) -> None:
        """A node is silent that owes answers: another one may give them, or know who leads now."""
        connection.doubts += 1
        if self._any_endpoint(now_ms) == connection.endpoint:
            return
        for correlation, call in connection.repeatable_calls():
            route = call.route
            if isinstance(route, Anywhere):
                self._reroute(connection, correlation, call)
            elif isinstance(route, ToCoordinator):
                self._find_coordinator(now_ms, call, route)
            elif isinstance(route, ToLeader):
                self._request_metadata(now_ms, call, (route.topic,), route.auto_create)

    def _leave_silent(self, key: tuple[object, ...], now_ms: int) -> None:
        """Calls to a silent node that another one was found for."""
        for connection in self._connections.values():
            if connection.is_silent(now_ms, self._patience_ms):
                for correlation, call in connection.repeatable_calls():
                    if call.needs == key and not self._goes_to(call, connection.endpoint):
                        self._reroute(connection, correlation, call)

    def _reroute(self, connection: Connection, correlation: int, call: Call) -> None:
        """Its answer does not count any more."""
        connection.in_flight[correlation] = None
        call.may_have_effect = True
        self._waiting.append(call)

    def _judge_waiting(self, now_ms: int) -> None:
        """Note why calls for a partition still cannot go, and when to ask again."""
        for call in self._waiting:
            route = call.route
            if isinstance(route, ToLeader):
                if self.view.leader(route.topic, route.partition) is None:
                    tp = TopicPartition(route.topic, route.partition)
                    self._back_off(call, why_no_leader(self.view, tp, call.name), now_ms)
            elif isinstance(route, ToNode) and route.node_id not in self.view.nodes:
                why = ConnectionFailed(f"{call.name}: the cluster has no node {route.node_id} now")
                self._back_off(call, why, now_ms)

    def _coordinator_found(self, key: tuple[object, ...], response: Any, now_ms: int) -> None:
        # Brokers that are asked for several say nothing of a right that is missing. Those that do
        # not serve transactions refuse by that code, at which any client stops, and say so.
        is_batched = hasattr(response, "coordinators")
        coordinator = response.coordinators[0] if is_batched else response
        kind, name = key[1], key[2]
        assert isinstance(kind, int)
        assert isinstance(name, str)
        if int(coordinator.error_code) == 0:
            node = int(coordinator.node_id)
            self.view.coordinators[kind, name] = node
            self.view.nodes[node] = Endpoint(coordinator.host, int(coordinator.port))
            return
        for call in self._waiting:
            if call.route == ToCoordinator(name, kind):
                why = failure(
                    int(coordinator.error_code),
                    call.name,
                    getattr(coordinator, "error_message", None),
                    key=name,
                    is_explained=is_batched,
                )
                assert why is not None
                self._back_off(call, why, now_ms)

    def _back_off(self, call: Call, why: KeptError, now_ms: int) -> None:
        call.back_off(why, now_ms, offline_grace_ms(len(self.view.nodes)))

    # Events.

    def _connected(self, number: int, effects: list[Effect]) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.established = True
            self._send_handshake(connection, connection.request_versions(self.software), effects)

    def _send_handshake(
        self, connection: Connection, request: HandshakeRequest, effects: list[Effect]
    ) -> None:
        """A request that the connection itself needs before it is ready."""
        correlation = self._correlation()
        connection.in_flight[correlation] = None
        connection.in_flight_versions[correlation] = (request.api_key, request.version)
        data = encode_request(
            request.api_key, request.version, correlation, self.client_id, request.values
        )
        effects.append(Send(connection.id, data))

    def _received(self, connection: Connection, now_ms: int, effects: list[Effect]) -> None:
        while connection.id in self._connections:
            why = ""
            try:
                frame = connection.incoming.next()
                if frame is None:
                    return
                why = "its answer is not readable: "
                self._frame(connection, frame, now_ms, effects)
            except (CorruptMessage, struct.error) as error:
                effects.append(Close(connection.id))
                self._lost(connection.id, f"{why}{error}", now_ms, effects, kind=NotKafka)
            except AuthenticationFailed as error:
                effects.append(Close(connection.id))
                self._lost(connection.id, str(error), now_ms, effects, kind=AuthenticationFailed)

    def _frame(
        self,
        connection: Connection,
        frame: bytes | memoryview,
        now_ms: int,
        effects: list[Effect],
    ) -> None:
        if connection.response_received(now_ms):
            self._patience_ms = min(2 * self._patience_ms, CONNECT_TIMEOUT_MS)
        (correlation,) = struct.unpack_from(">i", frame)
        request = connection.in_flight_versions.pop(correlation, None)
        if request is None:
            raise CorruptMessage(f"an answer to a request that was not made ({correlation})")
        call = connection.in_flight.pop(correlation)
        if call is None:
            if not connection.ready:
                self._agree(connection, request, frame, now_ms, effects)
            return
        connection.served = True
        _, response = decode_response(*request, frame)
        if self._finish_internal(call, response, now_ms):
            return
        error = call.check(response) if call.check is not None else None
        call.may_have_effect |= isinstance(error, PERHAPS_EXECUTED)
        if error is None:
            effects.append(Finished(call, response, None))
        elif call.is_retried_after(error):
            self._forget_route(call)
            self._back_off(call, error, now_ms)
            self._waiting.append(call)
            self._end_if_late(now_ms, effects)
        else:
            effects.append(Finished(call, None, error))

    def _agree(
        self,
        connection: Connection,
        request: tuple[int, int],
        frame: bytes | memoryview,
        now_ms: int,
        effects: list[Effect],
    ) -> None:
        """An answer that brings a connection nearer to being ready."""
        if request[0] == ApiKey.API_VERSIONS:
            following = connection.versions_came(frame, self.software)
            if following is None:
                self.reached = True  # where it closes under the login, it may lack room for now
                following = connection.begin_login(self.security, now_ms)
        else:
            _, response = decode_response(*request, frame)
            following = connection.login_answered(request[0], response, self._spread, now_ms)
        if following is not None:
            self._send_handshake(connection, following, effects)
        else:
            self._refused.clear()

    def _forget_route(self, call: Call) -> None:
        """What was known of the way to this call's node is wrong."""
        route = call.route
        if isinstance(route, ToLeader):
            self.view.forget_topic(route.topic)
        elif isinstance(route, ToCoordinator):
            self.view.coordinators.pop((route.kind, route.key), None)
        elif isinstance(route, ToController):
            self.view.controller_id = -1

    def _lost(
        self,
        number: int,
        why: str,
        now_ms: int,
        effects: list[Effect],
        kind: type[ConnectionFailed | NotKafka | AuthenticationFailed] = ConnectionFailed,
    ) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        del self._by_endpoint[connection.endpoint]
        self._turn += 1
        text = why
        if connection.established and not connection.ready and kind is ConnectionFailed:
            login = connection.login is not None
            text = f"{why} during {'the SASL login' if login else UNVERSED}"
        elif connection.ready and not connection.served and not self.security.mechanism:
            text = why + UNKNOWN
        if not connection.ready:
            failed = kind if issubclass(kind, ConnectionFailed) else ConnectionFailed
            self._refused[connection.endpoint] = failed(f"{connection.endpoint}: {text}")
        for call in connection.in_flight.values():
            if call is not None:
                self._cut_off(
                    call, kind(f"{connection.endpoint}: {call.name}: {text}"), now_ms, effects
                )
        if not connection.ready:
            self._unreachable(connection.endpoint, text, kind, now_ms, effects)

    def _cut_off(self, call: Call, error: KeptError, now_ms: int, effects: list[Effect]) -> None:
        """A connection broke under a call."""
        self._forget_route(call)
        if isinstance(error, RetriableError) and call.repeatable and call.patient:
            self._back_off(call, error, now_ms)
            self._waiting.append(call)
        else:
            self._finish(call, error, effects)

    def _unreachable(
        self,
        endpoint: Endpoint,
        why: str,
        kind: type[ConnectionFailed | NotKafka | AuthenticationFailed],
        now_ms: int,
        effects: list[Effect],
    ) -> None:
        """An endpoint does not answer: its calls go elsewhere, or wait, or end if all is vain."""
        hopeless = not self.reached and all(e in self._refused for e in self.bootstrap)
        waiting, self._waiting = self._waiting, []
        requested = {call.needed_for for call in waiting}
        for call in waiting:
            error = kind(f"{endpoint}: {call.name}: {why}")
            concerned = isinstance(call.route, Anywhere) or self._goes_to(call, endpoint)
            lasting = not issubclass(kind, ConnectionFailed)
            if hopeless or lasting or (concerned and not call.patient):
                all_tried = self._refused.values() if hopeless else ()
                self._finish(call, unreachable(call.name, error, all_tried), effects)
                continue
            self._waiting.append(call)
            if concerned:
                self._forget_route(call)
                self._back_off(call, error, now_ms)
            elif call.needs in requested:
                call.last_error = error  # what it waits for is not found out

    def _goes_to(self, call: Call, endpoint: Endpoint) -> bool:
        route, view = call.route, self.view
        if isinstance(route, ToLeader):
            return view.leader(route.topic, route.partition) == endpoint
        if isinstance(route, ToCoordinator):
            return view.nodes.get(view.coordinators.get((route.kind, route.key), -1)) == endpoint
        node = route.node_id if isinstance(route, ToNode) else view.controller_id
        return view.nodes.get(node, isinstance(route, ToController) and endpoint) == endpoint

    def _finish(self, call: Call, error: KeptError, effects: list[Effect]) -> None:
        """End a call with an error; one of our own ends those that needed it, or they ask again."""
        if call.needed_for is None:
            effects.append(Finished(call, None, error))
            return
        self._requested.discard(call.needed_for)
        for other in self._waiting:
            if other.needed_for is None and other.needs == call.needed_for:
                other.last_error = error
                if not isinstance(error, RetriableError):
                    other.deadline_ms = other.started_ms
                    other.not_before_ms = MAX_INT64

    # Time.

    def _expire(self, now_ms: int, effects: list[Effect]) -> None:
        for connection in list(self._connections.values()):
            if connection.owes_responses and now_ms >= connection.next_doubt_ms(self._patience_ms):
                self._doubt(connection, now_ms)
            if not connection.ready and now_ms - connection.since_ms >= CONNECT_TIMEOUT_MS:
                effects.append(Close(connection.id))
                why = f"no connection within {CONNECT_TIMEOUT_MS // 1000} s"
                self._lost(connection.id, why, now_ms, effects)
            effects.extend(connection.awaits_controller(now_ms - NOTICE_MS))
            for correlation, call in connection.in_flight.items():
                if call is not None and call.deadline_ms <= now_ms:
                    connection.in_flight[correlation] = None
                    seconds = (now_ms - call.started_ms) / 1000
                    why = f"{connection.endpoint}: {call.name}: no answer within {seconds:.3g} s"
                    self._finish(call, NoResponse(why + call.earlier_error), effects)
            if connection.is_given_up(now_ms):
                effects.append(Close(connection.id))
                self._lost(connection.id, "no answer", now_ms, effects)
        self._end_if_late(now_ms, effects)

    def _end_if_late(self, now_ms: int, effects: list[Effect]) -> None:
        waiting, self._waiting, connections = self._waiting, [], self._connections.values()
        for call in waiting:
            if call.deadline_ms > now_ms:
                self._waiting.append(call)
                continue
            late = f"{call.name}: not possible within {(now_ms - call.started_ms) / 1000:.3g} s"
            tried = () if any(c.ready for c in connections) else self._refused.values()
            self._finish(
                call, unreachable(call.name, call.last_error or NoResponse(late), tried), effects
            )
