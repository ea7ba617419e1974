"""Breaks lines of the product, one at a time, and prints those that no test notices.

    make mutate MODULE=node/replicas/maintenance.py [COUNT=40] [SEED=1]
    [TESTS="tests/node/replicas/test_maintenance.py"]

Works in a copy of the tree, so nothing here changes and a stop in the middle leaves nothing behind.
Each mutant is one edit: a comparison turned, a constant moved by one, ``not`` dropped, ``and``
for ``or``, branches swapped, a statement taken away. The tests mapped to the module run against it
until one fails; a mutant they pass *survives*. A survivor is a question: is a test missing, is the
line dead, or does the edit change nothing that anybody can see? Lines that only log are left out.

A mutant takes as long as the test that fails: this process imports what the tests import, except
what depends on the broken module, and forks a child for each mutant; files of tests run in the
order of the time they took unbroken. Nodes that tests start run the broken module, too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

ROOT: Final = Path(__file__).resolve().parents[2]
MANIFESTS: Final = [
    f"tests/node/replicas/manifests/test_{name}.py"
    for name in ("shell", "store", "status", "applying", "committed_first")
]
CONFIG: Final = [f"tests/node/config/test_{name}.py" for name in ("config", "config_cluster")]
OF_TOPICS: Final = "tests/node/config/test_topic_config.py"
OF_SECURITY: Final = "tests/node/config/test_security_checks.py"
DIRECTORIES: Final = [
    f"tests/node/replicas/test_{name}.py" for name in ("vanished_directories", "broken_directories")
]
TRANSACTIONS: Final = [
    f"tests/node/coordinator/transactions/test_{name}.py"
    for name in ("requests", "histories", "invariants", "model")
]
TESTS: Final = {
    "client/protocol/bounds.py": [
        "tests/client/protocol/test_bounds.py",
        "tests/client/protocol/test_unknown_tags.py",
    ],
    "cluster/raft/message_guard.py": [
        "tests/cluster/raft/test_strangers.py",
        "tests/cluster/test_impossible_terms.py",
    ],
    "node/grpc/callers.py": ["tests/grpc/test_callers.py"],
    "node/http/host_header.py": ["tests/node/http/test_server.py"],
    "node/kafka/accept_throttle.py": ["tests/node/kafka/test_accept_throttle.py"],
    "node/kafka/fetch_sessions.py": ["tests/node/kafka/test_fetch_sessions.py"],
    "node/kafka/handshake_timeout.py": ["tests/node/kafka/test_handshake_timeout.py"],
    "node/kafka/listener.py": ["tests/node/kafka/test_listener.py"],
    "node/runtime/connection_quota.py": ["tests/node/kafka/test_listener.py"],
    "node/runtime/connection_slots.py": [
        "tests/grpc/test_callers.py",
        "tests/node/http/test_server.py",
    ],
    "node/security/password_checks.py": [
        "tests/node/security/test_password_checks.py",
        "tests/node/security/test_passwords_at_the_front.py",
    ],
    "node/config/node_config.py": [*CONFIG, "tests/node/metadata/test_preflight.py"],
    "node/config/bootstrap_scram.py": ["tests/node/config/test_bootstrap_scram.py"],
    "node/config/checks.py": [*CONFIG, OF_TOPICS, OF_SECURITY],
    "node/config/config_def.py": [*CONFIG, OF_TOPICS],
    "node/config/definitions.py": [CONFIG[0], OF_TOPICS],
    "node/config/listener_settings.py": [*CONFIG, OF_SECURITY],
    "node/config/listeners.py": CONFIG,
    "node/config/sasl.py": ["tests/node/config/test_sasl.py"],
    "node/config/security_checks.py": [OF_SECURITY],
    "node/config/sources.py": CONFIG,
    "node/config/topic_config.py": [OF_TOPICS],
    "node/runtime/memory_budget.py": [
        f"tests/node/runtime/test_{name}.py" for name in ("memory_budget", "request_memory")
    ],
    "node/runtime/fd_quota.py": ["tests/node/runtime/test_fd_quota.py"],
    "node/coordinator/groups/memory_limit.py": [
        "tests/node/coordinator/groups/test_memory_limit.py",
        "tests/node/runtime/test_request_memory.py",
    ],
    "node/coordinator/groups/offsets.py": [
        f"tests/node/coordinator/groups/test_{name}.py"
        for name in ("histories", "memory_limit", "shard", "random_histories")
    ],
    "node/coordinator/transactions/core.py": TRANSACTIONS,
    "node/coordinator/transactions/markers.py": TRANSACTIONS,
    "node/coordinator/transactions/requests.py": TRANSACTIONS,
    "node/coordinator/transactions/transaction.py": TRANSACTIONS,
    "node/kafka/handlers/transactions/transactional_commits.py": [
        "tests/node/coordinator/groups/test_transactional_commits.py"
    ],
    "node/kafka/handlers/records/batch_checks.py": [
        "tests/node/kafka/handlers/records/test_batch_checks.py"
    ],
    "node/metadata/directory_ids.py": [
        "tests/node/replicas/test_log_dirs.py",
        "tests/node/metadata/test_foreign_metadata.py",
        DIRECTORIES[1],
    ],
    "node/metadata/metadata_log.py": [
        f"tests/node/metadata/test_metadata_{name}.py" for name in ("log", "waits")
    ],
    "node/metadata/preflight.py": ["tests/node/metadata/test_preflight.py"],
    "node/metadata/join_timeout.py": ["tests/node/metadata/test_join_timeout.py"],
    "node/replicas/dirty_logs.py": [
        f"tests/node/replicas/test_{name}.py" for name in ("dirty_logs", "maintenance")
    ],
    "node/replicas/log_dir_failures.py": [
        "tests/node/replicas/test_log_dir_failures.py",
        "tests/node/replicas/test_log_lifecycle.py",
        *DIRECTORIES,
    ],
    "node/replicas/log_lifecycle.py": ["tests/node/replicas/test_log_lifecycle.py"],
    "node/replicas/log_dirs.py": [
        "tests/node/replicas/test_log_dirs.py",
        *DIRECTORIES,
        "tests/node/test_clean_epoch.py",
    ],
    "node/replicas/manifests/install.py": [
        "tests/node/compaction/test_cleaner_swap.py",
        *(
            f"tests/node/replicas/manifests/test_{name}.py"
            for name in ("install", "store", "applying", "committed_first", "lost")
        ),
    ],
    "node/replicas/manifests/recover.py": [
        f"tests/node/replicas/manifests/test_{name}.py" for name in ("recover", "lost")
    ],
    "node/replicas/manifests/status.py": [
        f"tests/node/replicas/manifests/test_{name}.py" for name in ("status", "shown", "recover")
    ],
    "node/replicas/manifests/replicate.py": ["tests/node/replicas/manifests/test_travel.py"],
    "node/replicas/manifests/notify.py": ["tests/node/replicas/manifests/test_travel.py"],
    "node/replicas/manifests/store.py": [
        *MANIFESTS,
        "tests/node/compaction/test_cleaner_swap.py",
        "tests/node/compaction/test_cleaner_faults.py",
    ],
    "node/replicas/manifests/": [
        *MANIFESTS,
        "tests/node/replicas/manifests/test_lost.py",
        "tests/node/compaction/test_cleaner_swap.py",
    ],
    "node/replicas/stray_logs.py": ["tests/node/replicas/test_stray_logs.py"],
    "node/replicas/maintenance.py": [
        "tests/node/replicas/test_maintenance.py",
        "tests/node/replicas/test_dirty_logs.py",
        DIRECTORIES[0],
    ],
    "storage/log/follower_append.py": [
        f"tests/storage/log/test_{name}.py" for name in ("follower_append", "log")
    ],
    "storage/log/tail.py": [
        f"tests/storage/log/test_{name}.py" for name in ("follower_append", "log", "retention")
    ],
    "storage/log/truncation.py": [
        "tests/storage/producers/test_cut_preparation.py",
        *(
            f"tests/storage/log/test_{name}.py"
            for name in ("truncation", "checkpoints_at_a_cut", "log", "exhausted", "transactions")
        ),
    ],
    "storage/producers/cut_preparation.py": ["tests/storage/producers/test_cut_preparation.py"],
    "storage/producers/producer_state_manager.py": [
        "tests/storage/producers/test_cut_preparation.py",
        *(
            f"tests/storage/log/test_{name}.py"
            for name in ("log", "retention", "damage", "transactions", "truncation")
        ),
    ],
    "storage/producers/": ["tests/storage/producers/test_producer_states.py"],
    "storage/directory.py": [
        f"tests/storage/test_{name}.py" for name in ("directory", "running_mark")
    ],
}
"""The fast tests of a module, or of all modules of a folder."""
LEFT_OUT: Final = (".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".hypothesis")
COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One edit: ``source[start:end]`` becomes ``text``."""

    line: int
    start: int
    end: int
    was: str
    text: str


