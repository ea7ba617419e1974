"""What a registry shows of the package, its source archive, and its bill of materials."""

from __future__ import annotations

import email
import importlib.metadata
import json
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from setuptools import Distribution

from kept.package_metadata import SBOM, BdistWheel, absolute_links, bill_of_materials

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta; build_meta.build_sdist({!r})"
HOME = "https://example.org/kept"
PLANTED = (
    "deploy/notes.txt~",
    "docs/.DS_Store",
    "docs/node_modules/left/pad.js",
    "node/proto/broker_pb2.py",
    "storage/records/_kernel.abi3.so",
    "tests/__pycache__/conftest.cpython-311.pyc",
    "tests/tools/cache/kafka.jar",
)
"""What work in a tree leaves behind."""
ADDED = {"PKG-INFO", "setup.cfg"}
"""By setuptools, beside ``kept_log.egg-info``."""
LEFT_OUT = {".ci/run", ".gitattributes", ".gitignore"}


def tracked() -> dict[str, bool]:
    """Files that git knows, and whether each is a link."""
    listed = subprocess.run(
        ["git", "ls-files", "-s", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = (line.partition("\t") for line in listed.stdout.split("\0") if line)
    return {path: mode.startswith("120000") for mode, _, path in rows}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source archive of a copy of this tree in which somebody has worked."""
    tree = tmp_path_factory.mktemp("tree")
    for name, is_link in tracked().items():
        if is_link or not (ROOT / name).exists():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).symlink_to(ROOT / name)
    for name in PLANTED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("stray\n")
    out = tree / "out"
    subprocess.run(
        [sys.executable, "-c", BUILD.format(str(out))], cwd=tree, check=True, capture_output=True
    )
    (made,) = out.iterdir()
    return made


def test_the_source_archive_has_every_file_of_the_repository_and_no_other(sdist):
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        assert all(member.isfile() for member in members)
        names = {str(PurePosixPath(*PurePosixPath(m.name).parts[1:])) for m in members}
    names = {name for name in names if not name.startswith("kept_log.egg-info/")}
    wanted = {name for name, is_link in tracked().items() if not is_link and (ROOT / name).exists()}
    assert names == (wanted - LEFT_OUT) | ADDED


def test_a_registry_shows_links_that_lead_somewhere(sdist):
    with tarfile.open(sdist) as archive:
        (name,) = [n for n in archive.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO")]
        found = archive.extractfile(name)
        assert found is not None
        metadata = email.message_from_bytes(found.read())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home = project["urls"]["Homepage"]
    shown = metadata.get_payload()
    pages = f"{home}/blob/v{project['version']}/"
    assert pages in shown
    assert absolute_links(shown, HOME, "v0") == shown, "a relative link is left"
    linked = [rest.split(")")[0].split("#")[0] for rest in shown.split(pages)[1:]]
    assert [path for path in linked if not (ROOT / path).exists()] == []
    assert {label.partition(",")[0] for label in metadata.get_all("Project-URL")} == {
        "Changelog",
        "Documentation",
        "Homepage",
        "Issues",
        "Security",
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("see [docs](docs/a.md#b), or", f"see [docs]({HOME}/blob/v1/docs/a.md#b), or"),
        ("[x](./LICENSE)", f"[x]({HOME}/blob/v1/LICENSE)"),
        ("![a log](docs/a.svg)", f"![a log]({HOME}/raw/v1/docs/a.svg)"),
        ('<img src="docs/a.svg">', f'<img src="{HOME}/raw/v1/docs/a.svg">'),
        ('<a href="docs/a.md">', f'<a href="{HOME}/blob/v1/docs/a.md">'),
        (
            "[![a](docs/a.svg)](docs/a.md)",
            f"[![a]({HOME}/raw/v1/docs/a.svg)]({HOME}/blob/v1/docs/a.md)",
        ),
        ("[below](#below), [there](https://x.org/y)", "[below](#below), [there](https://x.org/y)"),
        ("mail [us](mailto:a@b.org)", "mail [us](mailto:a@b.org)"),
    ],
)
def test_links_become_absolute(text, wanted):
    assert absolute_links(text, HOME, "v1") == wanted


def test_the_bill_of_materials_names_what_is_required_and_what_generated_code():
    metadata = importlib.metadata.metadata("kept-log")
    document = bill_of_materials(metadata, "gcc 12", 1_700_000_000)
    assert bill_of_materials(metadata, "gcc 12", 1_700_000_000) == document
    assert bill_of_materials(metadata, "gcc 13", None)["serialNumber"] != document["serialNumber"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    itself = document["metadata"]["component"]
    assert (itself["name"], itself["version"]) == ("kept-log", project["version"])
    assert itself["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    by_scope = {
        scope: [one["name"] for one in document["components"] if one["scope"] == scope]
        for scope in ("required", "optional")
    }
    assert len(by_scope["required"]) == len(project["dependencies"])
    assert set(by_scope["optional"]) >= {"pyspark", "testcontainers", "trustme"}
    (grpcio,) = [one for one in document["components"] if one["name"] == "grpcio"]
    assert grpcio["properties"] == [{"name": "kept:requirement", "value": "grpcio<2,>=1.80"}]
    assert "version" not in grpcio, "an installer chooses it"
    tools = {one["name"]: one["version"] for one in document["metadata"]["tools"]["components"]}
    assert tools["C compiler"] == "gcc 12"
    assert tools["Cython"] == importlib.metadata.version("Cython")
    references = [one["bom-ref"] for one in document["components"]]
    assert len(set(references)) == len(references)
    assert document["dependencies"][0] == {"ref": itself["bom-ref"], "dependsOn": references}


def test_a_wheel_has_its_bill_of_materials(tmp_path):
    """It is written with the file WHEEL, which no wheel is without."""
    folder = tmp_path / "kept_log.dist-info"
    folder.mkdir()
    # Where the source tree is on the path, its egg-info is found first: no file METADATA there.
    metadata = importlib.metadata.metadata("kept-log")
    (folder / "METADATA").write_text(metadata.as_string())
    wheel = BdistWheel(Distribution({"name": "kept-log"}))
    wheel.ensure_finalized()
    wheel.write_wheelfile(str(folder))
    assert (folder / "WHEEL").exists()
    document = json.loads((folder / "sboms" / SBOM).read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "kept-log"
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert options["cmdclass"]["bdist_wheel"] == "kept.package_metadata.BdistWheel"
