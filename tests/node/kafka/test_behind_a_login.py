"""What a client sends behind a login without waiting for its outcome.

As in Kafka 4.3, where a channel that authenticates is read by its authenticator alone and one that
failed to is read by nobody (``Selector.pollSelectionKeys``, ``maybeReadFromClosingChannel``): it is
served once the login has succeeded, and never if it has failed.
"""

from __future__ import annotations

from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.client.security.jaas import PLAIN_MODULE
from kept.cluster.metadata.records import ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from kept.storage.types import TopicPartition
from tests.support.credentials import credential
from tests.support.loops import until
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, METADATA, VERSIONS, RawClient
from tests.support.request_values import one_batch, produce_values

RECORDS = 3
RIGHT, WRONG = b"\0ada\0pencil", b"\0ada\0wrong"
OF_A_FILE = {"plain_sasl_jaas_config": f'{PLAIN_MODULE} required user_ada="pencil";'}
CHECKED_IN_A_THREAD = {"kept_sasl_plain_users": "scram"}
NONE, FAILED, NOT_ENABLED = "none", "sasl_authentication_failed", "unsupported_sasl_mechanism"


@pytest.fixture
def secure(lone_node: Any) -> Any:
    def start(**settings: str) -> Any:
        lone = lone_node(
            listeners="SASL_PLAINTEXT://127.0.0.1:0",
            sasl_enabled_mechanisms="PLAIN,SCRAM-SHA-256",
            connection_failed_authentication_delay_ms="0",
            **settings,
        )
        ada = ScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256, credential("pencil"))
        lone.run(lone.node.parts.metadata.propose([ada]))
        lone.create("t")
        return lone

    return start


def login(mechanism: str, token: bytes | None = None) -> bytes:
    data = protocol.encode_request(HANDSHAKE, 1, 7, "test", {"mechanism": mechanism})
    if token is not None:
        data += protocol.encode_request(AUTHENTICATE, 2, 7, "test", {"auth_bytes": token})
    return data


def produced() -> bytes:
    """Records for which no answer is wanted."""
    return protocol.encode_request(0, 9, 7, "test", produce_values("t", one_batch(), acks=0))


BEHIND = (
    produced() * RECORDS
    + protocol.encode_request(METADATA, 9, 7, "test", {"topics": None})
    + login("PLAIN", RIGHT)
)


def end_offset(lone: Any) -> int:
    return int(lone.node.parts.table.partitions[TopicPartition("t", 0)].log_end_offset)


async def is_over(lone: Any, peer: RawClient, codes: list[str]) -> bool:
    """Whether the login is answered so, and nothing else is before the node closes."""
    answers = zip((HANDSHAKE, AUTHENTICATE), (1, 2), codes, strict=False)
    for key, version, code in answers:
        assert (await peer.receive(key, version)).error_code.name == code
    ended = await peer.ends()
    await until(lambda: not lone.node.parts.listeners[0].quota.count)
    return ended


@pytest.mark.parametrize(
    ("settings", "login", "codes"),
    [
        (OF_A_FILE, login("GSSAPI"), [NOT_ENABLED]),
        (OF_A_FILE, login("PLAIN", WRONG), [NONE, FAILED]),
        (CHECKED_IN_A_THREAD, login("PLAIN", WRONG), [NONE, FAILED]),
        (OF_A_FILE, login("SCRAM-SHA-256", b"junk"), [NONE, FAILED]),
    ],
)
def test_behind_a_login_that_fails_nothing_is_served(
    secure: Any, settings: dict[str, str], login: bytes, codes: list[str]
) -> None:
    lone = secure(**settings)

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            peer.writer.write(login + BEHIND)
            assert await is_over(lone, peer, codes)

    lone.run(go())
    assert end_offset(lone) == 0
    assert lone.node.parts.counters.logins == 0


@pytest.mark.parametrize(
    ("settings", "again", "codes"),
    [
        (OF_A_FILE, login("GSSAPI"), [NOT_ENABLED]),
        (OF_A_FILE, login("SCRAM-SHA-256"), [FAILED]),
        (OF_A_FILE, login("PLAIN", WRONG), [NONE, FAILED]),
        (CHECKED_IN_A_THREAD, login("PLAIN", WRONG), [NONE, FAILED]),
    ],
)
def test_nor_is_it_where_a_session_should_have_been_renewed(
    secure: Any, settings: dict[str, str], again: bytes, codes: list[str]
) -> None:
    """Though the session before it was not over yet."""
    lone = secure(connections_max_reauth_ms="3600000", **settings)

    async def go() -> None:
        async with await RawClient.connect(lone.port, "ada", "pencil") as peer:
            peer.writer.write(again + BEHIND)
            assert await is_over(lone, peer, codes)

    lone.run(go())
    assert end_offset(lone) == 0


@pytest.mark.parametrize("settings", [OF_A_FILE, CHECKED_IN_A_THREAD])
@pytest.mark.parametrize("renews", [False, True])
def test_behind_one_that_succeeds_all_is_served(
    secure: Any, settings: dict[str, str], renews: bool
) -> None:
    """Also of a client that says no more, and where the session was over when it came."""
    lone = secure(connections_max_reauth_ms="3600000", **settings)

    async def go() -> None:
        async with await RawClient.connect(lone.port) as peer:
            if renews:
                assert await peer.log_in("ada", "pencil") == 0
                (connection,) = lone.node.parts.listeners[0].connections
                connection.session.expires_at = 0.0
            peer.writer.write(login("PLAIN", RIGHT) + produced() * RECORDS)
            peer.send(VERSIONS, 0)
            peer.writer.write_eof()
            for key, version in ((HANDSHAKE, 1), (AUTHENTICATE, 2)):
                assert (await peer.receive(key, version)).error_code.name == NONE
            await until(lambda: end_offset(lone) == RECORDS)
        await until(lambda: not lone.node.parts.listeners[0].quota.count)

    lone.run(go())
