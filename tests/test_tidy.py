"""The rules of the house that a program can check (docs/architecture.md, at its end)."""

from __future__ import annotations

import ast
import builtins
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
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
    for block in BLOCKS:
        for inner in getattr(node, block, ()):
            yield from functions(inner)


@dataclass
class Scope:
    """The names in a module (also what it imports) or in a class, whose ``bases`` have more."""

    names: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)
    classes: dict[str, Scope] = field(default_factory=dict)

    def collect(self, node: ast.AST) -> None:
        """Add the names that the statements of a module or of a class make."""
        for block in BLOCKS:
            for inner in getattr(node, block, ()):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.names.add(inner.name)
                    self.collect_attributes(inner)
                elif isinstance(inner, ast.ClassDef):
                    bases = [ast.unparse(base).split("[")[0] for base in inner.bases]
                    scope = Scope(bases=[base.rpartition(".")[2] for base in bases])
                    scope.collect(inner)
                    self.names.add(inner.name)
                    self.classes[inner.name] = scope
                else:
                    self.names.update(names_made(inner))
                    self.collect(inner)

    def collect_attributes(self, node: ast.AST) -> None:
        """What a function imports, and what a method sets in its object."""
        for block in BLOCKS:
            for inner in getattr(node, block, ()):
                self.names.update(names_made(inner, of_self=True))
                self.collect_attributes(inner)


BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


def names_made(node: ast.AST, *, of_self: bool = False) -> Iterator[str]:
    """What one statement imports or assigns; ``of_self``: assigned to attributes of it only."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple):
            targets += target.elts
        elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
            yield target.attr
        elif isinstance(target, ast.Name) and not of_self:
            yield target.id
    alias = getattr(node, "name", None)
    if isinstance(alias, ast.Name):  # type X = ...
        yield alias.id


@functools.cache
def parsed(path: Path) -> tuple[list[tuple[str, int, int]], list[str], Scope]:
    """Name, first line and length of each function, the public names without a docstring, and all
    names.
    """
    tree = ast.parse(text_of(path))
    lengths = [(f.name, f.lineno, (f.end_lineno or 0) - f.lineno + 1) for f in functions(tree)]
    things = [("the module", tree), *public_things(tree)]
    bare = [name for name, node in things if not ast.get_docstring(node)]  # type: ignore[arg-type]
    scope = Scope()
    scope.collect(tree)
    return lengths, bare, scope


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


def test_docstrings_say_what_a_thing_is() -> None:
    """Whoever reads a class in an editor sees its docstring, not its module's."""
    elsewhere = re.compile(r'"""See the module|\. See the module\b')
    offenders = [
        f"{path.relative_to(ROOT)}: says 'see the module' and nothing else"
        for path in MODULES
        if path != Path(__file__).resolve() and elsewhere.search(text_of(path))
    ]
    assert not offenders, "\n".join(offenders)


def test_lines_are_not_packed() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{i}"
        for path in MODULES
        for i, line in enumerate(text_of(path).splitlines(), 1)
        if re.search(r"# fmt: (off|skip)", line)
    ]
    assert not offenders, "\n".join(offenders)


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
NO_NAMES = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", GLOSSARY, re.M))))
"""The words of the glossary that name nothing."""


def public_names(scope: Scope) -> Iterator[str]:
    """The public names of a module, and in its classes those of methods and fields."""
    yield from (name for name in scope.names if not name.startswith("_"))
    for class_name, inner in scope.classes.items():
        if not class_name.startswith("_"):
            yield from (f"{class_name}.{name}" for name in public_names(inner))


def test_public_names_are_no_words_that_name_nothing() -> None:
    assert len(NO_NAMES) > 10, "the table of the glossary is written otherwise: it was not found"
    offenders = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in filter(product, MODULES)
        for name in public_names(parsed(path)[2])
        if name.rpartition(".")[2].lower() in NO_NAMES
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


