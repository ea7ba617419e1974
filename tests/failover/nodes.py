"""Three real nodes as a test of failover sees them: who leads, who was fenced, what logs hold."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.testing import Cluster
from tests.deploy.containers import Compose

ASK_S: Final = 10.0
CATCH_UP_S: Final = 90.0
FENCE: Final = re.compile(r"^(\S+) .*event=decided what=fence broker=(\d+) reason=(.*)$")
SOON_S: Final = 10.0
"""A death may be noticed so long after it is over, on a loaded machine."""


@dataclass(frozen=True)
class Down:
    """A node that was not there, or stood still, for some time of the wall clock."""

    node: int
    since: float
    until: float


@dataclass(frozen=True)
class Fence:
    """The controller decided that a broker is gone."""

    node: int
    at: float
    reason: str


class Nodes:
    """A cluster, and what was done to its nodes."""

    def __init__(self, cluster: Cluster | Compose) -> None:
        self.cluster = cluster
        self.numbers = range(len(cluster))
        self.absent: set[int] = set()
        """Nodes that a test stopped or stalled: nobody asks them."""
        self.downs: list[Down] = []
        self._since: dict[int, float] = {}

    # What they say.

    def ask(self, node: int, path: str) -> Any:
        """What a node's API answers. Raises HttpFailed."""
        return JsonApi(Endpoint(self.cluster.host(node), self.cluster.port(node)), ASK_S).get(path)

    def present(self) -> list[int]:
        """Nodes that run and were not stalled."""
        return [i for i in self.numbers if i not in self.absent and self.cluster.running(i)]

    def answers(self, path: str) -> Iterator[Any]:
        """The answers of all nodes that are there and give one."""
        for node in self.present():
            try:
                yield self.ask(node, path)
            except HttpFailed:
                continue

    def controller(self) -> int:
        """The active controller, by its own word; waits until there is one."""

        def active() -> list[int]:
            answers = self.answers("cluster")
            return [a["node_id"] for a in answers if a["controller_id"] == a["node_id"]]

        return self._await(active, "a controller is active")

    def leader(self, topic: str, partition: int = 0) -> int:
        """The leader of a partition that is there; waits until there is one."""
        return self._await(
            lambda: [
                p["leader"]
                for p in self.partitions(topic, partition)
                if p["leader"] in self.present()
            ],
            f"{topic}-{partition} has a leader",
        )

    def elsewhere(self, topic: str, partitions: int, node: int) -> None:
        """Wait until the others agree that a node leads nothing of a topic."""

        def moved() -> bool:
            answers = list(self.answers(f"topics/{topic}"))
            return bool(answers) and not any(
                p["leader"] in (node, None, -1)
                for answer in answers
                for p in answer["partitions"][:partitions]
            )

        self.cluster.wait_until(moved, f"others lead what node {node} led", CATCH_UP_S)

    def partitions(self, topic: str, partition: int) -> list[dict[str, Any]]:
        """A partition as each node that is there sees it."""
        return [a["partitions"][partition] for a in self.answers(f"topics/{topic}")]

    def _await(self, ask: Any, what: str) -> int:
        found: list[int] = []

        def some() -> bool:
            found[:] = ask()
            return bool(found)

        self.cluster.wait_until(some, what, CATCH_UP_S)
        return found[-1]

    # What is done to them.

    def gone(self, *nodes: int) -> None:
        """From now on these nodes are not there."""
        for node in nodes:
            self.absent.add(node)
            self._since[node] = time.time()

    def back(self, *nodes: int) -> None:
        """They are there again."""
        for node in nodes:
            self.absent.discard(node)
            self.downs.append(Down(node, self._since.pop(node), time.time()))

    def kill(self, *nodes: int) -> None:
        """kill -9, all before any is waited for."""
        self.gone(*nodes)
        side_by_side(self.cluster.kill, nodes)

    def stop(self, node: int) -> None:
        """TERM: it must end in order."""
        self.gone(node)
        assert self.cluster.stop(node) == 0, f"node {node} did not end in order"

    def start(self, *nodes: int) -> None:
        """Start them again, side by side, and wait until all are ready."""
        side_by_side(self.cluster.start, nodes)
        self.back(*nodes)

    @contextmanager
    def stalled(self, *nodes: int) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self.gone(*nodes)
        for node in nodes:
            self.cluster.pause(node)
        try:
            yield
        finally:
            for node in nodes:
                self.cluster.resume(node)
            self.back(*nodes)

    # What must hold.

    def fences(self) -> list[Fence]:
        """Every decision to fence, from the nodes' logs."""
        found = []
        for node in self.numbers:
            for line in self.cluster.log(node).splitlines():
                match = FENCE.match(line)
                if match is not None:
                    at = datetime.fromisoformat(match[1]).timestamp()
                    found.append(Fence(int(match[2]), at, match[3]))
        return sorted(found, key=lambda fence: fence.at)

    def false_fences(self) -> list[Fence]:
        """Those of nodes that were there: nobody had touched them."""
        open_downs = [Down(node, since, time.time()) for node, since in self._since.items()]
        return [
            fence
            for fence in self.fences()
            if not any(
                down.node == fence.node and down.since - 0.01 <= fence.at <= down.until + SOON_S
                for down in [*self.downs, *open_downs]
            )
        ]

    def await_isr(self, topic: str) -> None:
        """Wait until every node sees all replicas of all partitions in sync."""
        self._await_replicas(topic, lambda _: True)

    def await_in_sync(self, topic: str) -> None:
        """Wait until they are also of one length, which needs that nobody writes."""
        self._await_replicas(
            topic,
            lambda seen: len({(p["log_end_offset"], p["high_watermark"]) for p in seen}) == 1,
        )

    def _await_replicas(self, topic: str, more: Callable[[Any], bool]) -> None:
        def settled() -> bool:
            answers = list(self.answers(f"topics/{topic}"))
            return len(answers) == len(self.numbers) and all(
                all(len(p["isr"]) == len(self.numbers) for p in seen) and more(seen)
                for seen in zip(*(a["partitions"] for a in answers), strict=True)
            )

        self.cluster.wait_until(settled, f"all replicas of {topic} are in sync", CATCH_UP_S)

    def segments(self, node: int, topic: str, partition: int) -> list[Path]:
        """A replica's files of records, in order."""
        return sorted((Path(self.cluster.log_dir(node)) / f"{topic}-{partition}").glob("*.log"))

    def check_replicas(self, topic: str, partitions: int) -> None:
        """All replicas of a topic at rest hold the same bytes."""
        self.await_in_sync(topic)
        for partition in range(partitions):
            contents = [
                b"".join(path.read_bytes() for path in self.segments(node, topic, partition))
                for node in self.numbers
            ]
            assert contents[0], f"{topic}-{partition} is empty"
            assert contents[0] == contents[1] == contents[2], f"{topic}-{partition} differs"


def side_by_side(action: Any, nodes: Iterable[int]) -> None:
    """The same for several nodes at once; raises what the first that failed raised."""
    errors: list[BaseException] = []

    def act(node: int) -> None:
        try:
            action(node)
        except BaseException as error:  # noqa: BLE001 -- it is raised below
            errors.append(error)

    threads = [threading.Thread(target=act, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
