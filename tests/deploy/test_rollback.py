"""``helm upgrade`` and ``helm rollback`` of the chart, by helm itself: what happens where the check
of replicas refuses one, and how an operator goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import kubernetes_api
from tests.deploy.chart import CHART, Refused, helm

pytestmark = [pytest.mark.slow, pytest.mark.helm]
FIVE = {"replicas": 5}
THREE = {"replicas": 3}


class Release:
    """The chart as it is installed at an API server."""

    def __init__(self, api: kubernetes_api.Api, address: str) -> None:
        self.api = api
        self._at = ("-n", "kept", "--kube-apiserver", address)

    def upgrade(self, values: dict[str, int]) -> str:
        return helm("upgrade", "--install", "kept", str(CHART), *self._at, values=values)

    def rollback(self, revision: int, *more: str) -> str:
        return helm("rollback", "kept", str(revision), *more, *self._at)

    def replicas(self) -> int:
        (found,) = self.api.of_kind("StatefulSet")
        count: int = found["spec"]["replicas"]
        return count

    def history(self) -> list[str]:
        found = json.loads(helm("history", "kept", "-o", "json", *self._at))
        return [revision["status"] for revision in found]


class Cluster:
    """What the nodes say, and the check that asks them, as its Job runs it."""

    def __init__(self, folder: Path) -> None:
        self.replicas = dict.fromkeys(range(5), 7)
        self.said = ""
        self._programs = folder

    def check(self, job: kubernetes_api.Object) -> bool:
        """Whether the Job succeeds."""
        nodes = [{"node_id": number, "replicas": held} for number, held in self.replicas.items()]
        status = json.dumps({"nodes": nodes, "voters": [0, 1, 2]})
        (self._programs / "kept").write_text(f"#!/bin/sh\necho '{status}'\n")
        (self._programs / "kept").chmod(0o755)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        done = subprocess.run(
            [sys.executable, CHART / "files" / "scale_down.py", *container["command"][2:]],
            env={"PATH": f"{self._programs}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        self.said = done.stderr
        return done.returncode == 0


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


@pytest.fixture
def release(cluster):
    """A release of five nodes that had three before: revision 2."""
    with kubernetes_api.serving(cluster.check) as (api, address):
        release = Release(api, address)
        release.upgrade(THREE)
        release.upgrade(FIVE)
        yield release


def test_an_upgrade_is_refused_while_nodes_are_needed(release, cluster):
    with pytest.raises(Refused, match="kept-scale-down"):
        release.upgrade(THREE)
    assert "kept cluster drain 3 4 --wait" in cluster.said
    assert release.replicas() == 5
    cluster.replicas |= {3: 0, 4: 0}
    release.upgrade(THREE)
    assert release.replicas() == 3


def test_a_rollback_is_refused_while_nodes_are_needed(release, cluster):
    with pytest.raises(Refused, match="kept-scale-down-rollback"):
        release.rollback(1)
    assert "kept cluster drain 3 4 --wait" in cluster.said
    assert release.replicas() == 5
    cluster.replicas |= {3: 0, 4: 0}
    release.rollback(1)
    assert release.replicas() == 3
    assert release.history()[-1] == "deployed"


def test_after_a_refused_rollback_the_check_says_how_to_go_on(release, cluster):
    """helm 3 leaves the refused revision pending, and upgrades nothing until another one ends."""
    with pytest.raises(Refused, match="kept-scale-down-rollback"):
        release.rollback(1)
    assert release.history() == ["superseded", "deployed", "pending-rollback"]
    with pytest.raises(Refused, match=r"another operation .* is in progress"):
        release.upgrade(FIVE)
    assert "helm rollback RELEASE N" in cluster.said
    release.rollback(2)
    assert release.history()[-1] == "deployed"
    release.upgrade(FIVE)
    assert release.replicas() == 5


def test_without_hooks_it_goes_back_whatever_the_nodes_hold(release):
    release.rollback(1, "--no-hooks")
    assert release.replicas() == 3
