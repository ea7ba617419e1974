"""Produce values for a few keys, one after the other, and a tombstone now and then.

    python serial_tombstone_prod.py --topic my_topic --keys key1,key2,key3 \
        --num_messages 500 --wait_time 100
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time

from confluent_kafka import Producer


def main() -> None:
    parser = argparse.ArgumentParser(description="Produce keys with random tombstones.")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--keys", default="key1,key2,key3", help="separated by commas")
    parser.add_argument("--num_messages", type=int, default=500)
    parser.add_argument("--wait_time", type=float, default=100, help="milliseconds between two")
    parser.add_argument("--tombstones", type=float, default=0.1, help="share of tombstones, 0 to 1")
    parser.add_argument("--padding", type=int, default=1000, help="bytes added to each value")
    parser.add_argument("--seed", type=int, help="for the same records again")
    parser.add_argument(
        "-b", "--bootstrap", default=os.environ.get("KEPT_BOOTSTRAP", "localhost:9092")
    )
    arguments = parser.parse_args()
    keys = [key for key in arguments.keys.split(",") if key]
    draw = random.Random(arguments.seed)
    # murmur2_random puts a key where Java's client and kept's own tools put it.
    producer = Producer(
        {
            "bootstrap.servers": arguments.bootstrap,
            "partitioner": "murmur2_random",
            "enable.idempotence": True,
            "batch.size": 16_384,  # well below segment.bytes, also without waiting
            "log_level": 0,
        }
    )
    counts = {"values": 0, "tombstones": 0}
    failed: list[str] = []

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            failed.append(str(error))

    for number in range(arguments.num_messages):
        key = keys[number % len(keys)]
        tombstone = draw.random() < arguments.tombstones
        text = json.dumps({"key": key, "number": number, "padding": "x" * arguments.padding})
        producer.produce(arguments.topic, None if tombstone else text, key, on_delivery=delivered)
        producer.poll(0)
        counts["tombstones" if tombstone else "values"] += 1
        if sys.stdout.isatty():
            print(f"{number + 1}/{arguments.num_messages} {key}", "(tombstone)" * tombstone)
        if failed:
            break
        time.sleep(arguments.wait_time / 1000)
    producer.flush()
    if failed:
        sys.exit(f"not delivered: {failed[0]}")
    print(f"produced {counts['values']} values and {counts['tombstones']} tombstones")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
