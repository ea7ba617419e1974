"""Apache Kafka from its published jars: the judge of our files and of our behaviour.

Fetches the jars with Maven, once, into a cache (``KAFKA_DIST_CACHE``, else ``~/.cache/kept/kafka-
dist``) and runs their classes. Needs Java 17 and Maven. As a script::

    python -m tests.tools.kafka_dist install
    python -m tests.tools.kafka_dist dump FILE [ARG...]
    python -m tests.tools.kafka_dist run CLASS [ARG...]
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tools.fetched import once

VERSION = os.environ.get("KAFKA_VERSION", "4.3.0")
ARTIFACTS = (
    f"org.apache.kafka:kafka_2.13:{VERSION}",
    f"org.apache.kafka:kafka-tools:{VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
)
POM = """<project><modelVersion>4.0.0</modelVersion><groupId>local</groupId>
<artifactId>kafka-dist</artifactId><version>1</version><dependencies>{}</dependencies></project>"""
DEPENDENCY = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)
LOGGING = """Configuration:
  status: "ERROR"
  Appenders: {Console: {name: STDOUT, PatternLayout: {pattern: "[%d] %p %m (%c)%n"}}}
  Loggers: {Root: {level: "${sys:kafka.log.level:-WARN}", AppenderRef: [{ref: STDOUT}]}}
"""
HEAP = "-Xmx512m"
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""For tests: a tool starts sooner with the simple compiler, and is slower once it runs."""
ONE_JVM = Path(__file__).parent / "in_one_jvm"
STOP_SECONDS = 60
START_SECONDS = 120


def missing() -> str | None:
    """Why Apache Kafka can not run here; None when it can."""
    absent = [name for name in ("java", "mvn") if shutil.which(name) is None]
    return f"not found: {', '.join(absent)}" if absent else None


def home() -> Path:
    """Where the jars are, or will be."""
    cache = os.environ.get("KAFKA_DIST_CACHE")
    root = Path(cache) if cache else Path.home() / ".cache" / "kept" / "kafka-dist"
    return root / VERSION


def install() -> Path:
    """Fetch the jars unless they are there; the directory that holds them."""

    def make(place: Path) -> None:
        _copy_dependencies(place, *ARTIFACTS)
        (place / "log4j2.yaml").write_text(LOGGING)

    return once(home(), make)


def libraries(artifact: str) -> Path:
    """A directory with an artifact (``group:name:version``) and what it needs, fetched once."""
    _, name, version = artifact.split(":")
    place = home().with_name(f"{name}-{version}")
    return once(place, lambda made: _copy_dependencies(made, artifact)) / "libs"


def _copy_dependencies(target: Path, *artifacts: str) -> None:
    dependencies = "".join(DEPENDENCY.format(*name.split(":")) for name in artifacts)
    (target / "pom.xml").write_text(POM.format(dependencies))
    subprocess.run(
        ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=libs"],
        cwd=target,
        check=True,
        stdout=sys.stderr,
    )


def command(
    class_name: str,
    *args: str,
    level: str = "WARN",
    heap: str = HEAP,
    flags: Sequence[str] = QUICK_START,
) -> list[str]:
    """The java command line for a main class."""
    target = install()
    return [
        "java",
        heap,
        *flags,
        f"-Dlog4j2.configurationFile={target}/log4j2.yaml",
        f"-Dkafka.log.level={level}",
        "-cp",
        f"{target}/libs/*",
        class_name,
        *args,
    ]


