"""Installs a wheel in an empty environment and runs the tests of the kernels against it.

    python release/try_wheel.py WHEEL SDIST [--python PYTHON ...]

The tests come from the source archive, and run in a folder without the sources of kept, so that
only what is installed can be imported. Then ``kept`` starts a node, and its commands produce and
read a record. Once per ``--python`` (default: the one that runs this). Ends with status 1 at the
first that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

TESTED: Final = (
    "tests/storage/records",
    "tests/compaction/kernels",
    "tests/node/kafka/codec",
    "tests/client/protocol",
    "tests/compaction/test_kernels.py",
)
NODE: Final = """
import kept.testing
from kept.kernels import uncompiled
assert not uncompiled(load=True), uncompiled(load=True)
with kept.testing.Cluster() as cluster:
    import subprocess, sys
    run = [sys.executable, "-P", "-m", "kept"]
    at = ["--bootstrap", cluster.bootstrap]
    subprocess.run([*run, "topic", "create", "t", *at], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*run, "produce", "t", *at], input=b"hello\\n", check=True)
    read = [*run, "consume", "t", "--from-beginning", "--until-end", "--value-only", *at]
    out = subprocess.run(read, check=True, stdout=subprocess.PIPE).stdout
assert out == b"hello\\n", out
"""


def main() -> int:
    """Try it with every Python; the exit status."""
    arguments = argparse.ArgumentParser(description="Tries a wheel in an empty environment.")
    arguments.add_argument("wheel", type=Path)
    arguments.add_argument("sdist", type=Path)
    arguments.add_argument("--python", action="append", help="an interpreter; may be repeated")
    given = arguments.parse_args()
    for python in given.python or [sys.executable]:
        with tempfile.TemporaryDirectory(prefix="kept-try-") as scratch:
            try:
                try_one(given.wheel.resolve(), given.sdist, python, Path(scratch))
            except subprocess.CalledProcessError as error:
                said = " ".join(map(str, error.cmd))
                print(f"{given.wheel.name} on {python}: failed: {said}", file=sys.stderr)
                return 1
    return 0


def try_one(wheel: Path, sdist: Path, python: str, scratch: Path) -> None:
    """Install, test and serve. Raises CalledProcessError of what failed."""
    environment = scratch / "environment"
    subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    inside = str(environment / "bin" / "python")
    (scratch / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", sdist, "-C", scratch / "unpacked"], check=True)
    (source,) = (scratch / "unpacked").iterdir()
    folder = scratch / "tests"
    folder.mkdir()
    for name in ("tests", "pyproject.toml"):
        (source / name).rename(folder / name)
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["dependency-groups"]
    install = [sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--no-compile"]
    constraints = ["-c", str(source / "constraints.txt")]
    subprocess.run(
        [*install, *constraints, "--only-binary=:all:", str(wheel), *groups["test-kernels"]],
        check=True,
    )
    environ = {**os.environ, "PYTHONPATH": "", "PATH": f"{environment}/bin:{os.environ['PATH']}"}
    run = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTED]
    subprocess.run(run, cwd=folder, env=environ, check=True)
    subprocess.run([inside, "-P", "-c", NODE], cwd=scratch, env=environ, check=True)
    version = subprocess.run([inside, "-VV"], capture_output=True, text=True, check=True)
    print(f"{wheel.name} on {version.stdout.strip()}: works", flush=True)


if __name__ == "__main__":
    sys.exit(main())