def mutants(source: str) -> Iterator[Mutant]:
    """All edits of a module."""
    starts = [0]
    encoded = source.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    silent = [node for node in ast.walk(tree) if says_only(node)]
    for node in ast.walk(tree):
        silent += node.decorator_list if isinstance(node, ast.ClassDef) else []
    ignored = {id(inner) for node in silent for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in ignored or not isinstance(node, ast.expr | ast.stmt):
            continue
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        was = encoded[start:end].decode()
        for text in edits(node, was):
            yield Mutant(node.lineno, start, end, was, text)


def says_only(node: ast.AST) -> bool:
    """A docstring, a line of the log, an error's text, imports for annotations, a class's
    decorator: no test needs to care.
    """
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Expr):
        value = node.value
        if isinstance(value, ast.Constant):
            return True
        return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(
            ("log.", "logger.")
        )
    return isinstance(node, ast.JoinedStr)


def edits(node: ast.AST, was: str) -> Iterator[str]:
    """What a node may become."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
            turned = ast.Compare(left, [COMPARED[type(op)]()], [right])
            yield f"({ast.unparse(turned)})"
        case ast.BoolOp(op, values):
            other = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
            other = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield f"({ast.unparse(ast.BinOp(left, other, right))})"
        case ast.Constant(bool() as value):
            yield repr(not value)
        case ast.Constant(int() as value):
            yield f"({value + 1})"
            yield f"({value - 1})"
        case ast.Call(ast.Name("min" | "max" as name)):
            yield ("max" if name == "min" else "min") + was[3:]
        case ast.If() | ast.While():
            prefix = "el" if was.startswith("elif") else ""
            yield prefix + unindented(ast.unparse(with_test(node)), node)
        case ast.Expr(ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield "pass"


def with_test(node: ast.If | ast.While) -> ast.If | ast.While:
    """The same with its condition turned round."""
    test = ast.UnaryOp(ast.Not(), node.test)
    return type(node)(test=test, body=node.body, orelse=node.orelse)


def unindented(text: str, node: ast.stmt) -> str:
    """A block as it stands at the node's column; its first line is there already."""
    return text.replace("\n", "\n" + " " * node.col_offset)