def run(class_name: str, *args: str, check: bool = True, timeout: float = 240) -> str:
    """Run a main class; its standard output and error together."""
    done = subprocess.run(
        command(class_name, *args),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{class_name} {' '.join(args)} failed:\n{done.stdout}")
    return done.stdout


def run_each(class_name: str, runs: Sequence[Sequence[str]], timeout: float = 240) -> list[str]:
    """Run a main class with several lists of arguments, one after the other and all in one JVM,
    which starts once; the output and errors of each. One that fails says so in its output.
    """
    done = subprocess.run(
        command(str(ONE_JVM / "RunEach.java"), class_name),
        input="".join("\t".join(run) + "\n" for run in runs),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = done.stdout.split("\f\n")
    if done.returncode or len(said) != len(runs) + 1:
        raise RuntimeError(f"{class_name} failed:\n{done.stdout}")
    return said[:-1]


def tool(class_name: str, *args: str, stdin: str | None = None) -> str:
    """Run a tool; its output and errors together. Fails when the tool does."""
    done = subprocess.run(
        command(class_name, *args),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def dump(files: list[Path], *args: str) -> str:
    """DumpLogSegments over some files; faults appear in its output, they do not fail it."""
    names = ",".join(str(path) for path in files)
    return run("org.apache.kafka.tools.DumpLogSegments", "--files", names, *args)


def new_id() -> str:
    """A random id of a cluster."""
    text = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return "A" + text[1:] if text.startswith("-") else text


class Broker:
    """One Apache Kafka node (broker and controller) on 127.0.0.1, files in ``directory/data``.

    The controller listens on the port above that of the broker. ``features`` are levels that are
    finalized at first, where they are not the highest; ``scram`` credentials as ``SCRAM-SHA-256=
    [name=ada,password=…]``.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        cluster_id: str | None = None,
        features: Mapping[str, int] | None = None,
        scram: Sequence[str] = (),
        **properties: object,
    ) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.bootstrap = f"127.0.0.1:{port}"
        self._log = directory / "broker.log"
        self._config = directory / "server.properties"
        self._process: subprocess.Popen[bytes] | None = None
        settings: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": 0,
            "controller.quorum.voters": f"0@127.0.0.1:{port + 1}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{port + 1}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self.data,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
        }
        settings |= {
            name if "." in name else name.replace("_", "."): value
            for name, value in properties.items()
        }
        directory.mkdir(parents=True, exist_ok=True)
        self._config.write_text("".join(f"{n}={v}\n" for n, v in settings.items()))
        run(
            "kafka.tools.StorageTool",
            "format",
            "-t",
            cluster_id or new_id(),
            "-c",
            str(self._config),
            "--ignore-formatted",
            *(f"--feature={name}={level}" for name, level in (features or {}).items()),
            *(f"--add-scram={credential}" for credential in scram),
        )

    def start(self) -> None:
        """Start it and wait until it serves."""
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command("kafka.Kafka", str(self._config), level="INFO"),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        try:
            while "Kafka Server started" not in (said := self._log.read_text()):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Apache Kafka did not start:\n{said[-4000:]}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop it cleanly."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Cluster:
    """Nodes of Apache Kafka, reached and treated as those of :class:`kept.testing.Cluster`."""

    def __init__(
        self,
        directory: Path,
        ports: Sequence[int],
        features: Mapping[str, int] | None = None,
        **properties: object,
    ) -> None:
        copies = min(len(ports), 3)
        shared: dict[str, object] = {
            "controller_quorum_voters": ",".join(
                f"{number}@127.0.0.1:{port + 1}" for number, port in enumerate(ports)
            ),
            "default_replication_factor": copies,
            "min_insync_replicas": max(1, copies - 1),
            "offsets_topic_replication_factor": copies,
            "transaction_state_log_replication_factor": copies,
            "transaction_state_log_min_isr": max(1, copies - 1),
            **properties,
        }
        cluster_id = new_id()
        self._brokers = [
            Broker(
                directory / f"node-{number}",
                port,
                cluster_id,
                features,
                **{"node_id": number, **shared},
            )
            for number, port in enumerate(ports)
        ]

    def __len__(self) -> int:
        return len(self._brokers)

    @property
    def bootstrap(self) -> str:
        """``host:port[,host:port]``."""
        return ",".join(broker.bootstrap for broker in self._brokers)

    def start(self, i: int = 0) -> None:
        """Start a node and wait until it serves."""
        self._brokers[i].start()

    def kill(self, i: int = 0) -> None:
        """kill -9 of a node."""
        self._brokers[i].kill()

    def __enter__(self) -> Cluster:
        try:
            with ThreadPoolExecutor(len(self)) as starting:  # none is ready without the others
                list(starting.map(Broker.start, self._brokers))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor(len(self)) as stopping:
            list(stopping.map(Broker.stop, self._brokers))


def main(argv: list[str]) -> int:
    """The script; see the module."""
    if argv[:1] == ["install"]:
        print(install())
    elif argv[:1] == ["dump"] and len(argv) > 1:
        print(dump([Path(argv[1])], *argv[2:]), end="")
    elif argv[:1] == ["run"] and len(argv) > 1:
        os.execvp("java", command(*argv[1:]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
