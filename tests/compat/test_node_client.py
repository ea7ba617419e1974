"""kafkajs: a Node client, which negotiates and groups on its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("node-client")
    for name in ("package.json", "round_trip.js"):
        shutil.copy(HERE / name, folder)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"],
        cwd=folder, check=True, capture_output=True, timeout=110,
    )  # fmt: skip
    return folder


@pytest.mark.node_js
def test_codecs_groups_and_commits(broker, workspace):
    done = subprocess.run(
        ["node", "round_trip.js", broker.bootstrap, broker.name("node")],
        cwd=workspace, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["codecs"]) == 6
    assert result["grouped"] == 350
