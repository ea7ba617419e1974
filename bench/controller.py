"""The controller at size: CPU seconds to decide that a broker died, by the size of the image.

One image of 300 brokers in six racks, three replicas a partition. ``fence`` decides and applies the
death of one broker; ``change`` is one ISR change applied; ``create`` a topic of one partition;
``entry`` one that says nothing. CPU of this process, best of three; the ratio compares the largest
image with the smallest. ``python bench/controller.py`` prints a table, with ``--json`` one JSON
object. ``memory`` is what the process grew by per partition of the largest image, which comes first
so that nothing freed is used again. Exit code 1 when the goal (1 s) is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from uuid import UUID

import meters
from msgspec.structs import replace

from kept.cluster.controller import partition_election
from kept.cluster.controller.brokers import fence_brokers
from kept.cluster.controller.topics import CreateTopic, create_topic
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import BrokerRecord, NoOpRecord

BROKERS = 300
REPLICAS = 3
SIZES = (1_000, 10_000, 100_000)
PARTITIONS_PER_TOPIC = 10
GOAL_SECONDS = 1.0
REPEATS = 3

UNITS = {"changed": ("partitions", 1.0), "memory": ("bytes/partition", 1.0)}

Row = dict[str, object]


def build(partitions: int) -> Image:
    """An image of that many partitions, in topics of ten."""
    ids = random.Random(4)
    image, _ = Image().apply(
        BrokerRecord(n, n + 1, UUID(int=n), (), f"rack-{n % 6}", False) for n in range(BROKERS)
    )
    for number in range(partitions // PARTITIONS_PER_TOPIC):
        wanted = CreateTopic(
            f"topic-{number}", UUID(int=ids.getrandbits(128)), PARTITIONS_PER_TOPIC, REPLICAS
        )
        image, _ = image.apply(create_topic(image, wanted))
    return image


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of ``work``, best of three."""
    best = float("inf")
    for _ in range(REPEATS):
        before = time.process_time()
        work()
        best = min(best, time.process_time() - before)
    return best


def measure(partitions: int) -> dict[str, float]:
    """What each decision costs in an image of that size."""
    before = meters.resident_bytes(os.getpid())
    image = build(partitions)
    grown = meters.resident_bytes(os.getpid()) - before
    broker_epoch = image.brokers[7].broker_epoch
    state = image.topics["topic-0"].partitions[0]
    after = replace(state, isr=state.isr[:2], partition_epoch=state.partition_epoch + 1)
    wanted = CreateTopic("one-more", UUID(int=1), 1, REPLICAS)

    def fence() -> None:
        image.apply(fence_brokers(image, {7: broker_epoch}))

    return {
        "fence": cpu(fence),
        "change": cpu(lambda: image.apply([after])),
        "create": cpu(lambda: image.apply(create_topic(image, wanted))),
        "entry": cpu(lambda: image.apply([NoOpRecord()])),
        "balance": cpu(lambda: partition_election.balance_preferred(image)),
        "memory": grown / partitions,
        "changed": float(len(fence_brokers(image, {7: broker_epoch})) - 1),
    }


def rows(sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """All figures, as ``run.py`` keeps them."""
    found: list[Row] = []
    measured = {size: measure(size) for size in reversed(sizes)}
    for size in sizes:
        for name, value in measured[size].items():
            if name == "memory" and size != sizes[-1]:
                continue
            unit, factor = UNITS.get(name, ("CPU-ms", 1e3))
            found.append(row(f"{name}, {size} partitions", unit, value * factor))
    small, large = measured[sizes[0]], measured[sizes[-1]]
    ratio = large["fence"] / max(small["fence"], 1e-9)
    found.append(row(f"fence, ratio of {sizes[-1] // sizes[0]} x partitions", "x", ratio))
    return found


def row(name: str, unit: str, value: float) -> Row:
    """One figure."""
    return {"group": "controller", "name": name, "broker": "kept", "unit": unit, "value": value}


def main() -> int:
    """Print the figures; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    found = rows()
    if arguments.json:
        print(json.dumps({"rows": found}))
    else:
        for one in found:
            print(f"  {one['broker']:6} {one['name']:42} {one['value']:10.3f} {one['unit']}")
    fence = next(r["value"] for r in found if r["name"] == f"fence, {SIZES[-1]} partitions")
    return int(float(str(fence)) > GOAL_SECONDS * 1000)


if __name__ == "__main__":
    raise SystemExit(main())
