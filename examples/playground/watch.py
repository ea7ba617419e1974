"""Watch the segments of a topic and the cleaner at work, through the JSON API of kept.

python watch.py -t my_topic
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request


def ask(bootstrap: str, topic: str) -> dict:
    """What the leaders know of the topic."""
    url = f"http://{bootstrap}/api/v1/topics/{topic}?leaders=true"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return sys.exit(f"{url}: {error.read().decode(errors='replace').strip()}")
    except OSError as error:
        return sys.exit(f"{url}: {error}")


def show(topic: dict) -> None:
    if sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    for p in topic["partitions"]:
        if "high_watermark" not in p:  # it has no leader, or that is away
            why = p.get("unanswered") or p["offline"]
            print(f"{topic['name']}:{p['partition']}: not served now: {why}")
            continue
        print(
            f"{topic['name']}:{p['partition']}: offsets {p['log_start_offset']} to "
            f"{p['high_watermark']}, {p['size_bytes']:,} bytes"
        )
        for s in p["segments"]:
            span = f"{s['base_offset']}..{s['next_offset']}"
            print(f"  {s['base_offset']:020d}.log {s['size_bytes']:>12,}  {s['kind']:<7} {span}")
        compaction = p["compaction"]
        if compaction is not None:
            print(
                f"  cleaner: {compaction['state']}, dirty ratio {compaction['dirty_ratio']:.2f}, "
                f"{compaction['reason']}"
            )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch segments and cleaner of a topic.")
    parser.add_argument("-t", "--topic", required=True)
    parser.add_argument("-i", "--interval", type=float, default=1.0, help="seconds")
    parser.add_argument("--once", action="store_true", help="show once and stop")
    parser.add_argument(
        "-b", "--bootstrap", default=os.environ.get("KEPT_BOOTSTRAP", "localhost:9092")
    )
    arguments = parser.parse_args()
    node = arguments.bootstrap.split(",")[0]
    while True:
        show(ask(node, arguments.topic))
        if arguments.once:
            return
        time.sleep(arguments.interval)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
