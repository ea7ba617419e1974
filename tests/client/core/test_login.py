"""The login of a connection by SASL, against brokers and a clock that live in tests/support."""

from __future__ import annotations

import pytest

from kept.client.core.broker_errors import AuthenticationFailed, ConnectionFailed
from kept.client.core.calls import Anywhere, ToCoordinator, ToLeader
from kept.client.core.events import Lost
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import versions
from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.client.security.scram import ScramServer
from kept.client.security.security import Security
from tests.support.client_world import A, B, World, offsets
from tests.support.credentials import credential

PASSWORD = "the-password"
SASL = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)
SALT = b"salt"


def security(mechanism="SCRAM-SHA-256", password=PASSWORD):
    module = PLAIN_MODULE if mechanism == "PLAIN" else SCRAM_MODULE
    return Security(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.jaas.config": f'{module} required username="ada" password="{password}";',
        }
    )


class Secured(World):
    """Brokers that want a login; sessions last ``lifetime_ms``, 0: for good."""

    def __init__(self, given, mechanism="SCRAM-SHA-256", lifetime_ms=0, spread=0.5):
        super().__init__(served={k: (versions(k)[0], versions(k)[-1]) for k in SASL})
        self.core.security, self.core._spread = given, spread
        self.mechanism, self.lifetime_ms = mechanism, lifetime_ms
        self.logins: list[int] = []
        self.refusal = 0
        self.answers[ApiKey.SASL_HANDSHAKE] = self.handshake
        self.answers[ApiKey.SASL_AUTHENTICATE] = self.authenticate
        self.server = None

    def handshake(self, api, version, endpoint, request):
        self.logins.append(self.now)
        keys = credential(PASSWORD, salt=SALT)
        self.server = ScramServer("SCRAM-SHA-256", lambda _: keys, lambda _: keys)
        code = self.refusal or (0 if request.mechanism == self.mechanism else 33)
        return {"error_code": code, "mechanisms": (self.mechanism,)}

    def authenticate(self, api, version, endpoint, request):
        message = b""
        try:
            if self.mechanism == "PLAIN":
                right = request.auth_bytes == f"\0ada\0{PASSWORD}".encode()
            else:
                message, right = self.server.step(request.auth_bytes), True
        except Exception:  # noqa: BLE001
            right = False
        return {
            "error_code": 0 if right else 58,
            "error_message": None if right else "no",
            "auth_bytes": message,
            "session_lifetime": self.lifetime_ms,
        }


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_connection_logs_in_before_it_is_used(mechanism):
    world = Secured(security(mechanism), mechanism)
    assert world.result(offsets(world)).topics[0].partitions[0].offset == 7
    apis = [api for _, api, _ in world.requests]
    before = apis[: apis.index(ApiKey.METADATA)]
    assert before[:2] == [ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE]
    assert set(before[2:]) == {ApiKey.SASL_AUTHENTICATE}
    assert len(before[2:]) == (1 if mechanism == "PLAIN" else 2)


def test_who_is_not_believed_is_told_at_once_and_nothing_is_tried_again():
    world = Secured(security(password="another"))
    call = offsets(world)
    with pytest.raises(
        AuthenticationFailed,
        match=r"a:1: ListOffsets of t:0: ada was not believed by SASL SCRAM-SHA-256: no$",
    ):
        world.result(call)
    assert not world.connections and world.logins == [1000]


@pytest.mark.parametrize(
    ("refusal", "mechanism", "said"),
    [
        (0, "PLAIN", r"sasl.mechanism is SCRAM-SHA-256; its listener has PLAIN"),
        (34, "SCRAM-SHA-256", "no login by SASL: security.protocol may be PLAINTEXT there"),
        (35, "SCRAM-SHA-256", "SaslHandshake: UNSUPPORTED_VERSION"),
    ],
)
def test_a_refused_handshake_says_what_would_be_right(refusal, mechanism, said):
    world = Secured(security(), mechanism)
    world.refusal = refusal
    with pytest.raises(AuthenticationFailed, match=said):
        world.result(offsets(world))


def test_a_server_that_says_yes_without_knowing_the_password_is_not_believed():
    world = Secured(security())
    world.answers[ApiKey.SASL_AUTHENTICATE] = lambda *_: {
        "error_code": 0,
        "error_message": None,
        "auth_bytes": b"",
        "session_lifetime": 0,
    }
    with pytest.raises(AuthenticationFailed, match="first SCRAM message is malformed"):
        world.result(offsets(world))


def test_a_broker_without_frames_for_tokens_is_too_old():
    world = Secured(security())
    world.served[ApiKey.SASL_HANDSHAKE] = (0, 0)
    with pytest.raises(AuthenticationFailed, match="too old"):
        world.result(offsets(world))


@pytest.mark.parametrize(("spread", "renewed"), [(0.0, 8_500), (1.0, 9_500)])
def test_a_session_is_renewed_before_it_ends_and_calls_wait_for_that(spread, renewed):
    world = Secured(security(), lifetime_ms=10_000, spread=spread)
    began = world.now
    for past in (0, renewed - 1, renewed, renewed + 1, 2 * renewed):
        world.now = began + past
        world.result(offsets(world))
    assert world.logins == [began, began + renewed, began + 2 * renewed]
    assert len(world.connections) == 1


