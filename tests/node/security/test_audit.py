"""The audit log: lines of JSON, equal ones counted, in a file that may be renamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.runtime.runtime import Runtime
from kept.node.security import audit
from kept.node.security.audit import AuditFile, AuditLog, RepeatedEvents
from kept.node.security.authorizer import AccessEvent, Rule, Ruling
from kept.node.security.session import Session
from kept.storage.disk import Disk, File

DENIED = AccessEvent(
    "User:bob",
    "10.0.0.1",
    "OUT",
    "PLAIN",
    "fetch",
    AclOperation.READ,
    AclResourceType.TOPIC,
    "foo",
    Ruling(allowed=False, rule=Rule.NO_BINDING),
)


def test_equal_events_are_counted() -> None:
    repeats = RepeatedEvents(window_ms=10, max_windows=2)
    assert [repeats.is_first(event, 0) for event in "aabaa"] == [True, False, True, False, False]
    assert not repeats.is_first("c", 1), "there is no room: it is one of the others"
    assert repeats.ended(9, 9) == [] and repeats.next_end_ms() == 10
    assert repeats.ended(10, 9) == [("a", 3), (None, 1)] and repeats.next_end_ms() is None
    assert repeats.is_first("a", 11) and repeats.ended(100, 9) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8))))
def test_every_event_is_counted_once(history) -> None:
    repeats, now, counted = RepeatedEvents(window_ms=10, max_windows=2), 0, 0
    for event, later in history:
        now += later
        counted += sum(count for _, count in repeats.ended(now, 9))
        counted += repeats.is_first(event, now)
    counted += sum(count for _, count in repeats.ended(float("inf"), 9))
    assert counted == len(history)


def test_lines(capsys) -> None:
    async def run() -> None:
        log = AuditLog(Runtime(Disk()), 7, "denied")
        for _ in range(3):
            log.decided(DENIED)
        for _ in range(2):
            log.login_refused("10.0.0.2", "OUT", "PLAIN", None)
        log.changed(Session("User:superman", "10.0.0.3"), "CreateAcls", ("topic:\x1b[2J\n",))
        await log.close()

    asyncio.run(run())
    text = capsys.readouterr().err
    assert text.count("\n") == 5 and "\x1b" not in text
    first, login, change, again, others = map(json.loads, text.splitlines())
    assert first["node"] == 7 and first["time"].endswith("Z")
    assert (first["outcome"], first["operation"], first["resource"]) == ("denied", "READ", "foo")
    assert (first["rule"], first["binding"]) == ("no binding names the resource", None)
    assert (first["count"], again["count"], again["resource"]) == (1, 2, "foo")
    assert (others["event"], others["count"]) == ("login", 1)
    assert login["principal"] is None and login["host"] == "10.0.0.2"
    assert change["api"] == "CreateAcls" and change["names"] == ["topic:\x1b[2J\n"]


def test_a_name_of_a_megabyte_is_neither_written_nor_remembered(capsys) -> None:
    long = structs.replace(DENIED, name="n" * 1_000_000, api="GET /" + "p" * 60_000)

    async def run() -> int:
        log = AuditLog(Runtime(Disk()), 7, "denied")
        for _ in range(2):
            log.decided(long)
        kept = sum(len(event.name) + len(event.api) for event in log._repeated._repeats)
        await log.close()
        return kept

    assert asyncio.run(run()) < 1000
    first, again = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["resource"] == "n" * 256 + "… (1000000 characters)"
    assert first["api"].endswith("… (60005 characters)") and len(first["api"]) < 300
    assert again["count"] == 1


def test_off_says_nothing(capsys) -> None:
    async def run() -> None:
        log = AuditLog(Runtime(Disk()), 7, "off")
        log.decided(DENIED)
        log.login_refused("10.0.0.2", "OUT", "PLAIN", "ada")
        await log.close()

    asyncio.run(run())
    assert capsys.readouterr().err == ""


def test_a_file_is_for_its_owner_and_may_be_renamed(tmp_path) -> None:
    path, rotated = tmp_path / "audit.log", tmp_path / "audit.log.1"

    async def run() -> None:
        runtime = Runtime(Disk())
        log = AuditLog(runtime, 7, "all", str(path))
        log.decided(DENIED)
        while not path.exists() or not path.stat().st_size:
            await asyncio.sleep(0)
        path.rename(rotated)
        log.changed(Session(), "CreateTopics", ("t",))
        while rotated.read_text().count("\n") < 2:
            await asyncio.sleep(0)
        log.reopen()
        log.changed(Session(), "CreateTopics", ("u",))
        await log.close()
        runtime.close()

    asyncio.run(run())
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["names"] for line in path.read_text().splitlines()] == [["u"]]


def test_a_file_that_is_renamed_while_it_is_opened_is_opened_anew(tmp_path) -> None:
    """The signal comes between the two: or all lines would go to the renamed one for good."""
    path, renamed = tmp_path / "audit.log", tmp_path / "audit.log.1"

    class Renames(Disk):
        def open_append(self, name: str) -> File:
            file = super().open_append(name)
            if not renamed.exists():
                path.rename(renamed)
                audited.reopen()
            return file

    async def run() -> None:
        nonlocal audited
        runtime = Runtime(Renames())
        audited = AuditFile(runtime, str(path))
        for line in ("before\n", "behind\n"):
            audited.write(line)
            await audited.drain()
        runtime.close()

    audited: Any = None
    asyncio.run(run())
    assert (renamed.read_text(), path.read_text()) == ("before\n", "behind\n")


def test_a_disk_that_fails_is_told_and_does_not_fill_memory(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(audit, "MAX_WAITING", 2)
    path = tmp_path / "none" / "audit.log"

    async def run() -> None:
        runtime = Runtime(Disk())
        file = AuditFile(runtime, str(path))
        for number in range(5):
            file.write(f"{number}\n")
        while not (tmp_path / "none").exists():
            if "not written" in capsys.readouterr().err:
                (tmp_path / "none").mkdir()
            await asyncio.sleep(0)
        file.write("last\n")
        while not path.exists() or "last" not in path.read_text():
            await asyncio.sleep(0)
        runtime.close()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["denied", "all"])
def test_what_is_allowed_is_recorded_if_wanted(mode) -> None:
    async def run() -> bool:
        return AuditLog(Runtime(Disk()), 7, mode).records_allowed

    assert asyncio.run(run()) is (mode == "all")
