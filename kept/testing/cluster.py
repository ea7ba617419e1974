"""Real nodes as processes of their own, for tests: started, stopped, killed and started again."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from kept.client.admin.readiness import cluster_is_up
from kept.client.core.metadata import Endpoint
from kept.client.security.security import PLAINTEXT, Security
from kept.node.config.local_cluster import NODE_PORT_OFFSET, cluster_settings
from kept.node.config.local_security import ADMIN, LocalSecurity
from kept.node.config.local_security import DEFAULT_MECHANISM as MECHANISM
from kept.storage.errors import ConfigurationError, KeptError
from kept.testing import reaper
from kept.testing.ports import free_port, give_back, is_free

if TYPE_CHECKING:
    from kept.client.client import Client

START_DEADLINE_S: Final = 60.0
"""How long a node may take to be ready. A loaded machine needs seconds, a free one 0.3."""
STOP_DEADLINE_S: Final = 60.0
CLOSE_DEADLINE_S: Final = 5.0
"""How long nodes of a cluster that is closed may take to stop cleanly, before they are killed."""
HEARD_S: Final = 10.0
"""How long a new topic may take to be known to a node, and a node to answer that it is."""
PORT_ATTEMPTS: Final = 5
_POLL_S: Final = 0.005
_LONGEST_POLL_S: Final = 0.05
_TAIL_LINES: Final = 30


class NodeFailed(KeptError):
    """A node that did not become ready, or did not stop; the message has the end of its log."""


@dataclass(slots=True)
class _Node:
    """What the cluster knows of one node."""

    number: int
    directory: str
    host: str = "localhost"
    port: int = 0
    node_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    started: bool = False

    @property
    def log_path(self) -> str:
        return os.path.join(self.directory, "kept.log")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Cluster:
    """Nodes of kept on this machine, in a temporary directory, on free ports.

    ``settings`` are settings of every node, Kafka's names with underscores for dots:
    ``Cluster(log_segment_bytes=4096, kept_fsync_threads=2)``. A context manager: entering starts
    the nodes that do not run yet and waits until all are ready, leaving stops them and removes
    their files (unless ``directory`` was given). Three nodes and more keep three replicas and want
    two in sync. When the process that made it dies, its nodes do too (:mod:`kept.testing.reaper`).

    ``security``: ``SASL_SSL``, ``SASL_PLAINTEXT`` or ``SSL``. Certificates (by the extra
    ``secure``), passwords and the users ``admin``, ``ada`` and ``bob`` are made then, and ACLs are
    asked: ``admin`` may do everything, the others nothing yet.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        directory: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        security: str | None = None,
        **settings: object,
    ) -> None:
        if nodes < 1:
            raise ConfigurationError(f"nodes={nodes}: a cluster has one node at least")
        self._temporary = directory is None
        self.directory = (
            tempfile.mkdtemp(prefix="kept-") if directory is None else os.path.abspath(directory)
        )
        if self._temporary:
            reaper.watch(self.directory, remove=True)
        self._environ = dict(environ or {})
        self._local_security = (
            None
            if security is None
            else LocalSecurity(os.path.join(self.directory, "security"), security)
        )
        self._settings = {
            name.replace("_", "."): setting_text(value) for name, value in settings.items()
        }
        self._nodes = [
            _Node(number, os.path.join(self.directory, f"node-{number}")) for number in range(nodes)
        ]
        self._shared: dict[str, str] = {}
        self._topic_numbers = itertools.count(1)
        self._closed = False

    def __enter__(self) -> Self:
        atexit.register(self.close)
        try:
            if len(self._nodes) > 1:
                self._start_all()
            elif self.running():
                self.await_ready()
            else:
                self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._nodes)

    # What a test needs to reach it.

    @property
    def bootstrap(self) -> str:
        """``host:port[,host:port]`` for any Kafka client."""
        return ",".join(f"{node.host}:{node.port}" for node in self._nodes)

    def host(self, i: int = 0) -> str:
        """Where node ``i`` is."""
        return self._nodes[i].host

    def port(self, i: int = 0) -> int:
        """The port of node ``i``; it stays the same when the node is started again."""
        return self._nodes[i].port

    def url(self, i: int = 0) -> str:
        """Where node ``i`` answers HTTP."""
        tls = self._local_security is not None and self._local_security.has_tls
        return f"http{'s' * tls}://{self._nodes[i].host}:{self._nodes[i].port}"

    def pid(self, i: int = 0) -> int:
        """The process id of node ``i``; NodeFailed when it does not run."""
        process = self._nodes[i].process
        if process is None or process.poll() is not None:
            raise NodeFailed(f"node {i} does not run")
        return process.pid

    def client(
        self, client_id: str = "kept-testing", *, user: str = ADMIN, mechanism: str = MECHANISM
    ) -> Client:
        """A client of ours for this cluster, as ``user`` where it is secured; the caller closes
        it.
        """
        return self._client(self.bootstrap, self.security(user, mechanism), client_id=client_id)

    @staticmethod
    def _client(bootstrap: str, security: Security, **given: Any) -> Client:
        from kept.client.client import Client

        return Client(bootstrap, security=security, **given)

    def security(self, user: str = ADMIN, mechanism: str = MECHANISM) -> Security:
        """How ``user`` connects."""
        if self._local_security is None:
            return PLAINTEXT
        return Security(self._local_security.client_properties(user, mechanism))

    def client_properties(self, user: str = ADMIN, mechanism: str = MECHANISM) -> dict[str, str]:
        """How ``user`` connects, as the properties of a Kafka client."""
        return dict(self.security(user, mechanism).properties)

    def command_config(self, user: str = ADMIN, mechanism: str = MECHANISM) -> str:
        """The path of a file with :meth:`client_properties`: for ``--command-config`` of our
        commands and of Kafka's. Raises ConfigurationError without ``security``.
        """
        if self._local_security is None:
            raise ConfigurationError("command_config() is for a Cluster(security=...)")
        return self._local_security.command_config(user, mechanism)

    @property
    def ca_path(self) -> str:
        """The certificate, as a PEM file, of who signed those of the nodes. Raises
        ConfigurationError without ``security``.
        """
        if self._local_security is None:
            raise ConfigurationError("ca_path is of a Cluster(security=...)")
        return self._local_security.certificates.ca_path

    def topic(self, prefix: str = "topic") -> str:
        """A topic name that nobody has used here; the topic is not created."""
        return f"{prefix}-{next(self._topic_numbers)}-{uuid.uuid4().hex[:8]}"

    def create_topic(
        self,
        prefix: str = "topic",
        *,
        partitions: int = 1,
        replication_factor: int = -1,
        config: Mapping[str, str] | None = None,
    ) -> str:
        """Create a topic under a fresh name, which is returned once its partitions are led, and
        known to every node that answers.

        Without a replication factor it has three replicas where there are three nodes or more.
        """
        name = self.topic(prefix)
        with self.client() as client:
            client.create_topic(
                name,
                partitions=partitions,
                replication_factor=replication_factor,
                config=dict(config or {}),
            )
            client.bounds(name)  # asks the leaders, until they know that they lead
        if len(self._nodes) > 1:
            for node in self._nodes:
                if node.running:
                    self._await_known(node, name)
        return name

    def _await_known(self, node: _Node, topic: str) -> None:
        """Until a node has heard of a topic, or does not answer: it may stand still, or be cut off
        by whoever tests that.
        """
        end = time.monotonic() + HEARD_S
        where, timeout_ms = f"{node.host}:{node.port}", int(HEARD_S * 1000)
        with self._client(where, self.security(), timeout_ms=timeout_ms) as client:
            try:
                while not self._knows(client, topic) and time.monotonic() < end:
                    time.sleep(_POLL_S)
            except KeptError:
                return

    @staticmethod
    def _knows(client: Client, topic: str) -> bool:
        view = client.metadata([topic]).topics.get(topic)
        return view is not None and not view.error_code and bool(view.partitions)

    # Files.

    def data_dir(self, i: int = 0) -> str:
        """Node ``i``'s data directory: ``log/`` holds the partitions, ``meta/`` the metadata."""
        return os.path.join(self._nodes[i].directory, "data")

    def log_dir(self, i: int = 0) -> str:
        """Where node ``i`` keeps its partitions, one directory each."""
        return os.path.join(self.data_dir(i), "log")

    def log(self, i: int = 0) -> str:
        """What node ``i`` has printed so far, over all its starts."""
        try:
            with open(self._nodes[i].log_path, encoding="utf-8", errors="replace") as source:
                return source.read()
        except FileNotFoundError:
            return ""

    # Life and death.

    def running(self, i: int = 0) -> bool:
        """Whether the process of node ``i`` is alive."""
        return self._nodes[i].running

    def start(
        self, i: int = 0, *, fail_point: str | None = None, wait: bool = True, **settings: object
    ) -> None:
        """Start node ``i`` and wait until it is ready; again with its data after stop or kill.

        ``fail_point`` is armed in this process only (``KEPT_FAIL_POINT``); ``settings`` hold from
        now on. Without ``wait`` the caller waits (:meth:`await_ready`), as for the first nodes of
        several, which are ready once a majority runs; a port that another program took is not
        exchanged then. Raises NodeFailed with the end of the node's log.
        """
        node = self._nodes[i]
        if node.running:
            raise NodeFailed(f"node {i} runs already (pid {self.pid(i)})")
        node.settings.update({k.replace("_", "."): setting_text(v) for k, v in settings.items()})
        several = len(self._nodes) > 1  # whose settings name the ports of all
        if several and not self._shared:
            self._choose_ports()
        for attempt in range(PORT_ATTEMPTS):
            chooses = not node.started and not several
            if chooses:
                node.port = free_port()
            position = self._launch(node, fail_point)
            if not wait:
                node.started = True  # who called may have told others the port
                return
            try:
                self._await_ready(node, position)
            except NodeFailed:
                is_busy = chooses and not node.running and not is_free(node.port)
                self._end(node, signal.SIGKILL)
                if not is_busy or attempt == PORT_ATTEMPTS - 1:
                    raise
            else:
                node.started = True
                return

    def kill(self, i: int = 0) -> None:
        """``kill -9`` node ``i`` and wait until it is gone."""
        self._end(self._nodes[i], signal.SIGKILL)

    def stop(self, i: int = 0) -> int:
        """Stop node ``i`` cleanly (TERM) and return its exit status.

        Raises NodeFailed when it does not end; it is killed then.
        """
        return self._end(self._nodes[i], signal.SIGTERM)

    def pause(self, i: int = 0) -> None:
        """Stall node ``i`` (STOP): it keeps its connections and answers nothing."""
        os.kill(self.pid(i), signal.SIGSTOP)

    def resume(self, i: int = 0) -> None:
        """Let a stalled node go on (CONT)."""
        os.kill(self.pid(i), signal.SIGCONT)

    def wait(self, i: int = 0, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Wait until node ``i`` ends by itself, as at an armed fail point; its exit status. Raises
        NodeFailed after ``deadline_s``.
        """
        process = self._nodes[i].process
        if process is None:
            raise NodeFailed(f"node {i} was not started")
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise NodeFailed(
                self._explain(self._nodes[i], f"did not end in {deadline_s} s")
            ) from None

    def wait_until(
        self, condition: Callable[[], bool], what: str, deadline_s: float = START_DEADLINE_S
    ) -> None:
        """Ask ``condition`` until it is true; NodeFailed with ``what`` after the deadline."""
        end = time.monotonic() + deadline_s
        pause = _POLL_S
        while not condition():
            if time.monotonic() > end:
                raise NodeFailed(
                    self._explain(self._nodes[0], f"after {deadline_s} s not so: {what}")
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)  # the nodes want the processor, too

    def close(self) -> None:
        """End all nodes and remove their files. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if len(self._nodes) == 1:
                if self._nodes[0].running:
                    self._end(self._nodes[0], signal.SIGTERM)
            else:
                self._close_all()
        finally:
            for node in self._nodes:
                give_back((node.port, node.node_port))
            if self._temporary:
                shutil.rmtree(self.directory, ignore_errors=True)
            for directory in (self.directory, *(node.directory for node in self._nodes)):
                reaper.forget(directory)

    def await_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait until every node that runs is ready and knows all the others that do. Raises
        NodeFailed after ``deadline_s``, with what the node said.
        """
        up = [Endpoint(node.host, node.port) for node in self._nodes if node.running]
        end = time.monotonic() + deadline_s
        while (why := cluster_is_up(up, self.security())) is not None:
            if time.monotonic() > end:
                who = why.partition(" ")[0].rstrip(":")
                named = (n for n in self._nodes if f"{n.host}:{n.port}" == who)
                node = next(named, self._nodes[0])
                raise NodeFailed(self._explain(node, f"after {deadline_s} s: {why}"))
            time.sleep(_POLL_S)

    # Inside.

    def _start_all(self) -> None:
        """Start those of several nodes that do not run, side by side; on other ports when one was
        taken, unless one was started before: its settings name the ports of all.
        """
        chooses = not self._shared
        for attempt in range(PORT_ATTEMPTS):
            if chooses:
                self._choose_ports()
            others = [node for node in self._nodes if not node.running]
            positions = [self._launch(node, None) for node in others]
            try:
                for node, position in zip(others, positions, strict=True):
                    self._await_ready(node, position)
                self.await_ready()
            except NodeFailed:
                if not chooses:
                    raise
                dead = [node for node in self._nodes if not node.running]
                for node in self._nodes:
                    self._end(node, signal.SIGKILL)
                    shutil.rmtree(self.data_dir(node.number), ignore_errors=True)
                is_busy = any(not is_free(p) for node in dead for p in (node.port, node.node_port))
                if not is_busy or attempt == PORT_ATTEMPTS - 1:
                    raise
            else:
                for node in self._nodes:
                    node.started = True
                return

    def _choose_ports(self) -> None:
        used: set[int] = set()
        for node in self._nodes:
            port = free_port(above=[NODE_PORT_OFFSET])
            while {port, port + NODE_PORT_OFFSET} & used:
                port = free_port(above=[NODE_PORT_OFFSET])
            node.port, node.node_port = port, port + NODE_PORT_OFFSET
            used |= {node.port, node.node_port}
        self._shared = cluster_settings([node.node_port for node in self._nodes])

    def _close_all(self) -> None:
        """Stop all at once; some must lose their quorum in that and may not end by themselves.

        Where the files go too there is nothing to stop cleanly for.
        """
        running = [node.process for node in self._nodes if node.process is not None]
        for process in running:
            process.send_signal(signal.SIGKILL if self._temporary else signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        end = time.monotonic() + CLOSE_DEADLINE_S
        for process in running:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for node in self._nodes:
            node.process = None

    def _launch(self, node: _Node, fail_point: str | None) -> int:
        """Start the process; the size of its log before it."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KEPT_")}
        for name in ("KEPT_KERNEL",):
            if name in os.environ:
                environ[name] = os.environ[name]
        environ.update(self._environ, PYTHONUNBUFFERED="1")
        if fail_point is not None:
            environ["KEPT_FAIL_POINT"] = fail_point
        os.makedirs(node.directory, exist_ok=True)
        if not self._temporary:
            reaper.watch(node.directory)  # in a directory of the caller's others may work
        with open(node.log_path, "ab") as log:
            position = log.tell()
            node.process = subprocess.Popen(
                self._command(node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=node.directory,
                start_new_session=True,
            )
        return position

    def _command(self, node: _Node) -> list[str]:
        command = [sys.executable, "-P", "-m", "kept", "serve", "--node-id", str(node.number)]
        secured = {} if self._local_security is None else self._local_security.settings(node.port)
        settings = {**secured, **self._shared, **self._settings, **node.settings}
        if "listeners" not in settings:
            command += ["--port", str(node.port)]
        if "log.dirs" in settings:
            settings.setdefault(
                "metadata.log.dir", os.path.join(self.data_dir(node.number), "meta")
            )
        else:
            command += ["--data-dir", self.data_dir(node.number)]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        return command

    def _await_ready(self, node: _Node, position: int) -> None:
        end = time.monotonic() + START_DEADLINE_S
        assert node.process is not None
        while True:
            ended = node.process.poll() is not None
            with open(node.log_path, "rb") as log:
                log.seek(position)
                lines = log.read().splitlines(keepends=True)
            if any(b" ready on " in line and line.endswith(b"\n") for line in lines):
                return
            if ended:
                status = node.process.returncode
                raise NodeFailed(self._explain(node, f"ended with status {status} before ready"))
            if time.monotonic() > end:
                raise NodeFailed(self._explain(node, f"was not ready in {START_DEADLINE_S} s"))
            time.sleep(_POLL_S)

    def _end(self, node: _Node, with_signal: signal.Signals) -> int:
        process = node.process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(with_signal)
            process.send_signal(signal.SIGCONT)
        try:
            return process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise NodeFailed(self._explain(node, f"did not stop in {STOP_DEADLINE_S} s")) from None
        finally:
            node.process = None

    def _explain(self, node: _Node, what: str) -> str:
        tail = self.log(node.number).splitlines()[-_TAIL_LINES:]
        return "\n".join([f"node {node.number} {what}; the end of its log:", *tail])


def setting_text(value: object) -> str:
    """A setting's value as ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)
