"""AlterUserScramCredentials and DescribeUserScramCredentials."""

from __future__ import annotations

import hmac

from kept.client.security.scram import ScramClient, password_matches, salted_password
from kept.cluster.metadata.records import FeatureRecord, ScramCredentialRecord
from kept.cluster.security.credentials import ScramMechanism
from tests.support.credentials import credential
from tests.support.decisions import propose
from tests.support.raw_client import AUTHENTICATE, HANDSHAKE, RawClient

SALT = b"0123456789abcdef01234567"


def upsertion(user, mechanism=2, iterations=4096, password="secret"):
    name = "SCRAM-SHA-256" if mechanism == 1 else "SCRAM-SHA-512"
    return {
        "name": user,
        "mechanism": mechanism,
        "iterations": iterations,
        "salt": SALT,
        "salted_password": salted_password(name, password, SALT, 4096) if password else b"",
    }


def alter(lone, *upsertions, deletions=()):
    asked = [{"name": user, "mechanism": mechanism} for user, mechanism in deletions]
    answer = lone.ask(51, 0, deletions=asked, upsertions=upsertions)
    return {result.user: int(result.error_code) for result in answer.results}


def describe(lone, *users):
    answer = lone.ask(50, 0, users=[{"name": user} for user in users] or None)
    assert (int(answer.error_code), answer.error_message) == (0, "")
    return {
        result.user: [(info.mechanism, info.iterations) for info in result.credential_infos]
        or int(result.error_code)
        for result in answer.results
    }


def test_a_user_gets_a_password_another_one_and_none(lone):
    assert alter(lone, upsertion("ada"), upsertion("bob", 1)) == {"ada": 0, "bob": 0}
    assert alter(lone, upsertion("ada", 1)) == {"ada": 0}
    assert describe(lone) == {"ada": [(1, 4096), (2, 4096)], "bob": [(1, 4096)]}
    credentials = lone.node.parts.metadata.image.credentials
    stored = credentials["ada", ScramMechanism.SCRAM_SHA_512]
    assert password_matches("SCRAM-SHA-512", "secret", stored)
    assert alter(lone, upsertion("ada", password="other")) == {"ada": 0}
    stored = lone.node.parts.metadata.image.credentials["ada", ScramMechanism.SCRAM_SHA_512]
    assert password_matches("SCRAM-SHA-512", "other", stored)
    assert alter(lone, deletions=[("ada", 1), ("bob", 1), ("zoe", 1)]) == {
        "ada": 0,
        "bob": 0,
        "zoe": 91,
    }
    assert describe(lone, "bob", "ada") == {"bob": 91, "ada": [(2, 4096)]}


def test_what_must_not_be_stored_is_refused_user_by_user(lone):
    asked = (
        upsertion("few", iterations=1),
        upsertion("none", password=""),
        {**upsertion("what"), "mechanism": 0},
        {**upsertion("never"), "mechanism": 77},
        upsertion("good"),
    )
    assert alter(lone, *asked) == {"few": 93, "none": 93, "what": 33, "never": 33, "good": 0}
    assert describe(lone) == {"good": [(2, 4096)]}


def test_nothing_is_stored_while_a_node_could_not_read_it(lone):
    lone.run(propose(lone.node, [FeatureRecord("kept.security", 0)]))
    answer = lone.ask(51, 0, deletions=(), upsertions=[upsertion("ada"), upsertion("bob")])
    assert [(r.user, int(r.error_code)) for r in answer.results] == [("ada", 35), ("bob", 35)]
    assert "kept.security 1" in answer.results[0].error_message
    assert describe(lone) == {}


def test_the_keys_are_those_of_the_rfc(lone):
    """A client that only knows the password proves it: StoredKey is the hash of its key."""
    alter(lone, upsertion("ada", 1))
    stored = lone.node.parts.metadata.image.credentials["ada", ScramMechanism.SCRAM_SHA_256]
    salted = salted_password("SCRAM-SHA-256", "secret", SALT, 4096)
    assert stored.server_key == hmac.digest(salted, b"Server Key", "sha256")


def shown(lone, user):
    """Salt and iterations, as SCRAM tells them who says that he is ``user``."""

    async def go():
        async with await RawClient.connect(lone.port) as peer:
            await peer.ask(HANDSHAKE, 1, mechanism="SCRAM-SHA-512")
            token = ScramClient("SCRAM-SHA-512", user, "x").step(None)
            answer = await peer.ask(AUTHENTICATE, 2, auth_bytes=token)
            return answer.auth_bytes.partition(b",s=")[2]

    return lone.run(go())


def test_what_unknown_users_are_shown_outlives_a_restart(lone_node, tmp_path):
    settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl_enabled_mechanisms": "SCRAM-SHA-512",
        "log_dirs": str(tmp_path / "data"),
    }
    lone = lone_node(**settings)
    alter(lone, upsertion("ada"))
    before = [shown(lone, user) for user in ("ada", "bob", "eve")]
    assert len(set(before)) == 3
    alter(lone, upsertion("joe"), upsertion("zoe"))
    alter(lone, deletions=[("zoe", 2)])
    lone.stop()
    again = lone_node(**settings)
    assert [shown(again, user) for user in ("ada", "bob", "eve")] == before
    assert describe(again).keys() == {"ada", "joe"}


def test_a_directory_with_users_gets_what_unknown_ones_are_made_of_at_the_next_start(
    lone_node, tmp_path
):
    """One of a version that had no secret for it."""
    lone = lone_node(log_dirs=str(tmp_path / "data"))
    sha_256 = ScramMechanism.SCRAM_SHA_256
    lone.run(propose(lone.node, [ScramCredentialRecord("ada", sha_256, credential("pencil"))]))
    assert lone.node.parts.metadata.image.decoy_credential is None
    lone.stop()
    images = []
    for _ in range(2):
        again = lone_node(log_dirs=str(tmp_path / "data"))
        images.append(again.node.parts.metadata.image)
        again.stop()
    assert images[0].decoy_credential == images[1].decoy_credential is not None
    assert images[0].credentials.keys() == {("ada", sha_256)}
