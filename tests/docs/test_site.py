"""The site of the documentation, read from a file: pages, search, nothing from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.mkdocs, pytest.mark.chromium]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built without a warning."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_search_finds_a_page_and_nothing_is_fetched_from_elsewhere(site):
    from tests.console.browser import chromium, opened

    with chromium() as browser:
        page, wrong = opened(browser)
        fetched: list[str] = []
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(f"file://{site}/reference/commands.html")
        assert page.locator("h3", has_text="kept topic create").is_visible()
        page.locator(".md-search__input").click()
        page.keyboard.type("tombstone")
        page.locator(".md-search-result__item").first.wait_for()
        assert all(url.startswith("file:") for url in fetched), fetched
        assert not wrong


def test_what_is_generated_is_there(site):
    settings = (site / "configuration.html").read_text(encoding="utf-8")
    assert 'id="logsegmentbytes"' in settings
    metrics = (site / "reference" / "metrics.html").read_text(encoding="utf-8")
    assert "kept_under_replicated_partitions" in metrics
    api = (site / "reference" / "http-api.html").read_text(encoding="utf-8")
    assert "GET /api/v1/cluster" in api and "<code>mutualTLS</code>" in api
    library = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert "kept.testing.Cluster" in library
    assert "Our own Raft core" in (site / "adr" / "index.html").read_text(encoding="utf-8")
