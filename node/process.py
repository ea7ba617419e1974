"""The process of ``kept serve``: signals, garbage collection, start, wait, stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import kept
from kept.node.config.security_checks import security_warnings
from kept.node.node import Node
from kept.node.runtime.fd_quota import raise_file_limit
from kept.node.runtime.huge_pages import collapse_heap
from kept.node.runtime.logging import bridge, log
from kept.node.runtime.service_manager import ServiceManager
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread of a pool may keep the loop from running: Python's 5 ms are too many."""
GC_THRESHOLDS: Final = (1_000, 5, 20_000)
"""The hot path makes no cycles. A collection of the second generation is of 7,000 new objects at
most, and costs 0.3 to 3 ms: all together less than larger ones do, whose objects are not in the
processor's cache any more. A full one costs 3 to 20 ms for every 35,000 objects that are not
frozen, once in a hundred million that stayed for a while. CPython 3.14.0 to 3.14.4 have no full
ones: with each of the first generation they look through a part of the rest."""
MANY_REPLICAS: Final = 1_000
"""A replica is of 54 objects: so many take a full collection 40 ms."""
ADJUST_S: Final = 10.0
"""Between two looks at how many replicas came and went."""


class LongLivedObjects:
    """Freezes what is there, and later what came with many new replicas: no collection looks
    through it. ``replicas``: how many there are; ``removed``: how many have gone from the process.

    Objects of a replica refer to each other, so only a collection frees those of one that was
    removed. Once there are many they are unfrozen, and nothing is frozen before a full collection.
    """

    def __init__(self, replicas: int, removed: int) -> None:
        # Without a collection: with 10,000 partitions it would hold the loop for half a second, and
        # find a few dozen objects.
        gc.freeze()
        self._frozen = replicas + removed
        """How many had been opened when it was frozen last."""
        self._unfrozen = self._freed = removed
        """How many had been removed when it was unfrozen last, and how many of these are surely
        freed: those of before a full collection that looked at them."""
        self._full = _full_collections()

    def adjust(self, replicas: int, removed: int) -> None:
        """Freeze or unfreeze, if many came or went. Takes 4 ms at most, when it freezes."""
        opened, full = replicas + removed, _full_collections()
        if full != self._full:
            self._full, self._freed = full, removed
        if removed - self._unfrozen >= MANY_REPLICAS:
            gc.unfreeze()
            self._unfrozen, self._frozen = removed, opened - MANY_REPLICAS
            # A full collection before did not look at what was frozen.
            self._freed = removed - MANY_REPLICAS
        elif opened - self._frozen >= MANY_REPLICAS and removed - self._freed < MANY_REPLICAS / 10:
            gc.collect(1)
            gc.freeze()
            self._frozen = opened


def _full_collections() -> int:
    count: int = gc.get_stats()[2]["collections"]
    return count


async def keep_collections_short(node: Node) -> None:
    """Freeze what is there, and go on as :class:`LongLivedObjects` has it, while no log is made or
    deleted.
    """
    table, lifecycle = node.parts.table, node.parts.replicas.log_lifecycle
    long_lived = LongLivedObjects(len(table.replicas), lifecycle.removed)
    while True:
        await asyncio.sleep(ADJUST_S)
        if lifecycle.is_idle:
            long_lived.adjust(len(table.replicas), lifecycle.removed)


async def serve(config: NodeConfig) -> str:
    """Run a node until TERM or INT, or until it fails; returns why it failed, else nothing."""
    loop = asyncio.get_running_loop()
    manager = ServiceManager.from_environment(os.environ, os.getpid())
    manager.status("starting")
    if (unreached := out_of_reach(config, os.getpid())) is not None:
        log.warning(unreached[0], why=unreached[1])
    for warning in security_warnings(config):
        log.warning("insecure settings", why=warning)
    node = Node(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.parts.shutdown.requested.set)
    if config.audit_path is not None:
        loop.add_signal_handler(signal.SIGHUP, node.parts.audit.reopen)
    raise_file_limit()
    starting = loop.create_task(node.start())
    stopping = loop.create_task(node.parts.shutdown.requested.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        manager.stopping("stopping before the node was ready")
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return node.parts.shutdown.failure
    await starting
    ready = ready_line(node)
    print(ready, flush=True)
    manager.ready(ready)
    tasks = TaskOwner(loop)
    reporting = tasks.spawn(manager.report(partial(service_status, node, ready)))
    await node.warmed_up()
    collecting = tasks.spawn(keep_collections_short(node))
    await node.parts.runtime.in_thread(collapse_heap)
    await stopping
    log.info("stopping")
    manager.stopping(node.parts.shutdown.failure or "stopping")
    await node.stop()
    reporting.cancel()
    collecting.cancel()
    return node.parts.shutdown.failure


def service_status(node: Node, ready: str) -> str:
    """What the service manager shows of a node that runs: ``ready``, or why clients should not
    come.
    """
    if node.parts.shutdown.requested.is_set():
        return node.parts.shutdown.failure or "stopping"
    reason = node.parts.admin.health.unready()
    return ready if reason is None else f"not ready: {reason}"


def out_of_reach(config: NodeConfig, pid: int) -> tuple[str, str] | None:
    """Which clients do not reach the node though somebody may think so, and why."""
    if not config.listeners or not all(listener.is_loopback for listener in config.listeners):
        return None
    listens = f"it listens on {', '.join(map(str, config.listeners))}"
    if pid == 1:
        return (
            "clients outside of this container do not reach the node",
            f"{listens}: set KEPT_LISTENERS and KEPT_ADVERTISED_LISTENERS",
        )
    advertised = [
        str(listener) for listener in config.advertised_listeners if not listener.is_loopback
    ]
    if not advertised:
        return None
    return (
        "clients on other machines do not reach the node",
        f"{listens}, and they are told {', '.join(advertised)}: set listeners, "
        "as in PLAINTEXT://:9092",
    )


def ready_line(node: Node) -> str:
    """What ``kept serve`` prints when clients may come."""
    config = node.config
    host, port = node.parts.addresses.own_address(
        config.listeners[0].name if config.listeners else ""
    )
    where = f"{host}:{port}"
    if not config.is_broker:
        what = f"kept {kept.__version__} controller {config.node_id}"
        return f"{what} ready on {where}, data in {config.metadata_log_dir}"
    dirs = config.log_dirs
    data = ",".join(dirs)
    if len(dirs) == 1 and dirs[0].endswith("/log"):
        parent = dirs[0].removesuffix("/log")
        if config.metadata_log_dir == f"{parent}/meta":
            data = parent
    return f"kept {kept.__version__} node {config.node_id} ready on {where}, data in {data}"


def run(config: NodeConfig, before: Callable[[], None] = lambda: None) -> None:
    """The whole of ``kept serve``; ``before`` comes first, when what it logs is seen.

    Raises KeptError when the node can't start, or go on.
    """
    import uvloop

    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    log.configure(as_json=config.log_format == "json", level=config.log_level)
    bridge()
    before()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if failure := uvloop.run(serve(config)):
        raise KeptError(failure)
