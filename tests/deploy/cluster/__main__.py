"""A trial of the Helm chart on a cluster of one node: ``python -m tests.deploy.cluster``.

It runs where ``cluster run`` runs it, beside the cluster that ``cluster up`` has started, with the
image that ``cluster image`` has imported, and prints a line for each thing that it did. See
``tests/deploy/cluster/README.md``. Not part of CI.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.chart import CHART
from tests.failover.load import Load, under_load
from tests.support.certificates import Authority
from tests.tools import judges

NAMESPACE: Final = "kept"
DOMAIN: Final = f"kept-nodes.{NAMESPACE}.svc.cluster.local"
PASSWORD: Final = "first-password-of-admin"
DISKS: Final = 8
WAIT_S: Final = 300.0
VALUES: Final[dict[str, Any]] = {
    "image": {"repository": "kept", "pullPolicy": "Never"},
    "storage": {"size": "1Gi", "className": "disks"},
    "resources": {
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "limits": {"memory": "768Mi"},
    },
    "config": {
        "kept.inflight.max.bytes": 268435456,
        "kept.inflated.max.bytes": 67108864,
        "log.cleaner.dedupe.buffer.size": 67108864,
    },
    "tls": {"enabled": True, "existingSecret": "kept-certificate"},
    "auth": {"enabled": True, "adminSecret": "kept-admin"},
    "networkPolicy": {"metricsNamespace": "monitoring", "egress": True},
}
CONNECT: Final = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[3])
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
        print("connected")
        break
    except OSError as error:
        if time.monotonic() > end:
            print("refused:", error)
            break
    time.sleep(0.5)
"""
"""Address, port, and for how many seconds it is tried: rules for a new pod come after the pod."""


def run(*command: str, stdin: str | None = None, check: bool = True, wait_s: float = WAIT_S) -> str:
    """What a command prints, both streams. Raises AssertionError."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        input=stdin,
        timeout=wait_s,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stdout.strip()[-2000:]}")
    return done.stdout


def kubectl(*arguments: str, **more: Any) -> str:
    """A command of kubectl in the release's namespace."""
    return run(str(judges.kubectl()), "-n", NAMESPACE, *arguments, **more)


def apply(*manifests: dict[str, Any]) -> None:
    """Make or change what the manifests say."""
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))


def kept(*arguments: str, pod: int = 0, **more: Any) -> str:
    """The command line in a pod, where it is the administrator's."""
    return kubectl("exec", f"kept-{pod}", "-c", "kept", "--", "kept", *arguments, **more)


def secret(name: str, texts: dict[str, str]) -> dict[str, Any]:
    """A Secret."""
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


