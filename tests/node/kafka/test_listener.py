"""Whom a listener admits, whom it closes, and what it counts; connections are made up here."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kept.client.security.plain import MAX_FIELD_BYTES
from kept.cluster.security.acls import ANONYMOUS
from kept.node.config.node_config import NodeConfig
from kept.node.kafka import listener
from kept.node.kafka.handshake_timeout import HandshakeTimeouts
from kept.node.kafka.listener import PROBE_CONNECTIONS, Accepted, HandedOver, Listener
from kept.node.parts import NodeParts
from kept.node.runtime.connection_quota import ConnectionQuota
from kept.node.security.sasl_authenticator import AccessTokenChecked
from kept.node.security.session import ALLOW_ALL, Session, may_change_voters
from kept.storage.errors import ConfigurationError, InvalidRequest
from tests.support.given import Given
from tests.support.loops import run, turns

HERE, OTHER, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class Peer:
    """A connection, as far as its listener knows it."""

    def __init__(self, host: str = HERE, last_active: float = 0.0, **state: Any) -> None:
        self.session = Session(host=host)
        self.host, self.peer, self.last_active = host, f"{host}:1", last_active
        self.idle, self.has_unsent, self.partial_since = True, False, 0.0
        self.from_this_node = False
        self.over_limit: tuple[str, int] | None = None
        self.aborted: list[str] = []
        self.shrunk = 0
        vars(self).update(state)

    def is_late(self, oldest: float) -> bool:
        return 0 < self.partial_since < oldest

    def abort(self, why: str = "", **fields: Any) -> None:
        self.aborted.append(" ".join((why, *map(str, fields.values()))).strip())

    def shrink(self) -> None:
        self.shrunk += 1


class Site:
    """A node without anything but settings, a clock, quotas and open files."""

    def __init__(self, listeners: str = "PLAINTEXT://127.0.0.1:0", **settings: str) -> None:
        given = {name.replace("_", "."): text for name, text in settings.items()}
        self.config = NodeConfig.load(None, {"listeners": listeners, **given}, {}, port=None)
        self.now = 1000.0
        self.client_connections, self.node_connections = ConnectionQuota(), ConnectionQuota()
        self.context: Any = Given(
            config__current=self.config,
            runtime__stream_socket=lambda family: socket.socket(family, socket.SOCK_STREAM),
            runtime__loop__time=lambda: self.now,
            runtime__loop__call_later=lambda *_: Given(cancel=lambda: None),
            open_files__connection_limit=lambda most: min(most, self.files),
            open_files__nearly_out=lambda fd: fd >= self.files,
        )
        self.files = 1000

    def listener(self, *, between_nodes: bool = False) -> Listener:
        quota = self.node_connections if between_nodes else self.client_connections
        return Listener(
            self.context, self.config.listeners[0], quota, {}, between_nodes=between_nodes
        )


def admitted(found: Listener, *hosts: str, fd: int = 1) -> list[Peer]:
    """Connections from there; all are admitted."""
    peers: list[Any] = [Peer(host) for host in hosts]
    assert [found.admit(peer, fd) for peer in peers] == [True] * len(peers)
    return peers


def refused(found: Listener, host: str = HERE, fd: int = 1) -> bool:
    """It is sent away, at once or because it is no probe."""
    peer: Any = Peer(host, last_active=999.0)
    admitted = found.admit(peer, fd)
    assert (peer in found.connections) is admitted
    if admitted and peer.over_limit is not None:
        found.leave(peer)
        return True
    return not admitted


# Who is admitted.


def test_connections_are_bounded_over_all_clients_listeners(capfd) -> None:
    site = Site(max_connections="3", max_connections_per_ip="2147483647")
    one, two = site.listener(), site.listener()
    first, *_ = admitted(one, HERE, HERE)
    admitted(two, OTHER)
    assert refused(one) and refused(two, THIRD)
    assert site.client_connections.count == 3 and len(one.silent) == 2
    assert "setting=max.connections limit=3" in capfd.readouterr().err
    one.leave(first)  # type: ignore[arg-type]
    one.leave(first)  # type: ignore[arg-type]
    assert len(one.silent) == 1
    assert not refused(two) and refused(two)


def test_a_listener_may_have_a_limit_of_its_own(capfd) -> None:
    site = Site(listener_name_plaintext_max_connections="2")
    one, two = site.listener(), site.listener()
    two.own_max_connections = 100
    first, *_ = admitted(one, HERE, HERE)
    assert refused(one) and not refused(two)
    assert "setting=listener.name.plaintext.max.connections limit=2" in capfd.readouterr().err
    one.leave(first)  # type: ignore[arg-type]
    assert not refused(one) and refused(one)


def test_connections_are_bounded_for_each_address_alone(capfd) -> None:
    site = Site(max_connections="100", max_connections_per_ip="2")
    found = site.listener()
    first, *_ = admitted(found, HERE, HERE, OTHER)
    assert refused(found)
    assert not refused(found, OTHER) and refused(found, OTHER)
    assert "setting=max.connections.per.ip limit=2" in capfd.readouterr().err
    found.leave(first)  # type: ignore[arg-type]
    assert not refused(found) and refused(found)


def test_addresses_of_one_ipv6_network_are_one_where_connections_are_bounded(capfd) -> None:
    """Whoever has one of a /64 has them all."""
    site = Site(max_connections="100", max_connections_per_ip="2")
    found = site.listener()
    first, *_ = admitted(found, "2001:db8::1", "2001:db8::ffff:1")
    assert refused(found, "2001:db8::2") and not refused(found, "2001:db8:0:1::2")
    assert "setting=max.connections.per.ip limit=2" in capfd.readouterr().err
    found.leave(first)  # type: ignore[arg-type]
    assert not refused(found, "2001:db8::2") and refused(found, "2001:db8::3")
    for mapped in ("::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.2"):
        assert not refused(found, mapped), "IPv4, however it is written, is no network"
    assert refused(found, "10.0.0.1")


def test_what_a_node_opens_to_itself_for_a_user_counts_nowhere() -> None:
    site = Site(
        max_connections="2", max_connections_per_ip="1", listener_name_plaintext_max_connections="2"
    )
    found = site.listener()
    several = [Peer(HERE, from_this_node=True) for _ in range(3)]
    first, *_ = admitted(found, HERE)
    assert [found.admit(peer, 1) for peer in several] == [True] * 3  # type: ignore[arg-type]
    assert site.client_connections.count == 1 and len(found.silent) == 1
    (second,) = admitted(found, OTHER)
    assert second.over_limit is None and refused(found, THIRD)
    for peer in (*several, first):
        found.leave(peer)  # type: ignore[arg-type]
    assert site.client_connections.count == 1 and not refused(found)


@pytest.mark.parametrize(("files", "fd"), [(2, 1), (1000, 1000)], ids=["many", "high descriptor"])
def test_connections_leave_files_to_the_others(files, fd, capfd) -> None:
    site = Site()
    found = site.listener()
    admitted(found, HERE, HERE, fd=999)
    site.files = files
    assert refused(found, OTHER, fd)
    assert f"setting=RLIMIT_NOFILE limit={files}" in capfd.readouterr().err
    site.files = 1000
    assert not refused(found, OTHER, 999)


def test_refusals_are_told_once_in_a_while(capfd) -> None:
    site = Site(max_connections="1")
    found = site.listener()
    admitted(found, HERE)
    told = []
    for seconds in (0.0, 9.9, 0.1, 9.9):
        site.now += seconds
        assert refused(found)
        told.append(capfd.readouterr().err.count('event="connection refused"'))
    assert told == [1, 0, 1, 0]


def test_nodes_have_places_of_their_own_and_no_bound_for_an_address(capfd) -> None:
    site = Site(max_connections="1", max_connections_per_ip="1", kept_node_max_connections="16")
    clients, nodes = site.listener(), site.listener(between_nodes=True)
    admitted(clients, HERE)
    assert refused(clients)
    capfd.readouterr()
    several = admitted(nodes, *[HERE] * 16)
    for peer in several:
        peer.idle = False
    assert refused(nodes), "none of them is idle"
    assert "setting=kept.node.max.connections limit=16" in capfd.readouterr().err
    assert not any(peer.aborted for peer in several)
    assert refused(clients)


@pytest.mark.parametrize("full", [True, False], ids=["places", "files"])
def test_the_node_connection_that_was_idle_longest_makes_room(full) -> None:
    site = Site(kept_node_max_connections="16")
    found = site.listener(between_nodes=True)
    busy, newer, oldest, *_ = admitted(found, HERE, HERE, OTHER, *[THIRD] * (12 if full else 2))
    for peer in found.connections:
        peer.last_active = 3.0
    busy.last_active, oldest.last_active, busy.idle = 1.0, 2.0, False
    site.files = 50
    assert not refused(found, THIRD, 49)
    count = found.quota.count
    assert count == (16 if full else 6) and not oldest.aborted
    assert not refused(found, THIRD, 49 if full else 50)
    assert oldest.aborted == ["closed to make room for another node kept.node.max.connections"]
    assert not busy.aborted and not newer.aborted
    assert oldest not in found.connections and busy in found.connections
    assert found.quota.of(OTHER) == 0
    assert found.quota.count == len(found.connections) == count


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"GET /healthz HTTP/1.1", True),
        (b"HEAD /readyz", True),
        (b"GET /", None),
        (b"HEAD", None),
        (b"GET /metrics", False),
        (b"POST /healthz", False),
        (b"\0\0\0\x14", False),
    ],
)
def test_a_probe_is_known_by_its_first_bytes(said, expected) -> None:
    assert Listener.is_probe(said) is expected


def test_a_full_node_has_places_for_probes_which_are_bounded(capfd) -> None:
    site = Site(max_connections="1")
    found = site.listener()
    admitted(found, HERE)
    waiting = admitted(found, *[OTHER] * (PROBE_CONNECTIONS + 1))
    assert [peer.over_limit for peer in waiting] == [("max.connections", 1)] * len(waiting)
    assert [peer.aborted for peer in waiting] == [[""], *[[]] * PROBE_CONNECTIONS]
    assert len(found.silent) == 1
    probes = [found.hand_over(peer, None) for peer in waiting[1:]]  # type: ignore[arg-type]
    assert all(probe.is_probe for probe in probes) and not len(found.probes)
    late: Any = Peer(THIRD)
    assert not found.admit(late, 1), "as many are being served"
    assert capfd.readouterr().err.count('event="connection refused"') == 1
    probes[0].closed()
    assert found.admit(late, 1)
    site.files = 5
    assert not found.admit(late, 5), "the last descriptors are not for probes"


def test_nodes_are_not_probed_beyond_their_limit() -> None:
    site = Site(kept_node_max_connections="16")
    found = site.listener(between_nodes=True)
    for peer in admitted(found, *[HERE] * 16):
        peer.idle = False
    late: Any = Peer()
    assert not found.admit(late, 1) and late.over_limit is None


# Other protocols.


def test_a_connection_counts_under_another_protocol_until_that_closes_it() -> None:
    site = Site(max_connections="1")
    found = site.listener()
    (peer,) = admitted(found, HERE)
    transport = Given(abort=lambda: None)
    taken = found.hand_over(peer, transport)  # type: ignore[arg-type]
    found.leave(peer)  # type: ignore[arg-type]
    assert not found.connections and found.handed_over == {taken: None}
    assert (taken.transport, taken.host) == (transport, HERE)
    assert refused(found)
    taken.closed()
    taken.closed()
    assert (found.quota.count, found.quota.of(HERE), found.handed_over) == (0, 0, {})
    assert not refused(found)


@pytest.fixture
def parts(tmp_path) -> Iterator[NodeParts]:
    settings = {
        "node.id": "0",
        "listeners": "PLAINTEXT://127.0.0.1:0,NODE://127.0.0.1:10001",
        "controller.quorum.voters": "0@127.0.0.1:10001,1@127.0.0.1:10002",
    }
    config = NodeConfig.load(None, settings, {}, port=None, data_dir=str(tmp_path))

    async def build() -> NodeParts:
        return NodeParts(config)

    with asyncio.Runner() as runner:
        yield runner.run(build())


@pytest.mark.parametrize("method", [b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC"])
def test_http_has_its_server_on_every_listener(method, parts) -> None:
    assert len(parts.all_listeners) == 2
    for found in parts.all_listeners:
        assert found.protocols[method] == parts.http.receive_connection


def test_grpc_and_nodes_go_to_who_serves_them_there(parts, monkeypatch) -> None:
    clients, nodes = parts.all_listeners
    assert clients.protocols[b"PRI "] == parts.grpc.receive_connection
    calls: list[Any] = []
    monkeypatch.setattr(parts.peers, "accept", lambda *given: calls.append(given))
    taken = HandedOver(nodes, object(), Session(host=HERE))
    nodes.protocols[b"KEPT"](taken, b"KEPT")
    assert calls[0][:2] == (taken.transport, b"KEPT")
    assert b"KEPT" not in clients.protocols
    assert b"PRI " not in nodes.protocols, "nodes speak no gRPC"


def test_everything_open_is_closed_at_the_end() -> None:
    found = Site().listener()
    stays, goes = admitted(found, HERE, HERE)
    aborted: list[int] = []
    transport = Given(abort=lambda: aborted.append(1))
    found.hand_over(goes, transport)  # type: ignore[arg-type]
    found.throttle._waiting[Given(abort=lambda: aborted.append(2))] = HERE
    assert found.silent._timer is not None
    found.close_connections()
    assert stays.aborted == [""] and sorted(aborted) == [1, 2] and not goes.aborted
    assert found.silent._timer is None


def test_sessions_that_are_over_end_with_their_connections_whatever_they_speak() -> None:
    found = Site().listener()
    kafka, http, *others = admitted(found, HERE, HERE, HERE, HERE)
    aborted: list[str] = []
    for peer, name in ((http, "over"), (others[0], "goes on")):
        transport = Given(abort=lambda name=name: aborted.append(name))
        found.hand_over(peer, transport)  # type: ignore[arg-type]
    over = [kafka.session, http.session]
    found.end_sessions(lambda session: any(session is one for one in over))
    assert kafka.aborted and not others[1].aborted
    assert aborted == ["over"]


@pytest.mark.parametrize(
    ("user", "password", "asked"),
    [
        ("ada", "x" * MAX_FIELD_BYTES, True),
        ("ada", "x" * (MAX_FIELD_BYTES + 1), False),
        ("a" * (MAX_FIELD_BYTES + 1), "x", False),
        ("ada", "", False),
        ("", "x", False),
        ("ada", "a\0b", False),
    ],
)
def test_nobody_checks_a_password_that_sasl_would_not_take(user, password, asked) -> None:
    """A hash of it costs milliseconds, and more for a long one."""
    found = Site().listener()
    checked: list[tuple[str, str]] = []

    async def matches(_listener: str, _host: str, user: str, password: str, *, plain: bool) -> bool:
        checked.append((user, password))
        return False

    async def refused(*_: Any) -> None:
        return None

    found.context.authorizer, found.context.logins = ALLOW_ALL, Given(password_matches=matches)
    found._refuse_login = refused  # type: ignore[method-assign]
    transport = Given(get_extra_info=lambda name: (HERE, 1) if name == "peername" else None)
    assert asyncio.run(found.authenticate_password(transport, user, password)) is None
    assert checked == ([(user, password)] if asked else [])


# What comes before a connection serves.


def test_a_request_of_which_too_much_would_be_decoded_is_refused() -> None:
    found = Site(kept_request_decoded_max_bytes="65536").listener()
    found.check_decoded(65536)
    with pytest.raises(InvalidRequest, match=r"65537 bytes .* kept\.request\.decoded\.max\.bytes"):
        found.check_decoded(65537)


@pytest.mark.parametrize("session", [None, Session("User:ada")])
def test_the_end_of_a_pair_of_this_nodes_own_counts_nowhere(session) -> None:
    found = Site().listener()
    found.context.authorizer = ALLOW_ALL
    opened: list[Any] = []
    found.open = lambda *given, **more: opened.append((*given, more))  # type: ignore[method-assign]
    transport: Any = Given(get_extra_info=lambda _: (HERE, 1))
    Accepted(found, session).connection_made(transport)
    ((over, served, more),) = opened
    assert over is transport and more == ({} if session is None else {"from_this_node": True})
    assert served is session or served.host == HERE


@run
async def test_a_pair_whose_other_end_is_not_served_is_closed(monkeypatch) -> None:
    pair = [Given(setblocking=lambda _: None, closed=[]) for _ in range(2)]
    for end in pair:
        end.close = lambda end=end: end.closed.append(1)

    async def fails(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    found = Site().listener()
    found.context.runtime.loop.connect_accepted_socket = fails
    monkeypatch.setattr(listener.socket, "socketpair", lambda: pair)
    with pytest.raises(OSError, match="Too many"):
        await found.connect_here()
    assert [end.closed for end in pair] == [[1], [1]]


@pytest.mark.parametrize(
    ("room", "unread", "served", "outcome"),
    [
        (100, b"", [], ""),
        (100, b"abcdef", [b"abcdef"], ""),
        (4, b"abcdefghij", [b"abcd", b"efgh", b"ij"], ""),
        (0, b"ab", [], "more was sent behind a login than is served at once"),
        (2, b"ab!def", [b"ab", b"!d"], "closed"),
    ],
)
def test_what_came_in_already_is_served_first(room, unread, served, outcome, monkeypatch) -> None:
    """As much at a time as the connection takes, until that closes."""
    received: list[bytes] = []

    class Made(Peer):
        transport: Any = None
        outcome = ""

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            assert found.admit(self, 1)  # type: ignore[arg-type]

        def get_buffer(self, _: int) -> memoryview:
            self.buffer = bytearray(room)
            return memoryview(self.buffer)

        def buffer_updated(self, size: int) -> None:
            received.append(bytes(self.buffer[:size]))
            if b"!" in received[-1]:
                self.transport, self.outcome = None, "closed"

        def abort(self, why: str = "", **fields: Any) -> None:
            self.outcome = why

    made: list[Any] = []
    found = Site().listener()
    monkeypatch.setattr(
        listener, "Connection", lambda *_, **more: made.append(Made(**more)) or made[0]
    )
    transport = Given(set_protocol=lambda protocol: made.append(protocol))
    found.open(transport, Session(), unread, logged_in=bool(unread))
    assert made[0] is made[1] and (received, made[0].outcome) == (served, outcome)
    assert len(found.silent) == (not unread), "who has logged in need not speak at once"


@pytest.mark.parametrize(
    ("tls", "first", "expected"),
    [
        (None, b"\0\0\0\x14", True),
        (None, b"GET ", True),
        (None, b"\x16\x03\x01\x02", False),
        (None, b"\x16\x03\x03\x02", False),
        (None, b"\x16\x03\x04\x02", True),
        (None, b"\x15\x03\x01\x02", True),
        ("", b"\0\0\0\x14", True),
        ("h2", b"PRI ", True),
        ("h2", b"GET ", False),
        ("http/1.1", b"GET ", True),
        ("http/1.1", b"PRI ", False),
        ("http/1.1", b"\0\0\0\x14", False),
    ],
)
@pytest.mark.parametrize("peer", [(HERE, 1), None])
def test_who_begins_as_another_protocol_than_it_named_is_not_served(
    tls, first, expected, peer, capfd
) -> None:
    found = Site().listener()
    negotiated = None if tls is None else Given(selected_alpn_protocol=lambda: tls or None)
    extra = {"ssl_object": negotiated, "peername": peer}
    assert found.is_expected(Given(get_extra_info=extra.get), first) is expected
    told = capfd.readouterr().err
    assert ("speaks TLS" in told) is (tls is None and not expected)
    if told:
        assert f"peer={HERE if peer else '?'}" in told


# Idle and late ones.


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ({"last_active": 939.9}, "closed"),
        ({"last_active": 940.0}, "shrunk"),
        ({"last_active": 939.9, "idle": False}, "shrunk"),
        ({"last_active": 939.9, "idle": False, "has_unsent": True}, "closed"),
        ({"last_active": 989.9}, "shrunk"),
        ({"last_active": 990.0}, ""),
        ({"last_active": 999.0, "partial_since": 969.9}, "late"),
        ({"last_active": 999.0, "partial_since": 970.0}, ""),
    ],
)
@pytest.mark.parametrize("between_nodes", [False, True])
def test_idle_and_late_connections_are_closed(state, outcome, between_nodes) -> None:
    site = Site(connections_max_idle_ms="60000", kept_request_receive_ms="30000")
    found = site.listener(between_nodes=between_nodes)
    peer: Any = Peer(**state)
    assert found.admit(peer, 1)
    found.close_idle()
    late = "a request did not come in whole within kept.request.receive.ms"
    assert peer.aborted == {"closed": [""], "late": [late]}.get(outcome, [])
    assert peer.shrunk == (outcome == "shrunk")


def test_a_negative_time_closes_nothing_and_none_closes_at_once() -> None:
    for idle_ms, closed in (("-1", False), ("0", True)):
        found = Site(connections_max_idle_ms=idle_ms).listener()
        peer: Any = Peer(last_active=0.001)
        assert found.admit(peer, 1)
        found.close_idle()
        assert bool(peer.aborted) is closed


@pytest.mark.parametrize("between_nodes", [False, True])
def test_the_oldest_silent_one_goes(between_nodes) -> None:
    found = Site(kept_silent_max_connections="2").listener(between_nodes=between_nodes)
    several = admitted(found, HERE, HERE, HERE)
    assert [peer.aborted for peer in several] == [[""], [], []]
    assert isinstance(found.silent, HandshakeTimeouts) and found.silent._patience_s == 10.0


# Addresses.


def test_a_port_that_is_taken_is_told_and_nothing_stays_bound() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = Site(f"PLAINTEXT://127.0.0.1:{port}").listener()
        with pytest.raises(ConfigurationError, match=f"port {port} on 127.0.0.1 is in use"):
            found.bind()
    found.bind()
    assert found.port == port
    (bound,) = found._sockets
    found.stop_accepting()
    assert bound.fileno() == -1 and not found._sockets


def test_an_address_that_is_not_here_is_told() -> None:
    found = Site("PLAINTEXT://192.0.2.1:0").listener()
    with pytest.raises(ConfigurationError, match=r"cannot bind .*192\.0\.2\.1"):
        found.bind()


class Sockets:
    """Sockets of a machine that may lack IPv6, or has no such address, or not that port of it."""

    def __init__(self, *, family: int = 0, bind: dict[int, int]) -> None:
        self.family, self.bind = family, bind
        self.made: list[Any] = []

    def __call__(self, family: int, _: int) -> Any:
        if family == socket.AF_INET6 and self.family:
            raise OSError(self.family, "no such family")
        made = Given(closed=False, options=[])

        def bind(address: Any) -> None:
            made.address = address
            if family in self.bind:
                raise OSError(self.bind[family], "refused")

        made.setsockopt = lambda *given: made.options.append(given)
        made.getsockname = lambda: ("", 9092)
        made.close = lambda: setattr(made, "closed", True)
        made.bind = bind
        self.made.append(made)
        return made


@pytest.mark.parametrize(
    ("family", "bind", "outcome"),
    [
        (0, {}, "both"),
        (errno.EAFNOSUPPORT, {}, "one"),
        (0, {socket.AF_INET6: errno.EADDRNOTAVAIL}, "one"),
        (0, {socket.AF_INET6: errno.EADDRINUSE}, "port 9092 on ::1 is in use"),
        (0, {socket.AF_INET: errno.EADDRINUSE}, "port 0 on 127.0.0.1 is in use"),
        (0, {socket.AF_INET: errno.EACCES}, "cannot bind PLAINTEXT://localhost:0: refused"),
    ],
)
def test_both_families_share_a_port_where_there_are_two(family, bind, outcome, monkeypatch) -> None:
    sockets = Sockets(family=family, bind=bind)
    monkeypatch.setattr(listener.socket, "socket", sockets)
    found = Site("PLAINTEXT://localhost:0").listener()
    if outcome in ("both", "one"):
        found.bind()
        assert len(found._sockets) == (2 if outcome == "both" else 1)
    else:
        with pytest.raises(ConfigurationError, match=outcome):
            found.bind()
        assert not found._sockets
    assert [made.closed for made in sockets.made] == [
        made not in found._sockets for made in sockets.made
    ]
    addresses = [made.address for made in sockets.made]
    assert addresses == [("127.0.0.1", 0), ("::1", 9092)][: len(addresses)]
    reuse = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    only = (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    options = [made.options for made in sockets.made]
    assert options == [[reuse], [reuse, only]][: len(options)]


@pytest.mark.parametrize(
    ("family", "bind", "outcome"),
    [
        (errno.EAFNOSUPPORT, {}, "no address of .* can be bound"),
        (0, {socket.AF_INET6: errno.EADDRNOTAVAIL}, "cannot bind .*: refused"),
    ],
)
def test_the_only_address_is_not_left_out(family, bind, outcome, monkeypatch) -> None:
    monkeypatch.setattr(listener.socket, "socket", Sockets(family=family, bind=bind))
    with pytest.raises(ConfigurationError, match=outcome):
        Site("PLAINTEXT://[::1]:0").listener().bind()


# Logins outside of SASL.


@pytest.mark.parametrize(
    ("authorization", "way", "user"),
    [
        ("Basic YWRhOnB3", "Basic", "ada"),
        ("Basic YWRhOg==", "Basic", "ada"),
        ("Bearer a.b.c", "Bearer", ""),
        ("Bearer ", "Bearer", ""),
        ("Digest ada", "Basic", ""),
    ],
    ids=["another password", "no password", "another token", "no token", "no such way"],
)
@run
async def test_a_refused_login_is_told_of_before_its_answer_waits(
    authorization: str, way: str, user: str
) -> None:
    """So that its call gives way to others while it waits."""
    told: list[tuple[str, ...]] = []

    async def check_token(_listener: str, _token: str) -> AccessTokenChecked:
        return AccessTokenChecked(why="no signature")

    async def password_matches(*_: str, plain: bool) -> bool:
        assert not plain
        return False

    def refused(listener: str, host: str, way: str, user: str, _why: str) -> float:
        told.append((listener, host, way, user))
        return 3600.0

    found = Site().listener()
    found.context.authorizer = ALLOW_ALL
    found.context.logins = Given(
        settings=lambda _: Given(http_schemes=("Basic", "Bearer")),
        check_token=check_token,
        password_matches=password_matches,
        refused=refused,
    )
    transport = Given(get_extra_info=lambda _: (HERE, 1))
    login = asyncio.ensure_future(
        found.authenticate(transport, authorization.encode(), lambda: told.append(("call",)))
    )
    await turns()
    assert told == [("call",), ("PLAINTEXT", HERE, way, user)] and not login.done()
    login.cancel()


@run
async def test_a_token_is_of_the_address_that_showed_it_though_its_connection_has_gone() -> None:
    """What a POST asks for is done then, but for what an ACL denies by host."""
    peer: list[Any] = [(HERE, 1)]

    async def check_token(*_: str) -> AccessTokenChecked:
        peer[0] = None
        return AccessTokenChecked("ada")

    found = Site().listener()
    found.context.authorizer, found.context.counters = ALLOW_ALL, Given(logins=0)
    found.context.logins = Given(
        settings=lambda _: Given(http_schemes=("Bearer",)),
        check_token=check_token,
        lifetime_ms=lambda *_: 1000,
    )
    transport = Given(get_extra_info=lambda _: peer[0])
    session = await found.authenticate(transport, b"Bearer a.b.c")
    assert session is not None and (session.principal, session.host) == ("User:ada", HERE)
    assert session.expires_at == 1001.0 and found.context.counters.logins == 1


# Who may change the voters.


@pytest.mark.parametrize(
    ("between_nodes", "host", "allowed"),
    [
        (False, "127.0.0.1", True),
        (False, "127.8.8.8", True),
        (False, "::1", True),
        (False, "[::1]", True),
        (False, "10.1.2.3", False),
        (False, "192.168.0.1", False),
        (False, "", False),
        (False, "fe80::1", False),
        (False, "localhost.evil", False),
        (True, "10.1.2.3", True),
    ],
)
def test_who_votes_is_not_for_every_client(between_nodes: bool, host: str, allowed: bool) -> None:
    assert may_change_voters(between_nodes, Session(host=host, authorizer=ALLOW_ALL)) is allowed
    found = Site().listener(between_nodes=between_nodes)
    assert HandedOver(found, None, Session(host=host)).may_change_voters is allowed


def test_who_votes_is_for_whom_acls_let_alter_the_cluster() -> None:
    """That they do is decided before: of whom nothing is asked, nothing was decided."""
    strange = "10.1.2.3"
    assert may_change_voters(False, Session("User:admin", strange))
    assert not may_change_voters(False, Session("User:admin", strange, authorizer=ALLOW_ALL))
    assert not may_change_voters(False, Session(ANONYMOUS, strange))


def test_a_quota_counts_in_all_and_for_each_address() -> None:
    quota = ConnectionQuota()
    for host in ("a", "a", "b"):
        quota.enter(host)
    assert (quota.count, quota.of("a"), quota.of("b"), quota.of("c")) == (3, 2, 1, 0)
    quota.leave("a")
    quota.leave("b")
    assert (quota.count, quota.of("a"), quota.of("b")) == (1, 1, 0)
