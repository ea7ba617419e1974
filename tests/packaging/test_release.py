"""What release/release.py refuses, and what it makes of the changelog and of a commit."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from release import release
from tests.docs.blocks import Command, given_to, run, typed

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHANGES = """# Changelog

## Unreleased

## 1.1.0 (2027-01-31)

### Install
- A wheel.

## 1.1 (2026-12-24)
- Older.
"""


PAGE = "docs/release.md"


@pytest.fixture
def tree(tmp_path):
    """The files that name the version, and a changelog that is ready for it."""
    for name in release.VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = f"# Changelog\n\n## Unreleased\n\n## {VERSION} (2027-01-31)\n- All of it.\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    return tmp_path


def test_every_file_that_names_the_version_names_this_one(tree):
    assert list(release.mistakes(tree, VERSION)) == []


def test_another_version_is_found_in_each_of_them(tree):
    found = list(release.mistakes(tree, "9.9.9"))
    for name in release.VERSIONED:
        assert any(line.startswith(f"{name} does not say ") for line in found), found
    assert "CHANGELOG.md has no heading '## 9.9.9 (YYYY-MM-DD)'" in found


def test_changes_that_are_not_released_are_found(tree):
    text = (tree / "CHANGELOG.md").read_text()
    (tree / "CHANGELOG.md").write_text(text.replace("## Unreleased\n", "## Unreleased\n- One.\n"))
    assert list(release.mistakes(tree, VERSION)) == [
        "CHANGELOG.md has changes below '## Unreleased'"
    ]


def test_notes_are_the_section_of_that_version():
    assert release.section(CHANGES, "1.1.0") == "### Install\n- A wheel.\n"
    assert release.section(CHANGES, "1.1") == "- Older.\n"
    assert release.section(CHANGES, "Unreleased") == ""
    assert release.section(CHANGES, "2.0.0") == ""


def test_sums_are_those_that_sha256sum_checks(tmp_path):
    (tmp_path / "b.whl").write_bytes(b"b")
    (tmp_path / "a.tar.gz").write_bytes(b"a")
    release.write_sums(tmp_path)
    release.write_sums(tmp_path)
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256(content).hexdigest()}  {name}"
        for name, content in (("a.tar.gz", b"a"), ("b.whl", b"b"))
    ]
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)


def stand_in(wheel: Path) -> None:
    """A wheel with nothing in it but what ``pip`` asks of it."""
    name, version, python, abi, platform = wheel.stem.split("-")
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {python}-{abi}-{platform}\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))


def typed_here() -> list[Command]:
    """The commands of the page, for this kind of processor."""
    ((_, text, line),) = given_to("tests/packaging/test_release.py", ROOT / PAGE)
    return list(typed(text.replace("x86_64", os.uname().machine), PAGE, line))


@pytest.mark.slow
def test_what_a_release_holds_is_checked_and_installed_as_the_page_says(tmp_path):
    """With an empty wheel of the name that the page gives: its version, Python and platform."""
    check, install = typed_here()
    wheel = tmp_path / install.text.rpartition("/")[2]
    assert wheel.name.startswith(f"kept_log-{VERSION}-")
    stand_in(wheel)
    (tmp_path / "left-out").write_bytes(b"x")
    release.write_sums(tmp_path)
    (tmp_path / "left-out").unlink()
    venv.create(tmp_path / "venv", with_pip=True)
    shown = Command("python -m pip show kept-log", ("…", f"Version: {VERSION}", "…"), PAGE, 0)
    alone = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    programs = tmp_path / "venv" / "bin"
    run([check, install, shown], tmp_path, 1, 200, programs, environ=alone)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(AssertionError, match="FAILED"):
        run([check], tmp_path, 1, 60)


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path, monkeypatch, capsys):
    assert release.foreign(tmp_path / "absent") == release.foreign(tmp_path) == ""
    (tmp_path / "kept_log-1.0.tar.gz").write_bytes(b"of make dist")
    (tmp_path / "NOTES.md").write_text("notes")
    release.write_sums(tmp_path)
    assert release.foreign(tmp_path) == ""
    (tmp_path / "thesis").mkdir()
    assert release.foreign(tmp_path) == "thesis"
    monkeypatch.setattr(sys, "argv", ["release.py", "--into", str(tmp_path)])
    with pytest.raises(SystemExit):
        release.main()
    assert "holds thesis, which no release made" in capsys.readouterr().err
    assert (tmp_path / "thesis").is_dir()


def test_only_what_is_committed_is_released(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            cwd=repository,
            check=True,
            capture_output=True,
        )

    git("init")
    (repository / "in").write_text("committed\n")
    git("add", "in")
    git("commit", "-m", "one")
    (repository / "in").write_text("changed\n")
    (repository / "stray").write_text("stray\n")
    monkeypatch.setattr(release, "ROOT", repository)
    release.export("HEAD", tmp_path / "tree")
    assert {path.name: path.read_text() for path in (tmp_path / "tree").iterdir()} == {
        "in": "committed\n"
    }
