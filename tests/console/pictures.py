"""The pictures of the console in docs/console: ``python -m tests.console.pictures``.

Three nodes with something to see are started, and the views photographed; takes four minutes.
"""

from __future__ import annotations

import time
from pathlib import Path

from kept.client.client import OutRecord
from kept.testing import Cluster
from tests.console import browser, scene

FOLDER = Path(__file__).parents[2] / "docs" / "console"
MOST_BYTES = 150_000
HISTORY_S = 180
"""Long enough for lines over time, which are sampled every 15 seconds."""
PHONE = {"width": 390, "height": 844, "scheme": "dark"}


def take(chromium, cluster, name, view, prepare=None, **how):
    page, wrong = browser.opened(chromium, **how)
    browser.show(page, cluster.url(), view)
    if prepare is not None:
        prepare(page)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    page.context.close()
    if wrong:
        raise SystemExit(f"{view}: {wrong}")
    size = path.stat().st_size
    print(f"{path}: {size} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MOST_BYTES}")


def half_cleaned(page):
    """Wait until the cleaner is in the middle of the log."""
    page.wait_for_function(
        "() => parseFloat(document.querySelector('.log.big .cleaner')?.style.left) > 25"
    )


def unfolded(page):
    """Wait for the records, and unfold the second one."""
    page.wait_for_selector("tr.record:nth-child(20)")
    page.locator("button.toggle").nth(1).click()


def filled(page):
    """Type a setting into the form that changes one."""
    page.fill("#alter #name", "min.cleanable.dirty.ratio")
    page.fill("#alter #value", "0.3")


def dry_run(page):
    page.click("#dry-run")
    page.wait_for_selector("caption:text-is('Offsets before and after')", state="attached")


def why(page):
    page.get_by_role("button", name="why?").first.click()
    page.wait_for_function("() => document.querySelector('tr.gap').textContent.includes('removed')")


def main():
    FOLDER.mkdir(exist_ok=True)
    orders = f"#topic/{scene.ORDERS}"
    with (
        Cluster(
            3, log_cleaner_io_max_bytes_per_second=60_000, kept_console_actions="true"
        ) as cluster,
        browser.chromium() as chromium,
    ):
        scene.fill(cluster)
        end = time.monotonic() + HISTORY_S
        with cluster.client() as client:
            n = 0
            while time.monotonic() < end:
                n += 1
                scene.append_orders(client, 0, 1)
                scene.append_orders(client, 1, 1 + n % 3)
                clicks = [OutRecord(None, b"/page", partition=n % 3)] * (n % 7 * 20)
                client.produce(scene.CLICKS, [*clicks, OutRecord(None, b"/late", partition=1)])
                time.sleep(6)
            scene.append_orders(client, 0, 20)
        take(chromium, cluster, "partition", f"{orders}/0", half_cleaned, height=1060)
        take(chromium, cluster, "cluster", "#", height=1000)
        take(chromium, cluster, "topic", f"#topic/{scene.CLICKS}", height=860)
        take(chromium, cluster, "group", f"#group/{scene.GROUP}", height=640)
        take(chromium, cluster, "records", f"#records/{scene.ORDERS}?contains=paid", unfolded)
        take(chromium, cluster, "missing", f"#records/{scene.ORDERS}/1?offset=180", why, height=500)
        take(chromium, cluster, "settings", f"#settings/{scene.ORDERS}", filled, height=1160)
        take(chromium, cluster, "reset", f"#reset/{scene.GROUP}", dry_run, height=620)
        key = "b3JkZXItMDAwMDA="
        take(chromium, cluster, "key", f"#key/{scene.ORDERS}/0?key_base64={key}", height=720)
        take(chromium, cluster, "phone", f"{orders}/1", **PHONE)
        search = f"#records/{scene.ORDERS}?contains=sent"
        take(chromium, cluster, "phone-records", search, unfolded, **PHONE)


if __name__ == "__main__":
    main()
