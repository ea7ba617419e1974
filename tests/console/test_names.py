"""A browser at a node: names of what is not there, and names that are long."""

from __future__ import annotations

import pytest

from kept.storage.types import TopicPartition

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chromium,
    pytest.mark.timeout(400),
    # playwright's own, where greenlets end
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_a_partition_that_is_missing_is_no_missing_topic(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic(partitions=3)
    page, _ = browser.opened(chromium)
    browser.show(page, cluster.url(), f"#topic/{topic}/9")
    assert page.locator("h1").text_content() == "This cannot be shown"
    said = page.locator("main p.bad").text_content()
    assert said == f"{topic} has no partition 9; it has 0 to 2"
    page.click(f"main a:text-is('{topic}')")
    page.wait_for_selector(f"h1:text-is('{topic}')")


def test_beside_a_long_name_of_a_topic_short_words_stay_whole(kept_cluster, chromium):
    from tests.console import browser

    cluster = kept_cluster()
    with cluster.client() as client:
        client.create_topic("a-topic.with_a-long.name-" + "that-goes-on-and-on-" * 5)
    page, wrong = browser.opened(chromium)
    browser.show(page, cluster.url(), "#topics")
    lines = "all => all.map(one => one.getClientRects().length)"
    assert page.locator("tbody a").evaluate_all(lines)[0] > 1, "the name is in several lines"
    assert page.locator("tbody a:text-is('records')").evaluate_all(lines) == [1]
    assert wrong == []


def test_groups_whose_names_begin_with_two_underscores_are_listed_when_asked_for(
    kept_cluster, chromium
):
    from tests.console import browser

    cluster = kept_cluster()
    topic = cluster.create_topic()
    page, wrong = browser.opened(chromium)
    with cluster.client() as client:
        client.commit("__tool", {TopicPartition(topic, 0): 0})
        browser.show(page, cluster.url(), "#groups")
        assert browser.rows(page, "Consumer groups") == []
        assert page.locator(".empty code").count() == 1
        client.commit("readers", {TopicPartition(topic, 0): 0})
    page.reload()
    page.wait_for_selector("td a:text-is('readers')")
    assert [row["Group"] for row in browser.rows(page, "Consumer groups")] == ["readers"]
    page.check("#internal")
    page.wait_for_selector("td a:text-is('__tool')")
    listed = [row["Group"] for row in browser.rows(page, "Consumer groups")]
    assert sorted(listed) == ["__tool", "readers"]
    assert wrong == []
