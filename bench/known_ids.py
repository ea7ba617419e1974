"""What transactional ids cost that have no transaction: the memory of one node that made them, and
of the same node when it has read them back; how long that takes, and holds its loop.

    python bench/known_ids.py [--ids 1000000]
    python bench/known_ids.py --open 10000

The sizes are RSS above that of the node with :data:`FEW` ids; that of the node when it has read
them, its peak meanwhile, and that some time later. The node has a probe inside (``probe.py``).

``--open`` has ids that are known already begin a transaction each, with a record in one of
:data:`PARTITIONS` partitions: what is open costs above that, how long the node takes to list and to
describe all, that nothing of it is stable, and that all of it is once every transaction is
committed.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from typing import Any

import meters
from loop_stalls import node_reports, probed
from transactions import IDS_AT_ONCE, VALUE, Writer, asked, initialize, transactional_id

from kept.client.admin import transactions as admin
from kept.client.client import Client
from kept.client.consume.positions import LATEST
from kept.client.protocol.api_keys import ApiKey
from kept.storage.records import build_batch
from kept.storage.types import IsolationLevel, TopicPartition
from kept.testing import Cluster

IDS = 1_000_000
FEW = 100
SETTLE_S = 20.0
PARTITIONS = 10
ENDED_S = 60.0


def main() -> None:
    """Print the sizes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=IDS)
    parser.add_argument("--open", type=int, default=0)
    options = parser.parse_args()
    found = open_at_once(options.open) if options.open else known(options.ids)
    print(json.dumps(found, indent=2))


def known(count: int) -> dict[str, Any]:
    """Ids without a transaction."""
    with probed(1, {}) as cluster:
        Writer(cluster.bootstrap, "first", "none")  # with which there are coordinators
        _make(cluster, range(FEW))
        before, spent = meters.resident_bytes(cluster.pid()), meters.cpu_seconds(cluster.pid())
        _make(cluster, range(FEW, count))
        made = meters.resident_bytes(cluster.pid()) - before
        spent = meters.cpu_seconds(cluster.pid()) - spent
        cluster.stop()
        started = time.monotonic()
        cluster.start()
        _await_loaded(cluster, count)
        load_s = time.monotonic() - started
        load_cpu_s = meters.cpu_seconds(cluster.pid())
        loaded = meters.resident_bytes(cluster.pid()) - before
        peak = meters.peak_bytes(cluster.pid()) - before
        (report,) = node_reports(cluster)
        time.sleep(SETTLE_S)
        settled = meters.resident_bytes(cluster.pid()) - before
    return {
        "ids": count,
        "node_mb": before / 1e6,
        "made_mb": made / 1e6,
        "made_cpu_ms_each": 1000 * spent / count,
        "read_back_mb": loaded / 1e6,
        "read_back_peak_mb": peak / 1e6,
        "read_back_settled_mb": settled / 1e6,
        "read_back_s": load_s,
        "start_cpu_s": load_cpu_s,
        "longest_stall_ms": report["own_longest_ms"],
        "worst": report["worst"][:3],
    }


def open_at_once(count: int) -> dict[str, Any]:
    """Transactions that are open at the same time."""
    with (
        probed(1, {}) as cluster,
        cluster.client() as client,
        socket.create_connection((cluster.host(), cluster.port()), 60) as connection,
    ):
        topic = cluster.create_topic(partitions=PARTITIONS)
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        Writer(cluster.bootstrap, "first", topic).transaction(PARTITIONS)
        _await_ended(client, partitions, PARTITIONS)
        node_reports(cluster)  # what was used for the first time is not reported below
        producers = initialize(connection, range(count))
        before, spent = meters.resident_bytes(cluster.pid()), meters.cpu_seconds(cluster.pid())
        _begin(connection, topic, producers)
        opened = meters.resident_bytes(cluster.pid()) - before
        spent = meters.cpu_seconds(cluster.pid()) - spent
        found = {
            "open": count,
            "node_mb": before / 1e6,
            "open_mb": opened / 1e6,
            "open_bytes_each": opened / count,
            "begun_cpu_ms_each": 1000 * spent / count,
            **_answers(client, connection, partitions, count),
        }
        started = time.monotonic()
        _commit(connection, producers)
        found["ends_answered_s"] = time.monotonic() - started
        _await_ended(client, partitions, PARTITIONS + count)
        found["ended_s"] = time.monotonic() - started
        (report,) = node_reports(cluster)
        return found | {"longest_stall_ms": report["own_longest_ms"], "worst": report["worst"][:3]}


