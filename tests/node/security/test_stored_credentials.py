"""What users who do not exist are shown: what others are, by a secret that no user knows."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import structs

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import RemoveScramCredentialRecord, ScramCredentialRecord
from kept.cluster.metadata.snapshot import decode_snapshot, encode_snapshot
from kept.cluster.security.credentials import NOBODY, ScramCredential, ScramMechanism
from kept.node.security import stored_credentials
from kept.node.security.stored_credentials import StoredCredentials
from tests.support.credentials import DECOYS, credential, image_of

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
Users = Mapping[tuple[str, ScramMechanism], ScramCredential]
ADA = credential("pencil")
NAMES = [f"nobody-{number}" for number in range(300)]


def shown(image: Image, names: list[str] = NAMES) -> dict[str, ScramCredential]:
    """What a process that has just started shows who asks by these names."""
    stored = StoredCredentials(lambda: image)
    return {name: stored.decoy("SCRAM-SHA-256", name) for name in names}


def test_what_an_unknown_user_is_shown_looks_stored_and_does_not_change() -> None:
    users: Users = {("ada", SHA_256): ADA}
    stored = StoredCredentials(lambda: image_of(users))
    bob = stored.decoy("SCRAM-SHA-256", "bob")
    assert (len(bob.salt), bob.iterations) == (len(ADA.salt), ADA.iterations)
    assert bob.salt not in (ADA.salt, stored.decoy("SCRAM-SHA-256", "eve").salt)
    users = {**users, ("joe", SHA_256): ScramCredential(b"\0" * 24, b"k" * 32, b"s" * 32, 4096)}
    assert stored.decoy("SCRAM-SHA-256", "bob") == bob
    assert shown(image_of(users), ["bob"]) == {"bob": bob}
    assert stored.for_password("bob").exists is False
    assert stored.for_password("bob").mechanism == "SCRAM-SHA-256"


def test_a_cluster_without_users_makes_up_what_does_not_change() -> None:
    nobody = StoredCredentials(Image)
    assert nobody.decoy("SCRAM-SHA-512", "bob") == nobody.decoy("SCRAM-SHA-512", "bob")
    assert nobody.for_password("bob").exists is False


def test_what_users_know_of_themselves_says_nothing_of_what_others_are_shown() -> None:
    """It is made of their counts and sizes, which anybody sees, and of the cluster's secret."""
    users = {
        (f"u{number}", SHA_256): structs.replace(ADA, salt=bytes([number]) * 24)
        for number in range(3)
    }
    before = shown(image_of(users))
    for key in users:
        for known in (b"\0" * 32, b"\xff" * 32):
            other = structs.replace(ADA, salt=known[:24], stored_key=known, server_key=known)
            assert shown(image_of({**users, key: other})) == before, "he changed his password"
    another = structs.replace(DECOYS, server_key=b"another secret" * 4)
    after = shown(image_of(users, another))
    assert not {one.salt for one in before.values()} & {one.salt for one in after.values()}


def test_users_that_come_and_go_change_nothing_where_all_look_the_same() -> None:
    users: dict[tuple[str, ScramMechanism], ScramCredential] = {}
    before = shown(image_of({("first", SHA_256): ADA}))
    for salt in (b"\0" * 24, b"\xff" * 24, ADA.salt):  # the smallest and the largest
        users[f"u{salt[0]}", SHA_256] = structs.replace(ADA, salt=salt)
        assert shown(image_of(users)) == before
    del users["u0", SHA_256]
    assert shown(image_of(users)) == before


def test_nodes_show_the_same_after_the_same_entry_however_they_came_there() -> None:
    """Entry by entry, by a snapshot, or with the same users in another order."""
    secret = structs.replace(DECOYS, server_key=b"made by the controller" * 3)
    entries = [
        [ScramCredentialRecord("u1", SHA_256, ADA), ScramCredentialRecord(NOBODY, SHA_512, secret)],
        [ScramCredentialRecord("u2", SHA_256, structs.replace(ADA, iterations=8192))],
        [ScramCredentialRecord("u3", SHA_256, structs.replace(ADA, salt=b"x" * 200))],
        [RemoveScramCredentialRecord("u1", SHA_256)],
    ]
    image = Image()
    follower = StoredCredentials(lambda: image)
    for entry in entries:
        image, _ = image.apply(entry)
        followed = {name: follower.decoy("SCRAM-SHA-256", name) for name in NAMES}
    restored, _ = decode_snapshot("snapshot", encode_snapshot(image, 1))
    backwards = dict(reversed(list(image.credentials.items())))
    assert followed == shown(restored) == shown(image_of(backwards, secret))
    assert (NOBODY, SHA_512) not in image.credentials


