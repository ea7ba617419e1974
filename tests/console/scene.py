"""A cluster with something to see: topics, a log that is being cleaned, tombstones, a group, a
transaction.
"""

from __future__ import annotations

import json
import urllib.request

from kio.schema.errors import ErrorCode

from kept.client.client import OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from tests.support.kafka_connection import Connection

HOSTILE = '<script>document.title = "owned"</script><img src=x onerror="document.title=1">'
ORDERS, USERS, CLICKS, GROUP = "orders", "users", "clicks", "billing"
BANK = "bank"
AGAIN = (
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
)
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": "65536",
    "min.cleanable.dirty.ratio": "0.5",
}


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
    """Topics, records, a group that lags, an open transaction."""
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
    begin_transaction(cluster, BANK, CLICKS, 2)


def begin_transaction(cluster, transactional_id, topic, partition):
    """It stays open; its producer id."""
    asked = {"transactional_id": transactional_id, "transaction_timeout": 600_000}
    coordinator = Connection(cluster.bootstrap.split(",")[0])
    try:
        while True:
            found = coordinator.ask(10, 3, key=transactional_id, key_type=1)
            if found.error_code is ErrorCode.none:
                coordinator.close()
                coordinator = Connection(f"{found.host}:{found.port}")
                begun = coordinator.ask(22, 4, **asked, producer_id=-1, producer_epoch=-1)
                if begun.error_code is ErrorCode.none:
                    break
            assert found.error_code in AGAIN or begun.error_code in AGAIN
        added = coordinator.ask(
            24,
            3,
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=begun.producer_id,
            v3_and_below_producer_epoch=begun.producer_epoch,
            v3_and_below_topics=[{"name": topic, "partitions": [partition]}],
        )
        (one,) = added.results_by_topic_v3_and_below
        assert one.results_by_partition[0].partition_error_code is ErrorCode.none
        return begun.producer_id
    finally:
        coordinator.close()
