"""The rules of the house that a program can check (docs/architecture.md, "House rules")."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("storage", "compaction", "replication", "cluster", "client", "node", "pipeline")
TOP_LEVEL = "kept.pipeline.pyspark_kept"  # Spark looks for it as pyspark_kept
MODULE_LINES = 600
TEST_MODULE_LINES = 800
LONG_BECAUSE = "Long because "
"""A module over these limits says in its docstring why it is one piece: ``Long because ...``."""
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
    inside = [p for p in paths if not set(p.relative_to(ROOT).parts) & {".venv", "build"}]
    return [p for p in inside if p.is_file()]


SOURCES = tracked("*.py", "*.pyx")
MODULES = [p for p in SOURCES if p.suffix == ".py"]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


def is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


def product(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] in (*PARTS, "kept")


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions below a node. Expressions, the most of a tree, are passed over."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(node, block, ()):
            yield from functions(inner)


@functools.cache
def parsed(path: Path) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Name, first line and length of each function, and the public names without a docstring."""
    tree = ast.parse(text_of(path))
    lengths = [(f.name, f.lineno, (f.end_lineno or 0) - f.lineno + 1) for f in functions(tree)]
    things = [("the module", tree), *public_things(tree)]
    bare = [name for name, node in things if not ast.get_docstring(node)]  # type: ignore[arg-type]
    return lengths, bare


def test_modules_are_small() -> None:
    offenders = []
    for path in SOURCES:
        text, where = text_of(path), path.relative_to(ROOT)
        lines = text.splitlines()
        most = TEST_MODULE_LINES if is_test(path) else MODULE_LINES
        if len(lines) > most and LONG_BECAUSE not in text.split('"""')[1]:
            offenders.append(f"{where}: over {most} lines, without '{LONG_BECAUSE}...'")
        offenders += [
            f"{where}:{i}: over {LINE_LENGTH} characters"
            for i, line in enumerate(lines, 1)
            if len(line) > LINE_LENGTH
        ]
    assert not offenders, "\n".join(offenders)


def test_functions_fit_a_screen() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {name} is over {FUNCTION_LINES} lines"
        for path in MODULES
        for name, line, length in parsed(path)[0]
        if length > FUNCTION_LINES
    ]
    assert not offenders, "\n".join(offenders)


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


def test_public_names_have_docstrings() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}: {name} has no docstring"
        for path in filter(product, MODULES)
        for name in parsed(path)[1]
    ]
    assert not offenders, "\n".join(offenders)


def test_folders_packages_and_links_agree() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapping = config["package-dir"]
    for part in PARTS:
        link = ROOT / "kept" / part
        assert link.is_symlink() and os.readlink(link) == f"../{part}", part
        assert mapping[f"kept.{part}"] == part
    on_disk = {
        f"kept.{p.parent.relative_to(ROOT)}".replace("/", ".").replace(TOP_LEVEL, "pyspark_kept")
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
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if forbidden.search(line.split("#")[0]):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not offenders, "\n".join(offenders)


def test_children_take_no_code_from_the_working_directory() -> None:
    """``python -m`` puts it first on ``sys.path``; ``-P`` does not."""
    unsafe = re.compile(r"""sys\.executable,\s*["']-[mc]["']""")
    offenders = [
        f"{p.relative_to(ROOT)}: {found[0]}: start it with -P"
        for p in SOURCES
        if product(p) or p.relative_to(ROOT).parts[0] in ("examples", "deploy")
        for found in unsafe.finditer(text_of(p))
    ]
    assert not offenders, "\n".join(offenders)


def test_no_test_is_skipped_but_by_the_one_way_that_ci_can_forbid() -> None:
    """``REQUIRE_ALL=1`` fails what ``tests/tools/needs.py`` skips, and nothing else."""
    words = re.compile(r"\bpytest\.(skip|importorskip|xfail|mark\.(skip|skipif|xfail))\b(?!\.Exc)")
    words_imported = re.compile(r"from pytest import .*\b(skip|importorskip|xfail|mark)\b")
    allowed = {Path(__file__).resolve(), ROOT / "tests" / "tools" / "needs.py"}
    offenders = [
        f"{p.relative_to(ROOT)}:{i}: use cannot_run or need of tests/tools/needs.py"
        for p in SOURCES
        if is_test(p) and p not in allowed
        for i, line in enumerate(text_of(p).splitlines(), 1)
        if words.search(line) or words_imported.search(line) or "unittest.skip" in line
    ]
    assert not offenders, "\n".join(offenders)


def test_test_modules_do_not_import_each_other() -> None:
    imported = re.compile(r"^\s*(?:from|import) (tests\.(?:\w+\.)*test_\w+)", re.M)
    offenders = sorted(
        (str(p.relative_to(ROOT)), name)
        for p in SOURCES
        if is_test(p)
        for name in imported.findall(text_of(p))
    )
    assert not offenders, f"move what they share to tests/support or a conftest: {offenders}"


def test_fakes_have_types() -> None:
    """Tests build real parts, or give a few by name (tests/support/parts.py: Given)."""
    offenders = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if is_test(p) and p != Path(__file__).resolve() and "SimpleNamespace" in text_of(p)
    ]
    assert not offenders, offenders


