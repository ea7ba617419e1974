"""What Apache Kafka 4.3.0 left of its metadata: one secured node with checkpoints (``one``), three
nodes of one cluster stopped together (``n0`` to ``n2``; n2's log is an entry shorter). Their
partitions' logs are not kept here: :func:`copy` makes empty ones.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kept.cluster.metadata.voters import Voter
from kept.node.config.node_config import NodeConfig
from kept.node.kafka_import import adopted_metadata, directories
from kept.node.kafka_import.adopt import voters
from kept.node.kafka_import.adopted_metadata import ImportedMetadata
from kept.storage import checkpoints, layout
from kept.storage.disk import Disk
from kept.storage.types import TopicPartition

HERE = Path(__file__).parent / "kafka-4.3.0"
READY_S = 120.0
VOTERS = "0@127.0.0.1:23092,1@127.0.0.1:23192,2@127.0.0.1:23292"


def config(path: Path, node_id: int = 0, *, alone: bool = False, **more: str) -> NodeConfig:
    """The settings of a node that is to adopt ``path``."""
    settings = {"log.dirs": str(path), "listeners": "PLAINTEXT://127.0.0.1:0"}
    if not alone:
        settings |= {
            "controller.quorum.voters": VOTERS,
            "listeners": f"PLAINTEXT://127.0.0.1:0,NODE://127.0.0.1:{23092 + 100 * node_id}",
        }
    settings |= {name.replace("_", "."): value for name, value in more.items()}
    return NodeConfig.load(None, settings, node_id=node_id)


def read(name: str, listed: tuple[Voter, ...] = ()) -> ImportedMetadata:
    """The translated metadata of a fixture."""
    path = HERE / name
    node_id = 0 if name == "one" else int(name[1])
    found = directories.read_directory(Disk(), str(path), node_id)
    alone = name == "one"
    return adopted_metadata.read(
        Disk(),
        str(path / layout.METADATA_LOG),
        cluster_id=found.cluster_id,
        node_id=node_id,
        voters=listed or voters(config(path, node_id, alone=alone), found.cluster_id),
    )


def copy(name: str, target: Path) -> Path:
    """A directory as Kafka left it, with an empty log for each partition."""
    shutil.copytree(HERE / name, target)
    translation = read(name).translation
    for topic_id, number in translation.partitions:
        tp = TopicPartition(translation.topics[topic_id], number)
        log = target / layout.directory_name(tp)
        log.mkdir()
        checkpoints.write_partition_metadata(Disk(), str(log / layout.PARTITION_METADATA), topic_id)
        (log / f"{0:020d}.log").touch()
    return target


def hashes(directory: Path) -> dict[str, str]:
    """Of Kafka's files of metadata."""
    names = [directory / "meta.properties", directory / "bootstrap.checkpoint"]
    names += sorted((directory / layout.METADATA_LOG).iterdir())
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in names if path.exists()
    }


class Adopted:
    """One node of kept on a directory of Kafka's."""

    def __init__(self, kafka: Path, node_id: int, settings: dict[str, str], port: int) -> None:
        given = {"log.dirs": str(kafka), "listeners": f"PLAINTEXT://127.0.0.1:{port}"} | settings
        pairs = [arg for name, value in given.items() for arg in ("--set", f"{name}={value}")]
        self.bootstrap = f"127.0.0.1:{port}"
        self._log = kafka.parent / "kept.log"
        command = [sys.executable, "-m", "kept", "serve", "--adopt", "--node-id", str(node_id)]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen([*command, *pairs], stdout=out, stderr=out)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait(self, readies: int = 1) -> None:
        deadline = time.monotonic() + READY_S
        while self.said.count(" ready on ") < readies:
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.terminate()
        assert self._process.wait(60) == 0


@contextmanager
def serving(
    directories: list[Path], settings: list[dict[str, str]], ports: list[int], readies: int = 1
) -> Iterator[list[Adopted]]:
    nodes = [Adopted(path, n, settings[n], ports[n]) for n, path in enumerate(directories)]
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.stop)
        for node in nodes:
            node.wait(readies)
        yield nodes
