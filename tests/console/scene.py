"""A cluster with something to see: topics, a log that is being cleaned, tombstones, a group."""

from __future__ import annotations

import json
import urllib.request

from kept.client.client import OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST

HOSTILE = '<script>document.title = "owned"</script><img src=x onerror="document.title=1">'
ORDERS, USERS, CLICKS, GROUP = "orders", "users", "clicks", "billing"
COMPACTED = {
    "cleanup.policy": "compact", "segment.bytes": "65536", "min.cleanable.dirty.ratio": "0.5",
}  # fmt: skip


def given(cluster, path, i=0):
    """What the API says."""
    with urllib.request.urlopen(f"{cluster.url(i)}/api/v1/{path}", timeout=60) as answer:
        return json.load(answer)


def order(number, state):
    value = {
        "order": number,
        "state": state,
        "total": round(number * 7.35, 2),
        "items": [f"article {(number * 7 + n) % 1000:03}" for n in range(18)],
    }
    return OutRecord(b"order-%05d" % number, json.dumps(value).encode())


def append_orders(client, partition, rounds, keys=60):
    """Segments of orders that move through their states."""
    for n in range(rounds):
        state = ("placed", "paid", "packed", "sent")[n % 4]
        batch = [
            OutRecord(one.key, one.value, partition=partition)
            for one in (order(number, state) for number in range(partition, keys * 3, 3))
        ]
        client.produce(ORDERS, batch)


def fill(cluster):
    """Topics, records, a group that lags."""
    with cluster.client() as client:
        for name, config in (
            (ORDERS, COMPACTED),
            (USERS, COMPACTED),
            (CLICKS, {"segment.bytes": "65536"}),
        ):
            client.create_topic(name, partitions=3, config=config)
            client.bounds(name)
        for partition in range(3):
            append_orders(client, partition, 8)
            client.produce(CLICKS, [OutRecord(None, b"/page", partition=partition)] * 50)
        users = [OutRecord(b"user-%d" % n, b'{"name": "%d"}' % n, partition=0) for n in range(40)]
        client.produce(USERS, users)
        client.produce(USERS, [OutRecord(b"user-%d" % n, None, partition=0) for n in range(9)])
        client.produce(USERS, [OutRecord(b"user-9", HOSTILE.encode(), partition=0)])
        reader = GroupConsumer(client, GROUP, [CLICKS], reset=EARLIEST)
        while not reader.poll():
            pass
        reader.commit()
        reader.close()
        client.produce(CLICKS, [OutRecord(None, b"/late", partition=1)] * 17)
