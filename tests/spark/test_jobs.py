"""The jobs on a real session: tables, exports, compaction of exports, analyses."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kept.client.client import Client, OutRecord
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.compaction.strategy import From, Latest
from kept.pipeline import jobs
from kept.pipeline.connection import BadOption
from kept.pipeline.jobs import exports, tables
from kept.pipeline.jobs.job_directory import JobDirectory
from kept.pipeline.session import bounds_of
from kept.storage.records import Record
from kept.testing import Cluster
from kept.testing.strategies import clean
from tests.spark.topics import COMPACTED, compact, eventually, fill

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.fixture
def client(kept_broker: Cluster) -> Iterator[Client]:
    with kept_broker.client() as client:
        yield client


BY_HAND = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
"""Compacted when it is asked for, not in between."""


def history(client: Client, topic: str, rounds: int = 4) -> None:
    """Several records of each key, with headers, versions that go down, nulls and tombstones."""
    for n in range(rounds):
        records = [
            OutRecord(
                b"%s.%d" % (kind, key),
                b"%d of round %d" % (key, n),
                (("version", b"%d" % (9 - n)), ("x", None)) if key % 2 else (),
                1000 * n + key,
            )
            for kind in (b"user", b"cfg")
            for key in range(10)
        ]
        client.produce(topic, records)
    client.produce(topic, [OutRecord(b"user.%d" % n, None, (), 4000 + n) for n in range(3)])
    client.produce(topic, [OutRecord(b"user.1", b"back", (), 4100)])


def model(client: Client, topic: str, before_ms: int | None = None) -> dict[bytes, bytes]:
    table: dict[bytes, bytes] = {}
    for r in client.read(topic):
        if before_ms is not None and r.timestamp > before_ms:
            continue
        table.pop(r.key, None)
        if r.value is not None:
            table[r.key] = r.value
    return table


def as_dict(frame: Any) -> dict[bytes, bytes]:
    rows = frame.select("key", "value").collect()
    assert len({bytes(r.key) for r in rows}) == len(rows)
    return {bytes(r.key): bytes(r.value) for r in rows}


def test_a_table_of_now_and_of_then(spark, client, kept_broker):
    topic = kept_broker.create_topic(partitions=2, config=BY_HAND)
    history(client, topic)
    where = kept_broker.bootstrap
    now = as_dict(jobs.table(spark, where, topic))
    assert now == model(client, topic)
    assert now[b"user.1"] == b"back" and b"user.2" not in now
    then = as_dict(jobs.table(spark, where, topic, as_of_ms=2500))
    assert then == model(client, topic, 2500) != now
    nothing = jobs.table(spark, where, topic, as_of_offset={0: 0, 1: 0})
    assert as_dict(nothing) == {}
    for wrong, why in (
        ({"as_of_offset": 5}, "has 2 partitions, give one for each"),
        ({"as_of_offset": {0: 0, 1: 999}}, f"{topic}:1 has offsets 0 to .*, 999 is out of range"),
        ({"as_of_offset": {0: 0}}, r"names the partitions \[0\]"),
        ({"as_of_offset": 1, "as_of_ms": 1}, "contradict each other"),
        ({"as_of_ms": -2}, "no moment before 1970"),
    ):
        with pytest.raises(BadOption, match=why):
            jobs.table(spark, where, topic, **wrong)


def test_a_table_has_every_key_however_late_it_is_used(spark, client, kept_broker, tmp_path):
    topic = kept_broker.create_topic(config=COMPACTED)
    history(client, topic)
    table = jobs.table(spark, kept_broker.bootstrap, topic)
    old = model(client, topic)
    for key in [*old, *old]:
        client.produce(topic, [OutRecord(key, b"newer" + b"x" * 200)])
    compact(kept_broker, topic)
    assert as_dict(table) == model(client, topic)
    made = jobs.export(spark, kept_broker.bootstrap, topic, str(tmp_path / "export"))
    assert made.ends == {0: client.bounds(topic)[0][1]}


def test_a_table_is_refreshed_by_what_is_new(spark, client, kept_broker, tmp_path):
    topic = kept_broker.create_topic(partitions=2, config=BY_HAND)
    where, path = kept_broker.bootstrap, str(tmp_path / "table")
    with pytest.raises(BadOption, match="has no table"):
        jobs.saved(spark, path)
    history(client, topic, 1)
    first = jobs.refresh(spark, where, topic, path)
    assert first.whole == "there was no table yet"
    fill(client, topic, range(5))
    client.produce(topic, [OutRecord(b"cfg.1", None), OutRecord(b"cfg.2", b"new")])
    second = jobs.refresh(spark, where, topic, path)
    assert (second.whole, second.offsets_read) == (None, 7)
    assert as_dict(jobs.saved(spark, path)) == model(client, topic)
    client.create_partitions(topic, 3)
    eventually(lambda: len(client.metadata([topic]).topics[topic].partitions) == 3)
    client.produce(topic, [OutRecord(b"grown", b"here", (), None, 2)])
    third = jobs.refresh(spark, where, topic, path)
    assert (third.whole, third.offsets_read) == (None, 1)
    assert as_dict(jobs.saved(spark, path))[b"grown"] == b"here"
    state = Path(path, "_kept.json")
    said = json.loads(state.read_text())
    state.write_text(json.dumps({**said, "refreshed_ms": said["refreshed_ms"] - 86_400_000}))
    assert "delete.retention.ms" in str(jobs.refresh(spark, where, topic, path).whole)
    assert as_dict(jobs.saved(spark, path)) == model(client, topic)
    names = sorted(p.name[:12] for p in Path(path).glob("table-*"))
    assert names == ["table-000003", "table-000004"]
    other = kept_broker.create_topic()
    with pytest.raises(BadOption, match=f"is the table of {topic}, not of {other}"):
        jobs.refresh(spark, where, other, path)


def test_a_refresh_beside_another_one_and_beside_what_is_not_its_own(
    spark, client, kept_broker, tmp_path, monkeypatch
):
    topic = kept_broker.create_topic(config=BY_HAND)
    where, path = kept_broker.bootstrap, tmp_path / "table"
    history(client, topic, 1)
    for name in ("table-of-mine", "table-", "table-000009.old"):
        (path / name).mkdir(parents=True)
    jobs.refresh(spark, where, topic, str(path))
    write, asked = tables._write, []

    def bounds(*arguments: Any) -> Any:
        asked.append(time.time_ns() // 1_000_000)
        return bounds_of(*arguments)

    def overtaken(*arguments: Any, name: str) -> None:
        monkeypatch.setattr(tables, "_write", write)
        fill(client, topic, range(2))
        jobs.refresh(spark, where, topic, str(path))
        fill(client, topic, range(2, 4))
        write(*arguments, name=name)

    monkeypatch.setattr(tables, "_write", overtaken)
    monkeypatch.setattr(tables, "bounds_of", bounds)
    with pytest.raises(BadOption, match="another refresh ended meanwhile"):
        jobs.refresh(spark, where, topic, str(path))
    state = json.loads((path / "_kept.json").read_text())
    assert state["refreshed_ms"] <= asked[1], "a tombstone that comes then is newer"
    assert b"k1" in as_dict(jobs.saved(spark, str(path))) and len(list(path.glob("table-0*"))) == 3
    killed = path / "table-000002-dead"
    killed.mkdir()
    jobs.refresh(spark, where, topic, str(path))
    assert as_dict(jobs.saved(spark, str(path))) == model(client, topic)
    names = {p.name.rpartition("-")[0] for p in path.iterdir() if p.is_dir()}
    assert names == {"table-of", "table", "table-000002", "table-000003"} and not killed.exists()
    for text, why in (
        ("{", "_kept.json is damaged"),
        ("[]", "is a table of nothing"),
        ('{"format": 2}', "has format 2, not 1"),
        ('{"format": 1, "ends": {}}', "holds something else than a table"),
    ):
        (path / "_kept.json").write_text(text)
        for use in (jobs.saved, lambda s, p: jobs.refresh(s, where, topic, p)):
            with pytest.raises(BadOption, match=why):
                use(spark, str(path))


def test_export_and_restore(spark, client, kept_broker, tmp_path):
    settings = {**BY_HAND, "retention.ms": "777600000", "max.message.bytes": "3000000"}
    topic = kept_broker.create_topic(partitions=2, config=settings)
    where, path = kept_broker.bootstrap, str(tmp_path / "export")
    history(client, topic)
    made = jobs.export(spark, where, topic, path)
    assert not [name for name in made.config if name.startswith("kept.")], "Kafka refuses them"
    assert made.records == 84 and sum(made.ends.values()) == 84
    again = f"{topic}-again"
    assert jobs.restore(spark, where, path, again) == 84
    one, two = (
        [(r.partition, r.key, r.value, r.headers, r.timestamp) for r in client.read(name)]
        for name in (topic, again)
    )
    assert one == two
    assert as_dict(jobs.table(spark, where, again)) == model(client, topic)
    restored = {entry.name: entry.value for entry in client.topic_configs([again])[again]}
    assert restored["cleanup.policy"] == "compact"
    assert restored["max.message.bytes"] == "3000000"
    assert restored["retention.ms"] == "777600000", "or records as old would be deleted at once"
    for action, why in (
        (lambda: jobs.restore(spark, where, path, again), "is not empty: restore into a new topic"),
        (lambda: jobs.export(spark, where, topic, path), "is there and not empty"),
        (lambda: jobs.restore(spark, where, str(tmp_path), "new"), "is no export"),
    ):
        with pytest.raises(BadOption, match=why):
            action()


def test_a_refresh_that_fails_leaves_nothing_and_one_whose_table_is_gone_reads_all(
    spark, client, kept_broker, tmp_path
):
    topic = kept_broker.create_topic(config=BY_HAND)
    where, path = kept_broker.bootstrap, tmp_path / "table"
    history(client, topic, 1)
    table = Path(jobs.refresh(spark, where, topic, str(path)).path)
    before = sorted(os.listdir(path))
    for part in table.glob("part-*"):
        part.write_bytes(b"damaged")
    fill(client, topic, range(5))
    for _ in range(2):
        with pytest.raises(Exception, match="is not a Parquet file"):
            jobs.refresh(spark, where, topic, str(path))
        assert sorted(os.listdir(path)) == before
    shutil.rmtree(table)
    assert str(jobs.refresh(spark, where, topic, str(path)).whole).endswith("is gone")
    assert as_dict(jobs.saved(spark, str(path))) == model(client, topic)


def test_a_refresh_whose_directory_was_removed_is_no_table(
    spark, client, kept_broker, tmp_path, monkeypatch
):
    topic = kept_broker.create_topic(config=BY_HAND)
    where, path = kept_broker.bootstrap, tmp_path / "table"
    history(client, topic, 1)
    jobs.refresh(spark, where, topic, str(path))
    old, write = model(client, topic), tables._write
    fill(client, topic, range(5))

    def removed(*arguments: Any, name: str) -> None:
        """As by a third refresh at once; what Spark still writes makes the directory again."""
        write(*arguments, name=name)
        assert "_begun" in os.listdir(path / name)
        shutil.rmtree(path / name)
        (path / name).mkdir()

    monkeypatch.setattr(tables, "_write", removed)
    with pytest.raises(BadOption, match="another refresh removed what this one wrote"):
        jobs.refresh(spark, where, topic, str(path))
    assert as_dict(jobs.saved(spark, str(path))) == old
    monkeypatch.setattr(tables, "_write", write)
    made = jobs.refresh(spark, where, topic, str(path))
    assert as_dict(jobs.saved(spark, str(path))) == model(client, topic) != old
    assert len(list(path.glob("table-*"))) == 2 and "_begun" not in os.listdir(made.path)


def test_a_refresh_after_the_log_was_cut_back_and_has_grown_again(spark, kept_cluster, tmp_path):
    cluster = kept_cluster(3, unclean_leader_election_enable="true", min_insync_replicas="1")
    topic = cluster.create_topic(replication_factor=2, config=BY_HAND)
    where, path = cluster.bootstrap, str(tmp_path / "table")

    def partition() -> Any:
        return client.metadata([topic]).topics[topic].partitions[0]

    with cluster.client() as client:
        fill(client, topic, range(4))
        eventually(lambda: len(partition().isr) == 2)
        first = partition().leader
        (second,) = set(partition().replicas) - {first}
        cluster.kill(second)
        fill(client, topic, range(6))
        assert jobs.refresh(spark, where, topic, path).rows == 6
        cluster.kill(first)
        cluster.start(second)
        eventually(lambda: partition().leader == second)
        fill(client, topic, range(20, 40))
        assert "records were cut back" in str(jobs.refresh(spark, where, topic, path).whole)
        assert as_dict(jobs.saved(spark, path)) == model(client, topic)
        assert jobs.refresh(spark, where, topic, path).whole is None


def test_a_note_that_cannot_be_replaced_leaves_the_table_of_before(
    spark, client, kept_broker, tmp_path, monkeypatch
):
    topic = kept_broker.create_topic(config=BY_HAND)
    where, path = kept_broker.bootstrap, tmp_path / "table"
    history(client, topic, 1)
    jobs.refresh(spark, where, topic, str(path))
    before, old, replace = sorted(os.listdir(path)), model(client, topic), JobDirectory.replace

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def interrupted(*arguments: Any) -> None:
        replace(*arguments)
        raise KeyboardInterrupt

    fill(client, topic, range(5))
    monkeypatch.setattr(JobDirectory, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        jobs.refresh(spark, where, topic, str(path))
    assert sorted(os.listdir(path)) == before
    assert as_dict(jobs.saved(spark, str(path))) == old
    monkeypatch.setattr(JobDirectory, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jobs.refresh(spark, where, topic, str(path))
    assert as_dict(jobs.saved(spark, str(path))) == model(client, topic) != old


def test_a_note_with_members_that_are_missing_or_wrong_is_damaged(
    spark, client, kept_broker, tmp_path
):
    topic = kept_broker.create_topic(config=BY_HAND)
    where, table, export = kept_broker.bootstrap, str(tmp_path / "table"), str(tmp_path / "export")
    jobs.refresh(spark, where, topic, table)
    jobs.export(spark, where, topic, export)
    for path, job, wrong in (
        (
            table,
            lambda: jobs.refresh(spark, where, topic, table),
            ({"starts": None}, {"offsets": {"x": 1}}, {"refreshed_ms": "y"}, {"offsets": 1}),
        ),
        (
            export,
            lambda: exports.load(spark, export),
            ({"starts": None}, {"ends": {"x": 1}}, {"ends": None}, {"what": 1}),
        ),
    ):
        note = Path(path, "_kept.json")
        said = json.loads(note.read_text())
        short = {name: value for name, value in said.items() if name != "topic_id"}
        for damaged in (*({**said, **more} for more in wrong), short):
            note.write_text(json.dumps(damaged))
            with pytest.raises(BadOption, match=r"_kept\.json is damaged"):
                job()


def test_what_a_topic_takes_and_how_it_is_cleaned_is_restored(spark, client, kept_broker, tmp_path):
    settings = {
        "cleanup.policy": "compact",
        "min.compaction.lag.ms": "60000",
        "max.compaction.lag.ms": "70000000",
        "min.cleanable.dirty.ratio": "0.3",
        "message.timestamp.after.max.ms": str(2**63 - 1),
    }
    topic, path = kept_broker.create_topic(config=settings), str(tmp_path / "export")
    ahead = 10**15
    client.produce(topic, [OutRecord(b"a", b"v", (), ahead)])
    jobs.export(spark, kept_broker.bootstrap, topic, path)
    again = f"{topic}-again"
    assert jobs.restore(spark, kept_broker.bootstrap, path, again) == 1
    assert [r.timestamp for r in client.read(again)] == [ahead]
    restored = {entry.name: entry.value for entry in client.topic_configs([again])[again]}
    assert {name: restored[name] for name in settings} == settings


def test_a_session_whose_timestamps_have_no_zone(spark, client, kept_broker, tmp_path):
    topic = kept_broker.create_topic(config=BY_HAND)
    history(client, topic, 2)
    where, path = kept_broker.bootstrap, str(tmp_path / "export")
    other = spark.newSession()
    other.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    other.conf.set("spark.sql.session.timeZone", "America/New_York")
    jobs.export(other, where, topic, path)
    jobs.restore(other, where, path, f"{topic}-again")
    assert [r.timestamp for r in client.read(f"{topic}-again")] == [
        r.timestamp for r in client.read(topic)
    ]
    jobs.refresh(other, where, topic, str(tmp_path / "table"))
    assert as_dict(jobs.saved(other, str(tmp_path / "table"))) == model(client, topic)
    kinds = dict(jobs.table(other, where, topic).dtypes)
    assert kinds["timestamp"] == "timestamp"


def test_an_export_that_fails_leaves_nothing_and_two_at_once_do_not_mix(
    spark, client, kept_broker, tmp_path, monkeypatch
):
    topic = kept_broker.create_topic(config=BY_HAND)
    where, path = kept_broker.bootstrap, tmp_path / "export"
    history(client, topic, 1)
    write, finish = exports._write, exports._finish

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def second(*arguments: Any) -> None:
        with pytest.raises(BadOption, match="has an export that is being written, or was given up"):
            jobs.export(spark, where, topic, str(path))
        assert not JobDirectory(spark, str(path)).claim("_begun")
        write(*arguments)

    monkeypatch.setattr(exports, "_finish", full)
    with pytest.raises(OSError, match="No space left"):
        jobs.export(spark, where, topic, str(path))
    assert os.listdir(path) == []
    monkeypatch.setattr(exports, "_finish", finish)
    monkeypatch.setattr(exports, "_write", second)
    made = jobs.export(spark, where, topic, str(path))
    assert sorted(os.listdir(path)) == ["_kept.json", "records"]
    next((path / "records").glob("partition=0/part-*")).unlink()
    for job in (
        lambda: jobs.restore(spark, where, str(path), f"{topic}-again"),
        lambda: jobs.compact(spark, str(path), str(tmp_path / "compacted")),
    ):
        why = f"is damaged: records has 0 records, _kept.json says {made.records}"
        with pytest.raises(BadOption, match=why):
            job()
    assert f"{topic}-again" not in client.metadata(None).topics


STRATEGIES = {
    "latest": {},
    "latest-n": {"kept.compaction.latest.n": "2"},
    "highest-version": {"kept.compaction.version.header": "version"},
    "by-key-prefix": {"kept.compaction.prefixes": "user.=latest-n:3,cfg.=highest-version:version"},
}


def test_an_export_is_compacted_to_what_the_cleaner_leaves(spark, client, kept_broker, tmp_path):
    api = JsonApi(Endpoint(kept_broker.host(), kept_broker.port()))
    for name, more in STRATEGIES.items():
        config = {**COMPACTED, "kept.compaction.strategy": name, **more, "segment.bytes": "1500"}
        topic = kept_broker.create_topic(config=config)
        history(client, topic)
        fill(client, topic, range(60))  # the segment before it is closed
        whole = str(tmp_path / f"{name}-whole")
        made = jobs.export(spark, kept_broker.bootstrap, topic, whole)
        compact(kept_broker, topic)
        left = [r.offset for r in client.read(topic)]
        end = api.get(f"topics/{topic}")["partitions"][0]["compaction"]["first_dirty_offset"]
        assert 84 <= end <= made.ends[0]
        target = str(tmp_path / name)
        reduced = jobs.compact(spark, whole, target, config=more, below={0: end})
        rows = spark.read.parquet(str(tmp_path / name / "records")).select("offset").collect()
        assert sorted(row.offset for row in rows) == left, name
        assert reduced.records == len(left) < made.records


def test_an_analysis_counts_what_is_there(spark, client, kept_broker, tmp_path):
    topic = kept_broker.create_topic(partitions=2, config=BY_HAND)
    history(client, topic)
    for _ in range(5):
        client.produce(topic, [OutRecord(b"hot", b"x" * 100)])
    found = jobs.analyze(spark, kept_broker.bootstrap, topic, out=str(tmp_path / "out"))
    log = list(client.read(topic))
    size = sum(
        len(r.key) + len(r.value or b"") + sum(len(k) + len(v or b"") for k, v in r.headers)
        for r in log
    )
    total = found.totals
    assert (total["records"], total["bytes"], total["keys"]) == (len(log), size, 21)
    assert (total["tombstones"], total["winning_tombstones"]) == (3, 2)
    assert total["kept_records"] == 21
    assert {p["prefix"]: p["records"] for p in found.prefixes} == {"user.": 44, "cfg.": 40, "": 5}
    assert sum(p["records"] for p in found.partitions) == len(log)
    hottest = found.hottest[0]
    assert (hottest["key"], hottest["records"], hottest["bytes"]) == (
        b"user.1",
        6,
        hottest["bytes"],
    )
    assert sum(d["keys"] for d in found.duplicates) == 21
    ages = {a["age"]: a["records"] for a in found.ages}
    assert ages.pop(6) == 84 and sum(ages.values()) == 5
    assert found.skew >= 1
    saved = spark.read.parquet(str(tmp_path / "out" / "prefixes"))
    assert saved.count() == 3
    page = jobs.page(found)
    assert page.count("<table>") == 5 and "user.1" in page and topic in page


def test_partitions_without_records_count_and_prefixes_are_text(spark, client, kept_broker):
    topic = kept_broker.create_topic(partitions=4, config=BY_HAND)
    none = jobs.analyze(spark, kept_broker.bootstrap, topic)
    assert (none.totals["records"], len(none.partitions), none.skew) == (0, 4, 1.0)
    keys = ("münchen→1", "münchen→2", "plain")
    records = [OutRecord(key.encode(), b"v", (), None, 2) for key in keys]
    client.produce(topic, [*records, OutRecord("\udcff→".encode("utf-8", "surrogateescape"), b"v")])
    found = jobs.analyze(spark, kept_broker.bootstrap, topic, prefix_until="→")
    assert sum(one["records"] for one in found.partitions) == 4 == len(found.partitions)
    assert found.skew >= 3
    prefixes = {one["prefix"]: one["records"] for one in found.prefixes}
    assert (prefixes["münchen→"], prefixes[""]) == (2, 1) and len(prefixes) == 3


class Undeleted(Latest):
    """Not built in: all records of a key that was not deleted."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def collect(self, state: Any) -> Any:
        return {key: From(0) for key in state.keys}


def test_an_analysis_by_a_strategy_of_ones_own(spark, client, kept_broker, tmp_path, monkeypatch):
    known = tmp_path / "own-1.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (known / "entry_points.txt").write_text(
        f"[kept.compaction.strategies]\nundeleted = {__name__}:Undeleted\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    topic = kept_broker.create_topic()
    history(client, topic)
    client.produce(topic, [OutRecord(None, b"no key"), OutRecord(b"user.4", None)])
    log = [
        Record(r.offset, r.timestamp, r.key, r.value, r.headers)
        for r in client.read(topic)
        if r.key is not None
    ]
    left = clean(Undeleted(), log)
    own = {"kept.compaction.strategy": "undeleted"}
    found = jobs.analyze(spark, kept_broker.bootstrap, topic, config=own)
    assert (found.totals["records"], found.totals["kept_records"]) == (len(log) + 1, len(left))
    kept = {p["prefix"]: p["kept_records"] for p in found.prefixes}
    assert kept == {
        prefix: sum(r.key.startswith(prefix.encode()) for r in left) for prefix in ("user.", "cfg.")
    } | {"": 0}
    assert kept["cfg."] == 40 < kept["user."] + 10 < 50