def test_texts_name_partitions_as_commands_take_them() -> None:
    """``users:0``, not ``users-0``, but where a bug of ours is told or a debugger shows it."""
    found = []
    for path in filter(product, MODULES):
        if not re.search(r"\{[\w.]*\b(tp|topic_partition)\}", text_of(path)):
            continue
        nodes = [*ast.walk(ast.parse(text_of(path)))]
        ours = [f for f in nodes if isinstance(f, ast.FunctionDef) and f.name == "__repr__"]
        ours += [
            call
            for call in nodes
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "InvariantViolation"
        ]
        passed_over = {id(inner) for each in ours for inner in ast.walk(each)}
        found += [
            f"{path.relative_to(ROOT)}:{value.lineno}: {ast.unparse(value.value)}"
            for value in nodes
            if isinstance(value, ast.FormattedValue)
            and id(value) not in passed_over
            and ast.unparse(value.value).rpartition(".")[2] in ("tp", "topic_partition")
        ]
    assert not found


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
    """Tests build real parts, or give a few by name (tests/support/given.py)."""
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
    promises = ("NotImplementedError", "TODO", "FIXME", "XXX")
    words = re.compile(rf"\b({'|'.join(promises)})\b")
    offenders = [
        f"{p.relative_to(ROOT)}:{i}"
        for p in SOURCES
        if p != Path(__file__).resolve()
        if any(word in text_of(p) for word in promises)
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


UNION = re.compile(
    r"^(?:Event|Effect|Report|Timer|Change|AppendEvent|Decision) = (\(.*?^\)|.*)", re.M | re.S
)
"""What a core hears or wants done; a name without a dot is of the module or imported there."""


def test_no_two_events_have_one_name() -> None:
    """Among the events and effects of all cores (ADR 19)."""
    folders = ("replication", "cluster", "node/coordinator")
    paths = [p for p in MODULES if str(p.relative_to(ROOT)).startswith(folders)]
    unions = "".join(" ".join(UNION.findall(text_of(path))) for path in paths)
    events = set(re.findall(r"(?<![.\w])[A-Z]\w+(?![.\w])", unions))
    assert len(events) > 100, "the unions are written otherwise: they were not found"
    places = defaultdict(list)
    for path in paths:
        for name in events & parsed(path)[2].classes.keys():
            places[name].append(str(path.relative_to(ROOT)))
    assert not (twice := {name: at for name, at in places.items() if len(at) > 1}), twice


def test_pages_are_in_the_navigation() -> None:
    """Every page, once; decisions and formats, which have pages that list them, are numbered."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/-]+\.md)$", nav, re.M)
    made = {"reference/commands.md", "reference/metrics.md", "reference/http-api.md"}
    pages = [str(p.relative_to(ROOT / "docs")) for p in tracked("docs/*.md", "docs/reference/*.md")]
    pages = [page for page in pages if not page.startswith(("adr/", "formats/"))]
    assert sorted(listed) == sorted({*pages, *made, "adr/README.md", "formats/README.md"})
    numbers = sorted(int(p.name[:4]) for p in tracked("docs/adr/*.md"))
    assert numbers == list(range(1, len(numbers) + 1)), "two decisions of one number, or a gap"


NAMED_FILE = re.compile(r"``([\w/]+\.py)``")
ROLE = re.compile(r":(?:class|mod|func|meth|attr|data|exc):`~?([\w.\s]+)`")
MEMBER = re.compile(r"``([A-Z]\w*\.(?!scala|java)[a-z_0-9]+)``")
"""Apache Kafka's members, which are cited beside ours, have capitals; so do its files."""


def module_of(path: Path) -> str:
    """``kept.storage.disk``, ``tests.sim.world``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = ("kept",) if parts[0] in PARTS else ()
    return ".".join((*package, *(part for part in parts if part != "__init__")))


class Names:
    """All names that a docstring or a comment may mean."""

    def __init__(self) -> None:
        paths = [p for p in tracked("*.py", "*.pyi") if not p.name.endswith("_pb2.pyi")]
        self.scopes = {module_of(path): parsed(path)[2] for path in paths}
        for path in tracked("*.pyx"):
            self.scopes.setdefault(module_of(path), Scope())
        for path in paths:
            self.scopes.setdefault(module_of(path.parent), Scope())
        self.classes: dict[str, list[Scope]] = defaultdict(list)
        for scope in self.scopes.values():
            for name, inner in scope.classes.items():
                self.classes[name].append(inner)
        self.modules: dict[str, list[str]] = defaultdict(list)
        """Full names by their last part."""
        for name in self.scopes:
            self.modules[name.rpartition(".")[2]].append(name)

    def has_member(self, class_name: str, member: str) -> bool:
        """A class of that name has it, or a base of it that is not ours may have it."""
        for scope in self.classes.get(class_name, ()):
            if member in scope.names or member in scope.classes:
                return True
            for base in scope.bases:
                ours = base in self.classes and base != class_name
                if self.has_member(base, member) if ours else hasattr(builtins, base):
                    return True
        return False

    def inside(self, module: str, rest: list[str]) -> bool:
        """Whether a module has ``rest``: a name, or a class and its member."""
        if not rest:
            return True
        scope = self.scopes[module]
        if rest[0] not in scope.names:
            return False
        is_class = rest[0] in self.classes
        return len(rest) == 1 or not is_class or self.has_member(rest[0], rest[1])

    def resolves(self, target: str, module: str) -> bool:
        """Whether what ``module`` names is there: by its full name or the end of it, or as the
        module itself would say it.
        """
        first, *rest = parts = target.lstrip(".").split(".")
        for cut in range(len(parts), 0, -1):
            end = "." + ".".join(parts[:cut])
            for name in self.modules.get(parts[cut - 1], ()):
                if f".{name}".endswith(end) and self.inside(name, parts[cut:]):
                    return True
        scope = self.scopes[module]
        if not rest:
            return (
                first in scope.names
                or any(self.has_member(name, first) for name in scope.classes)
                or hasattr(builtins, first)
            )
        if first in self.classes:
            return self.has_member(first, rest[0])
        return first in scope.names or first in sys.stdlib_module_names


def test_what_comments_name_is_there() -> None:
    """Files, and names of ours: by a role, or as ``Class.member``. Of Python's modules only."""
    names = Names()
    files = {path.relative_to(ROOT) for path in SOURCES}
    dangling = []
    for path in MODULES:
        where, text, module = path.relative_to(ROOT), text_of(path), module_of(path)
        for named in NAMED_FILE.findall(text):
            near = [f for f in files if f.parts[0] == where.parts[0] and f.name == named]
            known = near or Path(named) in files or where.parent / named in files
            if not known and named.removesuffix(".py") not in sys.stdlib_module_names:
                dangling.append(f"{where}: {named}")
        for found in ROLE.findall(text):
            target = re.sub(r"\s+", "", found)
            if not names.resolves(target, module):
                dangling.append(f"{where}: {target}")
        for found in MEMBER.findall(text):
            class_name, member = found.split(".")
            if class_name in names.classes and not names.has_member(class_name, member):
                dangling.append(f"{where}: {found}")
    assert not dangling, "\n".join(dangling)