class Release:
    """The chart, installed, as the checked load sees it."""

    def __init__(self, directory: Path, disks: Path) -> None:
        self.directory, self.disks = directory, disks
        self.authority = Authority(directory)
        self.values = VALUES
        self.client = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "admin",
            "sasl.password": PASSWORD,
            "ssl.ca.location": self.authority.ca,
        }
        self._topics = 0

    @property
    def bootstrap(self) -> str:
        """Addresses of the first three nodes."""
        return ",".join(f"kept-{node}.{DOMAIN}:9092" for node in range(3))

    def wait_until(
        self, condition: Callable[[], object], what: str, deadline_s: float = WAIT_S
    ) -> None:
        """Wait for a condition. Raises AssertionError with ``what``."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not within {deadline_s:.0f} s: {what}"
            time.sleep(0.2)

    def certificate(self) -> dict[str, Any]:
        """The nodes' Secret with a new key and certificate."""
        names = (
            f"*.{DOMAIN}",
            f"kept.{NAMESPACE}.svc.cluster.local",
            f"kept.{NAMESPACE}.svc",
            "kept",
            "localhost",
        )
        store = Path(self.authority.issue("kept-node", *names)).read_text()
        begin = "-----BEGIN CERTIFICATE-----"
        key, chain = store.split(begin, 1)
        texts = {"tls.key": key, "tls.crt": begin + chain, "ca.crt": self.authority.ca_pem}
        return secret("kept-certificate", texts)

    def prepare(self) -> None:
        """Namespaces, disks and secrets."""
        restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
        for name, labels in ((NAMESPACE, restricted), ("monitoring", {}), ("elsewhere", {})):
            metadata = {"name": name, "labels": labels}
            apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        disks = [self.disk(number) for number in range(DISKS)]
        apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": "disks"},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            },
            *disks,
            self.certificate(),
            secret("kept-admin", {"password": PASSWORD}),
        )

    def disk(self, number: int) -> dict[str, Any]:
        """A volume in a directory of this machine."""
        path = self.disks / str(number)
        path.mkdir(parents=True)
        on = [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}]
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"disk-{number}"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "disks",
                "persistentVolumeReclaimPolicy": "Retain",
                "local": {"path": str(path)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": on}]}},
            },
        }

    def upgrade(self, check: bool = True, **values: Any) -> str:
        """Install the release or change its values; returns when all pods are ready."""
        wanted = {**self.values, **values}
        said = run(
            str(judges.helm()),
            "upgrade",
            "--install",
            "kept",
            str(CHART),
            "-n",
            NAMESPACE,
            "--wait",
            "--timeout",
            f"{WAIT_S:.0f}s",
            "--values",
            "-",
            stdin=yaml.safe_dump(wanted),
            check=check,
            wait_s=WAIT_S + 60,
        )
        if check:
            self.values = wanted
            kubectl("rollout", "status", "statefulset/kept", f"--timeout={WAIT_S:.0f}s")
        return said

    def topic(self) -> str:
        """A new topic for a load, on three nodes."""
        self._topics += 1
        name = f"log-{self._topics}"
        kept("topic", "create", name, "--partitions", "3")
        return name

    def healthy(self) -> bool:
        """Nobody fenced, no replica missing."""
        status = kept("cluster", "status", "--check", check=False)
        return "kept:" not in status and "error" not in status.lower()

    def await_healthy(self) -> None:
        """Until all nodes are there and all replicas in sync."""
        self.wait_until(self.healthy, "kept cluster status --check")

    def pod(self, number: int) -> dict[str, Any]:
        """What the API server knows of a pod."""
        found: dict[str, Any] = json.loads(kubectl("get", "pod", f"kept-{number}", "-o", "json"))
        return found

    def restarts(self, number: int) -> int:
        """How often a node was started again in its pod."""
        (status,) = self.pod(number)["status"]["containerStatuses"]
        count: int = status["restartCount"]
        return count

    def ready(self, number: int) -> bool:
        """Whether the kubelet finds a pod ready; one that is not there is not."""
        found = kubectl("get", "pod", f"kept-{number}", "--ignore-not-found", "-o", "json")
        conditions = json.loads(found)["status"].get("conditions", ()) if found.strip() else ()
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def signal(self, number: int, name: str) -> None:
        """A signal to the process of a node, which process 1 of a container does not hear from
        inside of it.
        """
        (status,) = self.pod(number)["status"]["containerStatuses"]
        task = status["containerID"].removeprefix("containerd://")
        ctr = ("ctr", "--address", "/run/containerd/containerd.sock", "-n", "k8s.io")
        run(*ctr, "tasks", "kill", "--signal", name, task)

    def shown(self, number: int) -> str:
        """The certificate that a node shows."""
        address = (f"kept-{number}.{DOMAIN}", 9092)
        return ssl.get_server_certificate(address, ca_certs=self.authority.ca)