def test_node_has_few_modules_of_its_own() -> None:
    """What a node is made of is in its subsystems."""
    assert len(list((ROOT / "node").glob("*.py"))) <= 4


def test_no_empty_promises() -> None:
    words = re.compile(r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")
    offenders = [
        f"{p.relative_to(ROOT)}:{i}"
        for p in SOURCES
        if p != Path(__file__).resolve()
        if words.search(text_of(p))
        for i, line in enumerate(text_of(p).splitlines(), 1)
        if words.search(line)
    ]
    assert not offenders


SEMANTICS = (ROOT / "docs" / "semantics.md").read_text()
PROTOCOL = (ROOT / "docs" / "compaction-protocol.md").read_text()
RULES = set(re.findall(r'<a id="rule-(\d+a?)"></a>', SEMANTICS))
COUNTEREXAMPLES = set(re.findall(r'<a id="c(\d+)"></a>', PROTOCOL))
NUMBERS = r"(\d+a?(?:(?:, | and | to |-)\d+a?)*)"
CITED_RULES = re.compile(rf"\b[Rr]ules? {NUMBERS}", re.S)
CITED_COUNTEREXAMPLE = re.compile(r"\bC([1-9]\d?)[a-e]?\b")
PAGES = re.compile(r"\b(?:SEMANTICS|SURFACE)\b|\bFACTS(?:\.md|\))")
"""Pages that this repository does not have."""


def test_every_rule_names_tests_that_are_there() -> None:
    for section in SEMANTICS.split('<a id="rule-')[1:]:
        number = section.split('"')[0]
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", section)
        assert named, f"rule {number} names no test"
        for path, name in named:
            source = (ROOT / "tests" / path).read_text()
            assert f"def {name}(" in source, f"rule {number}: {path} has no {name}"


FOLDERS = (*PARTS, "kept", "tests", "bench", "docs", "examples", "deploy")


def test_pages_name_files_that_are_there() -> None:
    missing = []
    for page in tracked("*.md"):
        for named in re.findall(r"`([\w.-]+/[\w./-]+)`", text_of(page)):
            known = named.split("/")[0] in FOLDERS and not named.startswith("bench/results")
            if known and not ((ROOT / named).exists() or (ROOT / f"{named}.py").exists()):
                missing.append(f"{page.relative_to(ROOT)}: {named}")
    assert not missing, missing


def test_pages_name_functions_that_are_there() -> None:
    """What a page names as `file.py: Class.method`."""
    missing = []
    for page in tracked("*.md"):
        for named, what in re.findall(r"`([\w./-]+\.py): ([\w.]+)`", text_of(page)):
            scope: ast.AST | None = ast.parse(text_of(ROOT / named))
            for part in what.split("."):
                inside = getattr(scope, "body", [])
                kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                scope = next((n for n in inside if isinstance(n, kinds) and n.name == part), None)
            if scope is None:
                missing.append(f"{page.relative_to(ROOT)}: {named}: {what}")
    assert not missing, missing


def test_lines_of_pages_fit() -> None:
    """A page is read in an editor and in a diff, too."""
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in tracked("*.md")
        for number, line in enumerate(text_of(page).splitlines(), 1)
        if len(line) > 200
    ]
    assert not long, long


def test_make_and_ci_name_files_that_are_there() -> None:
    missing = [
        f"{name}: {named}"
        for name in ("Makefile", ".ci/run")
        for named in re.findall(r"\b(?:tests|bench|examples)/[\w./-]+", (ROOT / name).read_text())
        if not (ROOT / named).exists() and not named.startswith("bench/results")
    ]
    assert not missing, missing


def test_what_the_code_cites_is_there() -> None:
    dangling = []
    for path in tracked("*.py", "*.pyx", "*.pxd", "*.h", "*.md"):
        if path == Path(__file__):
            continue
        text = text_of(path)
        where = path.relative_to(ROOT)
        for cited in CITED_RULES.findall(text):
            numbers = re.findall(r"\d+a?", cited)
            dangling += [f"{where}: rule {n}" for n in numbers if n not in RULES]
        if where.parts[0] != "tests" or where.parts[1] in ("replication", "sim", "model"):
            cited = CITED_COUNTEREXAMPLE.findall(text)
            dangling += [f"{where}: C{n}" for n in cited if n not in COUNTEREXAMPLES]
        dangling += [f"{where}: {page}" for page in PAGES.findall(text)]
    assert not dangling, dangling
