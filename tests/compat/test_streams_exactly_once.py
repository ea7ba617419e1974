"""Kafka Streams with exactly_once_v2 on one node and on three: each result of a word count and of a
join is written once, while the application and a node are killed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.compat.movers import Killer, Nodes, create, leader, read
from tests.compat.streams import Application

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 200
GUARANTEE = "exactly_once_v2"
USERS = 7


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def send(bootstrap: str, topic: str, pairs: Sequence[tuple[str | None, str]]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for number, (key, value) in enumerate(pairs):
        where = {} if key is not None else {"partition": number % 2}
        producer.produce(topic, value, key, **where)
    assert producer.flush(60) == 0


def over_kills(
    nodes: Nodes,
    application: Application,
    folder: Path,
    feed: Callable[[], None],
    whole: Callable[[], bool],
) -> None:
    """Feed an application four times: it works, is killed, loses a node, has it again."""
    state = folder / "state"
    killer = Killer(nodes)
    with application.running(state) as process:
        feed()
        wait(whole, "the first part is done")
        feed()
        process.kill()
        process.wait()
    with application.running(state):
        wait(whole, "the second part is done by the next instance")
        feed()
        killer.kill(leader(nodes.bootstrap, application.target))
        wait(whole, "the third part is done while a node dies")
        killer.wait()
        feed()
        wait(whole, "the fourth part is done")


def test_every_count_of_a_word_count_is_written_once(nodes: Nodes, tmp_path: Path) -> None:
    source, target = "lines", "words"
    create(nodes, [source, target], partitions=2)
    words: Counter[str] = Counter()

    def feed() -> None:
        lines = [f"word-{number % 7} word-{number % 11} all" for number in range(150)]
        words.update(word for line in lines for word in line.split())
        send(nodes.bootstrap, source, [(None, line) for line in lines])

    def counts() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for key, value in read(nodes.bootstrap, target, 2, "read_committed"):
            found.setdefault(key.decode(), []).append(int(value))
        return found

    def whole() -> bool:
        found = counts()
        assert all(n == list(range(1, len(n) + 1)) for n in found.values()), "counted twice"
        return {word: len(numbers) for word, numbers in found.items()} == words

    application = Application("WordCount", nodes.bootstrap, source, target, GUARANTEE)
    over_kills(nodes, application, tmp_path, feed, whole)


def test_every_order_is_joined_once(nodes: Nodes, tmp_path: Path) -> None:
    source, target = "orders", "named"
    create(nodes, [source, f"{source}-users", target], partitions=2)
    users = [(f"user-{number}", f"name-{number}") for number in range(USERS)]
    send(nodes.bootstrap, f"{source}-users", users)
    orders: Counter[bytes] = Counter()

    def feed() -> None:
        first = sum(orders.values())
        sent = [(f"user-{n % USERS}", f"order-{n}") for n in range(first, first + 300)]
        orders.update(b"%s name-%d" % (o.encode(), int(u[5:])) for u, o in sent)
        send(nodes.bootstrap, source, sent)

    def whole() -> bool:
        found = Counter(v for _, v in read(nodes.bootstrap, target, 2, "read_committed"))
        assert max(found.values(), default=1) == 1, "joined twice"
        return found == orders

    application = Application("Join", nodes.bootstrap, source, target, GUARANTEE)
    over_kills(nodes, application, tmp_path, feed, whole)