def _begin(connection: socket.socket, topic: str, producers: list[tuple[int, int]]) -> None:
    """A record in a transaction of each producer: the leader has the partition added (v12)."""
    now_ms = int(time.time() * 1000)
    requests = (
        {
            "transactional_id": transactional_id(number),
            "acks": -1,
            "timeout": 30_000,
            "topic_data": [
                {
                    "name": topic,
                    "partition_data": [
                        {
                            "index": number % PARTITIONS,
                            "records": build_batch(
                                [(now_ms, None, VALUE, ())],
                                producer_id=producer_id,
                                producer_epoch=epoch,
                                base_sequence=0,
                                is_transactional=True,
                            ),
                        }
                    ],
                }
            ],
        }
        for number, (producer_id, epoch) in enumerate(producers)
    )
    for answer in asked(connection, ApiKey.PRODUCE, 12, requests):
        code = answer.responses[0].partition_responses[0].error_code
        _require(not code, f"Produce: {code}")


def _answers(
    client: Client, connection: socket.socket, partitions: list[TopicPartition], count: int
) -> dict[str, float]:
    """What the node says of them, and in how many ms."""
    took = {}
    started = time.monotonic()
    listed = client.run(admin.list_transactions([], 60_000, states=["Ongoing"]))
    took["list_ms"] = 1000 * (time.monotonic() - started)
    _require(len(listed) == count, f"{len(listed)} are listed")
    started = time.monotonic()
    names = [transactional_id(number) for number in range(count)]
    wanted = [{"transactional_ids": names[at : at + 100]} for at in range(0, count, 100)]
    states = [
        one
        for answer in asked(connection, ApiKey.DESCRIBE_TRANSACTIONS, 0, wanted)
        for one in answer.transaction_states
        if one.transaction_state == "Ongoing" and one.topics
    ]
    took["describe_ms"] = 1000 * (time.monotonic() - started)
    _require(len(states) == count, f"{len(states)} are described")
    started = time.monotonic()
    of_logs = client.run(admin.open_transactions(partitions))
    took["describe_producers_ms"] = 1000 * (time.monotonic() - started)
    _require(len(of_logs) == count, f"{len(of_logs)} are open in the logs")
    started = time.monotonic()
    stable = _ends(client, partitions, IsolationLevel.READ_COMMITTED)
    took["list_stable_offsets_ms"] = 1000 * (time.monotonic() - started)
    _require(stable == 2 * PARTITIONS, f"up to {stable} are stable")
    written = _ends(client, partitions, IsolationLevel.READ_UNCOMMITTED)
    _require(written == stable + count, f"up to {written} are written")
    return took


def _commit(connection: socket.socket, producers: list[tuple[int, int]]) -> None:
    """An EndTxn for each."""
    requests = (
        {
            "transactional_id": transactional_id(number),
            "producer_id": producer_id,
            "producer_epoch": epoch,
            "committed": True,
        }
        for number, (producer_id, epoch) in enumerate(producers)
    )
    for answer in asked(connection, ApiKey.END_TXN, 5, requests):
        _require(not answer.error_code, f"EndTxn: {answer.error_code}")


def _await_ended(client: Client, partitions: list[TopicPartition], count: int) -> None:
    """Until so many records are there to read, with a marker each."""
    deadline = time.monotonic() + ENDED_S
    while _ends(client, partitions, IsolationLevel.READ_COMMITTED) < 2 * count:
        _require(time.monotonic() < deadline, f"not all have ended within {ENDED_S:.0f} s")
        time.sleep(0.05)


def _ends(client: Client, partitions: list[TopicPartition], isolation: IsolationLevel) -> int:
    """The sum of the end offsets that a consumer of this isolation sees."""
    found = client.list_offsets(dict.fromkeys(partitions, LATEST), isolation)
    return sum(one.offset for one in found.values())


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _make(cluster: Cluster, numbers: range) -> None:
    """An InitProducerId for each."""
    with socket.create_connection((cluster.host(), cluster.port()), 60) as connection:
        initialize(connection, numbers)


def _await_loaded(cluster: Cluster, count: int) -> None:
    """Until every partition is read: the last ids of all are answered for."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            _make(cluster, range(max(0, count - IDS_AT_ONCE), count))
        except RuntimeError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the ids were not read back within 600 s")


if __name__ == "__main__":
    main()
