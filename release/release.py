"""Makes everything of a release from one commit, and the tag when asked to.

    python release/release.py [--tag] [--without-image] [--commit COMMIT] [--into DIR]

What is made comes from the commit alone, not from the files around it: the source archive, the
wheels (``wheels.py``), the image as an archive, bills of materials, the notes (its section of
CHANGELOG.md) and SHA256SUMS over all. Nothing leaves this machine; the last lines say which
commands publish. Without ``--tag`` it is a rehearsal: what would be wrong with the release is only
said. With it, each of these is an error, and at the end the commit gets its tag.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
RELEASE: Final = Path("release")
HEADING: Final = r"^## {version} \(\d{{4}}-\d\d-\d\d\)$"
UNRELEASED: Final = "## Unreleased"
VERSIONED: Final = {
    "kept/__init__.py": '__version__ = "{version}"',
    "deploy/Dockerfile": "kept:{version} ",
    "deploy/compose.yaml": "kept:{version}}}",
    "deploy/compose.secure.yaml": "kept:{version}}}",
    "deploy/helm/kept/Chart.yaml": "appVersion: {version}\n",
    "deploy/kubernetes/kept.yaml": "image: kept:{version}\n",
}
"""Files that name the version, and how; pyproject.toml decides."""
SUMS: Final = "SHA256SUMS"
PUBLISH: Final = """\
To publish it:
  git push origin {tag}
  twine upload {into}/*.whl {into}/*.tar.gz
  docker load -i {into}/{image} && docker push REGISTRY/kept:{version}"""


def main() -> int:
    """Make it; the exit status."""
    arguments = argparse.ArgumentParser(description="Makes everything of a release.")
    arguments.add_argument("--commit", default="HEAD")
    arguments.add_argument("--into", type=Path, default=Path("dist"))
    arguments.add_argument("--tag", action="store_true", help="no rehearsal: tag the commit")
    arguments.add_argument("--without-image", action="store_true", help="where no Docker is")
    given = arguments.parse_args()
    if other := foreign(given.into):
        arguments.error(f"--into {given.into} holds {other}, which no release made: empty it first")
    commit = _git("rev-parse", f"{given.commit}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="kept-release-") as scratch:
        tree = Path(scratch) / "tree"
        export(commit, tree)
        version = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
        tag = f"v{version}"
        wrong = list(mistakes(tree, version))
        if _git("tag", "--list", tag):
            wrong.append(f"the tag {tag} is there already")
        for mistake in wrong:
            print(f"release: {mistake}", file=sys.stderr)
        if wrong and given.tag:
            return 1
        made = Path(scratch) / "made"
        made.mkdir()
        seconds = _git("show", "-s", "--format=%ct", commit).strip()
        try:
            packages(tree, made, seconds)
            if not given.without_image:
                image(tree, made, version, commit)
        except subprocess.CalledProcessError as error:
            print(f"release: failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
            return 1
        notes = section((tree / "CHANGELOG.md").read_text(), version)
        (made / "NOTES.md").write_text(notes)
        write_sums(made)
        if other := foreign(given.into):
            print(f"release: {given.into} holds {other}, which no release made", file=sys.stderr)
            return 1
        shutil.rmtree(given.into, ignore_errors=True)
        shutil.move(made, given.into)
    if given.tag:
        _git("tag", "--annotate", "--message", f"kept {version}", tag, commit)
    print((given.into / SUMS).read_text(), end="")
    if given.tag:
        print(PUBLISH.format(tag=tag, into=given.into, image=_archive(version), version=version))
    else:
        print(f"A rehearsal of {tag} at {commit[:12]}: nothing is tagged. --tag does it.")
    return 0


def export(commit: str, into: Path) -> None:
    """The files of a commit, and no others, with its time."""
    into.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "x", "-C", into], input=archive.stdout, check=True)


def mistakes(tree: Path, version: str) -> Iterator[str]:
    """What keeps the files of a commit from being released as this version."""
    for name, wanted in VERSIONED.items():
        if (text := wanted.format(version=version)) not in (tree / name).read_text():
            yield f"{name} does not say {text.strip()!r}"
    changes = (tree / "CHANGELOG.md").read_text()
    if not re.search(HEADING.format(version=re.escape(version)), changes, re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'"
    if section(changes, "Unreleased").strip():
        yield f"CHANGELOG.md has changes below {UNRELEASED!r}"


def section(changes: str, version: str) -> str:
    """What CHANGELOG.md says of a version, without its heading; empty if nothing."""
    found = re.search(
        rf"^## {re.escape(version)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)",
        changes,
        re.MULTILINE | re.DOTALL,
    )
    return found[1].strip() + "\n" if found and found[1].strip() else ""


def packages(tree: Path, into: Path, seconds: str) -> None:
    """Source archive, wheels, and the wheels' bill of materials; one wheel is tried.

    Raises CalledProcessError of what failed. ``seconds`` is the commit's time: with the same tools
    the same commit gives the same wheels, byte by byte.
    """
    environ = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    build = [sys.executable, "-m", "build", "-q", "--sdist", "--no-isolation", "--outdir"]
    subprocess.run([*build, into.resolve(), tree], env=environ, check=True)
    (sdist,) = into.glob("*.tar.gz")
    script = tree / RELEASE / "wheels.py"
    subprocess.run([sys.executable, script, sdist, "--into", into], env=environ, check=True)
    machine = os.uname().machine
    (wheel,) = into.glob(f"*-manylinux2014_{machine}.whl")
    script = tree / RELEASE / "try_wheel.py"
    subprocess.run([sys.executable, script, wheel, sdist], check=True)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
        (into / Path(name).name).write_bytes(archive.read(name))


def image(tree: Path, into: Path, version: str, commit: str) -> None:
    """The image for this machine's kind of processor as an archive, and its bill of materials.

    Raises CalledProcessError of what failed.
    """
    name = f"kept:{version}"
    labels = {"version": version, "revision": commit}
    given = [f"--label=org.opencontainers.image.{key}={value}" for key, value in labels.items()]
    dockerfile = tree / "deploy" / "Dockerfile"
    subprocess.run(
        ["docker", "build", "-q", "-f", dockerfile, "-t", name, *given, tree], check=True
    )
    saved = subprocess.run(["docker", "save", name], stdout=subprocess.PIPE, check=True)
    (into / _archive(version)).write_bytes(gzip.compress(saved.stdout, compresslevel=6, mtime=0))
    shown = subprocess.run(
        ["docker", "run", "--rm", "--entrypoint", "cat", name, "/opt/kept/kept.cdx.json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    (into / f"kept-{version}-image.cdx.json").write_bytes(shown.stdout)


def foreign(folder: Path) -> str:
    """The name of something in ``folder`` that an earlier release, or ``make dist``, did not put
    there; empty where there is none.
    """
    if not folder.exists():
        return ""
    sums = folder / SUMS
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    known = {SUMS, *(line.partition("  ")[2] for line in lines)}
    for path in sorted(folder.iterdir()):
        package = path.name.startswith("kept_log-") and path.name.endswith((".whl", ".tar.gz"))
        if path.is_dir() or not (path.name in known or package):
            return path.name
    return ""


def write_sums(into: Path) -> None:
    """SHA256SUMS of all files, as ``sha256sum --check`` reads it."""
    files = sorted(path for path in into.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (into / SUMS).write_text("".join(lines))


def _archive(version: str) -> str:
    return f"kept-{version}-image-{os.uname().machine}.tar.gz"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
