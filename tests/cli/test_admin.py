"""Commands of administrators that need no more than Kafka's protocol: each test runs against kept,
and against Apache Kafka.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from kept.client.admin.topics import NewTopic
from kept.client.client import Client, OutRecord
from kept.storage.types import TopicPartition
from tests.cli.conftest import Kept


def test_quotas_from_the_first_to_the_last(either: Kept) -> None:
    ada = ("--user", "quota-ada")
    said = either("quota", "set", *ada, "--producer-byte-rate", "1MiB", "--consumer-byte-rate", 500)
    assert said.out == (
        "set for user quota-ada: producer_byte_rate 1048576 B/s (1.0 MiB/s), "
        "consumer_byte_rate 500 B/s\n"
    )
    either("quota", "set", *ada, "--client-id-default", "--request-percentage", 150)
    either("quota", "set", "--ip", "10.1.2.3", "--connection-creation-rate", 5)
    assert either("quota", "list", *ada, "--json").json == [
        {
            "entity": {"client-id": None, "user": "quota-ada"},
            "quotas": {"request_percentage": 150.0},
        },
        {
            "entity": {"user": "quota-ada"},
            "quotas": {"consumer_byte_rate": 500.0, "producer_byte_rate": 1048576.0},
        },
    ]
    rows = [line.split() for line in either("quota", "list").lines]
    assert ["quota-ada", "(default)", "-", "request_percentage", "150", "%"] in rows
    assert ["-", "-", "10.1.2.3", "connection_creation_rate", "5/s"] in rows

    described = either("quota", "describe", *ada, "--client-id", "app").lines
    assert [line.split("  ")[-1].strip() for line in described[1:]] == [
        "user quota-ada",
        "user quota-ada",
        "user quota-ada, client id (default)",
        "-",
    ]
    assert either("quota", "describe", "--ip", "10.1.2.3", "--json").json == [
        {"quota": "connection_creation_rate", "value": 5.0, "entity": {"ip": "10.1.2.3"}}
    ]

    one = ("quota", "delete", *ada, "--quota", "consumer_byte_rate")
    assert either(*one).out == "deleted of user quota-ada: consumer_byte_rate 500 B/s\n"
    assert "user quota-ada has no consumer_byte_rate" in either(*one, status=1).err
    either("quota", "delete", *ada)
    either("quota", "delete", *ada, "--client-id-default")
    either("quota", "delete", "--ip", "10.1.2.3")
    assert "kept quota list shows" in either("quota", "delete", *ada, status=1).err
    assert either("quota", "list", *ada, "--json").json == []


def test_quotas_that_there_are_not_are_wrong_usage(offline: Kept) -> None:
    for arguments, said in {
        ("--user", "a", "--connection-creation-rate", "4"): "no quota of users and client ids",
        ("--ip", "10.0.0.1", "--producer-byte-rate", "4"): "no quota of an address",
        ("--user", "a", "--producer-byte-rate", "4zz"): "'4zz' is no number of bytes a second",
        ("--ip", "somewhere", "--connection-creation-rate", "4"): "'somewhere' is no address",
        ("--producer-byte-rate", "4"): "whose? Give --user",
        ("--user", "a"): "nothing to set",
        ("--user", "a", "--user-default", "--producer-byte-rate", "4"): "contradict each other",
        ("--user", "a", "--ip", "10.0.0.1", "--producer-byte-rate", "4"): "no user or client id",
        ("--user", "", "--producer-byte-rate", "4"): "--user '' names nobody",
        ("--user", "a", "--request-percentage", "0"): "is not a number above 0",
        ("--user", "a", "--producer-byte-rate", "9" * 400): "is no number of bytes a second",
        ("--user", "a", "--producer-byte-rate", "9" * 5000): "is no number of bytes a second",
        ("--user", "a", "--producer-byte-rate", "9223372036854775807KiB"): "is no number of bytes",
        ("--ip", "10.0.0.1", "--connection-creation-rate", "1_000"): "is not a whole number",
    }.items():
        assert said in offline("quota", "set", *arguments, status=2).err
    for more in (("--user", "ada"), ("--client-id", "app")):
        described = offline("quota", "describe", "--ip", "10.0.0.1", *more, status=2)
        assert "for no user or client id" in described.err


def described_as(either: Kept, arguments: tuple[str, ...], wanted: Any) -> None:
    """Wait until a description is that: Apache Kafka answers a change before it has applied it."""
    end = time.monotonic() + 20
    while (found := either(*arguments).json) != wanted:
        assert time.monotonic() < end, found


def test_settings_of_brokers(either: Kept) -> None:
    name, other = "log.cleaner.backoff.ms", "log.retention.ms"
    described = ("broker", "config", "describe", "--name", name, "--json")
    (number,) = {row["broker"] for row in either(*described).json} - {"default"}
    before = either(*described).json

    wrong = ("broker", "config", "set", "default", "--config", f"{name}=x")
    assert "AlterConfigs of all brokers: INVALID" in either(*wrong, status=1).err
    both = ("broker", "config", "set", number, "default", "--config", f"{name}=14000")
    ran = either(*both, "--dry-run")
    assert ran.lines == [
        f"broker {number}: {name}=14000 (dry run)",
        f"all brokers: {name}=14000 (dry run)",
    ]
    assert either(*described).json == before
    assert either(*both).lines == [f"broker {number}: {name}=14000", f"all brokers: {name}=14000"]
    entry = {"name": name, "value": "14000", "dynamic": True, "sensitive": False}
    of_all = "cluster default (dynamic)"
    default = {"broker": "default", **entry, "source": of_all}
    described_as(
        either, described, [default, {"broker": number, **entry, "source": "broker (dynamic)"}]
    )
    either("broker", "config", "delete", number, "--name", name)
    described_as(either, described, [default, {"broker": number, **entry, "source": of_all}])
    either("broker", "config", "delete", "default", "--name", name)
    described_as(either, described, before)

    shown = either("broker", "config", "describe", number).lines
    assert shown[0].split() == ["BROKER", "NAME", "VALUE", "SOURCE", "DYNAMIC"]
    assert not any(line.split()[1:2] == [name] for line in shown)
    everything = either("broker", "config", "describe", number, "--all").lines
    assert any(
        line.split()[1] == name and line.split()[-2:] == ["default", "yes"] for line in everything
    )

    near = f"there is no broker setting {name}s; did you mean {name}?"
    for arguments in (
        ("set", number, "--config", f"{name}s=1"),
        ("describe", "--name", f"{name}s"),
        ("delete", number, "--name", f"{name}s"),
    ):
        assert near in either("broker", "config", *arguments, status=1).err
    said = either("broker", "config", "set", "77", "--config", f"{name}=1", status=1).err
    assert f"there is no broker 77; brokers: {number}" in said
    refused = (
        "broker",
        "config",
        "set",
        number,
        "default",
        "--config",
        f"{name}=14000",
        "--config",
        f"{other}=soon",
    )
    ran = either(*refused, status=1, errors=3)
    assert ran.err.count("Invalid value soon for configuration log.retention.ms") == 2
    assert "no broker was changed" in ran.err
    assert either(*described).json == before
    assert "neither the id of a broker" in either("broker", "config", "describe", "x", status=2).err


def test_secrets_of_brokers_are_not_shown(either: Kept) -> None:
    rows = either("broker", "config", "describe", "--all", "--json").json
    secret = [row["name"] for row in rows if row["sensitive"]]
    assert "ssl.keystore.password" in secret
    assert not any(row["value"] for row in rows if row["sensitive"])
    shown = either("broker", "config", "describe", "--all").lines
    line = next(line for line in shown if " ssl.keystore.password " in line)
    assert "(hidden)" in line


@pytest.fixture
def group(either: Kept) -> str:
    """A group that has read 3 of 5 records of ``GROUP-a:0``, and what there is of ``GROUP-b``."""
    name = f"group-{uuid.uuid4().hex[:8]}"
    a, b = f"{name}-a", f"{name}-b"
    with Client(either.environ["KEPT_BOOTSTRAP"]) as client:
        client.create_topics([NewTopic(a, 2), NewTopic(b, 1)])
        for topic in (a, b):
            client.produce(topic, [OutRecord(None, b"x", partition=0)] * 5)
        committed = {TopicPartition(a, 0): 3, TopicPartition(a, 1): 0, TopicPartition(b, 0): 5}
        client.commit(name, committed)
    return name


def test_groups_are_listed_with_members_and_lag(either: Kept, group: str) -> None:
    listed = {row["group"]: row for row in either("group", "list", "--json").json}
    row = listed[group]
    assert (row["state"], row["type"]) == ("Empty", "classic")
    assert (row["members"], row["lag"], row["partitions_unknown"]) == (0, 2, 0)
    assert row["topics"] == [f"{group}-a", f"{group}-b"]
    shown = [line.split() for line in either("group", "list").lines]
    assert [group, "classic", row["protocol_type"] or "-", "Empty", "0", "2", "0"] in shown
    assert "LAG" not in either("group", "list", "--no-lag").lines[0]
    assert group in either("group", "list", "--state", "empty").out
    assert group not in either("group", "list", "--state", "Stable").out

    described = either("group", "describe", group, "--json").json
    assert (described["lag"], described["partitions_unknown"]) == (2, 0)
    shown = either("group", "describe", group).lines
    assert shown[:2] == [f"Group: {group}", "State: Empty"]
    assert "Members: 0" in shown
    assert "Lag: 2" in shown
    assert shown[7].split() == [
        "TOPIC",
        "PARTITION",
        "COMMITTED",
        "LOG",
        "END",
        "LAG",
        "MEMBER",
        "HOST",
    ]


def test_what_is_unknown_of_a_lag_is_counted(either: Kept, group: str) -> None:
    either("topic", "delete", f"{group}-b")
    (row,) = [row for row in either("group", "list", "--json").json if row["group"] == group]
    described = either("group", "describe", group, "--json").json
    by_topic = {row["topic"]: row["lag"] for row in described["partitions"]}
    if f"{group}-b" in by_topic:  # Apache Kafka removes the offsets of a topic that is deleted
        assert by_topic[f"{group}-b"] is None
        assert row["partitions_unknown"] == described["partitions_unknown"] == 1
        assert "Lag: 2 (unknown of 1 partition)" in either("group", "describe", group).lines
    assert row["lag"] == described["lag"] == 2


def test_internal_groups_are_listed_with_internal_only(either: Kept, group: str) -> None:
    hidden = f"__{group}"
    either("group", "reset-offsets", hidden, "--topic", f"{group}-a", "--to", "earliest")
    assert hidden not in either("group", "list").out
    assert hidden in either("group", "list", "--internal").out


def test_several_groups_and_one_that_there_is_not(either: Kept, group: str) -> None:
    second = f"{group}-2"
    either("group", "reset-offsets", second, "--topic", f"{group}-a", "--to", 1)
    wrong = group + "x"
    ran = either("group", "describe", group, wrong, second, status=1)
    assert [line for line in ran.lines if line.startswith("Group:")] == [
        f"Group: {group}",
        f"Group: {second}",
    ]
    assert f"kept: {wrong}: no group {wrong}; did you mean {group}?" in ran.err
    ran = either("group", "describe", group, wrong, second, "--json", status=1)
    assert [described["group"] for described in ran.json] == [group, second]
    ran = either("group", "delete", group, wrong, second, status=1)
    assert ran.lines == [f"deleted group {group}", f"deleted group {second}"]
    assert f"no group {wrong}" in ran.err


def test_offsets_are_reset_by_place_and_by_count(either: Kept, group: str) -> None:
    def reset(*arguments: object) -> list[tuple[str, int, int, int]]:
        rows = either("group", "reset-offsets", group, *arguments, "--json").json
        return [
            (
                f"{row['topic'].removeprefix(group)}:{row['partition']}",
                row["before"],
                row["after"],
                row["wanted"],
            )
            for row in rows
        ]

    a = f"{group}-a"
    assert reset("--topic", f"{a}:0", "--to", "-1") == [("-a:0", 3, 4, 4)]
    assert reset("--topic", f"{a}:0", "--shift-by", "-3") == [("-a:0", 4, 1, 1)]
    assert reset("--topic", a, "--to", "@-1h") == [("-a:0", 1, 0, 0), ("-a:1", 0, 0, 0)]
    assert reset("--all-topics", "--shift-by", "+2") == [
        ("-a:0", 0, 2, 2),
        ("-a:1", 0, 0, 2),
        ("-b:0", 5, 5, 7),
    ]
    ran = either("group", "reset-offsets", group, "--all-topics", "--shift-by", "100", "--dry-run")
    assert "WOULD BE" in ran.lines[0]
    assert "102 is above the log end" in ran.lines[1]
    assert reset("--topic", f"{a}:0", "--topic", f"{group}-b", "--to", "earliest") == [
        ("-a:0", 2, 0, 0),
        ("-b:0", 5, 0, 0),
    ]
    both = either("group", "seek", group, f"{group}x", "--all-topics", "--to", "latest", status=1)
    assert len(both.lines) == 4
    assert f"did you mean {group}?" in both.err
    ran = either("group", "reset-offsets", f"{group}x", "--topic", a, "--to", "latest", "--dry-run")
    assert ran.err == f"kept: group {group}x is new; did you mean {group}?\n"
    from_file = ("group", "reset-offsets", f"{group}x", "--from-file", "-", "--dry-run")
    assert either(*from_file, stdin=f"{a},0,0\n").err == ran.err
    ran = either(
        "group", "reset-offsets", group, "--topic", f"{group}-c", "--to", "latest", status=1
    )
    assert f"no topic {group}-c; did you mean {group}-" in ran.err
    ran = either("group", "reset-offsets", group, "--topic", f"{a}:7", "--to", "latest", status=1)
    assert f"there is no {a}:7: topic {a} has partitions 0 to 1" in ran.err
    new = either("group", "reset-offsets", f"{group}x", "--topic", a, "--shift-by", 1, status=1)
    assert f"no group {group}x" in new.err


def test_offsets_go_to_a_file_and_back(either: Kept, group: str, tmp_path: Path) -> None:
    second, a, b = f"{group}-2", f"{group}-a", f"{group}-b"
    either("group", "reset-offsets", second, "--topic", f"{a}:1", "--to", "earliest")
    exported = either("group", "export-offsets", group)
    assert exported.lines == [f"{a},0,3", f"{a},1,0", f"{b},0,5"]
    both = either("group", "export-offsets", group, second)
    assert both.lines == [
        f"{group},{a},0,3",
        f"{group},{a},1,0",
        f"{group},{b},0,5",
        f"{second},{a},1,0",
    ]
    for name, ran in (
        ("offsets.csv", both),
        ("offsets.json", either("group", "export-offsets", group, second, "--json")),
    ):
        (tmp_path / name).write_text(ran.out)
        either("group", "reset-offsets", group, "--all-topics", "--to", "earliest")
        either("group", "reset-offsets", "--from-file", tmp_path / name)
        assert either("group", "export-offsets", group, second).out == both.out
    ran = either("group", "reset-offsets", second, "--from-file", "-", stdin=f"{a},0,2\n")
    assert ran.lines[1].split() == [second, a, "0", "-", "2"]

    before = either("group", "export-offsets", group).out
    for content, said in (
        (f"{a},0,1\n{a},x,1\n", "line 2: 'x' is no partition"),
        (f"{a},0,1\n{a}x,0,1\n", f"no topic {a}x; did you mean {a}?"),
        (f"{a},0,1\n{a},2,1\n", f"there is no {a}:2"),
        (f"{second},{a},0,1\n", f"it has no offsets of group {group}"),
    ):
        told = either("group", "reset-offsets", group, "--from-file", "-", stdin=content, status=1)
        assert said in told.err
    assert either("group", "export-offsets", group).out == before
    assert "no group nobody" in either("group", "export-offsets", "nobody", status=1).err


def test_committed_offsets_are_deleted(either: Kept, group: str) -> None:
    a, b = f"{group}-a", f"{group}-b"
    ran = either("group", "delete-offsets", group, f"{a}:1", b)
    assert ran.lines == [
        f"deleted the offset of {a}:1: it was 0",
        f"deleted the offset of {b}:0: it was 5",
    ]
    assert either("group", "export-offsets", group).lines == [f"{a},0,3"]
    said = either("group", "delete-offsets", group, f"{a}:1", status=1).err
    assert f"group {group} has no committed offset of {a}:1" in said


def test_wrong_usage_of_reset_offsets(offline: Kept) -> None:
    for arguments, said in {
        ("g", "--to", "5"): "which topics? Give --topic or --all-topics",
        ("g", "--to", "5", "--topic", "t", "--all-topics"): "--topic and --all-topics contradict",
        ("g", "--topic", "t"): "give one of --to, --shift-by and --from-file",
        ("g", "--topic", "t", "--to", "5", "--shift-by", "1"): "give one of",
        ("g", "--topic", "t", "--to", "soon"): "'soon' is neither an offset",
        ("g", "--topic", "t", "--shift-by", "+-3"): "'+-3' is no number of offsets",
        ("g", "--topic", "t", "--from-file", "-"): "--from-file names the partitions",
        ("--topic", "t", "--to", "5"): "which group?",
        ("g", "--topic", "t:x", "--to", "5"): "'t:x' is neither TOPIC nor TOPIC:PARTITION",
    }.items():
        assert said in offline("group", "reset-offsets", *arguments, status=2).err


def test_several_topics_and_what_is_wrong_with_some(either: Kept) -> None:
    name = f"topic-{uuid.uuid4().hex[:8]}"
    one, two = f"{name}-1", f"{name}-2"
    assert either("topic", "create", one, two, "--dry-run").lines == [
        f"would create topic {one}",
        f"would create topic {two}",
    ]
    assert f"no topic {one}" in either("topic", "describe", one, status=1).err
    ran = either("topic", "create", one, f"{name}/", two, "--partitions", 2, status=1)
    assert ran.lines == [
        f"created topic {one} with 2 partitions",
        f"created topic {two} with 2 partitions",
    ]
    assert f"kept: {name}/: CreateTopics of {name}/: INVALID_TOPIC_EXCEPTION" in ran.err
    ran = either("topic", "describe", one, f"{name}-3", two, "--json", status=1)
    assert [described["name"] for described in ran.json] == [one, two]
    assert f"no topic {name}-3; did you mean {name}-" in ran.err

    ran = either("topic", "alter", one, two, "--config", "retention.ms=100000", "--partitions", 3)
    assert ran.lines == [f"altered topic {one}", f"altered topic {two}"]
    fewer = ("--config", "retention.ms=200000", "--partitions", 2)
    assert "their number only grows" in either("topic", "alter", one, *fewer, status=1).err
    config = either("topic", "describe", one, "--json").json["config"]
    assert config["retention.ms"] == {"value": "100000", "source": "topic"}

    ran = either("topic", "delete", one, f"{name}-3", two, status=1)
    assert ran.lines == [f"deleted topic {one}", f"deleted topic {two}"]
    assert f"kept: {name}-3: no topic {name}-3" in ran.err


def test_the_oldest_records_are_deleted(either: Kept, group: str) -> None:
    a, b = f"{group}-a", f"{group}-b"

    def starts(*arguments: object) -> dict[str, int]:
        rows = either("topic", "delete-records", *arguments, "--json").json
        return {f"{r['topic']}:{r['partition']}": r["log_start_offset"] for r in rows}

    assert starts(f"{a}:0", b, "--before", 2, "--dry-run") == {f"{a}:0": 2, f"{b}:0": 2}
    shown = either("topic", "delete-records", f"{a}:0", b, "--before", 2).lines
    assert shown[0].split() == ["TOPIC", "PARTITION", "WAS", "LOG", "START", "LOG", "END"]
    assert [line.split() for line in shown[1:]] == [
        [a, "0", "0", "2", "5"],
        [b, "0", "0", "2", "5"],
    ]
    assert starts(f"{a}:0", "--before", 1) == {f"{a}:0": 2}
    assert starts(b, "--before", "@-1h") == {f"{b}:0": 2}
    assert starts(a, "--before", "-1") == {f"{a}:0": 4, f"{a}:1": 0}
    assert starts(a, b, "--before", "latest") == {f"{a}:0": 5, f"{a}:1": 0, f"{b}:0": 5}
    described = either("topic", "describe", a, "--json").json["partitions"]
    assert [p["log_start_offset"] for p in described] == [5, 0]


def test_records_that_may_not_be_deleted(either: Kept, group: str) -> None:
    a, compacted = f"{group}-a", f"{group}-c"
    either("topic", "create", compacted, "--config", "cleanup.policy=compact")
    for targets, before, said in (
        ((a,), 4, f"--before 4: {a}:1 ends at 0"),
        ((f"{a}:0", f"{a}:9"), 1, f"there is no {a}:9: topic {a} has partitions 0 to 1"),
        ((f"{a}:0", f"{a}x"), 1, f"no topic {a}x; did you mean {a}?"),
        ((f"{a}:0", compacted), "latest", f"{compacted} has cleanup.policy=compact"),
        (("__consumer_offsets",), "latest", "is an internal topic"),
    ):
        assert said in either("topic", "delete-records", *targets, "--before", before, status=1).err
    described = either("topic", "describe", a, "--json").json["partitions"]
    assert [p["log_start_offset"] for p in described] == [0, 0]
    future = either("topic", "delete-records", a, "--before", "@2999-01-01T00:00:00Z", status=2)
    assert "2999-01-01T00:00:00.000Z is in the future" in future.err
