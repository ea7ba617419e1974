"""Views of the console in a real browser: answers that fail, fields that are wrong, clocks."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.slow, pytest.mark.chromium, pytest.mark.timeout(400),
    # playwright's own, where greenlets end
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]  # fmt: skip


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
