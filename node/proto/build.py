"""Compiles ``*.proto`` to ``*_pb2.py`` and stubs, beside them.

The package build runs it (``[tool.setuptools.cmdclass]`` in pyproject.toml: wheels, editable
installs), and ``python node/proto/build.py`` does the same by hand. Needs grpcio-tools, which the
build requires and a running node does not. Nothing is written when nothing changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

try:
    from setuptools.command import build_py as _setuptools
except ImportError:
    _BuildPy: type = object
else:
    _BuildPy = _setuptools.build_py

HERE: Final = Path(__file__).resolve().parent
PACKAGE: Final = Path("kept/node/proto")
"""Where the files are for protoc: the names in ``import`` and in the modules made."""


def compile_protos(folder: Path = HERE) -> list[Path]:
    """Make the modules of all ``.proto`` files in a folder; those that changed.

    Raises RuntimeError with what protoc says.
    """
    sources = sorted(folder.glob("*.proto"))
    changed = []
    with tempfile.TemporaryDirectory(prefix="kept-proto-") as root:
        package = Path(root) / PACKAGE
        package.mkdir(parents=True)
        for source in sources:
            shutil.copy(source, package)
        names = [str(PACKAGE / source.name) for source in sources]
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-I.", "--python_out=.", *names]
        done = subprocess.run(
            [*command, "--pyi_out=."], cwd=root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"protoc failed: {done.stderr.strip()}")
        for made in sorted([*package.glob("*_pb2.py"), *package.glob("*_pb2.pyi")]):
            target = folder / made.name
            if not target.exists() or target.read_bytes() != made.read_bytes():
                shutil.copyfile(made, target)
                changed.append(target)
    return changed


class BuildPy(_BuildPy):  # type: ignore[misc]
    """setuptools' ``build_py`` that first makes the modules."""

    def run(self) -> None:
        """Compile, then copy modules as ever (or not, in an editable install)."""
        compile_protos()
        super().run()


if __name__ == "__main__":
    for path in compile_protos():
        print(path)