def tests_of(module: str) -> list[str]:
    """The mapped tests. SystemExit when there are none."""
    for name, tests in TESTS.items():
        if module == name or (name.endswith("/") and module.startswith(name)):
            return tests
    raise SystemExit(f"no tests are mapped to {module}: give --tests, or add them to {__file__}")


class Copy:
    """A copy of the tree in which one module is broken at a time; this process works there."""

    def __init__(self, module: str, folder: Path) -> None:
        root = folder / "kept"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self.path = root / module
        self.name = f"kept.{module.removesuffix('.py').replace('/', '.')}"
        self.source = self.path.read_bytes()
        self._written = 0
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)  # nodes that tests start
        sys.path.insert(0, str(root))
        for name in [one for one in sys.modules if one.partition(".")[0] == "tests"]:
            del sys.modules[name]

    def write(self, mutant: Mutant | None) -> None:
        """Break the module so, or mend it."""
        source = self.source
        if mutant is not None:
            source = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        self.path.write_bytes(source)
        self._written += 1  # the interpreter tells compiled files apart by whole seconds
        os.utime(self.path, (self._written, self._written))

    def preload(self, names: list[str]) -> None:
        """Import what tests import, except what cannot do without the module."""
        broken = self.name

        class Without(MetaPathFinder):
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
                if name == broken:
                    raise ImportError(name)

        sys.meta_path.insert(0, Without())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        del sys.meta_path[0]


