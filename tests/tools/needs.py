"""What a test needs that may not be here: the one way in which a test does not run.

A test says it with a marker (pyproject.toml lists them), :func:`need` or :func:`cannot_run`. It is
skipped then, and a line at the end of the run says so; with ``REQUIRE_ALL=1`` it fails.
``CANNOT_RUN=docker,clang`` excepts what a machine cannot have. ``tests/test_tidy.py`` refuses
``pytest.skip`` and its kin elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import NoReturn

import pytest

from kept.kernels import uncompiled
from kept.storage.disk import Disk

SAID = "did not run: "


def _on_path(*names: str) -> str | None:
    absent = [name for name in names if shutil.which(name) is None]
    return f"{', '.join(absent)} not found" if absent else None


def _docker() -> str | None:
    if why := _on_path("docker"):
        return why
    asked = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60)
    if asked.returncode:
        return "the Docker engine does not answer"
    from tests.deploy import containers

    return _on_path("docker-compose") or containers.no_base()


def _netns() -> str | None:
    from tests.failover import network

    return network.missing()


def _spark() -> str | None:
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed (pip install '.[spark]')"
    return _on_path("java")


def _kernels() -> str | None:
    absent = uncompiled(load=True)
    return f"not compiled: {', '.join(absent)}" if absent else None


def _chromium() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install --group browser)"
    return _on_path("chromium")


def _mkdocs() -> str | None:
    absent = importlib.util.find_spec("mkdocs") is None
    return "mkdocs is not installed (pip install --group docs)" if absent else None


def _judges(*names: str) -> str | None:
    from tests.tools import judges

    return next(filter(None, (judges.missing(getattr(judges, name)) for name in names)), None)


TOOLS: dict[str, Callable[[], str | None]] = {
    "spark": _spark,
    "java": lambda: _on_path("java", "mvn"),
    "kernels": _kernels,
    "c_compiler": lambda: _on_path("gcc"),
    "clang": lambda: _on_path("clang"),
    "node_js": lambda: _on_path("node", "npm"),
    "docker": _docker,
    "netns": _netns,
    "go": lambda: _on_path("go"),
    "openssl": lambda: _on_path("openssl"),
    "curl": lambda: _on_path("curl"),
    "chromium": _chromium,
    "mkdocs": _mkdocs,
    "helm": lambda: _judges("helm", "schemas"),
    "promtool": lambda: _judges("promtool"),
    "systemd": lambda: _on_path("systemd-analyze"),
    "boot_id": lambda: None if Disk().boot_id() else "this system does not name its boots",
}


@functools.cache
def missing(marker: str) -> str | None:
    """Why tests with this marker cannot run, None when they can."""
    return TOOLS[marker]()


def need(marker: str) -> None:
    """Skip the test, or fail it, where the tool of that marker is not here."""
    if why := missing(marker):
        cannot_run(marker, why)


def cannot_run(what: str, why: str) -> NoReturn:
    """End the test: skipped and counted at the end of the run, failed with ``REQUIRE_ALL=1``.

    ``what`` is the name by which ``CANNOT_RUN`` may except it.
    """
    excepted = what in os.environ.get("CANNOT_RUN", "").split(",")
    if os.environ.get("REQUIRE_ALL") == "1" and not excepted:
        pytest.fail(f"{what}: {why}, and REQUIRE_ALL=1 wants every test to run", pytrace=False)
    pytest.skip(f"{SAID}{what}: {why}", allow_module_level=True)
