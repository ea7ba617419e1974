"""The console: what a browser gets, what it may do, and that values stay text."""

from __future__ import annotations

import html
import re
import subprocess
import urllib.request

import pytest

from kept.client.blocking import OutRecord
from kept.node import console

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'


def get(broker, path, accept="text/html,*/*"):
    request = urllib.request.Request(broker.url() + path, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read().decode()


def test_a_browser_gets_the_page_and_curl_the_list(kept_broker):
    headers, page = get(kept_broker, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    headers, listed = get(kept_broker, "/", accept="*/*")
    assert headers["Content-Type"] == "text/plain; charset=utf-8" and "/api/v1/topics" in listed
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        headers, text = get(kept_broker, path)
        name = path.rpartition("/")[2]
        assert (headers["Content-Type"], text) == (console.TYPES[name], console.text(name))


def test_nothing_but_this_nodes_own_may_run(kept_broker):
    for path in ("/", "/console/page.js", "/console/page.css"):
        headers, _ = get(kept_broker, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    page, script = console.text("page.html"), console.text("page.js")
    assert "<style" not in page and not re.search(r"\son\w+=", page)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert not re.search(
        r"\.(inner|outer)HTML\s*=[^=]|insertAdjacent|document\.write|eval\(", script
    )
    assert not re.search(r"https?://", page + script + console.text("page.css"))


def shown_by_chromium(tmp_path, url):
    """The document after its script has run."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--virtual-time-budget=4000",
        f"--user-data-dir={tmp_path}", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.chromium
def test_a_real_browser_shows_what_the_api_says(kept_cluster, tmp_path):
    cluster = kept_cluster(broker_rack=HOSTILE, log_cleaner_enable="false")
    topic = cluster.create_topic(
        partitions=2, config={"cleanup.policy": "compact", "segment.bytes": "4096"}
    )
    with cluster.client() as client:
        for n in range(60):
            client.produce(topic, [OutRecord(b"k%d" % (n % 7), bytes(700), partition=0)])
    seen = shown_by_chromium(tmp_path, cluster.url() + "/")
    assert "<title>kept</title>" in seen
    assert f"<td>{html.escape(HOSTILE, quote=False)}</td>" in seen
    assert f'<a href="#topic/{topic}">{topic}</a>' in seen
    seen = shown_by_chromium(tmp_path, f"{cluster.url()}/#topic/{topic}")
    assert "<dd>0 to 60</dd>" in seen and "the cleaner is off" in seen
    kinds = re.findall(r'<span class="(\w+)" title', seen)
    assert kinds.count("dirty") > 5 and kinds.count("active") == 2
    seen = shown_by_chromium(tmp_path, f"{cluster.url()}/#topic/none")
    assert "there is no topic none" in seen