class Observed:
    """A plugin of pytest: how long each file's tests take, and what they import."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The quick files first."""
        items.sort(key=lambda item: self.times.get(file_of(item.nodeid), 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count its time."""
        file = file_of(report.nodeid)
        self.times[file] = self.times.get(file, 0.0) + report.duration
        if report.failed:
            self.failed = report.nodeid

    def result(self) -> str:
        """For the process that started this one."""
        names = [name for name in sys.modules if not name.startswith(("tests", "__m"))]
        return json.dumps({"times": self.times, "names": names, "failed": self.failed})


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


def passes(tests: list[str], times: dict[str, float], limit_s: float) -> tuple[bool, Any]:
    """Whether all tests pass in a child of this process, and what it observed; a hang is a failure,
    of which nothing is known.
    """
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if not child:
            run_tests(tests, Observed(times), told)
        status, until = None, time.monotonic() + limit_s
        try:
            while status is None and time.monotonic() < until:
                pid, found = os.waitpid(child, os.WNOHANG)
                status = os.waitstatus_to_exitcode(found) if pid else None
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what its tests left
            if status is None:
                os.waitpid(child, 0)
        told.seek(0)
        text = told.read()
    return status == 0, json.loads(text) if text else {"failed": "a hang, or a crash"}


def run_tests(tests: list[str], observed: Observed, told: TextIO) -> NoReturn:
    """Run them in this child."""
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(os.devnull, "r+") as nothing:
            for fd in range(3):
                os.dup2(nothing.fileno(), fd)
        import pytest

        ignored = "-Wignore::pytest.PytestAssertRewriteWarning"  # of what was imported before
        code = int(
            pytest.main(
                ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", ignored, *tests],
                plugins=[observed],
            )
        )
        told.write(observed.result())
        told.flush()
    finally:
        os._exit(code)


def main() -> int:
    """Break the module; the exit code is 1 when something survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", help="path from the root, as node/replicas/maintenance.py")
    parser.add_argument("--tests", nargs="*", help="instead of those that are mapped to it")
    parser.add_argument("--count", type=int, default=40, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--killers", action="store_true", help="print which test missed each")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # clean up, and end the tests that run
    tests = given.tests or tests_of(given.module)
    with tempfile.TemporaryDirectory(prefix="kept-mutate-") as folder:
        copy = Copy(given.module, Path(folder))
        every = list(mutants(copy.source.decode()))
        drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
        copy.write(None)
        unbroken, observed = passes(tests, {}, 600)
        if not unbroken:
            raise SystemExit(f"fails before anything is broken: {observed['failed']}")
        limit_s = 15 + 3 * sum(observed["times"].values())
        copy.preload(observed["names"])
        survivors = []
        began = time.monotonic()
        for mutant in sorted(drawn, key=lambda m: m.start):
            copy.write(mutant)
            survived, seen = passes(tests, observed["times"], limit_s)
            if survived or given.killers:
                what = "survives" if survived else f"killed by {seen['failed']}"
                was, text = (" ".join(part.split())[:90] for part in (mutant.was, mutant.text))
                print(f"{given.module}:{mutant.line}: {what}: {was}  ->  {text}", flush=True)
            if survived:
                survivors.append(mutant)
        os.chdir(ROOT)
    spent = (time.monotonic() - began) / max(len(drawn), 1)
    print(
        f"{given.module}: {len(survivors)} of {len(drawn)} survive "
        f"({len(every)} possible, seed {given.seed}, {spent:.1f} s each)"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