def test_unknown_users_are_shown_what_known_ones_are() -> None:
    """Each count of iterations and each kind of salt, as often as users have it; a user who joins
    changes what few of them are shown, and then as a new password does.
    """
    users = {}
    for number in range(90):
        salt = bytes([200, number]) * 12
        users[f"u{number}", SHA_256] = ScramCredential(salt, b"k" * 32, b"s" * 32, 8192)
    for number in range(9):
        salt = b"1dkf3mmgpzk3qj2x7b5y8w6v%d" % (10 + number)
        users[f"k{number}", SHA_256] = ScramCredential(salt, b"k" * 32, b"s" * 32, 4096)
    long = ScramCredential(b"\x01" * 200, b"k" * 32, b"secret" * 6, 16_384)
    users["long", SHA_256] = long
    names = [f"nobody-{number}" for number in range(3000)]
    before = shown(image_of(users), names)
    counts = Counter(one.iterations for one in before.values())
    assert 2600 < counts[8192] < 2800 and 200 < counts[4096] < 340 and 10 < counts[16_384] < 60
    assert {len(one.salt) for one in before.values() if one.iterations == 8192} == {24}
    assert {len(one.salt) for one in before.values() if one.iterations == 16_384} == {200}
    for one in before.values():
        if one.iterations == 4096:
            assert re.fullmatch(rb"[1-9a-z][0-9a-z]+", one.salt) and int(one.salt, 36) < 1 << 130
    assert len({one.salt for one in before.values()}) == len(names)

    more = {**users, ("new", SHA_256): ScramCredential(b"\xfa" * 24, b"k" * 32, b"t" * 32, 8192)}
    changed = 0
    for name, other in shown(image_of(more), names).items():
        if other != before[name]:
            changed += 1
            assert other.iterations != before[name].iterations
            assert other.salt[:8] != before[name].salt[:8]
    assert changed < 60

    # A password takes as long as that of a user whose only credential is the weaker one.
    users = {("ada", SHA_256): ADA, ("joe", SHA_512): long, ("joe", SHA_256): long}
    stored = StoredCredentials(lambda: image_of(users))
    found = Counter(stored.for_password(name)[:1] for name in names)
    assert 1300 < found["SCRAM-SHA-256",] < 1700, "joe's stronger one counts"


# What changes cost.


def records(random_: random.Random) -> list[Any]:
    """A few users get, change or lose a credential."""
    made: list[Any] = []
    for _ in range(random_.randint(1, 3)):
        user, mechanism = f"u{random_.randrange(12)}", random_.choice((SHA_256, SHA_512))
        salt = bytes(random_.randrange(256) for _ in range(random_.choice((8, 24))))
        iterations = random_.choice((4096, 8192))
        made.append(
            ScramCredentialRecord(user, mechanism, ScramCredential(salt, salt, salt, iterations))
        )
    return made


def test_counted_as_users_come_and_go_or_anew_it_is_the_same() -> None:
    """By each mechanism, and by the strongest of both, whatever was asked in between."""
    random_ = random.Random(7)
    image, _ = Image().apply([ScramCredentialRecord(NOBODY, SHA_512, DECOYS)])
    stored = StoredCredentials(lambda: image)
    compared = 0
    for _ in range(300):
        if image.credentials and random_.random() < 0.45:
            gone = random_.choice(sorted(image.credentials))
            image, _ = image.apply([RemoveScramCredentialRecord(*gone)])
        else:
            image, _ = image.apply(records(random_))
        if random_.random() < 0.5:
            continue
        compared += 1
        anew = StoredCredentials(lambda image=image: image)
        for name in ("nobody", "else", "at all"):
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                assert stored.decoy(mechanism, name) == anew.decoy(mechanism, name)
            assert stored.for_password(name) == anew.for_password(name)
    assert compared > 100


def test_a_change_of_one_user_costs_the_next_login_that_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among ten thousand: all were counted anew."""
    users = [
        ScramCredentialRecord(f"u{number}", SHA_512, structs.replace(ADA, iterations=8192))
        for number in range(10_000)
    ]
    image, _ = Image().apply([ScramCredentialRecord(NOBODY, SHA_512, DECOYS), *users])
    stored = StoredCredentials(lambda: image)
    before = stored.decoy("SCRAM-SHA-512", "nobody")
    counted: list[int] = []
    shape = stored_credentials._Shape

    def noted(mechanism: Any, iterations: int, salt_bytes: int) -> Any:
        counted.append(iterations)
        return shape(mechanism, iterations, salt_bytes)

    monkeypatch.setattr(stored_credentials, "_Shape", noted)
    for record, expected in (
        (ScramCredentialRecord("u77", SHA_512, ADA), [8192, 4096]),
        (RemoveScramCredentialRecord("u77", SHA_512), [4096]),
        (ScramCredentialRecord("new", SHA_512, structs.replace(ADA, iterations=8192)), [8192]),
    ):
        image, _ = image.apply([record])
        counted.clear()
        stored.decoy("SCRAM-SHA-512", "nobody")
        assert counted == expected, "what he had and what he has"
    assert stored.decoy("SCRAM-SHA-512", "nobody") == before
