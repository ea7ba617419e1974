"""The pytest plugin: installed kept is enough, pytest finds it.

``kept_broker``
    One node for the whole session: ``kept_broker.bootstrap``, ``kept_broker.topic()`` for a fresh
    topic name, ``kept_broker.create_topic(partitions=3, config={...})``. It keeps records of any
    age (``log.retention.ms=-1``): tests write fixed timestamps, and a session may be long.
``kept_secure_broker``
    One node for the whole session that is reached by SASL_SSL, with the users ``admin``, ``ada``
    and ``bob`` and an authorizer: ``kept_secure_broker.client(user="ada")``,
    ``kept_secure_broker.command_config("ada")``. It needs the extra ``secure``.
``kept_cluster``
    A function that starts a :class:`kept.testing.Cluster` of its own for one test:
    ``cluster = kept_cluster(log_segment_bytes=4096)`` or, with three nodes of which any may be
    killed, stalled and started again, ``kept_cluster(nodes=3)``; it is stopped when the test ends.

When a test that uses them fails, the end of each node's log is part of the report. When the node
of the session is dead, the first test that was to use it says so, and those after it have it again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from kept.testing.cluster import Cluster

_FIXTURES: Final = ("kept_broker", "kept_secure_broker", "kept_cluster")
_TAIL_LINES: Final = 60
_LIVE: Final = pytest.StashKey[list["Cluster"]]()
_SHARED: Final = pytest.StashKey[dict[str, "Cluster"]]()


@pytest.fixture(scope="session")
def kept_broker(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node of kept, shared by all tests of the session."""
    yield from _shared(request, "kept_broker")


@pytest.fixture(scope="session")
def kept_secure_broker(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The same, secured."""
    yield from _shared(request, "kept_secure_broker", security="SASL_SSL")


def _shared(request: pytest.FixtureRequest, name: str, **given: Any) -> Iterator[Cluster]:
    from kept.testing.cluster import Cluster

    shared = request.session.stash.setdefault(_SHARED, {})
    with Cluster(log_retention_ms=-1, **given) as cluster:
        request.session.stash.setdefault(_LIVE, []).append(cluster)
        shared[name] = cluster
        yield cluster
        del shared[name]


@pytest.fixture
def kept_cluster(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """A function ``(nodes=1, **settings)`` that starts a cluster for this test alone."""
    from kept.testing.cluster import Cluster

    live = request.session.stash.setdefault(_LIVE, [])
    with ExitStack() as started:  # one that does not stop leaves none of the others running

        def start(nodes: int = 1, **settings: Any) -> Cluster:
            cluster = Cluster(nodes, **settings)
            started.callback(cluster.close)
            started.callback(live.remove, cluster)
            live.append(cluster)
            return cluster.__enter__()

        yield start


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One test says that the shared node is dead, and not all that come after it."""
    for name, cluster in item.session.stash.get(_SHARED, {}).items():
        if name in getattr(item, "fixturenames", ()) and not cluster.running():
            tail = "\n".join(cluster.log().splitlines()[-_TAIL_LINES:])
            cluster.start()
            pytest.fail(
                "the node that all tests share was dead before this one; its log ended with\n"
                f"{tail}",
                pytrace=False,
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of the nodes' logs to the report of a failed test that uses our fixtures."""
    report = yield
    names = getattr(item, "fixturenames", ())
    if report.failed and call.when != "teardown" and any(name in names for name in _FIXTURES):
        for cluster in item.session.stash.get(_LIVE, []):
            for i in range(len(cluster)):
                lines = cluster.log(i).splitlines()[-_TAIL_LINES:]
                if lines:
                    name = f"kept node {i} on localhost:{cluster.port(i)}"
                    report.sections.append((name, "\n".join(lines)))
    return report
