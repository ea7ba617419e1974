"""``kept top``: rates from what a cluster says at two times, asked in turn where it is large."""

from __future__ import annotations

import io
import os
import pty
import select
import time
import uuid

import pytest
from rich.console import Console

from kept.cli.cluster_rates import ClusterRates, Rates, Rotation, sorted_rows
from kept.cli.commands.top import Settings, Watch, _screen, _that_fit
from kept.client.admin.cluster import ClusterDescription
from kept.client.admin.cluster_sample import PartitionSample
from kept.client.admin.groups import GroupListing
from kept.client.client import Client, OutRecord
from kept.client.core.metadata import PartitionMetadata, TopicMetadata
from kept.storage.printable import printable_line
from kept.storage.types import TopicPartition
from tests.cli.conftest import Kept
from tests.support.fake_client import FakeClient
from tests.support.hostile import HOSTILE, check

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


def test_a_rate_is_that_between_the_last_two_readings():
    rates: Rates[str] = Rates()
    rates.record({"x": 10}, 1.0)
    assert (rates.rate(["x"]), rates.value("x"), rates.value("y")) == (None, 10, None)
    rates.record({"x": 30, "y": 5}, 3.0)
    assert rates.rate(["x", "y", "z"]) == 10
    assert rates.total(["x", "y", "z"]) == 35
    rates.record({"x": 0}, 4.0)
    assert rates.rate(["x"]) == -30, "a log that was cut goes back"
    rates.record({"x": 7}, 4.0)
    assert rates.rate(["x"]) == -30, "no time has passed"
    rates.retain_only({"y"})
    assert rates.value("x") is None


def test_all_come_in_turn_and_no_more_than_allowed_at_once():
    rotation: Rotation[str] = Rotation(3)
    names = list("abcdefgh")
    turns = [rotation.next(names) for _ in range(rotation.turns(len(names)))]
    assert [len(turn) for turn in turns] == [3, 3, 3]
    assert sorted({name for turn in turns for name in turn}) == names
    rotation.last = "h"
    assert rotation.next(["a", "b", "x", "y"]) == ["a", "x", "y"]
    assert rotation.next(["a", "b"]) == ["a", "b"]


def topic(name: str, *partitions: PartitionMetadata) -> TopicMetadata:
    return TopicMetadata(name, None, False, {p.partition: p for p in partitions})


