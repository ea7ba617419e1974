"""The pictures of the console in docs/console: ``python -m tests.console.pictures``.

Three nodes with something to see are started, and the views photographed; takes two minutes.
"""

from __future__ import annotations

import time
from pathlib import Path

from kept.testing import Cluster
from tests.console import browser, scene

FOLDER = Path(__file__).parents[2] / "docs" / "console"
MOST_BYTES = 150_000
HISTORY_S = 100
"""Long enough for a line of dirty ratios, which are sampled every 15 seconds."""
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


def why(page):
    page.get_by_role("button", name="why?").first.click()
    page.wait_for_function("() => document.querySelector('tr.gap').textContent.includes('removed')")


def main():
    FOLDER.mkdir(exist_ok=True)
    orders = f"#topic/{scene.ORDERS}"
    with (
        Cluster(3, log_cleaner_io_max_bytes_per_second=60_000) as cluster,
        browser.chromium() as chromium,
    ):
        scene.fill(cluster)
        end = time.monotonic() + HISTORY_S
        with cluster.client() as client:
            while time.monotonic() < end:
                scene.append_orders(client, 0, 1)
                scene.append_orders(client, 1, 1)
                time.sleep(6)
            scene.append_orders(client, 0, 20)
        take(chromium, cluster, "partition", f"{orders}/0", half_cleaned, height=1080)
        take(chromium, cluster, "cluster", "#", height=800)
        take(chromium, cluster, "topic", orders, height=420)
        take(chromium, cluster, "group", f"#group/{scene.GROUP}", height=400)
        take(chromium, cluster, "records", f"#records/{scene.ORDERS}/1?offset=180", why)
        key = "b3JkZXItMDAwMDA="
        take(chromium, cluster, "key", f"#key/{scene.ORDERS}/0?key_base64={key}", height=720)
        take(chromium, cluster, "phone", f"{orders}/1", **PHONE)


if __name__ == "__main__":
    main()
