"""Breaks lines of the product, one at a time, and prints those that no test notices.

    make mutate MODULE=node/timers.py [COUNT=40] [SEED=1] [TESTS="tests/node/test_timers.py"]

Works in a copy of the tree, so nothing here changes and a stop in the middle leaves nothing behind.
Each mutant is one edit: a comparison turned, a constant moved by one, ``not`` dropped, ``and``
for ``or``, branches swapped, a statement taken away. The tests mapped to the module run against it
until one fails; a mutant they pass *survives*. A survivor is a question: is a test missing, is the
line dead, or does the edit change nothing that anybody can see? Lines that only log are left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = {
    "node/listener.py": ["tests/node/wire/test_limits.py", "tests/node/wire/test_silent.py"],
    "node/config.py": ["tests/node/test_config.py", "tests/node/test_config_cluster.py"],
    "node/config_listeners.py": ["tests/node/test_config.py", "tests/node/test_config_cluster.py"],
    "node/config_sources.py": ["tests/node/test_config.py"],
    "node/log_directories.py": [
        "tests/node/test_broken_directories.py", "tests/node/test_strays.py",
    ],
    "node/known_directories.py": [
        "tests/node/test_foreign_metadata.py", "tests/node/test_wrong_lists.py",
    ],
    "node/timers.py": ["tests/node/test_timers.py", "tests/node/test_deletion_while_flushed.py"],
    "node/manifests/": [
        "tests/node/manifests/test_applying.py", "tests/node/manifests/test_committed_first.py",
        "tests/node/test_cleaner_faults.py", "tests/node/test_cleaner_swap.py",
        "tests/node/test_unclean.py",
    ],
}  # fmt: skip
"""The fast tests of a module, or of all modules of a folder."""
LEFT_OUT: Final = (".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".hypothesis")
COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


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
    ignored = {id(inner) for node in ast.walk(tree) if says_only(node) for inner in ast.walk(node)}
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
    """A docstring, a line of the log, an annotation's or an error's text: no test needs to care."""
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
    """A copy of the tree in which one module is broken at a time."""

    def __init__(self, module: str, folder: Path) -> None:
        self.root = folder / "kept"
        shutil.copytree(
            ROOT, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT)
        )  # fmt: skip
        self.path = self.root / module
        self.source = self.path.read_bytes()

    def passes(self, tests: list[str], mutant: Mutant | None, limit_s: float) -> bool:
        """Whether all tests pass with the module broken so; a hang is a failure."""
        source = self.source
        if mutant is not None:
            source = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        self.path.write_bytes(source)
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             "-m", "not slow", f"--timeout={limit_s:.0f}", *tests],
            cwd=self.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    """Break the module; the exit code is 1 when something survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", help="path from the root, as node/timers.py")
    parser.add_argument("--tests", nargs="*", help="instead of those that are mapped to it")
    parser.add_argument("--count", type=int, default=40, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # clean up, and end the tests that run
    tests = given.tests or tests_of(given.module)
    with tempfile.TemporaryDirectory(prefix="kept-mutate-") as folder:
        copy = Copy(given.module, Path(folder))
        every = list(mutants(copy.source.decode()))
        drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
        began = time.monotonic()
        if not copy.passes(tests, None, 300):
            raise SystemExit(f"the tests fail before anything is broken: {' '.join(tests)}")
        limit_s = 10 + 5 * (time.monotonic() - began)
        survivors = []
        for mutant in sorted(drawn, key=lambda m: m.start):
            if copy.passes(tests, mutant, limit_s):
                survivors.append(mutant)
                was, text = (" ".join(part.split())[:90] for part in (mutant.was, mutant.text))
                print(f"{given.module}:{mutant.line}: survives: {was}  ->  {text}", flush=True)
    print(f"{given.module}: {len(survivors)} of {len(drawn)} survive ({len(every)} possible)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
