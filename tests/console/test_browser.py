"""A real browser at three nodes, of which one is killed while a log is compacted.

Long because every page of the console is visited, by the same few steps.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from operator import itemgetter
from urllib.parse import urlsplit

import pytest

from kept.client.client import OutRecord
from tests.console import scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chromium,
    pytest.mark.timeout(400),
    # playwright's own, where greenlets end
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    from kept.testing import Cluster

    slow = {"log_cleaner_io_max_bytes_per_second": 40_000}
    with Cluster(3, broker_rack=scene.HOSTILE, **slow) as made:
        scene.fill(made)
        yield made


def number(text):
    return int(text.replace(",", ""))


def apart(known, name):
    """How a number of partitions is shown, of which some are of internal topics."""
    internal = known[f"internal_{name}"]
    return f"{known[name] - internal:,}" + (f" and {internal:,} internal" if internal else "")


def leader(cluster, topic, partition, i=0):
    found = scene.given(cluster, f"topics/{topic}?partition={partition}", i)
    return found["partitions"][0]["leader"]


def unfold(page, partition, offset):
    """Press the button of a record's row; the texts of its key and value."""
    page.click(f"#record-{partition}-{offset}")
    return page.locator("tr.detail pre").all_text_contents()


def test_records_stay_what_they_are(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#records/{scene.USERS}/0")
    assert scene.HOSTILE in page.locator("td.payload .line").all_text_contents()
    assert page.locator("main script, main img").count() == 0
    assert page.title() == f"Records of {scene.USERS}, partition 0 · kept"
    records = scene.given(cluster, f"records?topic={scene.USERS}&partition=0&limit=25")["records"]
    offsets = [
        row["Offset"] for row in browser.rows(page, f"Records of {scene.USERS}, partition 0")
    ]
    assert offsets == [str(one["offset"]) for one in records]
    for kind, seen in (("hex", "3c 73 63 72"), ("json", "not JSON: <script>")):
        page.select_option("#format", kind)
        page.wait_for_function("kind => location.hash.endsWith(`format=${kind}`)", arg=kind)
        page.wait_for_selector("main:not([aria-busy]) h1")
        page.wait_for_selector("#record-0-49[aria-expanded=false]")
        assert seen in unfold(page, 0, 49)[1]
        assert page.evaluate("document.activeElement.id") == "record-0-49"
    assert wrong == []


def test_hostile_text_neither_hides_nor_spreads(cluster, chromium):
    """Text that turns around is not shown as another one, and a long word stays in its place."""
    from tests.console import browser

    topic = cluster.create_topic()
    long = b"W" * 3000
    with cluster.client() as client:
        client.produce(topic, [OutRecord(long, "\u202egnp.exe".encode(), headers=(("h", long),))])
    page, wrong = browser.opened(chromium, width=390)
    spread = "all => all.map(one => one.scrollWidth - one.clientWidth)"
    for view in (f"#records/{topic}/0", f"#records/{topic}"):
        browser.show(page, cluster.url(), view)
        page.wait_for_selector("#record-0-0")
        assert page.locator("td.payload .line").all_text_contents()[1] == "\\u202egnp.exe"
        assert unfold(page, 0, 0)[:2] == ["W" * 3000, "\\u202egnp.exe"]
        assert set(page.locator(".scroll").evaluate_all(spread)) == {0}
    assert wrong == []


def found_offsets(page):
    return [
        (int(row["Partition"]), number(row["Offset"]))
        for row in page.locator("tr.record").evaluate_all(
            "all => all.map(row => Object.fromEntries("
            "[...row.cells].map(cell => [cell.dataset.head, cell.textContent])))"
        )
    ]


def searched(page, records):
    """Wait until a search is over, or has a page of records, and shows so many."""
    page.wait_for_function(
        "wanted => document.getElementById('stop')?.hidden"
        " && document.getElementById('progress').textContent.includes('found')"
        " && document.querySelectorAll('tr.record').length === wanted",
        arg=records,
    )


def test_a_search_goes_through_all_partitions_newest_first(cluster, chromium):
    from tests.console import browser

    topic = cluster.create_topic(partitions=3)
    with cluster.client() as client:
        for n in range(130):
            value = json.dumps({"n": n, "big": 12345678901234567890 + n}).encode()
            record = OutRecord(b"k%d" % n, value, partition=n % 3, timestamp=1_700_000_000_000 + n)
            client.produce(topic, [record])
        client.produce(topic, [OutRecord(b"k", b"v", partition=1, headers=(("trace", b"t-7"),))])
    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#records/{topic}")
    searched(page, 50)
    newest = [(1, 43), *((n % 3, n // 3) for n in range(129, 80, -1))]
    assert found_offsets(page) == newest, "the newest first, over all partitions"
    page.click("#more")
    searched(page, 100)
    page.click("#more")
    searched(page, 131)
    assert len(set(found_offsets(page))) == 131 and page.locator("#more").is_hidden()
    assert "All was searched" in page.locator("#progress").text_content()
    # JSON stands in one line, and a number that JavaScript cannot hold stays what it is.
    assert page.locator("tr.record .line").nth(3).text_content() == (
        '{"n": 129, "big": 12345678901234568019}'
    )
    assert unfold(page, 0, 43)[1] == '{\n  "n": 129,\n  "big": 12345678901234568019\n}'
    page.click("#record-0-43")
    assert page.locator("tr.detail").count() == 0

    page.fill("#contains", '"n": 7,')
    page.keyboard.press("Enter")
    searched(page, 1)
    assert page.evaluate("document.activeElement.id") == "contains", "who types goes on typing"
    assert found_offsets(page) == [(1, 2)]
    page.go_back()
    searched(page, 50)
    page.go_forward()
    searched(page, 1)
    assert page.input_value("#contains") == '"n": 7,'
    for query, offsets in (
        ("header=trace%3Dt-7", [(1, 43)]),
        ("key=k5", [(2, 1)]),
        ("partition=0&order=oldest&to=1700000000009", [(0, 0), (0, 1), (0, 2)]),
        ("contains=nothing+has+this", []),
    ):
        browser.show(page, cluster.url(), f"#records/{topic}?{query}")
        searched(page, len(offsets))
        assert found_offsets(page) == offsets, query
    assert page.locator("p:text-is('No record fits.')").count() == 1
    assert wrong == []


def test_a_tail_shows_what_comes_and_can_be_paused(cluster, chromium):
    from tests.console import browser

    topic = cluster.create_topic(partitions=2)
    page, wrong = browser.opened(chromium)
    with cluster.client() as client:
        client.produce(topic, [OutRecord(b"k", b"before", partition=0)])
        browser.show(page, cluster.url(), f"#records/{topic}")
        page.click("#tail")
        page.wait_for_function("() => location.hash.endsWith('tail=1')")
        page.wait_for_function(
            "() => document.getElementById('progress').textContent === 'Following 2 partitions.'"
        )
        assert found_offsets(page) == [], "only what comes from now on"
        for n in range(3):
            client.produce(topic, [OutRecord(b"k", b"%d" % n, partition=1)])
        page.wait_for_selector("#record-1-2")
        assert found_offsets(page) == [(1, 2), (1, 1), (1, 0)], "the newest on top"
        page.click("#pause")
        client.produce(topic, [OutRecord(b"k", b"later", partition=0)] * 2)
        page.wait_for_function(
            "() => document.getElementById('waiting').textContent === '2 records came since.'"
        )
        assert page.locator("tr.record").count() == 3
        page.click("#pause")
        assert sorted(found_offsets(page)[:2]) == [(0, 1), (0, 2)]
        page.fill("#contains", "b")
        page.click("#tail")
        page.wait_for_function(
            "() => document.getElementById('progress').textContent === 'Following 2 partitions.'"
            " && !document.querySelector('tr.record')"
        )
        client.produce(topic, [OutRecord(b"k", value, partition=1) for value in (b"a", b"b")])
        page.wait_for_selector("#record-1-4")
        assert found_offsets(page) == [(1, 4)]
    page.click("a:text-is('Stop the tail')")
    searched(page, 2)
    # What an earlier page followed is closed: nothing comes any more.
    assert page.locator("#pause").count() == 0
    assert wrong == []


def test_a_search_that_is_refused_says_why_and_is_over(cluster, chromium):
    from tests.console import browser

    page, _ = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#records/{scene.USERS}?partition=7")
    page.locator(f"p.bad:text-is('{scene.USERS} has no partition 7; it has 0 to 2')").wait_for()
    page.locator("#stop").wait_for(state="hidden")
    assert page.locator("#progress").text_content() == ""


def test_a_key_is_found_in_whatever_partition(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#records/{scene.USERS}")
    page.fill("#key", "user-3")
    page.keyboard.press("Enter")
    searched(page, 2)
    assert found_offsets(page) == [(0, 43), (0, 3)]
    # Clients would put it into another one.
    said = page.locator("main").text_content()
    assert "Producers put this key into partition 2" in said
    browser.show(page, cluster.url(), f"#key/{scene.USERS}?key=user-3")
    life = browser.rows(page, "Records of the key, oldest first")
    assert [row["Offset"] for row in life] == ["3", "43"] and life[1]["Value"] == "tombstone"
    said = page.locator("main").text_content()
    assert "Found in partition 0; producers put this key into partition 2" in said
    assert wrong == []


def test_what_is_not_there_is_said_and_what_may_be_meant(cluster, chromium):
    from tests.console import browser

    page, _ = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#topic/{scene.ORDERS}")
    for view, head, meant in (
        ("#topic/ordesr", "There is no topic ordesr", [scene.ORDERS]),
        ("#topic/usres", "There is no topic usres", [scene.USERS]),
        ("#records/user?contains=x", "There is no topic user", [scene.USERS]),
        ("#group/biling", "There is no consumer group biling", [scene.GROUP]),
        ("#transaction/bonk", "There is no transactional id bonk", [scene.BANK]),
        ("#topic/nothing-like-it", "There is no topic nothing-like-it", []),
        ("#nonsense/1", "There is no such page", []),
    ):
        page.evaluate("view => { location.hash = view }", view)
        page.wait_for_selector(f"h1:text-is('{head}')")
        assert page.locator("table").count() == 0, "the page before does not stay"
        found = page.locator("p:has-text('Did you mean') a").all_text_contents()
        assert found == meant, view
    page.go_back()
    page.go_back()
    page.click(f"a:text-is('{scene.BANK}')")
    page.wait_for_selector(f"h1:text-is('{scene.BANK}')")


def test_an_empty_cluster_says_how_to_begin(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster()
    address = cluster.url().removeprefix("http://")
    page, wrong = browser.opened(chromium)
    for view, line in (
        ("#topics", "kept topic create orders --partitions 3"),
        ("#groups", "kept consume orders --group readers"),
        ("#transactions", "kept produce orders --transactional-id nightly"),
    ):
        browser.show(page, cluster.url(), view)
        (shown,) = page.locator(".empty code").all_text_contents()
        assert shown == f"{line} --bootstrap {address}"
    topic = cluster.create_topic()
    browser.show(page, cluster.url(), f"#topic/{topic}")
    shown = page.locator(".empty code").all_text_contents()
    assert [line.partition(" --bootstrap")[0] for line in shown] == [
        f"echo 'alice:hello' | kept produce {topic} --key-separator :",
        f"kept consume {topic} --group readers",
    ]
    browser.show(page, cluster.url(), "#groups")
    shown = page.locator(".empty code").text_content()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".empty button")
    page.wait_for_selector(".empty button:text-is('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == shown
    assert wrong == []


def test_command_lines_name_the_cluster_at_usual_ports_too(kept_cluster, chromium):
    """Neither what commands take by themselves nor a port that a browser leaves out is left out."""
    from kept.node.http.host_header import with_port
    from tests.console import browser

    cluster = kept_cluster()
    for url in (
        "http://localhost:9092",
        "http://127.0.0.1",
        "https://kept.example",
        "http://[::1]",
    ):
        page, wrong = browser.opened(chromium)
        page.route(f"{url}/**", lambda route: relayed(route, cluster))
        browser.show(page, url, "#topics")
        (shown,) = page.locator(".empty code").all_text_contents()
        host = page.evaluate("location.host")
        address = with_port(host, https=url.startswith("https:"))
        assert re.search(r":\d+$", address)
        line = f"kept topic create orders --partitions 3 --bootstrap {shlex.quote(address)}"
        assert shown == line, url
        page.context.close()
        assert not [one for one in wrong if "Failed to load" not in one], wrong


def relayed(route, cluster):
    """A request to whatever address is answered by the cluster; streams of events are not."""
    address = urlsplit(route.request.url)
    if address.path == "/api/v1/events":
        route.abort()
        return
    url = f"{cluster.url()}{address.path}"
    route.fulfill(response=route.fetch(url=f"{url}?{address.query}" if address.query else url))


def test_what_is_elsewhere_is_not_asked(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    browser.show(page, cluster.url(), "#")
    racks = {row["Rack"] for row in browser.rows(page, "Nodes of the cluster")}
    assert racks == {scene.HOSTILE}
    for view in ("#topics", f"#topic/{scene.ORDERS}", "#groups", f"#group/{scene.GROUP}"):
        browser.show(page, cluster.url(), view)
    assert asked and all(url.startswith(f"{cluster.url()}/") for url in asked)
    assert browser.facts(page)["Lag"] == "17"
    assert wrong == []


def test_transactions_and_their_partitions(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), "#transactions")
    (row,) = browser.rows(page, "Transactional ids")
    assert (row["Transactional id"], row["State"]) == (scene.BANK, "Ongoing")
    page.click(f"a:text-is('{scene.BANK}')")
    page.wait_for_selector(f"h1:text-is('{scene.BANK}')")
    assert browser.facts(page)["Timeout"] == "600 s"
    assert browser.facts(page)["Coordinator"] == row["Coordinator"]
    assert browser.rows(page, "Partitions of the transaction") == [
        {"Topic": scene.CLICKS, "Partition": "2"}
    ]
    assert wrong == []


def test_the_last_hour_is_drawn_and_told(cluster, chromium):
    from tests.console import browser

    def known(path, least=2):
        samples = scene.given(cluster, f"history/{path}")["samples"]
        return samples if len(samples) >= least else None

    path = f"throughput?topic={scene.CLICKS}"
    cluster.wait_until(lambda: known(path), "two samples of the topic", 60)
    cluster.wait_until(lambda: known(f"lag?group={scene.GROUP}"), "two samples of the group", 60)
    page, wrong = browser.opened(chromium)
    answers = []

    def the_first(route):  # the page asks again while it is looked at
        answers.append(answers[0] if answers else route.fetch().json())
        route.fulfill(json=answers[-1])

    page.route(f"**/history/{path}*", the_first)
    browser.show(page, cluster.url(), f"#topic/{scene.CLICKS}")
    page.click("summary:text-is('Size of logs as a table')")
    page.wait_for_selector("caption:text-is('Size of logs, the newest first')", state="attached")
    rows = browser.rows(page, "Size of logs, the newest first")
    samples = {
        datetime.fromtimestamp(one["at_ms"] / 1000, UTC).strftime("%H:%M:%S"): one
        for one in answers[0]["samples"]
    }
    assert len(rows) >= 2
    for row in rows:
        assert row["Value"] == f"{samples[row['Time']]['size_bytes'] / 1024:.1f} KiB"
    label = page.locator(".chart:has-text('Size of logs') svg").get_attribute("aria-label")
    assert re.match(r"Size of logs over the last \d+ minutes?: now [\d.]+ KiB, at most", label)
    heights = [y for _, y in browser.polyline(page, ".chart:has-text('Records in')")]
    assert 0 <= min(heights) <= max(heights) <= 100 and len(heights) == len(samples)
    now = max(samples.values(), key=lambda one: one["at_ms"])["bytes_out_per_second"]
    assert now == 0 and max(one["bytes_out_per_second"] for one in samples.values()) > 0
    out = page.locator(".chart:has-text('Bytes out') svg").get_attribute("aria-label")
    assert re.match(r"Bytes out over the last \d+ minutes?: now 0 B/s, at most [1-9]", out)

    browser.show(page, cluster.url(), f"#topic/{scene.USERS}")
    page.click("summary:text-is('Size of logs as a table')")
    page.wait_for_selector("#topic-size_bytes[open] td")
    with cluster.client() as client:
        client.produce(scene.USERS, [OutRecord(b"one", b"more", partition=2)])
    page.wait_for_function(
        "() => document.querySelectorAll('td[data-head=\"High watermark\"]')[2].textContent === '1'"
    )
    page.wait_for_selector("#topic-size_bytes[open] td")  # what is unfolded stays so

    browser.show(page, cluster.url(), f"#group/{scene.GROUP}")
    assert page.locator(".chart strong").text_content() == browser.facts(page)["Lag"] == "17"
    browser.show(page, cluster.url(), "#")
    assert page.locator(".chart svg[role=img]").count() == 4
    assert wrong == []


def test_nodes_without_compiled_kernels_are_named(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    lacking = {0: ["compaction.kernels._kernel", "storage.records._kernel"]}

    def slow(route):
        answer = route.fetch()
        found = answer.json()
        found["uncompiled_kernels"] = lacking.get(found["node"], [])
        route.fulfill(response=answer, json=found)

    page.route("**/api/v1/cleaner?*", slow)
    browser.show(page, cluster.url(), "#")
    assert page.locator("main p.bad").all_text_contents() == [
        "Node 0 runs kernels that are not compiled, and is far slower for it: "
        "compaction.kernels._kernel, storage.records._kernel"
    ]
    lacking.clear()
    browser.show(page, cluster.url(), "#topics")
    browser.show(page, cluster.url(), "#")
    assert page.locator("main p.bad").count() == 0
    assert wrong == []


def test_what_is_due_is_said_with_its_limit(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)

    def due(route):
        answer = route.fetch()
        found = answer.json()
        found["partitions"][0]["compaction"] |= {
            "state": "due",
            "dirty_ratio": 0.996,
            "reason": "100 % dirty, limit 90 %",
        }
        found["config"]["min.cleanable.dirty.ratio"] = "0.9"
        route.fulfill(response=answer, json=found)

    page.route(f"**/topics/{scene.ORDERS}?*", due)
    browser.show(page, cluster.url(), f"#topic/{scene.ORDERS}/0")
    said = page.locator(".why.due").text_content()
    assert said == "Compaction due: 100 % dirty, limit 90 %"
    points = browser.polyline(page, ".dirtiness")
    assert len(points) > 2
    for (x, y), (next_x, next_y) in pairwise(points):
        assert x == next_x or y == next_y, "a ratio holds until the next sample: steps"
    caption = page.locator(".dirtiness .scale").text_content()
    assert "compaction is due above 90 %" in caption
    assert wrong == []


def test_everybody_can_use_it(cluster, chromium):
    from axe_playwright_python.sync_playwright import Axe

    from tests.console import browser

    views = (
        "#",
        "#node/0",
        "#topics",
        "#create",
        f"#topic/{scene.ORDERS}",
        f"#topic/{scene.ORDERS}/0",
        f"#records/{scene.ORDERS}?contains=paid",
        f"#records/{scene.CLICKS}/1",
        f"#records/{scene.ORDERS}?tail=1",
        f"#key/{scene.USERS}?key=user-3",
        f"#produce/{scene.ORDERS}",
        f"#settings/{scene.ORDERS}",
        "#groups",
        f"#group/{scene.GROUP}",
        f"#reset/{scene.GROUP}",
        "#transactions",
        f"#transaction/{scene.BANK}",
        "#topic/ordesr",
    )
    for scheme, width in (("light", 1200), ("dark", 390)):
        page, wrong = browser.opened(chromium, scheme=scheme, width=width)
        for view in views:
            browser.show(page, cluster.url(), view)
            if "contains" in view:
                page.locator("button.toggle").first.click()
            page.locator("main details").evaluate_all("all => all.map(one => one.open = true)")
            found = Axe().run(page)
            assert not found.response["violations"], view + found.generate_report()
            spread = page.locator(".scroll").evaluate_all(
                "all => all.map(one => one.scrollWidth - one.clientWidth)"
            )
            assert width > 390 or not any(spread), f"{view} is scrolled sideways: {spread}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{view} is {wide} wide"
            tops = page.locator("header nav a").evaluate_all("all => all.map(a => a.offsetTop)")
            assert len(set(tops)) == 1, f"{view}: the links to pages are in {len(set(tops))} rows"
            covered = page.locator(".plot").evaluate_all(
                "all => all.filter(one => one.querySelector('.top').getBoundingClientRect().bottom"
                " > one.querySelector('svg').getBoundingClientRect().top + 1).length"
            )
            assert not covered, f"{view}: the end of an axis covers its line"
        assert not [one for one in wrong if "404" not in one], wrong
    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), "#topics")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    page.fill("#filter", "ord")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    for _ in range(3):  # internal topics too, create topic, the first row
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"h1:text-is('{scene.ORDERS}')")


def test_a_node_dies_while_a_log_is_compacted(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    at = next(p for p in range(3) if leader(cluster, scene.ORDERS, p) == 1)
    browser.show(page, cluster.url(), f"#topic/{scene.ORDERS}/{at}")
    assert page.locator("#compact").is_disabled()
    assert "kept.console.actions=true" in page.locator("#about-buttons").text_content()
    with cluster.client() as client:
        scene.append_orders(client, at, 8)
    # It is led elsewhere; its cleaner moves through it, seen from here.
    page.wait_for_selector(".log.big .cleaner", state="attached")
    page.wait_for_function(
        "() => parseFloat(document.querySelector('.log.big .cleaner')?.style.left) > 5"
    )
    page.wait_for_selector(".why.idle")

    def same():
        one = scene.given(cluster, f"topics/{scene.ORDERS}?leaders=true&partition={at}")
        (known,) = one["partitions"]
        seen = browser.facts(page)
        status = known["compaction"]
        kinds = page.locator(".log.big span").evaluate_all("all => all.map(one => one.className)")
        wanted = {
            "Leader": f"node {known['leader']}, epoch {known['leader_epoch']}",
            "Offsets": f"{known['log_start_offset']:,} to {known['log_end_offset']:,}",
            "High watermark": f"{known['high_watermark']:,}",
            "Tombstones pending": f"{status['tombstones_pending']:,}",
            "Generation published": status["published"] or status["generation"],
        }
        drawn = [segment["kind"] for segment in known["segments"]]
        return known["leader"] >= 0 and wanted.items() <= seen.items() and kinds == drawn

    cluster.wait_until(same, "the page shows what the API says", 60)
    assert "clean" in page.locator(".log.big span").first.get_attribute("class")
    passes = browser.rows(page, "Compactions in the removal journal, the newest first")
    assert passes and "superseded" in passes[0]["Removed"]

    cluster.kill(1)
    page.wait_for_function("() => document.body.textContent.includes('not in sync')")
    cluster.wait_until(same, "the page shows the new leader", 60)
    parts = {row["Replica"][:6]: row["Role"] for row in browser.rows(page, "Replicas")}
    assert parts["node 1"] == "follower, not in sync" and "leader" in parts.values()
    browser.show(page, cluster.url(), "#")
    page.wait_for_function("() => document.querySelector('.tiles').textContent.includes('2 of 3')")

    def tiles_are_right():
        known, tiles = scene.given(cluster, "cluster"), browser.facts(page, "tiles")
        sums = {"Topics": apart(known, "topics"), "Partitions": apart(known, "partitions")}
        rows = browser.rows(page, "Nodes of the cluster")
        return (
            [(row["Leaders"], row["Replicas"]) for row in rows]
            == [(apart(b, "leads"), apart(b, "replicas")) for b in known["brokers"]]
            and known["internal_partitions"] > 0
            and tiles["Controller"] == f"node {known['controller_id']}"
            and all(tiles[tile] == shown for tile, shown in sums.items())
            and all(
                number(tiles[tile]) == known[name]
                for tile, name in (
                    ("Offline", "offline_partitions"),
                    ("Under-replicated", "under_replicated_partitions"),
                )
            )
        )

    cluster.wait_until(tiles_are_right, "the tiles show what the API says", 60)
    states = {row["Node"]: row["State"] for row in browser.rows(page, "Nodes of the cluster")}
    assert states == {"0, this one": "active", "1": "fenced", "2": "active"}
    assert not [one for one in wrong if not one.startswith("said: Failed to load")], wrong


def test_a_button_compacts_and_another_elects(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster(kept_console_actions="true", log_cleaner_enable="false")
    topic = cluster.create_topic(config=scene.COMPACTED)
    with cluster.client() as client:
        for n in range(6):
            client.produce(topic, [scene.order(k, f"state {n}") for k in range(60)])
    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#topic/{topic}/0")
    assert page.locator("#elect").is_disabled()  # it leads already
    page.click("#compact")
    page.wait_for_function(
        "() => [...document.querySelectorAll('caption')].some("
        "one => one.textContent.startsWith('Compactions in the removal journal'))"
    )
    assert browser.facts(page)["Generation published"] == "0.1"
    failed = {"topic": topic, "partition": 0, "done": False, "error": "its leader is away"}
    page.route("**/compaction/now", lambda route: route.fulfill(json={"partitions": [failed]}))
    page.click("#compact")
    page.wait_for_selector("#trouble:visible")
    with cluster.client() as client:
        client.produce(topic, [scene.order(1, "one more")])
    page.wait_for_function("() => document.getElementById('view').textContent.includes('361')")
    # What a button came to is not wiped away by what moves.
    assert page.locator("#trouble").text_content() == "Partition 0: its leader is away"
    for key, said in (
        (b"order-00007", "If the key had records before offset"),
        (b"nobody", "No compaction in the journal removed a tombstone"),
    ):
        search = f"?key_base64={base64.b64encode(key).decode().replace('=', '%3D')}"
        browser.show(page, cluster.url(), f"#key/{topic}/0{search}")
        (told,) = [one for one in page.locator("p.quiet").all_text_contents() if said in one]
        assert re.search(r"of all keys they removed: \d+ superseded\.$", told), told
    assert wrong == []


def act(page, form, fields, *, typed=None, refused=None):
    """Fill a form and send it; what the node answers. Its command line is that of the answer."""
    for field, value in fields.items():
        control = page.locator(f"#{form} #{field}")
        if control.evaluate("control => control.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    submit = page.locator(f"#{form}-submit")
    if typed is not None:
        assert submit.is_disabled(), "not before the name is typed"
        page.fill(f"#{form}-typed", typed[:-1])
        assert submit.is_disabled()
        page.fill(f"#{form}-typed", typed)
    shown = page.locator(f"#{form} .command code").text_content()
    with page.expect_response(lambda response: response.request.method == "POST") as sent:
        submit.click()
    result = sent.value.json()
    page.wait_for_function(
        "form => [...document.querySelectorAll(`#${form} [role]`)].some(e => e.textContent)",
        arg=form,
    )
    if refused is None:
        assert result["done"], result
    else:
        assert refused in page.locator(f"#{form} [role=alert]").text_content()
    assert shown == result["command"]
    return result


def test_forms_do_with_topics_what_their_command_lines_do(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster(kept_console_actions="true")
    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), "#create")
    assert page.locator("#about-buttons").count() == 0
    fields = {"name": "people", "partitions": "2", "config": "cleanup.policy=compact"}
    act(page, "create", {**fields, "replicas": "3"}, refused="replication factor")
    act(page, "create", {**fields, "replicas": ""})
    page.click("#create a:text-is('people')")
    page.wait_for_selector("h1:text-is('people')")
    assert browser.facts(page)["cleanup.policy"] == "compact"

    browser.show(page, cluster.url(), "#settings/people")
    act(page, "alter", {"name": "segment.byte", "value": "9"}, refused="segment.bytes")
    act(page, "alter", {"name": "segment.bytes", "value": "70000"})
    act(page, "alter", {"name": "cleanup.policy", "what": "delete"})
    browser.show(page, cluster.url(), "#topic/people")
    page.click("a:text-is('their defaults')")
    page.wait_for_selector("caption:text-is('All settings of the topic')", state="attached")
    every = {row["Setting"]: row for row in browser.rows(page, "All settings of the topic")}
    config = scene.given(cluster, "topics/people/config")["settings"]
    assert list(every) == [one["name"] + one["documentation"] for one in config]
    rows = {one["name"]: every[one["name"] + one["documentation"]] for one in config}
    columns = itemgetter("Value", "Default", "From")
    assert columns(rows["segment.bytes"]) == ("70000", "1073741824", "topic")
    assert columns(rows["kept.compaction.latest.n"]) == ("unset", "the same", "default")
    lines = (
        "one => { const text = document.createRange(); text.selectNodeContents(one);"
        " return text.getClientRects().length; }"
    )
    assert page.locator("button[aria-label='change flush.ms']").evaluate(lines) == 1
    page.fill("#filter", "Tombstone")
    (found,) = browser.rows(page, "All settings of the topic")
    assert found["Setting"].startswith("delete.retention.ms")
    page.click("button[aria-label='change delete.retention.ms']")
    assert page.input_value("#alter #value") == "86400000"
    meaning = page.locator("#alter .meaning").text_content()
    assert meaning.startswith("long, at least 0, default 86400000. ")
    page.fill("#alter #name", max((one["name"] for one in config), key=len))
    assert page.locator("#alter #name").evaluate("one => one.scrollWidth - one.clientWidth") == 0
    page.fill("#filter", "no such thing")
    assert page.locator("p:text-is('No setting has that in its name or meaning.')").count() == 1
    act(page, "grow", {"partitions": "3"}, typed="people")
    found = scene.given(cluster, "topics/people")
    assert (found["config"], found["partition_count"]) == ({"segment.bytes": "70000"}, 3)

    browser.show(page, cluster.url(), "#produce/people")
    record = {"key": "it's", "value": '{"big": 12345678901234567890}', "headers": "a=1\nb=x=y"}
    act(page, "produce", {**record, "partition": "1"})
    act(page, "produce", {"key": "gone", "headers": ""} | {"partition": ""})
    page.check("#tombstone")
    act(page, "produce", {})
    browser.show(page, cluster.url(), "#records/people")
    searched(page, 3)
    assert page.locator(".badge:text-is('tombstone')").count() == 1
    (first,) = scene.given(cluster, "records?topic=people&partition=1&offset=0&limit=1")["records"]
    assert base64.b64decode(first["value_base64"]).decode() == record["value"]
    assert [header["name"] for header in first["headers"]] == ["a", "b"]

    browser.show(page, cluster.url(), "#settings/people")
    act(page, "delete", {}, typed="people")
    page.click("a:text-is('All topics')")
    page.wait_for_selector(".empty")
    assert wrong == []


def test_forms_reset_offsets_after_a_dry_run_and_change_brokers(kept_cluster, chromium):
    from kept.client.consume.consumer import GroupConsumer
    from kept.client.consume.positions import EARLIEST
    from tests.console import browser

    cluster = kept_cluster(kept_console_actions="true")
    topic = cluster.create_topic(partitions=2)
    page, wrong = browser.opened(chromium)
    with cluster.client() as client:
        client.produce(topic, [OutRecord(None, b"v", partition=n % 2) for n in range(3)])
        reader = GroupConsumer(client, "readers", [topic], reset=EARLIEST)
        while not reader.poll():
            pass
        reader.commit()
        reader.close()
    browser.show(page, cluster.url(), "#group/readers")
    assert browser.facts(page)["Lag"] == "0"
    page.click("a:text-is('Reset offsets')")
    page.wait_for_selector("h1:text-is('Reset offsets')")
    page.fill("#reset-typed", "readers")
    assert page.locator("#reset-submit").is_disabled(), "the dry run comes first"
    page.click("#dry-run")
    page.wait_for_selector("caption:text-is('Offsets before and after')", state="attached")
    after = {row["Partition"]: row for row in browser.rows(page, "Offsets before and after")}
    assert after[f"{topic}:1"]["Committed then"] == "0"
    assert scene.given(cluster, "groups/readers")["lag"] == 0, "a dry run commits nothing"
    page.select_option("#to", "latest")
    assert page.locator("#reset-submit").is_disabled(), "another target needs another dry run"
    page.select_option("#to", "earliest")
    page.click("#dry-run")
    page.wait_for_selector("caption:text-is('Offsets before and after')", state="attached")
    page.fill("#reset-typed", "")
    act(page, "reset", {}, typed="readers")
    assert scene.given(cluster, "groups/readers")["lag"] == 3

    browser.show(page, cluster.url(), "#node/0")
    act(page, "config", {"name": "log.cleaner.threads", "value": "2"})
    page.click("#config button:text-is('Load the settings again')")
    page.wait_for_selector("tr:has(code:text-is('log.cleaner.threads')) td:text-is('2')")
    meaning = page.locator("tr:has(code:text-is('log.cleaner.threads')) p").text_content()
    assert meaning == "Worker processes that compact, at most."
    act(page, "config", {"name": "log.cleaner.threads", "what": "delete"})
    assert wrong == []


def test_where_actions_are_off_forms_give_their_command_line(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    for view, form, fields, line in (
        ("#create", "create", {"name": "a"}, "kept topic create a"),
        (
            f"#settings/{scene.ORDERS}",
            "alter",
            {"name": "segment.ms", "value": "9"},
            f"kept topic alter {scene.ORDERS} --config segment.ms=9",
        ),
        (
            f"#reset/{scene.GROUP}",
            "reset",
            {"partition": "2"},
            f"kept group reset-offsets {scene.GROUP} --topic {scene.CLICKS}:2 --to earliest",
        ),
        (
            f"#produce/{scene.CLICKS}",
            "produce",
            {"key": "it's", "value": "b"},
            """printf '%s\\n' '{"key": "it'"'"'s", "value": "b"}' | """
            f"kept produce --json {scene.CLICKS}",
        ),
        (
            "#node/0",
            "config",
            {"name": "log.cleaner.threads", "value": "2"},
            "kept broker config set 0 --config log.cleaner.threads=2",
        ),
    ):
        browser.show(page, cluster.url(), view)
        for field, value in fields.items():
            page.fill(f"#{form} #{field}", value)
        shown = page.locator(f"#{form} .command code").text_content()
        assert shown.partition(" --bootstrap ")[0] == line
        for submit in page.locator("form.action button[class^=main]").all():
            assert submit.is_disabled()
        assert "kept.console.actions=true" in page.locator("#about-buttons").text_content()
    assert wrong == []


def test_a_login_is_asked_for_and_what_is_not_allowed_is_said(chromium):
    from playwright.sync_api import Error

    from kept.testing import Cluster
    from tests.console import browser

    settings = {"kept_console_actions": "true"}
    with Cluster(1, security="SASL_PLAINTEXT", **settings) as cluster, cluster.client() as client:
        for topic in ("hers", "theirs"):
            client.create_topic(topic, partitions=1)
            client.bounds(topic)
        client.produce("hers", [OutRecord(b"k", b"v")])
        access = ("--bootstrap", cluster.bootstrap, "--command-config", cluster.command_config())
        allow = ("acl", "add", "User:ada", "--consumer", "--topic", "hers", "--group", "g")
        subprocess.run([sys.executable, "-m", "kept", *allow, *access], check=True)
        stranger = chromium.new_context().new_page()
        with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):  # a person is asked
            stranger.goto(cluster.url())
        stranger.context.close()
        properties = cluster.security("ada").properties["sasl.jaas.config"]
        login = dict(re.findall(r'(username|password)="([^"]+)"', properties))
        page, _ = browser.opened(chromium, http_credentials=login)
        browser.show(page, cluster.url(), "#records/hers")
        searched(page, 1)
        page.click("#tail")
        page.wait_for_function(
            "() => document.getElementById('progress').textContent === 'Following 1 partition.'"
        )
        browser.show(page, cluster.url(), "#")
        assert page.locator("h1").text_content() == "Not allowed"
        assert "User:ada" in page.locator("main").text_content()
        browser.show(page, cluster.url(), "#records/theirs")
        assert page.locator("h1").text_content() == "Not allowed"
        browser.show(page, cluster.url(), "#settings/hers")
        said = page.locator("p:has-text('All settings')").text_content()
        assert "not shown: User:ada may not describe_configs topic hers; an administrator" in said
        assert page.locator("#alter").count() == 1
        # She may not see the cluster, nor produce: she is told by the node.
        browser.show(page, cluster.url(), "#produce/hers")
        page.fill("#produce #value", "v")
        page.click("#produce-submit")
        page.wait_for_selector("#produce [role=alert]:not(:empty)")
        assert {high for _, high in client.bounds("hers").values()} == {1}
