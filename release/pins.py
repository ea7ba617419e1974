"""Writes release/requirements: the packages that an image or a release needs, with hashes.

    python release/pins.py

Versions are those of constraints.txt, alone; a hash is there for each file that the registry has of
them, so that ``pip install --require-hashes`` takes nothing else, wherever it gets it from. Run it
after a change of constraints.txt or of what pyproject.toml requires; ``tests/packaging`` compares.
The dependency group ``release`` has the resolver, ``uv``.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "release" / "requirements"
HEADER: Final = "# Made by release/pins.py from constraints.txt and pyproject.toml: {what}.\n"


def requirements(project: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Per file: what it is for, and the requirements whose closure it has."""
    groups, own = project["dependency-groups"], project["project"]
    build = project["build-system"]["requires"]
    return {
        "image.txt": (
            "what a node needs, whatever its listeners ask for",
            [*own["dependencies"], *own["optional-dependencies"]["oauth"]],
        ),
        "image-build.txt": ("what builds the image", [*build, "wheel", *groups["image-build"]]),
        "release.txt": (
            "what makes and checks a release",
            [*build, "wheel", *_flat(groups, "release")],
        ),
    }


def main() -> int:
    """Write the files; the resolver's exit status if it fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    FOLDER.mkdir(exist_ok=True)
    for name, (what, wanted) in requirements(project).items():
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["--generate-hashes", "--python-version", "3.11", "--python-platform", "linux"]
        command += ["-c", str(ROOT / "constraints.txt"), "-"]
        done = subprocess.run(
            command, input="\n".join(wanted), stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            return done.returncode
        (FOLDER / name).write_text(HEADER.format(what=what) + done.stdout)
        print(FOLDER / name)
    return 0


def _flat(groups: dict[str, Any], name: str) -> list[str]:
    """The requirements of a dependency group and of those it includes (PEP 735)."""
    found: list[str] = []
    for one in groups[name]:
        found += _flat(groups, one["include-group"]) if isinstance(one, dict) else [one]
    return found


if __name__ == "__main__":
    sys.exit(main())
