"""The rules of the house that a program can check (docs/architecture.md, "House rules")."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("storage", "compaction", "replication", "cluster", "client", "node", "pipeline")
TOP_LEVEL = "kept.pipeline."  # before pyspark_kept, which Spark looks for by that name
MODULE_LINES = 600
KERNEL_LINES = 640
"""A kernel is one unit of compilation; its Python twin is in several modules."""
TEST_MODULE_LINES = 800
FUNCTION_LINES = 70
LINE_LENGTH = 100


def tracked(*patterns: str) -> list[Path]:
    """Files git tracks, or all files below the root where there is no checkout."""
    try:
        out = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", *patterns],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.splitlines()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        out = [str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.rglob(pattern)]
    paths = [ROOT / name for name in out]
    paths = [p for p in paths if not p.name.endswith("_pb2.py")]  # protoc's
    return [p for p in paths if p.is_file() and not (set(p.parts) & {".venv", "build"})]


SOURCES = tracked("*.py", "*.pyx")


def is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_are_small(path: Path) -> None:
    lines = path.read_text().splitlines()
    most = KERNEL_LINES if path.suffix == ".pyx" else MODULE_LINES
    assert len(lines) <= (TEST_MODULE_LINES if is_test(path) else most)
    long = [i for i, line in enumerate(lines, 1) if len(line) > LINE_LENGTH]
    assert not long, f"lines over {LINE_LENGTH} characters: {long}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.suffix == ".py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_functions_fit_a_screen(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= FUNCTION_LINES, f"{node.name} has {size} lines"


def public_things(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        found.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    overload = any("setter" in ast.dump(d) for d in item.decorator_list)
                    if not item.name.startswith("_") and not overload:
                        found.append((f"{node.name}.{item.name}", item))
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in (*PARTS, "kept")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module says what it is"
    missing = [
        name
        for name, node in public_things(tree)
        if not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    assert not missing, f"without a docstring: {missing}"


def test_folders_packages_and_links_agree() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapping = config["package-dir"]
    for part in PARTS:
        link = ROOT / "kept" / part
        assert link.is_symlink() and os.readlink(link) == f"../{part}", part
        assert mapping[f"kept.{part}"] == part
    on_disk = {
        ("kept." + str(p.parent.relative_to(ROOT)).replace("/", ".")).removeprefix(TOP_LEVEL)
        for part in PARTS
        for p in (ROOT / part).rglob("__init__.py")
    }
    on_disk |= {
        str(p.parent.relative_to(ROOT)).replace("/", ".")
        for p in (ROOT / "kept").glob("**/__init__.py")
        if p.parent.relative_to(ROOT).parts[1:2] == ()
        or p.parent.relative_to(ROOT).parts[1] not in PARTS
    }
    assert set(config["packages"]) == on_disk


def test_operating_system_calls_for_files_are_in_one_module() -> None:
    """``storage/disk.py`` is what the simulator and the fault tests replace."""
    forbidden = re.compile(
        r"(?<!def )(?<![\w.])open\(|\bos\.(open|rename|replace|remove|unlink|fsync|fdatasync|write|"
        r"writev|pread|preadv|truncate|ftruncate|mkdir|makedirs|listdir|scandir|sendfile)\("
    )
    offenders = []
    for path in SOURCES:
        part = path.relative_to(ROOT).parts[0]
        if part not in ("storage", "compaction", "replication", "cluster"):
            continue
        if path.name in ("disk.py", "disk_linux.py"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if forbidden.search(line.split("#")[0]):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not offenders, "\n".join(offenders)


def test_no_empty_promises() -> None:
    words = re.compile(r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")
    offenders = [
        f"{p.relative_to(ROOT)}:{i}"
        for p in SOURCES
        if p != Path(__file__).resolve()
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not offenders
