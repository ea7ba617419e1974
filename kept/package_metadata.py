"""What a package says of itself beside pyproject.toml: its links and its bill of materials.

Two of the package build's commands (``[tool.setuptools.cmdclass]``). The README's links are
relative, for whoever reads it in the repository; a registry shows it elsewhere, so the metadata
gets absolute ones, to the files of the version's tag. A wheel gets a CycloneDX document under
``.dist-info/sboms`` (:pep:`770`): what its code was generated and compiled with, and which other
packages it requires. Versions of these are the installer's choice, so the document has none: the
image's document, which docs/image.md is about, has them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from setuptools.command import bdist_wheel as _bdist_wheel
from setuptools.command import egg_info as _egg_info

SBOM: Final = "kept-log.cdx.json"
SPEC_VERSION: Final = "1.6"
GENERATORS: Final = {
    "Cython": "its code is in every compiled kernel",
    "grpcio-tools": "its protoc wrote the modules of kept/node/proto",
    "setuptools": "it put the wheel together",
}
_TARGET: Final = re.compile(
    r"""(?P<before>
        (?P<image>!?)\[(?P<text>(?:!\[[^]]*\]\([^)]*\)|[^][])*)\]\(  # [text]( or ![text](
        | \b(?P<attribute>src|srcset|href)="
    )
    (?P<target>(?![a-z][a-z0-9+.-]*:|\#)[^)"\s]+)  # neither a scheme nor within the page
    """,
    re.VERBOSE,
)
_PICTURE: Final = frozenset({"src", "srcset"})
_EggInfo: Any = _egg_info.egg_info
_BdistWheel: Any = _bdist_wheel.bdist_wheel


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Markdown whose links to files of the repository are those of ``tag`` on its web pages.

    Pictures are linked as files, all else as pages. Links with a scheme and links within the page
    stay as they are.
    """

    def absolute(found: re.Match[str]) -> str:
        before = found["before"]
        if found["text"]:
            inner = absolute_links(found["text"], repository, tag)
            before = before.replace(found["text"], inner, 1)
        kind = "raw" if found["image"] or found["attribute"] in _PICTURE else "blob"
        return f"{before}{repository}/{kind}/{tag}/{found['target'].removeprefix('./')}"

    return _TARGET.sub(absolute, text)


def bill_of_materials(metadata: Any, compiler: str, seconds: int | None) -> dict[str, Any]:
    """A CycloneDX document about the wheel with this metadata (of :mod:`importlib.metadata`).

    ``seconds`` since the epoch is when the wheel was built, None if that is not to be said. The
    same arguments give the same document.
    """
    name, version = metadata["Name"], metadata["Version"]
    itself = f"pkg:pypi/{name}@{version}"
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    dependencies = [
        _component(one.name, scope="optional" if _of_an_extra(one) else "required")
        | {"properties": [{"name": "kept:requirement", "value": str(one)}]}
        for one in sorted(required, key=lambda one: (one.name.lower(), str(one)))
    ]
    for number, one in enumerate(dependencies):
        one["bom-ref"] = f"{number}:{one['purl']}"
    generators = [
        _component(generator, importlib.metadata.version(generator), description=why)
        for generator, why in GENERATORS.items()
    ]
    generators.append({"type": "application", "name": "C compiler", "version": compiler})
    described: dict[str, Any] = {
        "lifecycles": [{"phase": "build"}],
        "tools": {"components": generators},
        "component": {
            "type": "application",
            "bom-ref": itself,
            "name": name,
            "version": version,
            "description": metadata["Summary"],
            "licenses": [{"license": {"id": metadata["License-Expression"]}}],
            "purl": itself,
        },
    }
    if seconds is not None:
        described["timestamp"] = datetime.fromtimestamp(seconds, UTC).isoformat()
    references = [one["bom-ref"] for one in dependencies]
    contents = {
        "metadata": described,
        "components": dependencies,
        "dependencies": [
            {"ref": itself, "dependsOn": references},
            *({"ref": one} for one in references),
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(contents, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": serial.urn,
        "version": 1,
        **contents,
    }


def _component(name: str, version: str = "", **more: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}" + (f"@{version}" if version else "")
    versioned = {"version": version} if version else {}
    return {"type": "library", "name": name, **versioned, "purl": purl, **more}


def _of_an_extra(requirement: Requirement) -> bool:
    return requirement.marker is not None and "extra" in str(requirement.marker)


def _compiler() -> str:
    """The first line of what the compiler says about itself, ``unknown`` if there is none."""
    command = [*os.environ.get("CC", "cc").split(), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


class EggInfo(_EggInfo):  # type: ignore[misc]
    """setuptools' ``egg_info``, which also writes a wheel's metadata, with absolute links."""

    def run(self) -> None:
        """Make the links absolute, then write as ever."""
        metadata = self.distribution.metadata
        metadata.long_description = absolute_links(
            metadata.long_description,
            metadata.project_urls["Homepage"],
            f"v{metadata.version}",
        )
        super().run()


class BdistWheel(_BdistWheel):  # type: ignore[misc]
    """setuptools' ``bdist_wheel`` that adds a bill of materials."""

    def write_wheelfile(self, wheelfile_base: str, *arguments: Any, **options: Any) -> None:
        """Write the file WHEEL as ever, and the document beside it."""
        super().write_wheelfile(wheelfile_base, *arguments, **options)
        metadata = importlib.metadata.PathDistribution(Path(wheelfile_base)).metadata
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        document = bill_of_materials(metadata, _compiler(), int(epoch) if epoch else None)
        folder = Path(wheelfile_base, "sboms")
        folder.mkdir(exist_ok=True)
        (folder / SBOM).write_text(json.dumps(document, indent=2) + "\n")
