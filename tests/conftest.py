"""Tests that need a tool which is not here are skipped, loudly; with REQUIRE_ALL=1 they fail
(``tests/tools/needs.py``).

Hypothesis draws the same examples every time then: a change is judged by itself, not by luck.

Fixtures come from the plugin that an installed kept brings (``kept.testing.plugin``).
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from kept.node.runtime.fd_quota import raise_file_limit
from kept.testing.ports import free_port
from tests.tools.needs import SAID, TOOLS, need

# How long an example takes says nothing on a machine that has other work.
hypothesis.settings.register_profile(
    "kept",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=os.environ.get("REQUIRE_ALL") == "1",
)
hypothesis.settings.load_profile("kept")


# A node raises its limit of open files; those within a test have the shell's, which is often 1024.
raise_file_limit()


def _not_waited_for(fd: int) -> None:
    """Nothing here cuts the power of this machine: the simulated disk does that to its own files.
    So a wait for the real disk shows nothing. Nodes in processes of their own do wait for it.
    """
    os.fstat(fd)


os.fsync = os.fdatasync = _not_waited_for


# Nodes that tests start would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


TOGETHER = {
    "tests/chaos/": "docker",
    "tests/deploy/": "docker",
    "tests/testing/test_container.py": "docker",
    "tests/spark/": "spark",
}
"""What is never tested in two processes at once: there is one Docker engine, and a Spark session
takes both cores.
"""


LONGEST = (
    "tests/sim/",
    "tests/compaction/kernels/test_rule_map.py",
    "tests/node/wire/test_limits.py",
    "tests/node/wire/test_faults.py",
    "tests/compat/",
    "tests/replication/manifests/test_histories.py",
    "tests/golden/test_golden_data.py",
    "tests/node/wire/test_cleaner.py",
    "tests/node/wire/test_open_files.py",
    "tests/node/runtime/test_stalls.py",
    "tests/cluster/raft/test_properties.py",
    "tests/testing/test_cluster.py",
    "tests/node/replicas/test_damaged_files.py",
    "tests/cli/",
    "tests/test_tidy.py",
)
"""These begin first: one that came last would run alone."""


class ByFileAndTool(LoadScopeScheduling):
    """The tests of a file run one after the other, and so do those that share a tool."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((tool for path, tool in TOGETHER.items() if file.startswith(path)), file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which files are dealt out."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected is no garbage: the collector, which would walk it again and
    again, waits for its end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: every later collection of garbage passes it over."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """How tests are dealt out to processes; ``--dist worksteal`` is xdist's own way."""
    if config.option.dist == "worksteal":
        return None
    config.option.loadscopereorder = False  # by count, of which most say nothing
    return ByFileAndTool(config, log)


OPEN_FILES = pytest.StashKey[dict[Path, int]]()
MANY_FILES = 50


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/dev/fd"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    counts = item.config.stash.setdefault(OPEN_FILES, {})
    if item.path not in counts:
        counts[item.path] = open_files()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """What a module of tests leaves open is told at the end of the run. What it thawed is frozen
    again: else every later collection in this process would walk all that was imported.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        counts = item.config.stash[OPEN_FILES]
        thawed = not gc.get_freeze_count()
        if thawed or open_files() > counts[item.path] + MANY_FILES:
            if isinstance(item, pytest.Function):
                item.funcargs.clear()
            gc.collect()  # closes the logs of nodes; by itself it may not come for long
        if thawed:
            gc.freeze()
        now = open_files()
        left, counts[item.path] = now - counts[item.path], now
        if left > MANY_FILES:
            item.user_properties.append(("left open", left))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in TOOLS:
        if item.get_closest_marker(marker) is not None:
            need(marker)


@pytest.fixture(scope="session")
def kafka_dist() -> ModuleType:
    """Apache Kafka's tools."""
    need("java")
    from tests.tools import kafka_dist as tools

    tools.install()
    return tools


@pytest.fixture(scope="module")
def apache_kafka(kafka_dist: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node of Apache Kafka; where it is."""
    with kafka_dist.Broker(tmp_path_factory.mktemp("kafka"), free_port(above=[1])) as broker:
        yield broker.bootstrap


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that nobody overlooks for each missing tool, and for each module that leaks."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        _, found, why = str(report.longrepr).partition(SAID)
        if found:
            reason = why.rstrip("')\"")
            counts[reason] = counts.get(reason, 0) + 1
    for reason, count in sorted(counts.items()):
        line = f"!!! {count} TESTS DID NOT RUN: {reason} (REQUIRE_ALL=1 makes this a failure)"
        terminalreporter.write_line(line, red=True, bold=True)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        for name, count in getattr(report, "user_properties", ()):
            if name == "left open" and report.when == "teardown":
                file = report.nodeid.partition("::")[0]
                line = f"!!! {file} LEFT {count} FILES AND SOCKETS OPEN in its process"
                terminalreporter.write_line(line, yellow=True, bold=True)