def test_rows_of_topics_and_groups():
    rates = ClusterRates()
    offline = PartitionMetadata(1, -1, 1, (1, 2), ())
    a = topic("a", PartitionMetadata(0, 1, 1, (1, 2), (1,)), offline)
    rates.set_topics({"a": a, "b": topic("b", PartitionMetadata(0, 2, 1, (2,), (2,)))})
    assert rates.partitions(led=True) == [A0, TopicPartition("b", 0)]
    rates.set_groups([GroupListing("g", "consumer", "Stable", "classic", 1)])
    for at_s, end in ((1.0, 100), (3.0, 120)):
        rates.add_partitions(PartitionSample({A0: end}, {A0: 10 * end}), at_s)
        rates.add_groups({}, {"g": {A0: end // 2, A1: 3}}, at_s)
    first, second = rates.topic_rows()
    assert first == {
        "topic": "a",
        "partitions": 2,
        "under_replicated": 2,
        "offline": 1,
        "records_per_s": 10.0,
        "size_bytes": 1200,
        "growth_bytes_per_s": 100.0,
    }
    assert second["records_per_s"] is None
    (row,) = rates.group_rows()
    assert (row["records_per_s"], row["lag"], row["partitions_unknown"]) == (5.0, 60, 1)
    assert row["members"] is None

    rates.set_topics({"b": rates.topics["b"]})
    rates.set_groups([])
    assert rates.ends.value(A0) is None and rates.group_rows() == []


def test_the_order_of_rows():
    rows = [{"topic": n, "size_bytes": s} for n, s in (("a", 1), ("b", None), ("c", 5), ("d", 5))]
    assert [r["topic"] for r in sorted_rows(rows, "size_bytes", "topic")] == ["c", "d", "a", "b"]
    assert [r["topic"] for r in sorted_rows(rows, "lag", "topic")] == ["a", "b", "c", "d"]


def test_what_fits_the_screen():
    settings = Settings(None, "rate", 1.0, None)
    assert settings.rows(40, nodes=3) == 12
    assert settings.rows(5, nodes=3) == 1
    settings.press("t")
    assert settings.views == ("topics",) and settings.rows(40, nodes=3) == 33
    settings.press("s")
    settings.press("x")
    assert (settings.sort, settings.view) == ("size", "topics")
    settings.press("a")
    assert settings.views == ("nodes", "topics", "groups")


def test_the_screen_spells_out_what_a_cluster_says() -> None:
    """Names of topics and groups, the cluster's own, and an error: none moves the cursor."""
    watch = Watch(FakeClient(), internal=False)
    watch.rates.cluster = ClusterDescription(HOSTILE, 1, (), None)
    watch.rates.set_topics({HOSTILE: topic(HOSTILE, PartitionMetadata(0, 1, 1, (1,), (1,)))})
    watch.rates.set_groups([GroupListing(HOSTILE, HOSTILE, HOSTILE, "classic", 1)])
    shown = io.StringIO()
    console = Console(file=shown, width=1000, force_terminal=False)
    console.print(_screen(watch, Settings(None, "name", 1.0, None), 1000, 60, HOSTILE))
    check("the screen", shown.getvalue())
    assert not any(line.startswith("level=") for line in shown.getvalue().splitlines())
    spelled = printable_line(HOSTILE)
    assert shown.getvalue().count(spelled) == 5, "cluster, error, topic, group and its state"


def test_a_narrow_screen_has_fewer_columns_and_the_keys() -> None:
    watch, name = Watch(FakeClient(), internal=False), "orders-of-the-region"
    watch.rates.set_topics({name: topic(name, PartitionMetadata(0, 1, 1, (1,), (1,)))})
    shown = io.StringIO()
    console = Console(file=shown, width=45, force_terminal=False)
    console.print(_screen(watch, Settings("topics", "name", 1.0, None), 45, 60, ""))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 45
    assert lines[1] == "by name  (n t g a: view, s: order, q: end)"
    assert lines[-2].split() == ["TOPIC", "PARTITIONS"]
    assert lines[-1].split() == [f"{name[:31]}", "1"]


@pytest.mark.parametrize(
    ("view", "sort", "columns"),
    [
        ("topics", "rate", ["TOPIC", "PARTITIONS", "RECORDS/S"]),
        ("topics", "size", ["TOPIC", "PARTITIONS", "SIZE"]),
        ("topics", "growth", ["TOPIC", "PARTITIONS", "GROWTH/S"]),
        ("topics", "lag", ["TOPIC", "PARTITIONS"]),
        ("groups", "lag", ["GROUP", "STATE", "MEMBERS", "LAG"]),
        ("groups", "size", ["GROUP", "STATE", "MEMBERS"]),
        ("groups", "rate", ["GROUP", "STATE", "RECORDS/S"]),
    ],
)
def test_a_narrow_screen_keeps_the_column_that_it_is_sorted_by(
    view: str, sort: str, columns: list[str]
) -> None:
    watch, name = Watch(FakeClient(), internal=False), "orders-of-the-region"
    watch.rates.set_topics({name: topic(name, PartitionMetadata(0, 1, 1, (1,), (1,)))})
    watch.rates.set_groups([GroupListing(name, "consumer", "Stable", "classic", 1)])
    shown = io.StringIO()
    console = Console(file=shown, width=40, force_terminal=False)
    console.print(_screen(watch, Settings(view, sort, 1.0, None), 40, 24, ""))
    head, row = shown.getvalue().splitlines()[-2:]
    assert head.split() == columns and len(row.split()) == len(columns)
    assert max(len(head), len(row)) <= 40


@pytest.mark.parametrize("width", [1, 8, 20, 25])
def test_the_name_gives_way_where_hardly_anything_fits(width: int) -> None:
    columns, rows, name_width = _that_fit(("topic", "size"), [("orders", "1.0 MiB")], width, "size")
    assert columns == ["topic", "size"] and rows == [["orders", "1.0 MiB"]]
    assert name_width == max(1, min(6, width - 9))


def test_a_long_name_leaves_the_other_columns_whole() -> None:
    watch, name = Watch(FakeClient(), internal=False), "orders." + "of-a-region." * 9
    watch.rates.set_topics({name: topic(name, PartitionMetadata(0, 1, 1, (1,), (1,)))})
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=False)
    console.print(_screen(watch, Settings("topics", "name", 1.0, None), 80, 24, ""))
    head, row = shown.getvalue().splitlines()[-2:]
    assert head.split() == [
        "TOPIC",
        "PARTITIONS",
        "UNDER-REPLICATED",
        "OFFLINE",
        "RECORDS/S",
        "SIZE",
    ]
    cut, *cells = row.split()
    assert cut.startswith("orders.") and cut.endswith("…") and cells == ["1", "0", "0", "-", "-"]


def test_what_moves_is_seen(either: Kept) -> None:
    name = f"top-{uuid.uuid4().hex[:8]}"
    bootstrap = either.environ["KEPT_BOOTSTRAP"]
    with Client(bootstrap) as client, Client(bootstrap) as watching:
        client.create_topic(name, partitions=2)
        watch = Watch(watching, internal=False)
        watch.refresh()
        client.produce(name, [OutRecord(b"k%d" % n, b"v" * 100) for n in range(50)])
        client.commit(name, {TopicPartition(name, 0): 0})
        watch.refresh()
        client.commit(name, {TopicPartition(name, 0): 10})
        watch.refresh(whole=True)
        (row,) = [row for row in watch.rates.topic_rows() if row["topic"] == name]
        assert (row["partitions"], row["under_replicated"], row["offline"]) == (2, 0, 0)
        assert row["size_bytes"] > 5_000
        (group,) = [row for row in watch.rates.group_rows() if row["group"] == name]
        assert group["records_per_s"] > 0
        assert group["lag"] == max(0, client.bounds(name)[0][1] - 10)
        (node,) = watch.rates.node_rows()
        assert node["controller"] is True and node["leaders"] >= 2


def test_top_once_and_as_json(either: Kept) -> None:
    name = f"top-{uuid.uuid4().hex[:8]}"
    either("topic", "create", name)
    told = either("top", "--json", "--interval", 0.5).json
    assert set(told) == {"nodes", "topics", "groups"}
    (row,) = [row for row in told["topics"] if row["topic"] == name]
    assert row["records_per_s"] == 0
    assert not any(row["topic"].startswith("__") for row in told["topics"])
    shown = either("top", "topics", "--sort", "name", "--limit", 1, "--interval", 0.5).lines
    assert shown[0].split()[:2] == ["TOPIC", "PARTITIONS"]
    assert shown[-1].endswith("more topics: --limit 0 shows all") or len(shown) == 2
    assert len(shown) <= 3


@pytest.mark.timeout(60)
def test_top_on_a_terminal_follows_keys(kept: Kept) -> None:
    ours, theirs = pty.openpty()
    kept.environ |= {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}

    def read_until(text: str) -> None:
        seen, end = "", time.monotonic() + 30
        while text not in seen:
            assert select.select([ours], [], [], max(0.0, end - time.monotonic()))[0], seen
            seen += os.read(ours, 65_536).decode()

    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with kept.started("top", "--interval", 0.5, **pipes) as running:
        read_until("LEADERS")
        os.write(ours, b"g")
        read_until("by rate")
        os.write(ours, b"s")
        read_until("by size")
        os.write(ours, b"q")
        read_until("\x1b[?1049l")
        assert running.wait(30) == 0
    os.close(ours)
    os.close(theirs)
