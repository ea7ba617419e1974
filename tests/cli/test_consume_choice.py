"""What ``kept consume`` reads, from where to where, and how it writes it."""

from __future__ import annotations

import datetime
import json
import os
import pty
import time

import pytest

from kept.cli.position_syntax import EARLIEST, LATEST, Position, PositionKind, position, time_ms
from kept.cli.record_format import formatted
from kept.client.client import OutRecord
from kept.client.consume.consumer import ConsumedRecord

BASE_MS = 1_700_000_000_000


@pytest.fixture
def hourly(kept_broker) -> str:
    """Two partitions of ten records each, one an hour; the value is the hour."""
    topic: str = kept_broker.create_topic(partitions=2)
    with kept_broker.client() as client:
        client.produce(
            topic,
            [
                OutRecord(None, b"%d" % hour, (), BASE_MS + hour * 3_600_000, partition)
                for partition in (0, 1)
                for hour in range(10)
            ],
        )
    return topic


def values(ran) -> list[int]:
    return sorted(int(line) for line in ran.lines)


@pytest.mark.parametrize(
    ("options", "hours"),
    [
        (("--offset", "-3", "--until-end"), [7, 7, 8, 8, 9, 9]),
        (("--offset", "-99", "--until-end", "--partition", 1), list(range(10))),
        (("--offset", "-0", "--until-end"), []),
        (("--offset", f"@{BASE_MS + 8 * 3_600_000}", "--until-end"), [8, 8, 9, 9]),
        (("--offset", "@2023-11-15T06:13:20.001Z", "--until-end"), [9, 9]),
        (("--offset", "@-1h", "--until-end"), []),
        (("--until", f"@{BASE_MS + 3_600_000 + 1}"), [0, 0, 1, 1]),
        (("--offset", "@1700003600000", "--until", "1700007200001"), [1, 1, 2, 2]),
        (("--offset", "-8", "--until", f"@{BASE_MS + 3 * 3_600_000}"), [2, 2]),
        (("--offset", "@1700007200000", "--until", "1700003600000"), []),
        (("--offset", "earliest", "--max", 20), sorted([*range(10), *range(10)])),
    ],
)
def test_from_where_to_where(kept, hourly, options, hours):
    assert values(kept("consume", hourly, *options, "--value-only")) == hours


def test_one_partition_by_its_name(kept, hourly):
    ran = kept("consume", f"{hourly}:1", "--offset", 8, "--until-end")
    assert [line.split()[0] for line in ran.lines] == ["1:8", "1:9"]
    assert "partitions 0 to 1" in kept("consume", f"{hourly}:7", "--until-end", status=1).err


def test_some_partitions_of_a_topic(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(None, b"%d" % p, (), 0, p) for p in range(3)])
    ran = kept("consume", f"{topic}:0", f"{topic}:2", "--until-end")
    assert sorted(line.split()[0] for line in ran.lines) == ["0:0", "2:0"], "it is one topic"


def test_several_topics_and_patterns(kept, kept_broker):
    prefix = f"multi{time.time_ns()}"
    topics = [kept_broker.create_topic(f"{prefix}.{name}") for name in ("a", "b")]
    for number, topic in enumerate(topics):
        kept("produce", topic, "--key", "k", stdin=f"{number}\n")
    ran = kept("consume", *topics, "--until-end")
    assert sorted(line.split()[0] for line in ran.lines) == [f"{topic}:0:0" for topic in topics]
    pattern = ("consume", f"{prefix}\\..*", "--regex", "--until-end", "--format", "%t=%v\\n")
    assert sorted(kept(*pattern).lines) == [f"{topic}={n}" for n, topic in enumerate(topics)]
    table = kept("consume", *topics, "--table").lines
    assert table[0].split()[0] == "TOPIC" and len(table) == 3
    assert "no topic is named nope.*" in kept("consume", "nope.*", "--regex", status=1).err
    group = f"{prefix}-group"
    member = ("consume", prefix + ".*", "--regex", "--group", group, "--until-end", "--value-only")
    assert values(kept(*member)) == [0, 1]
    kept("produce", topics[1], stdin="2\n")
    assert values(kept(*member)) == [2], "it goes on where it was"
    assert f"group={group}" not in kept_broker.log(), "who comes and goes is no news"
    internal = ("consume", "__consumer_off.*", "--regex", "--offset", "latest", "--until-end")
    assert "internal topics only with --internal" in kept(*internal, status=1).err
    assert kept(*internal, "--internal").out == ""


def test_keys_headers_and_format(kept, kept_broker):
    topic = kept_broker.create_topic()
    both = ("--header", "a=1", "--header", "b=x=y")
    kept("produce", topic, "--key", "k\u00fc", *both, stdin="v1\n")
    kept("produce", topic, stdin="v2\n")
    once = ("consume", topic, "--until-end")
    assert kept(*once, "--key-only").out == "k\u00fc\n\n"
    assert kept(*once).lines[0].endswith("k\u00fc  v1  a=1  b=x=y")
    assert kept(*once, "--no-headers").lines[0].endswith("k\u00fc  v1")
    every = "%t|%p|%o|%k|%K|%v|%V|%s|%S|%h|%H|%%\\t\\x41\\\\\\n"
    lines = kept(*once, "--format", every).lines
    assert lines[0] == f"{topic}|0|0|k\u00fc|3|v1|2|v1|2|a=1,b=x=y|2|%\tA\\"
    assert lines[1] == f"{topic}|0|1||-1|v2|2|v2|2||0|%\tA\\"
    stamped = kept(*once, "--format", "%T %d\\n").lines[0].split()
    assert datetime.datetime.fromisoformat(stamped[1]).timestamp() * 1000 == int(stamped[0])


