"""The Helm chart as tests render it."""

from __future__ import annotations

import os
import subprocess
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


class Refused(Exception):
    """What helm says against some values."""


def helm(*arguments: str, values: dict[str, Any] | None = None) -> str:
    """A helm command's output. Raises Refused."""
    given = [] if values is None else ["--values", "-"]
    done = subprocess.run(
        [judges.helm(), *arguments, *given], capture_output=True, text=True, check=False,
        timeout=60, input=None if values is None else yaml.safe_dump(values),
        env={**os.environ, "HELM_CACHE_HOME": "/nonexistent", "HELM_CONFIG_HOME": "/nonexistent"},
    )  # fmt: skip
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def render(values: dict[str, Any] | None = None, *arguments: str, release: str = "kept") -> str:
    """All manifests of a release in the namespace kept."""
    return helm("template", release, str(CHART), "-n", "kept", *arguments, values=values)


def documents(text: str) -> list[dict[str, Any]]:
    """Manifests by themselves."""
    return [one for one in yaml.safe_load_all(text) if one]


def plain() -> str:
    """deploy/kubernetes/kept.yaml as it should be."""
    return HEADER + render(None, "--no-hooks")


if __name__ == "__main__":
    Path(PLAIN).write_text(plain())