class Trial:
    """What is tried, and the lines that say what was seen."""

    def __init__(self, release: Release) -> None:
        self.release = release

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time a step; what it appends is printed with it."""
        began, seen = time.monotonic(), []
        try:
            yield seen
        except BaseException:
            print(f"FAILED {name}", flush=True)
            raise
        took = time.monotonic() - began
        print(f"{name}: {took:.0f} s{''.join(f'; {line}' for line in seen)}", flush=True)

    def under_load(self, name: str, act: Callable[[list[str]], None]) -> None:
        """A step while a checked load runs; everything acknowledged is there afterwards."""
        release = self.release
        with self.step(name) as seen:

            def events(load: Load) -> None:
                began = time.monotonic()
                act(seen)
                over = time.monotonic()
                load.goes_on(release)  # type: ignore[arg-type]
                gap_s = load.gap_s(began, over)
                seen.append(f"longest time without an acknowledgement {gap_s:.1f} s")

            topic = release.topic()
            load = under_load(release, topic, events, release.client)  # type: ignore[arg-type]
            seen.append(f"{load.sent} records, all there once and in order")

    def acts(self) -> dict[str, Callable[[list[str]], None]]:
        """What happens under load, by what is printed of it."""
        return {
            "rolling upgrade (a changed setting)": self.roll,
            "kill -9 of one node after the other": self.kill,
            "a node that stands still": self.stall,
            "a new certificate in the Secret": self.rotate,
            "from three nodes to five": self.grow,
            "from five nodes to three": self.shrink,
            "a lost volume": self.lose_volume,
        }

    def everything(self, chosen: list[str]) -> None:
        """All steps, in order; of those under load the chosen ones, if any are."""
        release = self.release
        with self.step("prepare"):
            release.prepare()
        with self.step("install three nodes with TLS, logins and ACLs") as seen:
            release.upgrade()
            release.await_healthy()
            seen.append(f"restarts {[release.restarts(node) for node in range(3)]}")
        if not chosen:
            with self.step("network policy") as seen:
                seen += self.policies()
        for name, act in self.acts().items():
            if not chosen or act.__name__ in chosen:
                self.under_load(name, act)
        with self.step("uninstall") as seen:
            run(str(judges.helm()), "uninstall", "kept", "-n", NAMESPACE, "--wait")
            claims = kubectl("get", "pvc", "-o", "name").split()
            seen.append(f"volumes that stay: {len(claims)}")

    def policies(self) -> list[str]:
        """Who reaches which port."""
        address = self.release.pod(0)["status"]["podIP"]
        seen = []
        for namespace, port, expected in (
            (NAMESPACE, 9092, True),
            (NAMESPACE, 10092, False),
            ("elsewhere", 9092, False),
            ("monitoring", 9092, True),
            ("monitoring", 10092, False),
        ):
            name = f"try-{namespace}-{port}"
            said = kubectl(
                "-n",
                namespace,
                "run",
                name,
                "--image=kept:0.1.0",
                "--image-pull-policy=Never",
                "--restart=Never",
                "--rm",
                "-i",
                "--quiet",
                f"--overrides={self.bare(name)}",
                "--override-type=strategic",
                "--command",
                "--",
                "python",
                "-c",
                CONNECT,
                address,
                str(port),
                "30" if expected else "10",
            )
            connected = "connected" in said
            seen.append(f"{namespace} to {port}: {'connected' if connected else 'refused'}")
            if connected != expected:
                seen.append(f"({'should not be' if connected else 'should be'})")
        egress = kubectl(
            "exec", "kept-0", "-c", "kept", "--", "python", "-c", CONNECT, "10.99.0.2", "10250", "3"
        )
        seen.append(f"from a node to elsewhere: {egress.split(':')[0].strip()}")
        return seen

    @staticmethod
    def bare(name: str) -> str:
        """A pod that the restricted profile admits."""
        security = {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {"name": name, "securityContext": security}
        return json.dumps({"spec": {"containers": [container]}})

    def roll(self, seen: list[str]) -> None:
        """Change a setting: pods are replaced one by one."""
        release = self.release
        release.upgrade(config={**release.values["config"], "log.retention.hours": 200})
        release.await_healthy()

    def kill(self, seen: list[str]) -> None:
        """Each node in turn."""
        for node in range(3):
            before = self.release.restarts(node)
            self.release.signal(node, "SIGKILL")
            self.release.wait_until(
                lambda n=node, b=before: self.release.restarts(n) > b and self.release.ready(n),
                f"kept-{node} is back",
            )
            self.release.await_healthy()

    def stall(self, seen: list[str]) -> None:
        """The readiness probe takes it out, the liveness probe ends it."""
        release, began = self.release, time.monotonic()
        before = release.restarts(1)
        release.signal(1, "SIGSTOP")
        release.wait_until(lambda: not release.ready(1), "kept-1 is not ready")
        seen.append(f"not ready after {time.monotonic() - began:.0f} s")
        release.wait_until(lambda: release.restarts(1) > before, "kept-1 is started again")
        seen.append(f"started again after {time.monotonic() - began:.0f} s")
        release.wait_until(lambda: release.ready(1), "kept-1 is ready")
        release.await_healthy()

    def rotate(self, seen: list[str]) -> None:
        """Nodes take it without a restart."""
        release, began = self.release, time.monotonic()
        before = [release.shown(node) for node in range(3)]
        starts = [release.restarts(node) for node in range(3)]
        apply(release.certificate())
        for node in range(3):
            release.wait_until(
                lambda n=node: release.shown(n) != before[n], f"kept-{node} shows the new one"
            )
        seen.append(f"shown by all after {time.monotonic() - began:.0f} s")
        assert [release.restarts(node) for node in range(3)] == starts

    def grow(self, seen: list[str]) -> None:
        """Two more brokers, which get their share."""
        release = self.release
        before = [release.pod(node)["metadata"]["uid"] for node in range(3)]
        release.upgrade(replicas=5)
        release.await_healthy()
        assert [release.pod(node)["metadata"]["uid"] for node in range(3)] == before
        kept("cluster", "reassign", f"log-{release._topics}", "--to", "3,4,0,1,2", "--wait")
        release.await_healthy()

    def shrink(self, seen: list[str]) -> None:
        """Refused while the nodes hold replicas; then they are drained."""
        release = self.release
        said = release.upgrade(check=False, replicas=3)
        pods = kubectl("get", "pods", "-o", "name")
        assert "pod/kept-4" in pods, said
        reason = kubectl("logs", "job/kept-scale-down", check=False)
        assert "cluster drain" in reason, said + reason
        seen.append("refused before the drain")
        kept("cluster", "drain", "3", "4", "--wait")
        release.upgrade(replicas=3)
        for node in (4, 3):
            release.wait_until(
                lambda n=node: (
                    "not fenced" not in kept("cluster", "unregister", str(n), check=False)
                ),
                f"node {node} is unregistered",
            )
        release.await_healthy()

    def lose_volume(self, seen: list[str]) -> None:
        """The node starts empty on another disk, and gets its vote back."""
        release = self.release
        kubectl("delete", "pvc", "data-kept-2", "--wait=false")
        kubectl("delete", "pod", "kept-2")
        release.wait_until(lambda: release.ready(2), "kept-2 is ready")
        said = kept("cluster", "voter", "add", "2")
        seen.append(said.strip())
        release.await_healthy()


def main() -> None:
    """Try everything."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--disks", type=Path, required=True, help="an empty directory")
    parser.add_argument("acts", nargs="*", help="roll, kill, stall, …; all, if none is named")
    arguments = parser.parse_args()
    disks: Path = arguments.disks
    if disks.exists() and os.listdir(disks):
        parser.error(f"{disks} is not empty")
    directory = Path(tempfile.mkdtemp(prefix="kept-trial-"))
    try:
        Trial(Release(directory, disks)).everything(arguments.acts)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