def test_bytes_go_out_as_they_are_but_not_to_a_terminal(kept, kept_broker, tmp_path):
    topic = kept_broker.create_topic()
    blob = tmp_path / "blob"
    blob.write_bytes(b"\x1b[2J\xff\n\0end")
    kept("produce", topic, "--file", blob)
    once = ("consume", topic, "--until-end", "--format", "%v")
    out = tmp_path / "out"
    with out.open("wb") as file, kept.started(*once, stdout=file) as process:
        assert process.wait(60) == 0
    assert out.read_bytes() == blob.read_bytes()

    shown = in_terminal(kept, *once, until=b"up to the end")
    assert b"\\u001b[2J\\xff\r\n\\u0000end" in shown
    assert b"kept: read 1 record of " in shown


def in_terminal(kept, *arguments: str, until: bytes) -> bytes:
    """What a terminal shows of a command that ends with this text."""
    ours, theirs = pty.openpty()
    with kept.started(*arguments, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        shown = b""
        while not shown.rstrip().endswith(until):
            shown += os.read(ours, 4096)
        assert process.wait(60) == 0
    os.close(ours)
    return shown


def test_a_terminal_shows_records_without_a_bar_between_them(kept, kept_broker):
    topic = kept_broker.create_topic()
    kept("produce", topic, stdin="a\nb\nc\n")
    once = ("consume", topic, "--until-end", "--value-only")
    told = f"kept: read 3 records of {topic}, up to the end"
    assert in_terminal(kept, *once, until=told.encode()).splitlines() == [
        *(b"a", b"b", b"c"),
        told.encode(),
    ]
    told = f"kept: read 2 records of {topic}"
    shown = in_terminal(kept, *once, "--max", "2", until=told.encode())
    assert shown.splitlines()[:2] == [b"a", b"b"], "and no word of the end, which is elsewhere"


def test_who_follows_in_a_terminal_is_told_what_is_waited_for(kept, kept_broker):
    topic = kept_broker.create_topic()
    ours, theirs = pty.openpty()
    with kept.started("consume", topic, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"Ctrl-C ends" not in shown:
            shown += os.read(ours, 4096)
        process.terminate()
        process.wait(60)
    os.close(ours)
    assert f"waiting for new records of {topic}; --from-beginning reads".encode() in shown


def test_positions():
    now = 10_000_000
    assert position("earliest", now) is EARLIEST and position("end", now) is LATEST
    assert position("42", now) == Position(PositionKind.OFFSET, 42)
    assert position("-5", now) == Position(PositionKind.BEFORE_END, 5)
    for ago in ("@-90m", "-90m"):
        assert position(ago, now) == Position(PositionKind.TIME, now - 90 * 60_000)
    for second in ("@1000", "@1970-01-01T00:00:01Z", "1970-01-01T00:00:01Z"):
        assert position(second, now) == Position(PositionKind.TIME, 1000)
    assert time_ms("1970-01-01T00:00:01Z", now) == 1000
    assert time_ms("1970-01-01T01:00:00+01:00", now) == 0
    for wrong in ("", "-", "--5", "@", "@-5x", "@\u0663", "1_0", "@1e9", "soon"):
        with pytest.raises(ValueError, match=r"is neither|is no time"):
            position(wrong, now)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("%", "% is no field"),
        ("a%z", "%z is no field: there are %t %p"),
        ("\\", "is no escape"),
        ("\\x4", "\\x is no escape"),
        ("\\q", "\\q is no escape"),
    ],
)
def test_a_format_that_is_none_is_named(given, said):
    with pytest.raises(ValueError) as raised:
        formatted(given)
    assert said in str(raised.value)


def test_a_tombstone_in_a_format():
    record = ConsumedRecord("t", 0, 1, 2, None, None, (("h", None),))
    assert formatted("%k|%K|%v|%V|%h")(record) == b"|-1||-1|h="


def test_json_stays_one_to_one_with_headers_of_one_s_own(kept, kept_broker):
    topic, copy = kept_broker.create_topic(), kept_broker.create_topic()
    kept("produce", topic, "--header", "a=1", stdin="x\n")
    lines = kept("consume", topic, "--until-end", "--json").out
    kept("produce", copy, "--json", stdin=lines)
    same = kept("consume", copy, "--until-end", "--json").json
    assert same | {"topic": topic} == json.loads(lines)
    kept("produce", copy, "--json", "--header", "b=2", stdin=lines)
    more = json.loads(kept("consume", copy, "--offset", "-1", "--until-end", "--json").out)
    assert more["headers"] == [{"key": "a", "value": "1"}, {"key": "b", "value": "2"}]
