"""A real browser at three nodes, of which one is killed while a log is compacted."""

from __future__ import annotations

import base64
import re

import pytest

from kept.client.client import OutRecord
from tests.console import scene

pytestmark = [
    pytest.mark.slow, pytest.mark.chromium, pytest.mark.timeout(400),
    # playwright's own, where greenlets end
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    from kept.testing import Cluster

    slow = {"log_cleaner_io_max_bytes_per_second": 40_000}
    with Cluster(3, broker_rack=scene.HOSTILE, **slow) as made:
        scene.fill(made)
        yield made


@pytest.fixture(scope="module")
def chromium():
    from tests.console import browser

    with browser.chromium() as found:
        yield found


def number(text):
    return int(text.replace(",", ""))


def leader(cluster, topic, partition, i=0):
    found = scene.given(cluster, f"topics/{topic}?partition={partition}", i)
    return found["partitions"][0]["leader"]


def test_records_stay_what_they_are(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#records/{scene.USERS}/0")
    shown = page.locator("td.payload pre").all_text_contents()
    assert scene.HOSTILE in shown
    assert page.locator("main script, main img").count() == 0
    assert page.title() == f"{scene.USERS} 0 · kept"
    records = scene.given(cluster, f"records?topic={scene.USERS}&partition=0&limit=25")["records"]
    offsets = [
        row["Offset"] for row in browser.rows(page, f"Records of {scene.USERS}, partition 0")
    ]
    assert offsets == [str(one["offset"]) for one in records]
    for kind, seen in (("hex", "3c 73 63 72"), ("json", "not JSON: <script>")):
        page.select_option("#format", kind)
        page.wait_for_function(
            "seen => [...document.querySelectorAll('pre')].some(o => o.textContent.includes(seen))",
            arg=seen,
        )
    assert wrong == []


def test_hostile_text_neither_hides_nor_spreads(cluster, chromium):
    """Text that turns around is not shown as another one, and a long word stays in its place."""
    from tests.console import browser

    topic = cluster.create_topic()
    long = b"W" * 3000
    with cluster.client() as client:
        client.produce(topic, [OutRecord(long, "\u202egnp.exe".encode(), headers=(("h", long),))])
    page, wrong = browser.opened(chromium, width=390)
    browser.show(page, cluster.url(), f"#records/{topic}/0")
    assert page.locator("td.payload pre").all_text_contents()[1] == "\\u202egnp.exe"
    spread = "all => all.map(one => one.scrollWidth - one.clientWidth)"
    assert set(page.locator(".scroll").evaluate_all(spread)) == {0}
    assert wrong == []


def test_a_key_is_looked_up(cluster, chromium):
    from tests.console import browser

    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#records/{scene.USERS}/0")
    page.select_option("#from", "key")
    page.fill("#value", "user-3")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('The life of a key')")
    life = browser.rows(page, "Records of the key, oldest first")
    assert [row["Offset"] for row in life] == ["3", "43"] and life[1]["Value"] == "tombstone"
    assert wrong == []


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


def test_everybody_can_use_it(cluster, chromium):
    from axe_playwright_python.sync_playwright import Axe

    from tests.console import browser

    log, records = f"#topic/{scene.ORDERS}/0", f"#records/{scene.CLICKS}/1"
    for scheme, width, some in (
        ("light", 1200, ("#", log, records, f"#group/{scene.GROUP}", f"#transaction/{scene.BANK}")),
        ("dark", 390, ("#topics", f"#topic/{scene.ORDERS}", log, records)),
    ):
        page, wrong = browser.opened(chromium, scheme=scheme, width=width)
        for view in some:
            browser.show(page, cluster.url(), view)
            found = Axe().run(page)
            assert not found.response["violations"], found.generate_report()
            spread = page.locator(".scroll").evaluate_all(
                "all => all.map(one => one.scrollWidth - one.clientWidth)"
            )
            assert width > 390 or not any(spread), f"{view} is scrolled sideways: {spread}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{view} is {wide} wide"
        assert wrong == []
    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), "#topics")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    page.fill("#filter", "ord")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    page.keyboard.press("Tab")
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
    passes = browser.rows(page, "Passes in the removal journal, newest first")
    assert passes and "superseded" in passes[0]["Removed"]

    cluster.kill(1)
    page.wait_for_function("() => document.body.textContent.includes('not in sync')")
    cluster.wait_until(same, "the page shows the new leader", 60)
    parts = {row["Replica"]: row["Part"] for row in browser.rows(page, "Replicas")}
    assert parts["node 1"] == "not in sync" and "leader" in parts.values()
    browser.show(page, cluster.url(), "#")
    page.wait_for_function("() => document.querySelector('.tiles').textContent.includes('2 of 3')")

    def tiles_are_right():
        known, tiles = scene.given(cluster, "cluster"), browser.facts(page, "tiles")
        return tiles["Controller"] == f"node {known['controller_id']}" and all(
            number(tiles[tile]) == known[name]
            for tile, name in (
                ("Topics", "topics"), ("Partitions", "partitions"),
                ("Offline", "offline_partitions"),
                ("Under-replicated", "under_replicated_partitions"),
            )
        )  # fmt: skip

    cluster.wait_until(tiles_are_right, "the tiles show what the API says", 60)
    states = {row["Node"]: row["State"] for row in browser.rows(page, "Nodes of the cluster")}
    assert states == {"0, this one": "serves", "1": "fenced", "2": "serves"}
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
        "one => one.textContent.startsWith('Passes in the removal journal'))"
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
        (b"nobody", "No pass in the journal removed a tombstone"),
    ):
        search = f"?key={base64.b64encode(key).decode().replace('=', '%3D')}"
        browser.show(page, cluster.url(), f"#key/{topic}/0{search}")
        (told,) = [one for one in page.locator("p.quiet").all_text_contents() if said in one]
        assert re.search(r"of all keys they removed: \d+ superseded\.$", told), told
    assert wrong == []
