"""One Spark session for all tests: ``local[2]``, as a user with kept installed has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Small queries, each run once: compiling them well costs more than it saves."""
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
