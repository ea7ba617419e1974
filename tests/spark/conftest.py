"""One Spark session for all tests: ``local[2]``, as a user with kept installed has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent.parent


QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Small queries, each run once: compiling them well costs more than it saves."""
TOO_SLOW = "Python worker failed to connect back"
"""Spark gives a new worker ten seconds to start, and has no setting for that."""
TRIES = 3
SOCKETS = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
"""PySpark 4.1 leaves its own sockets to the garbage collector; later versions close them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        from pyspark import __version__
    except ImportError:
        return
    if __version__.startswith("4.1."):
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.filterwarnings(SOCKETS))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of Spark again where the machine was too busy for Spark's patience."""
    if item.path.parent != Path(__file__).parent:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in reversed(range(TRIES)):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not left or not any(one.failed and TOO_SLOW in str(one.longrepr) for one in reports):
            break
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Spark finds sources on the import path only; that of an editable install is not one."""
    from pyspark.sql import SparkSession

    site = tmp_path_factory.mktemp("site")
    (site / "pyspark_kept").symlink_to(ROOT / "pipeline" / "pyspark_kept")
    work = tmp_path_factory.mktemp("spark")
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(site), str(ROOT), before.get("PYTHONPATH", "")) if p
    )
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("kept tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", QUICK)
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
        .config("spark.local.dir", str(work))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    os.environ.clear()
    os.environ.update(before)
