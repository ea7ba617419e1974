"""The Helm chart as tests render it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.files import DEPLOY
from tests.tools import judges

CHART: Final = DEPLOY / "helm" / "kept"
PLAIN: Final = DEPLOY / "kubernetes" / "kept.yaml"
HEADER: Final = (
    "# Rendered from deploy/helm/kept by `python -m tests.deploy.chart`; do not edit.\n"
    "#   kubectl create namespace kept && kubectl apply -f deploy/kubernetes/kept.yaml\n"
)

VALUES: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "one": {"replicas": 1, "voters": 1, "rackFromZone": False, "networkPolicy": {"enabled": False}},
    "many": {
        "replicas": 7,
        "voters": 5,
        "antiAffinity": "hard",
        "scaleDownCheck": False,
        "config": {
            "log.retention.hours": 24,
            "log.segment.bytes": 1073741824,
            "log.cleaner.min.cleanable.ratio": 0.3,
            "auto.create.topics.enable": False,
            "log.cleanup.policy": "compact,delete",
            "min.insync.replicas": 3,
            "default.replication.factor": 5,
        },
        "storage": {"size": "1Ti", "className": "fast"},
        "shutdownTimeoutSeconds": 90,
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "high",
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "data", "operator": "Exists"}],
        "podLabels": {"team": "logs"},
        "podAnnotations": {"note": "7"},
        "image": {"repository": "registry.example/kept", "tag": "1.2"},
        "resources": {
            "requests": {"cpu": "1500m", "memory": "2Gi"},
            "limits": {"cpu": 1.5, "memory": 2147483648},
        },
    },
    "load balancers": {
        "external": {"enabled": True, "domain": "logs.example", "annotations": {"a": "b"}}
    },
    "node ports": {"external": {"enabled": True, "type": "NodePort", "domain": "logs.example"}},
    "watched": {
        "monitoring": {
            "serviceMonitor": True,
            "prometheusRule": True,
            "dashboard": True,
            "labels": {"release": "prometheus"},
        },
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "logs"}}}]},
    },
    "certificates": {
        "tls": {"enabled": True, "issuerRef": {"name": "ca"}},
        "config": {"ssl.client.auth": "requested"},
    },
    "logins": {
        "tls": {
            "enabled": True,
            "existingSecret": "kept-certificate",
            "nodePrincipal": "CN=node,O=Example",
        },
        "auth": {
            "enabled": True,
            "adminSecret": "kept-admin",
            "mechanisms": ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"],
            "superUsers": ["User:ops"],
        },
        "external": {"enabled": True, "domain": "logs.example"},
        "monitoring": {"serviceMonitor": True, "basicAuthSecret": "prometheus"},
        "networkPolicy": {"metricsNamespace": "monitoring", "egress": True},
    },
    "tokens": {
        "tls": {"enabled": True, "issuerRef": {"name": "ca"}},
        "auth": {
            "enabled": True,
            "adminSecret": "kept-admin",
            "mechanisms": ["SCRAM-SHA-512", "OAUTHBEARER"],
        },
        "networkPolicy": {"egress": True, "jwks": [{"ipBlock": {"cidr": "192.0.2.7/32"}}]},
        "config": {"sasl.oauthbearer.jwks.endpoint.url": "https://idp.example:8443/keys"},
    },
}
"""Values that are right, by name."""


class Refused(Exception):
    """What helm says against some values."""


def helm(*arguments: str, values: dict[str, Any] | None = None) -> str:
    """A helm command's output. Raises Refused."""
    given = [] if values is None else ["--values", "-"]
    done = subprocess.run(
        [judges.helm(), *arguments, *given],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        input=None if values is None else yaml.safe_dump(values),
        env={**os.environ, "HELM_CACHE_HOME": "/nonexistent", "HELM_CONFIG_HOME": "/nonexistent"},
    )
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def render(values: dict[str, Any] | None = None, *arguments: str, release: str = "kept") -> str:
    """All manifests of a release in the namespace kept."""
    return helm("template", release, str(CHART), "-n", "kept", *arguments, values=values)


def documents(text: str) -> list[dict[str, Any]]:
    """Manifests by themselves."""
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(values: dict[str, Any] | None, kind: str, **arguments: str) -> list[dict[str, Any]]:
    """The manifests of one kind."""
    return [one for one in documents(render(values, **arguments)) if one["kind"] == kind]


def only(values: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """The one manifest of its kind."""
    (found,) = of_kind(values, kind)
    return found


def started_with(
    values: dict[str, Any],
    ordinal: int,
    directory: Path,
    *,
    rack: str = "",
    paths: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, str]]:
    """The path of the settings of a pod, and the environment that its start script gives to
    ``kept serve``. ``paths``: what stands in for directories of the pod.
    """
    texts = {m["metadata"]["name"]: m["data"] for m in of_kind(values, "ConfigMap")}["kept"]
    config, script = directory / "kept.yaml", directory / "start.sh"
    (directory / "rack").write_text(rack)
    stands_in = {
        "/run/kept/rack": f"{directory}/rack",
        "/etc/kept/kept.yaml": str(config),
        **(paths or {}),
    }
    for name, text in texts.items():
        for there, here in stands_in.items():
            text = text.replace(there, here)
        (directory / name).write_text(text)
    (directory / "kept").write_text('#!/bin/sh\necho "$@"\nenv\n')
    (directory / "kept").chmod(0o755)
    done = subprocess.run(
        ["sh", script],
        text=True,
        capture_output=True,
        check=False,
        env={"PATH": f"{directory}:/usr/bin:/bin", "HOSTNAME": f"kept-{ordinal}"},
    )
    if done.returncode:
        raise Refused(done.stderr)
    command, *environ = done.stdout.splitlines()
    assert command == f"serve --config-file {config}"
    return str(config), dict(line.split("=", 1) for line in environ)


def plain() -> str:
    """deploy/kubernetes/kept.yaml as it should be."""
    return HEADER + render(None, "--no-hooks")


if __name__ == "__main__":
    Path(PLAIN).write_text(plain())
