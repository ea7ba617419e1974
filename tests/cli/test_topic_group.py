"""``kept topic`` and ``kept group`` against a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.testing import Cluster
from tests.cli.conftest import Kept


def test_a_topic_from_creation_to_deletion(kept, kept_broker):
    name = kept_broker.topic()
    ran = kept(
        "topic",
        "create",
        name,
        "--partitions",
        3,
        "--config",
        "cleanup.policy=compact",
        "--config",
        "segment.bytes=4096",
    )
    assert ran.out == f"created topic {name} with 3 partitions\n"
    assert "TOPIC_ALREADY_EXISTS" in kept("topic", "create", name, status=1).err
    assert kept("topic", "create", name, "--if-not-exists").out == f"topic {name} exists\n"

    listed = {t["name"]: t for t in kept("topic", "list", "--json").json}
    assert (listed[name]["partitions"], listed[name]["replicas"]) == (3, 1)
    assert any(line.split() == [name, "3", "1"] for line in kept("topic", "list").lines)

    kept("produce", name, "--key-separator", "=", stdin="a=1\nb=2\nc=3\n")
    described = kept("topic", "describe", name, "--json").json
    assert described["config"]["segment.bytes"] == {"value": "4096", "source": "topic"}
    assert set(described["config"]) == {"cleanup.policy", "segment.bytes"}
    assert sum(p["high_watermark"] for p in described["partitions"]) == 3
    for p in described["partitions"]:
        assert (p["leader"], p["isr"], p["log_start_offset"]) == (0, [0], 0)
        assert p["dirty_ratio"] == 0.0
        assert p["last_compaction_ms"] is None
        assert p["reason"]
    shown = kept("topic", "describe", name).out
    for word in (
        f"Topic: {name}",
        "Partitions: 3",
        "cleanup.policy: compact",
        "DIRTY RATIO",
        "LAST COMPACTION",
        "0 %",
        "never",
    ):
        assert word in shown

    whole = f"kept: no topic {name}:1: give the whole topic, {name}\n"
    assert kept("topic", "describe", f"{name}:1", status=1).err == whole
    assert kept("topic", "delete", f"{name}:1", status=1).err == whole

    kept("topic", "alter", name, "--config", "segment.ms=5000", "--delete-config", "segment.bytes")
    described = kept("topic", "describe", name, "--json").json
    assert set(described["config"]) == {"cleanup.policy", "segment.ms"}
    assert "segment.bytes" in kept("topic", "describe", name, "--all", "--json").json["config"]
    kept("topic", "alter", name, "--partitions", 5)
    assert len(kept("topic", "describe", name, "--json").json["partitions"]) == 5
    assert (
        "has 5 partitions already" in kept("topic", "alter", name, "--partitions", 5, status=1).err
    )

    assert kept("topic", "delete", name).out == f"deleted topic {name}\n"
    assert name in kept("topic", "describe", name, status=1).err


def test_a_topic_that_is_not_compacted_has_no_dirty_ratio(kept, kept_broker):
    name = kept_broker.create_topic()
    described = kept("topic", "describe", name, "--json").json
    assert described["compacted"] is False
    assert "dirty_ratio" not in described["partitions"][0]
    assert "DIRTY" not in kept("topic", "describe", name).out


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("clenup.policy=compact", "clenup.policy"),
        ("cleanup.policy=compost", "cleanup.policy"),
        ("segment.bytes=1", "segment.bytes"),
        ("min.cleanable.dirty.ratio=2", "min.cleanable.dirty.ratio"),
    ],
)
def test_a_wrong_setting_is_named(kept, kept_broker, config, said):
    assert said in kept("topic", "create", kept_broker.topic(), "--config", config, status=1).err


def test_a_group_from_first_commit_to_deletion(kept, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    group = f"group-of-{topic}"
    kept("produce", topic, "--partition", 0, stdin="a\nb\nc\n")
    kept("produce", topic, "--partition", 1, stdin="d\n")
    ran = kept("consume", topic, "--group", group, "--from-beginning", "--max", 4, "--value-only")
    assert sorted(ran.lines) == ["a", "b", "c", "d"]
    assert group in {g["group"] for g in kept("group", "list", "--json").json}
    shown = [line.split() for line in kept("group", "list").lines]
    assert shown[0] == ["GROUP", "TYPE", "PROTOCOL", "STATE", "MEMBERS", "LAG", "UNKNOWN"]
    assert [group, "classic", "consumer", "Empty", "0", "0", "0"] in shown

    kept("produce", topic, "--partition", 0, stdin="e\n")
    described = kept("group", "describe", group, "--json").json
    assert described["state"] == "Empty"
    rows = {p["partition"]: p for p in described["partitions"]}
    assert (rows[0]["committed_offset"], rows[0]["high_watermark"], rows[0]["lag"]) == (3, 4, 1)
    assert rows[1]["lag"] == 0
    assert f"Group: {group}" in kept("group", "describe", group).out

    dry = kept(
        "group", "reset-offsets", group, "--topic", topic, "--to", "earliest", "--dry-run", "--json"
    ).json
    assert [(d["before"], d["after"]) for d in dry] == [(3, 0), (1, 0)]
    assert kept("group", "describe", group, "--json").json == described
    kept("group", "reset-offsets", group, "--topic", topic, "--to", "1", "--partition", 0)
    ran = kept("consume", topic, "--group", group, "--max", 3, "--value-only")
    assert ran.lines == ["b", "c", "e"]
    kept("group", "reset-offsets", group, "--topic", topic, "--to", "2000-01-01T00:00:00Z")
    kept("group", "reset-offsets", group, "--topic", topic, "--to", "latest")
    described = kept("group", "describe", group, "--json").json
    assert [p["lag"] for p in described["partitions"]] == [0, 0]

    assert kept("group", "delete", group).out == f"deleted group {group}\n"
    assert f"no group {group}" in kept("group", "describe", group, status=1).err


def test_offsets_of_a_group_with_members_are_not_reset(kept, kept_broker):
    from kept.client.consume.consumer import GroupConsumer

    topic = kept_broker.create_topic()
    with kept_broker.client() as client:
        member = GroupConsumer(client, f"live-{topic}", [topic])
        while not member.assignment:
            member.poll(100)
        arguments = ("group", "reset-offsets", f"live-{topic}", "--topic", topic)
        assert "stop its members" in kept(*arguments, "--to", "latest", status=1).err
        member.close()


def test_deleting_a_misspelt_setting_is_an_error(kept, kept_broker):
    topic = kept_broker.create_topic()
    ran = kept("topic", "alter", topic, "--delete-config", "segment.byte", status=1)
    assert "did you mean segment.bytes?" in ran.err
    kept("topic", "alter", topic, "--delete-config", "segment.bytes")


def test_without_a_node_the_error_says_what_to_do(offline):
    for command in (("topic", "list"), ("compact", "status")):
        said = offline(*command, status=1).err
        assert "connection refused" in said and "`kept serve` starts one" in said
        assert "not host:port" in offline(*command, "--bootstrap", "localhost:abc", status=2).err
    said = offline("compact", "status", "--bootstrap", "nohost.invalid:9092", status=1).err
    assert "nohost.invalid is not a known host" in said


def test_what_is_offline_is_shown_without_waiting():
    """The commands one looks with when something is wrong: they ask no leader that is not there."""
    with Cluster() as cluster:
        kept = Kept(cluster.bootstrap)
        kept("topic", "create", "t", "--partitions", 2)
        kept("produce", "t", "--partition", 0, stdin="a\n")
        kept("produce", "t", "--partition", 1, stdin="b\n")
        kept("consume", "t", "--group", "g", "--from-beginning", "--max", 2)
        cluster.stop(0)
        (Path(cluster.log_dir()) / "t-1" / "partition.metadata").write_bytes(b"\xff" * 43)
        cluster.start(0)
        parts = kept("topic", "describe", "t", "--json").json["partitions"]
        assert [(p["leader"], p["log_start_offset"], p["high_watermark"]) for p in parts] == [
            (0, 0, 1),
            (-1, None, None),
        ]
        rows = kept("group", "describe", "g", "--json").json["partitions"]
        assert [(r["committed_offset"], r["high_watermark"], r["lag"]) for r in rows] == [
            (1, 1, 0),
            (1, None, None),
        ]
        # Nobody waits for what does not mend itself; what is there is served.
        for command in (
            ("produce", "t", "--partition", 1),
            ("consume", "t", "--partition", 1),
            ("consume", "t", "--from-beginning", "--until-end"),
            ("consume", "t", "--group", "new", "--from-beginning"),
        ):
            said = kept(*command, stdin="c\n", status=1).err
            assert "t:1 has no leader: it is offline on node 0, its only replica; node 0: " in said
            assert "partition.metadata: damaged at byte 0" in said
        kept("produce", "t", "--partition", 0, stdin="c\n")
        read = ("consume", "t", "--partition", 0, "--until-end", "--value-only")
        assert kept(*read, "--from-beginning").lines == ["a", "c"]
        assert kept(*read, "--offset", 1).lines == ["c"]
        with cluster.client() as client:
            for _ in range(20):
                assert client.produce("t", [OutRecord(None, b"d")])[0].partition == 0
