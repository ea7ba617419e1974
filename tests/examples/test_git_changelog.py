"""``make demo`` on small repositories with everything that a history may hold."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "git_changelog.py"


class Repository:
    """A git repository that a test fills."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            **{
                f"GIT_{who}_{what}": "x@example.org"
                for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")
            },
        }
        path.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.path, env=self.environ, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def write(self, name: str | bytes, content: bytes) -> None:
        path = os.path.join(os.fsencode(self.path), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as out:
            out.write(content)

    def commit(self, *arguments: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change", *arguments)


def demo(path: Path, *more: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--repo", str(path), *more],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if status == 0:
        assert done.stdout.splitlines()[-1] == "equal"
        one_node, _, three_nodes = done.stdout.partition("2. Three nodes")
        if three_nodes:
            assert one_node.count("\nequal\n") == (not more)
            assert "(kill -9 of process" in three_nodes
            assert "failover gap 0.00 s" not in three_nodes
            assert "in sync again: node 0, node 1, node 2, all at offset" in three_nodes
            assert "applied by all: generation " in three_nodes
        assert done.stderr == ""
    return done


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_a_history_with_everything(repository):
    """Binary and empty files, links, modes, odd names, renames, deletions, merges, a submodule."""
    inner = Repository(repository.path.parent / "inner")
    inner.write("f", b"inside a submodule")
    inner.commit()

    repository.write("text", b"one\n")
    repository.write("empty", b"")
    repository.write("binary", bytes(range(256)) * 50)
    repository.write("crlf.txt", b"a\r\nb\r\n")
    repository.write(".gitattributes", b"*.txt text=auto eol=crlf\n")
    repository.write("deep/er/file", b"x")
    repository.write(b"n\xc3\xa4me\twith\nodd\xff:bytes", b"odd")
    repository.write(":100644 100644 a b M", b"looks like git's own output")
    os.symlink("text", repository.path / "link")
    os.symlink("no/such/place", repository.path / "dangling")
    repository.commit()
    for n in range(20):
        repository.write("text", b"%d\n" % n * 50)
        repository.commit()
    repository.git("mv", "deep/er/file", "moved")
    repository.git("rm", "-q", "crlf.txt")
    os.chmod(repository.path / "binary", 0o755)
    repository.commit()
    repository.git("checkout", "-q", "-b", "side")
    repository.write("side", b"from a branch")
    repository.write("text", b"changed on a branch")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.write("main", b"meanwhile")
    repository.commit()
    repository.git("merge", "-q", "--no-edit", "side")
    os.unlink(repository.path / "link")
    repository.write("link", b"a file now")
    os.unlink(repository.path / "main")
    os.symlink("text", repository.path / "main")
    repository.git("-c", "protocol.file.allow=always", "submodule", "add", str(inner.path), "sub")
    repository.commit()
    repository.git("rm", "-q", "-f", "sub")
    repository.write("sub", b"a file where a submodule was")
    repository.commit()
    repository.git("commit", "-q", "--allow-empty", "-m", "nothing")
    repository.git(
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "--force",
        "--name",
        "again",
        str(inner.path),
        "other",
    )
    repository.commit()

    said = demo(repository.path).stdout
    assert "2. Three nodes" in said
    assert "submodules are left out: other, sub" in said
    assert "2 deletions" in said
    assert "shallow" not in said
    assert "compaction saved" in said


@pytest.mark.slow
def test_a_shallow_clone_is_said_to_be_one(repository):
    for n in range(6):
        repository.write("a", b"%d" % n)
        repository.write(f"b{n}", b"x")
        repository.commit()
    shallow = repository.path.parent / "shallow"
    repository.git("clone", "-q", "--depth", "3", f"file://{repository.path}", str(shallow))
    said = demo(shallow, "--part", "1").stdout
    assert "this is a shallow clone" in said
    assert "3 commits" in said


@pytest.mark.slow
def test_one_commit(repository):
    repository.write("only", b"one")
    repository.commit()
    assert "1 commits" in demo(repository.path, "--part", "1").stdout


@pytest.mark.slow
def test_blobs_larger_than_a_message_may_be_by_default(repository):
    for n in range(3):
        repository.write("large", os.urandom(3_000_000 + n))
        repository.write("small", b"%d" % n)
        repository.commit()
    assert "2. Three nodes" in demo(repository.path).stdout


def test_no_commits(repository):
    assert "no commits" in demo(repository.path).stdout


@pytest.mark.slow
def test_everything_was_deleted(repository):
    repository.write("gone", b"x")
    repository.commit()
    repository.git("rm", "-q", "gone")
    repository.git("commit", "-q", "-m", "delete")
    assert "0 files" in demo(repository.path, "--part", "2").stdout


def test_commits_without_files(repository):
    repository.git("commit", "-q", "--allow-empty", "-m", "nothing")
    assert "no commit changes a file" in demo(repository.path).stdout


def test_no_repository(tmp_path):
    assert "not a git repository" in demo(tmp_path, status=2).stderr


def load_example(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    return importlib.import_module(name)


def test_a_difference_is_found(monkeypatch):
    """The comparison can fail: for a missing, an extra, a changed file and a changed mode."""
    blob = "257cc5642cb1a054f08cc83f2d943e56fd3ebe99"  # git hash-object of "foo\n"
    tree = {b"f": ("100644", blob)}
    find = load_example(monkeypatch, "git_history").first_difference
    assert find({b"f": ("100644", b"foo\n")}, tree, "sha1") is None
    assert "f is in HEAD but not in the topic" in find({}, tree, "sha1")
    assert "in the topic but not in HEAD" in find({b"f": ("100644", b"foo\n")}, {}, "sha1")
    assert f"{blob} in HEAD" in find({b"f": ("100644", b"bar\n")}, tree, "sha1")
    assert "mode 100755" in find({b"f": ("100755", b"foo\n")}, tree, "sha1")


LOSES_A_RECORD = """
import sys
import git_changelog

read_back = git_changelog.read_back

def less(plan, bootstrap):
    table, records, tombstones = read_back(plan, bootstrap)
    if {gone}:
        del table[b"b"]
    return table, records - {lost}, tombstones

git_changelog.read_back = less
git_changelog.main()
"""


@pytest.mark.parametrize(
    ("part", "lost", "said"),
    [
        (1, 0, "different: b is in HEAD but not in the topic"),
        pytest.param(2, 0, "different: b is in HEAD but not in the topic", marks=pytest.mark.slow),
        pytest.param(
            2, 1, "different: 3 records were acknowledged, the topic has 2", marks=pytest.mark.slow
        ),
    ],
)
def test_the_demo_fails_by_name(repository, part, lost, said):
    for name in "abc":
        repository.write(name, b"x")
    repository.commit()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LOSES_A_RECORD.format(gone=not lost, lost=lost),
            "--repo",
            str(repository.path),
            "--part",
            str(part),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == f"git_changelog: {said}\n"