def test_a_session_is_renewed_once_all_is_answered():
    world = Secured(security(), lifetime_ms=10_000)
    offsets(world)
    world.mute.add(A)
    early = offsets(world)
    world.now += 9_500
    late = offsets(world)
    assert late.id not in world.finished and len(world.logins) == 1
    world.mute.clear()
    (sent,) = world.unanswered
    world.deliver(sent)
    assert early.id in world.finished and late.id in world.finished and len(world.logins) == 2


def test_a_renewal_that_fails_ends_what_waits():
    world = Secured(security(), lifetime_ms=10_000)
    offsets(world)
    world.now += 9_500
    world.mechanism = "PLAIN"
    with pytest.raises(AuthenticationFailed, match="its listener has PLAIN"):
        world.result(offsets(world))


class Crowded(Secured):
    """Brokers without room for another login: they close without an answer, ``times`` times."""

    def __init__(self, times, bootstrap=(A,)):
        super().__init__(security("PLAIN"), "PLAIN")
        self.core.bootstrap = bootstrap
        self.times, self.closed = times, []

    def authenticate(self, api, version, endpoint, request):
        if len(self.closed) < self.times:
            self.closed.append(endpoint)
            self.step(Lost(max(self.connections), "the other side closed the connection"))
            return None
        return super().authenticate(api, version, endpoint, request)


@pytest.mark.parametrize("route", [ToLeader("t", 0), Anywhere(), ToCoordinator("g")])
def test_a_login_that_is_closed_without_an_answer_is_tried_again(route):
    world = Crowded(5, (A, B))
    call = offsets(world, route=route)
    assert call.id not in world.finished
    world.run()
    assert world.result(call) is not None
    assert world.closed == [A, B, A, B, A]


@pytest.mark.parametrize("route", [ToLeader("t", 0), Anywhere(), ToCoordinator("g")])
def test_a_login_that_is_always_closed_ends_at_the_deadline_and_says_so(route):
    world = Crowded(1000)
    call = offsets(world, route=route, timeout_ms=5000)
    world.run()
    said = "a:1: ListOffsets of t:0: the other side closed the connection during the SASL login$"
    with pytest.raises(ConnectionFailed, match=said):
        world.result(call)
    assert world.now == 6000 and 5 < len(world.closed) < 20
    (told,) = world.waited
    assert told.call is call and str(told.why).endswith("during the SASL login")


def test_a_listener_that_closes_before_it_tells_its_versions_is_not_tried_again():
    """It speaks TLS, or another protocol."""
    world = Secured(security())
    world.answers[ApiKey.API_VERSIONS] = lambda *_: None
    call = offsets(world)
    world.step(Lost(1, "the other side closed the connection"))
    with pytest.raises(ConnectionFailed, match="during ApiVersions; is it a Kafka listener"):
        world.result(call)


def test_a_listener_that_closes_before_it_answers_may_want_a_login():
    world = World()
    world.answers[ApiKey.LIST_OFFSETS] = lambda *_: None
    call = offsets(world, route=Anywhere(), repeatable=False)
    world.step(Lost(1, "the other side closed the connection"))
    with pytest.raises(ConnectionFailed, match="before it answered anything; does it want a login"):
        world.result(call)


REFUSED = b'{"status":"invalid_token"}'


@pytest.mark.parametrize("believed", [True, False])
def test_a_login_by_an_access_token(believed, tmp_path):
    path = tmp_path / "token"
    path.write_text("a.b.c")
    given = Security(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": path.as_uri(),
        }
    )
    given.refresh()
    world, messages = Secured(given, "OAUTHBEARER"), []

    def authenticate(api, version, endpoint, request):
        messages.append(bytes(request.auth_bytes))
        code = 58 if messages[-1] == b"\x01" else 0
        token = b"" if believed or code else REFUSED
        return {
            "error_code": code,
            "error_message": None,
            "auth_bytes": token,
            "session_lifetime": 0,
        }

    world.answers[ApiKey.SASL_AUTHENTICATE] = authenticate
    call = offsets(world)
    if believed:
        assert world.result(call).topics[0].partitions[0].offset == 7
    else:
        said = "the access token was not believed by SASL OAUTHBEARER"
        with pytest.raises(AuthenticationFailed, match=said):
            world.result(call)
    assert messages == [b"n,,\x01auth=Bearer a.b.c\x01\x01", b"\x01"][: 2 - believed]


def test_a_token_that_cannot_be_got_ends_what_waits(tmp_path):
    url = (tmp_path / "none").as_uri()
    given = Security(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": url,
        }
    )
    given.refresh()
    world = Secured(given, "OAUTHBEARER")
    with pytest.raises(AuthenticationFailed, match=f"{url}: No such file"):
        world.result(offsets(world))
