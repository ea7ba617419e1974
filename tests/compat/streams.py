"""Applications of Kafka Streams, one Java source each, as processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tools import kafka_dist

SOURCES = Path(__file__).parents[1] / "tools" / "streams"
STREAMS = f"org.apache.kafka:kafka-streams:{kafka_dist.VERSION}"


@dataclass(frozen=True)
class Application:
    """One that reads topics of a cluster and writes another."""

    name: str
    bootstrap: str
    source: str
    target: str
    guarantee: str = "at_least_once"

    @contextmanager
    def running(self, state: Path) -> Iterator[subprocess.Popen[bytes]]:
        """It runs, with its state in a directory and its log beside that."""
        libraries = kafka_dist.libraries(STREAMS)
        with (state.parent / "app.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    "java",
                    kafka_dist.HEAP,
                    *kafka_dist.QUICK_START,
                    "-cp",
                    f"{libraries}/*",
                    str(SOURCES / f"{self.name}.java"),
                    self.bootstrap,
                    f"{self.source}-app",
                    self.source,
                    self.target,
                    str(state),
                    self.guarantee,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()
