"""Which credentials may be stored, as Apache Kafka 4.3 answered the same requests, but where ours
is said.
"""

from __future__ import annotations

import pytest

from kept.cluster.controller.scram_changes import (
    Alterations,
    Deletion,
    Upsertion,
    alter_credentials,
    describe_credentials,
    with_decoys,
)
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import RemoveScramCredentialRecord, ScramCredentialRecord
from kept.cluster.security.credentials import NOBODY, ScramCredential, ScramMechanism
from kept.steps import run_to_end
from kept.storage.errors import (
    DuplicateResource,
    KeptError,
    ResourceNotFound,
    UnacceptableCredential,
    UnsupportedSaslMechanism,
)

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512


def alter(image: Image, changes) -> Alterations:
    return run_to_end(alter_credentials(image, changes))


def credential(iterations: int = 4096, salt: bytes = b"salt") -> ScramCredential:
    return ScramCredential(salt, b"stored", b"server", iterations)


def put(user: str, mechanism: int = SHA_256, **fields) -> Upsertion:
    return Upsertion(user, mechanism, credential(**fields))


IMAGE, _ = Image().apply(
    [
        ScramCredentialRecord("bob", SHA_512, credential(8192)),
        ScramCredentialRecord("ada", SHA_512, credential(16_384)),
        ScramCredentialRecord("ada", SHA_256, credential()),
    ]
)


def test_credentials_are_stored_and_removed_user_by_user() -> None:
    altered = alter(
        IMAGE, [Deletion("ada", SHA_256), Deletion("zoe", SHA_256), put("bob", SHA_512)]
    )
    assert [*altered.errors] == ["ada", "zoe", "bob"]
    assert altered.errors["ada"] is altered.errors["bob"] is None
    assert isinstance(altered.errors["zoe"], ResourceNotFound)
    assert altered.records == (
        RemoveScramCredentialRecord("ada", SHA_256),
        ScramCredentialRecord("bob", SHA_512, credential()),
    )


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ([put("")], UnacceptableCredential, "Username must not be empty"),
        ([put("", 9)], UnacceptableCredential, "Username must not be empty"),
        ([put("x", 0)], UnsupportedSaslMechanism, "Unknown SCRAM mechanism"),
        ([Deletion("ada", 3)], UnsupportedSaslMechanism, "Unknown SCRAM mechanism"),
        ([put("x", iterations=4095)], UnacceptableCredential, "Too few iterations"),
        ([put("x", iterations=16_385)], UnacceptableCredential, "Too many iterations"),
        ([Deletion("bob", SHA_256)], ResourceNotFound, "does not exist"),
        ([put("x"), put("x")], DuplicateResource, "altered twice"),
        ([put("x", SHA_256), put("x", SHA_512)], DuplicateResource, "altered twice"),
        ([Deletion("ada", SHA_256), put("ada", SHA_512)], DuplicateResource, "altered twice"),
        ([put("x"), put("x"), put("x")], DuplicateResource, "altered twice"),
        ([Deletion("zoe", SHA_256), put("zoe")], ResourceNotFound, "does not exist"),
        ([put("x", iterations=1), put("x")], UnacceptableCredential, "Too few iterations"),
        # Ours: Kafka stores the first two, and fails with UNKNOWN_SERVER_ERROR for the others.
        ([put("x\n")], UnacceptableCredential, "that print"),
        ([put("é" * 128)], UnacceptableCredential, "255 bytes"),
        ([put("x", salt=b"")], UnacceptableCredential, "1 to 1024 bytes"),
        ([Upsertion("x", SHA_256, None)], UnacceptableCredential, "salted password"),
    ],
)
def test_what_is_wrong_with_a_user_leaves_him_as_he_was(changes, error, says) -> None:
    altered = alter(IMAGE, changes)
    ((_, told),) = altered.errors.items()
    assert type(told) is error and says in str(told) and not altered.records


@pytest.mark.parametrize("iterations", [4096, 16_384])
def test_the_bounds_of_iterations_are_legal(iterations) -> None:
    assert alter(IMAGE, [put("x", iterations=iterations)]).errors == {"x": None}


def test_users_are_described_without_their_secrets() -> None:
    ada, bob = [(SHA_256, 4096), (SHA_512, 16_384)], [(SHA_512, 8192)]
    assert run_to_end(describe_credentials(IMAGE)) == {"ada": ada, "bob": bob}
    assert run_to_end(describe_credentials(Image())) == {}
    described = run_to_end(describe_credentials(IMAGE, ["zoe", "ada", "bob", "bob"]))
    assert described["ada"] == ada
    for user, error in (("zoe", ResourceNotFound), ("bob", DuplicateResource)):
        told = described[user]
        assert isinstance(told, KeptError) and type(told) is error and user in str(told)


# What users who do not exist are made of.


def test_the_first_user_brings_what_decoys_are_made_of_and_nobody_changes_it() -> None:
    ada = ScramCredentialRecord("ada", SHA_512, credential())
    gone = RemoveScramCredentialRecord("ada", SHA_512)
    image, drawn = Image(), []

    def random(count: int) -> bytes:
        drawn.append(count)
        return bytes([len(drawn)]) * count

    assert with_decoys(image, [], random) == [] and not drawn
    first, secret = with_decoys(image, [ada], random)
    assert first is ada and isinstance(secret, ScramCredentialRecord)
    assert secret.user == NOBODY and secret.credential.server_key == b"\1" * 64
    image, delta = image.apply([first, secret])
    assert image.decoy_credential == secret.credential
    assert image.credentials.keys() == delta.credentials == {("ada", SHA_512)}
    for entry in ([ada], [gone], [ada]):
        assert with_decoys(image, entry, random) is entry
        image, _ = image.apply(entry)
        assert image.decoy_credential == secret.credential
    assert drawn == [64]
    assert [*Image().apply(image.records())[0].records()] == [*image.records()] == [secret, ada]


def test_users_of_before_get_it_with_the_next_entry() -> None:
    *_, secret = with_decoys(IMAGE, [], lambda count: b"x" * count)
    image, _ = IMAGE.apply([secret])
    assert image.decoy_credential is not None and image.credentials == IMAGE.credentials
    assert "x" * 8 not in repr(image) + repr(secret)


def test_nobody_is_no_user() -> None:
    """Nor can one be made of him."""
    image, _ = IMAGE.apply(with_decoys(IMAGE, [], lambda count: b"x" * count))
    described = run_to_end(describe_credentials(image))
    assert described.keys() == {"ada", "bob"}
    assert isinstance(run_to_end(describe_credentials(image, [NOBODY]))[NOBODY], ResourceNotFound)
    altered = alter(image, [put(NOBODY, SHA_512)])
    assert isinstance(altered.errors[NOBODY], UnacceptableCredential) and not altered.records
    altered = alter(image, [Deletion(NOBODY, SHA_512)])
    assert isinstance(altered.errors[NOBODY], UnacceptableCredential) and not altered.records
