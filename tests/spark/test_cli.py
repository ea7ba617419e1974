"""``kept spark`` on the command line: what it prints, and what it refuses. The session of the tests
is the one that it joins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from kept.cli.run import run
from kept.client.client import OutRecord
from kept.pipeline import jobs
from kept.pipeline.jobs.analysis import AGES
from kept.pipeline.session import session
from kept.testing import Cluster
from kept.testing.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.fixture
def kept(capfd: Any, kept_broker: Cluster) -> Callable[..., tuple[int, str, str]]:
    """Runs ``kept spark`` in this process; exit status, what was printed and what was said."""

    def call(*arguments: str, bootstrap: str | None = kept_broker.bootstrap) -> Any:
        where = [] if bootstrap is None else ["--bootstrap", bootstrap]
        capfd.readouterr()
        status = run(["spark", *arguments, *where])
        return status, *capfd.readouterr()

    return call


def written(cluster: Cluster) -> str:
    topic = cluster.create_topic(
        config={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
    )
    with cluster.client() as client:
        for value in (b"1", b"2"):
            client.produce(topic, [OutRecord(b"a.%d" % n, value, (), 5) for n in range(4)])
        client.produce(topic, [OutRecord(b"a.0", None, (), 6)])
    return topic


def test_the_commands(spark, kept, kept_broker, tmp_path):
    topic, out = written(kept_broker), str(tmp_path / "table")
    status, printed, _ = kept("table", topic, "--json")
    assert status == 0
    assert [(r["key"], r["value"], r["offset"]) for r in json.loads(printed)["rows"]] == [
        ("a.1", "2", 5),
        ("a.2", "2", 6),
        ("a.3", "2", 7),
    ]
    status, printed, _ = kept("table", topic, "--as-of-offset", "4", "--limit", "2")
    lines = printed.splitlines()
    assert [line.split()[:2] for line in lines] == [["KEY", "VALUE"], ["a.0", "1"], ["a.1", "1"]]
    assert kept("table", topic, "--refresh", out)[1].endswith("all of it: there was no table yet\n")
    assert kept("table", topic, "--refresh", out)[1].startswith(f"3 rows in {out}/table-000002")

    export, reduced = str(tmp_path / "export"), str(tmp_path / "reduced")
    assert kept("export", topic, export)[1] == f"9 records of {topic} in {export}\n"
    two = (
        "--config",
        "kept.compaction.strategy=latest-n",
        "--config",
        "kept.compaction.latest.n=2",
    )
    assert kept("compact", export, reduced, *two, bootstrap=None)[1].startswith("7 records")
    assert kept("restore", reduced, f"{topic}-2")[1] == f"7 records in {topic}-2\n"

    report = tmp_path / "report.html"
    status, printed, _ = kept("analyze", topic, "--report", str(report), "--json")
    assert (status, json.loads(printed)["totals"]["kept_records"]) == (0, 4)
    assert "remove <strong>5</strong> of 9 records" in report.read_text()
    status, printed, _ = kept("audit", topic, "--reference", export)
    assert status == 0
    both = f"{topic}: clean; 18 records of node 0 and the reference compared\nThis cannot see:"
    assert printed.startswith(both)


def test_a_directory_may_be_named_like_a_pattern(spark, kept, kept_broker, tmp_path):
    topic, odd = written(kept_broker), tmp_path / "a *[1]?{b,c}#%20ü\\d"
    (tmp_path / "a bystander of the pattern").mkdir()
    to = {n: str(odd / n) for n in ("out", "table", "lists", "export", "compacted")}
    assert kept("table", topic, "--out", to["out"])[1] == f"3 rows in {to['out']}\n"
    for again in ("there was no table yet", "only what is new"):
        assert kept("table", topic, "--refresh", to["table"])[1].endswith(f"{again}\n")
    assert jobs.saved(spark, to["table"]).count() == 3
    assert kept("export", topic, to["export"])[1] == f"9 records of {topic} in {to['export']}\n"
    assert kept("compact", to["export"], to["compacted"], bootstrap=None)[0] == 0
    assert kept("audit", topic, "--reference", to["export"])[0] == 0
    report = str(odd / "report.html")
    assert kept("analyze", topic, "--out", to["lists"], "--report", report)[0] == 0
    assert sorted(os.listdir(odd)) == sorted([*to, "report.html"])
    lists = ["ages", "duplicates", "hottest", "partitions", "prefixes"]
    assert sorted(os.listdir(to["lists"])) == lists


def test_what_a_job_caches_has_as_few_tasks_as_it_needs(spark):
    of_the_tests = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        made = session(settings={"spark.sql.shuffle.partitions": "50"})
        cached = made.range(10).groupBy("id").count().cache()
        assert cached.count() == 10 and cached.rdd.getNumPartitions() < 10
        cached.unpersist()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", of_the_tests)


def test_timestamps_are_milliseconds_and_utc(spark, kept, kept_broker):
    topic = kept_broker.create_topic(
        config={"message.timestamp.after.max.ms": str(2**63 - 1), "cleanup.policy": "compact"}
    )
    stamps = {"a": 1_700_000_000_123, "b": 10**15, "c": -1}
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(k.encode(), b"v", (), ms) for k, ms in stamps.items()])
    status, printed, _ = kept("table", topic, "--json")
    assert status == 0
    assert {row["key"]: row["timestamp"] for row in json.loads(printed)["rows"]} == stamps
    shown = [line.split()[-1] for line in kept("table", topic)[1].splitlines()[1:]]
    assert shown == ["2023-11-14T22:13:20.123Z", str(10**15), "-"]


def test_an_analysis_of_keys_and_timestamps_of_any_kind(spark, kept, kept_broker):
    topic = kept_broker.create_topic(
        config={"message.timestamp.after.max.ms": str(2**63 - 1), "cleanup.policy": "compact"}
    )
    given = ((b"k" * 5000, None), (b"line\nbreak.x", -1), (b"later", 10**15), (b"early", 0))
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(key, b"v", (), ms) for key, ms in given])
    printed = kept("analyze", topic)[1]
    assert max(map(len, printed.splitlines())) < 150 and "line\\nbreak.x" in printed
    assert f"{'k' * 80}… (5,000 characters)" in printed
    ages = json.loads(kept("analyze", topic, "--json")[1])["ages"]
    assert {AGES[row["age"]]: row["records"] for row in ages} == {
        "1 minute": 1,
        "older": 1,
        "in the future": 1,
        "no timestamp": 1,
    }


def test_what_cannot_be_is_said_in_one_line(spark, kept, kept_broker, tmp_path):
    topic = written(kept_broker)
    export = str(tmp_path / "export")
    kept("export", topic, export)
    nobody = f"127.0.0.1:{free_port()}"
    mine = ("--config", "kept.compaction.strategy=mine")
    for arguments, where, why in (
        (("table", topic + "x"), kept_broker.bootstrap, f"has no topic {topic}x; did you mean "),
        (("audit", topic), nobody, "connection refused; no node is there"),
        (
            ("table", topic, "--as-of-offset", "99"),
            kept_broker.bootstrap,
            f"as of offset: {topic}:0 has offsets 0 to 9, 99 is out of range",
        ),
        (("table", topic, "--out", export), kept_broker.bootstrap, "is there and not empty"),
        (("export", topic, export), kept_broker.bootstrap, "is there and not empty"),
        (("restore", str(tmp_path), "new"), kept_broker.bootstrap, "is no export"),
        (("compact", export, export + "-2", *mine), None, "no compaction strategy 'mine'; there"),
        (("analyze", topic, *mine), kept_broker.bootstrap, "no compaction strategy 'mine'; there"),
        (("audit", topic, "--reference", str(tmp_path)), kept_broker.bootstrap, "is no export"),
        (("audit", topic, "--reference", ""), kept_broker.bootstrap, "directory is empty"),
        (("analyze", topic, "--out", ""), kept_broker.bootstrap, "directory is empty"),
        (("analyze", topic, "--out", export), kept_broker.bootstrap, "is there and not empty"),
        (
            ("analyze", topic, "--out", export + "/_kept.json/x"),
            kept_broker.bootstrap,
            "is not a directory",
        ),
    ):
        status, printed, said = kept(*arguments, bootstrap=where)
        assert (status, printed) == (1, ""), arguments
        assert why in said and said.startswith("kept: ") and said.count("\n") == 1, said
    for arguments in (
        ("table", topic, "--as-of-offset", "x"),
        ("table", topic, "--as-of-timestamp", "noon"),
        ("table", topic, "--refresh", export, "--out", export),
        ("analyze", topic, "--config", "x"),
    ):
        assert kept(*arguments)[0] == 2, arguments
