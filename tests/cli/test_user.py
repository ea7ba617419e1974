"""``kept user`` against a node whose clients log in: who is added, changed and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Kept
from tests.support.sasl_site import Secured, properties_file, secured

pytestmark = pytest.mark.slow

PASSWORD = 'pass=word; with "quotes", and \\'


@pytest.fixture(scope="module")
def site() -> Iterator[Secured]:
    with secured() as site:
        yield site


def test_a_user_from_his_first_password_to_his_end(site: Secured, tmp_path: Path) -> None:
    kept, asked = Kept(site.open), Kept(site.bootstrap)

    def can_log_in(mechanism: str, password: str) -> bool:
        file = properties_file(tmp_path / "ada.properties", mechanism, "ada", password)
        ran = asked("topic", "list", "--command-config", file, status=None)
        if ran.status:
            assert "ada was not believed" in ran.err, ran
        return ran.status == 0

    assert not can_log_in("PLAIN", PASSWORD)
    (tmp_path / "password").write_text(PASSWORD + "\nno part of it\n")
    added = kept("user", "add", "ada", "--password-file", tmp_path / "password")
    assert added.out == "added user ada with SCRAM-SHA-512\n"
    assert can_log_in("SCRAM-SHA-512", PASSWORD)
    assert can_log_in("PLAIN", PASSWORD)
    assert not can_log_in("SCRAM-SHA-512", PASSWORD + "x")
    assert not can_log_in("SCRAM-SHA-256", PASSWORD)
    refused = kept("user", "add", "ada", stdin=PASSWORD, status=1)
    assert "kept user passwd" in refused.err
    weaker = ("--mechanism", "SCRAM-SHA-256", "--iterations", "4096")
    kept("user", "add", "ada", *weaker, "--password-file", "-", stdin=PASSWORD)
    assert can_log_in("SCRAM-SHA-256", PASSWORD)
    assert kept("user", "list", "--json").json == [
        {"user": "ada", "mechanism": "SCRAM-SHA-256", "iterations": 4096},
        {"user": "ada", "mechanism": "SCRAM-SHA-512", "iterations": 8192},
    ]
    said = kept("user", "passwd", "ada", stdin="another\r\n").out
    assert said == "changed the password of ada for SCRAM-SHA-256, SCRAM-SHA-512\n"
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"):
        assert can_log_in(mechanism, "another")
        assert not can_log_in(mechanism, PASSWORD)
    kept("user", "delete", "ada", "--mechanism", "SCRAM-SHA-256")
    assert [line.split() for line in kept("user", "list").lines][1:] == [
        ["ada", "SCRAM-SHA-512", "8192"]
    ]
    kept("user", "add", "bob", stdin=PASSWORD)
    ran = kept("user", "delete", "adda", "bob", "ada", status=1)
    assert ran.lines == [
        "deleted the password of bob for SCRAM-SHA-512",
        "deleted the password of ada for SCRAM-SHA-512",
    ]
    assert ran.err == "kept: adda: no user adda; did you mean ada?\n"
    assert not can_log_in("SCRAM-SHA-512", "another")
    assert "no user ada" in kept("user", "delete", "ada", status=1).err
    assert "no user ada" in kept("user", "passwd", "ada", stdin="x", status=1).err


@pytest.mark.parametrize(
    ("name", "password", "why"),
    [
        ("bob", "", "1 to 255 bytes"),
        ("bob", "x" * 256, "1 to 255 bytes"),
        ("bob", "a\0b", "without NUL"),
        ("", "secret", "user"),
        ("b\x1b[2Job", "secret", "user"),
        ("b" * 256, "secret", "user"),
    ],
)
def test_what_is_refused(site: Secured, name: str, password: str, why: str) -> None:
    refused = Kept(site.open)("user", "add", name, stdin=password, status=1)
    assert why in refused.err
    assert "\x1b" not in refused.err
    assert "secret" not in refused.err


def test_no_option_takes_a_password(site: Secured) -> None:
    for command in ("add", "passwd"):
        assert Kept(site.open)("user", command, "bob", "--password", "x", status=2)
        assert "a prompt" in Kept(site.open)("user", command, "--help").out
