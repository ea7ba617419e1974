"""Debian's chromium, driven by playwright, for tests and for the pictures in the documentation."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, Page, sync_playwright

PATIENCE_MS = 60_000
"""What a page may take on a loaded machine."""
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def opened(
    browser: Browser, *, width=1200, height=900, scheme="light", http_credentials=None
) -> tuple[Page, list[str]]:
    """A page, and what goes wrong in it: errors, what its policy blocks, addresses elsewhere."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        locale="en-GB",
        timezone_id="UTC",
        reduced_motion="reduce",
        http_credentials=http_credentials,
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda said: said.type == "error" and wrong.append(f"said: {said.text}"))
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    return page, wrong


def show(page: Page, url: str, view: str) -> None:
    """Go to a view and wait until it is there."""
    page.goto(f"{url}/{view}")
    page.wait_for_selector("main:not([aria-busy]) h1")


def facts(page: Page, kind: str = "facts") -> dict[str, str]:
    """Terms and what they are, of the lists of a kind."""
    found = page.locator(f"dl.{kind} > div").evaluate_all(
        "all => all.map(one => [one.querySelector('dt').textContent,"
        " one.querySelector('dd').textContent])"
    )
    return dict(found)


def rows(page: Page, caption: str) -> list[dict[str, str]]:
    """A table's rows by the heads of its columns; none when the table is not there."""
    found = page.locator(f"table:has(caption:text-is('{caption}')) tbody tr").evaluate_all(
        "all => all.map(row => [...row.cells].map(cell => [cell.dataset.head, cell.textContent]))"
    )
    return [dict(row) for row in found]


def polyline(page: Page, figure: str) -> list[tuple[float, ...]]:
    """The points of a chart's first line."""
    points = page.locator(f"{figure} polyline").first.get_attribute("points")
    return [tuple(map(float, point.split(","))) for point in points.split()]
