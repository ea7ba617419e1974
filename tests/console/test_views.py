"""Views of the console in a real browser: answers that fail, fields that are wrong, clocks."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime

import pytest

from kept.client.client import OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from kept.storage.types import TopicPartition
from tests.console import scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chromium,
    pytest.mark.timeout(400),
    # playwright's own, where greenlets end
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_a_view_is_tried_until_it_is_there_unless_it_is_refused(kept_cluster, chromium):
    """Also one that is loaded once: a node that restarts does not leave it dead."""
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic()
    error = {"error": {"message": "no leader now"}}
    failures = [
        (lambda route: route.abort(), "This node does not answer"),
        (lambda route: route.abort(), "This node does not answer"),
        (lambda route: route.fulfill(status=503, json=error), "no leader now"),
        (lambda route: route.fulfill(status=502, body="<html>Bad gateway"), "Bad Gateway"),
        (lambda route: route.abort(), "This node does not answer"),
    ]
    tries = []

    def fail(route):
        tries.append(route.request.url)
        if len(tries) > len(failures):
            route.fallback()
        else:
            failures[len(tries) - 1][0](route)

    page, _ = browser.opened(chromium)
    page.clock.install()
    for view in ("settings", "records"):
        tries.clear()
        page.goto("about:blank")
        page.route(f"**/api/v1/topics/{topic}*", fail)
        page.goto(f"{cluster.url()}/#{view}/{topic}")
        for n, (_, said) in enumerate(failures, 1):
            page.wait_for_selector(f"main:not([aria-busy]):has-text('{said}')")
            assert "tried again every few seconds" in page.locator("main").text_content()
            cluster.wait_until(lambda n=n: len(tries) == n, f"{n} tries", 10)
            page.clock.run_for(4000)
        page.wait_for_selector("main form")
        page.clock.run_for(60_000)
        assert len(tries) == len(failures) + 1, "it is loaded once"
        page.unroute(f"**/api/v1/topics/{topic}*")
    failures[:] = [(lambda route: route.fulfill(status=400, json=error), "no leader now")] * 9
    tries.clear()
    page.route(f"**/api/v1/topics/{topic}*", fail)
    browser.show(page, cluster.url(), f"#settings/{topic}?")
    assert "no leader now" in page.locator("main").text_content()
    assert "tried again" not in page.locator("main").text_content()
    page.clock.run_for(60_000)
    assert len(tries) == 1, "a request that is refused is refused again"


def test_a_value_that_is_no_offset_or_time_is_said_at_its_field(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic()
    with cluster.client() as client:
        client.produce(topic, [OutRecord(b"k", b"%d" % n, timestamp=1000 * n) for n in range(9)])
    page, wrong = browser.opened(chromium)
    view = f"#records/{topic}/0"
    browser.show(page, cluster.url(), view)
    for kind, value, said in (
        ("time", "yesterday", 'not "yesterday"'),
        ("time", "", "2026-11-21 14:05, or milliseconds"),
        ("time", "1969-12-31", "from 1970 on"),
        ("time", "9" * 30, "9999"),
        ("offset", "x", 'a number, as in 42, not "x"'),
        ("offset", "-1", 'not "-1"'),
    ):
        page.select_option("#from", kind)
        page.fill("#value", value)
        page.click("button:text-is('Show')")
        assert said in page.locator("#value").evaluate("field => field.validationMessage")
        assert page.evaluate("location.hash") == view, "it is not sent"
    for kind, value, query, first in (
        ("time", "1970-01-01T00:00:05Z", "timestamp=5000", 5),
        ("time", "1000000", "timestamp=1000000", None),
        ("offset", "7", "offset=7", 7),
    ):
        page.select_option("#from", kind)
        page.fill("#value", value)
        page.click("button:text-is('Show')")
        page.wait_for_function("query => location.hash.endsWith(`?${query}`)", arg=query)
        page.wait_for_selector("main:not([aria-busy]) h1")
        if first is not None:
            page.wait_for_selector(f"tr.record:first-child #record-0-{first}")
    # A time that no date of JavaScript's has.
    browser.show(page, cluster.url(), f"{view}?timestamp=9000000000000000")
    assert page.input_value("#value") == "9000000000000000"
    assert wrong == []


@pytest.mark.parametrize("year", [2001, 2026])
def test_a_clock_that_is_behind_does_not_spoil_a_chart(kept_cluster, chromium, year):
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic()
    with cluster.client() as client:
        client.produce(topic, [OutRecord(None, b"v")] * 3)
        reader = GroupConsumer(client, "readers", [topic], reset=EARLIEST)
        while not reader.poll():
            pass
        reader.commit()
        reader.close()
    last = datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000

    def history(route):
        answer = route.fetch()
        samples = [{"at_ms": last - 15_000 * n, "lag": n} for n in (3, 2, 1, 0)]
        route.fulfill(response=answer, json=answer.json() | {"samples": samples})

    page, wrong = browser.opened(chromium)
    page.route("**/history/lag?*", history)
    page.clock.set_fixed_time(datetime(year, 1, 1, 0, 0, 15, tzinfo=UTC))
    browser.show(page, cluster.url(), "#group/readers")
    points = browser.polyline(page, ".chart")
    at = [x for x, _ in points]
    assert len(points) == 5 and at == sorted(at) and (at[0], at[-1]) == (0, 600)
    assert wrong == []


def test_a_tail_says_what_could_not_be_read(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic(partitions=2)
    skipped = {"partition": 1, "begin": 5, "end": 9, "why": "the log is damaged at offset 5"}
    told = {"partitions": 2, "records": [], "left_out": 6, "skipped": [skipped]}
    page, wrong = browser.opened(chromium)
    page.add_init_script(
        f"const told = {json.dumps(told)};"
        """
        const Real = window.EventSource;
        window.EventSource = function (address) {
          if (!address.startsWith("/api/v1/tail?")) return new Real(address);
          const source = { close() {} };
          setTimeout(() => source.onmessage({ data: JSON.stringify(told) }));
          return source;
        };
        """
    )
    browser.show(page, cluster.url(), f"#records/{topic}?tail=1")
    page.wait_for_function(
        "() => document.getElementById('progress').textContent.startsWith('Following 2')"
    )
    assert page.locator("#progress").text_content() == (
        "Following 2 partitions. 2 records left out: more came than are shown."
        " Partition 1: offsets 5 to 8 could not be read: the log is damaged at offset 5."
    )
    assert wrong == []


def test_the_lag_of_a_group_is_one_number_everywhere(kept_cluster, chromium):
    """In lists and pages, from /api/v1, by commands and among metrics; what is unknown, too."""
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic(partitions=3)

    def command(*words):
        line = [sys.executable, "-m", "kept", *words, "--json", "--bootstrap", cluster.bootstrap]
        return json.loads(subprocess.run(line, capture_output=True, check=True, timeout=60).stdout)

    with cluster.client() as client:
        for partition, count in enumerate((5, 7, 2)):
            client.produce(topic, [OutRecord(b"k", b"v", partition=partition)] * count)
        committed = {TopicPartition(topic, 0): 2, TopicPartition(topic, 1): 3}
        client.commit("readers", committed)
        reader = GroupConsumer(client, "readers", [topic], reset=EARLIEST)
        while not reader.poll():
            pass
        (listed,) = scene.given(cluster, "groups?name=readers")["groups"]
        (of_topic,) = scene.given(cluster, f"topics/{topic}/groups")["groups"]
        (moving,) = command("top", "groups", "--interval", "0.5")["groups"]
        (in_list,) = command("group", "list")
        told = [listed, of_topic, scene.given(cluster, "groups/readers"), moving, in_list]
        told.append(command("group", "describe", "readers"))
        assert [(one["lag"], one["partitions_unknown"]) for one in told] == [(7, 1)] * 6
        with urllib.request.urlopen(f"{cluster.url()}/metrics") as answer:
            metrics = answer.read().decode()
        assert f'kept_group_lag{{group="readers",topic="{topic}"}} 7.0\n' in metrics
        page, wrong = browser.opened(chromium)
        shown = []
        browser.show(page, cluster.url(), "#groups")
        shown += [row["Lag"] for row in browser.rows(page, "Consumer groups")]
        browser.show(page, cluster.url(), f"#topic/{topic}")
        shown += [row["Lag"] for row in browser.rows(page, "Consumer groups of the topic")]
        browser.show(page, cluster.url(), "#group/readers")
        shown.append(browser.facts(page)["Lag"])
        assert shown == ["7 (1 partition unknown)"] * 3
        reader.close()
        assert wrong == []
