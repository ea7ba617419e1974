"""docs/image.md: its commands run, and what it says of the image is so."""

from __future__ import annotations

import re
import subprocess

import pytest

import kept
from kept.testing.container import IMAGE
from kept.testing.ports import free_port
from release.release import write_sums
from tests.deploy.containers import docker, image
from tests.deploy.files import ROOT
from tests.docs.blocks import LOCAL_PORTS, Command, given_to, run, typed

PAGE = ROOT / "docs" / "image.md"
CONTAINER = "kept-alone"


def block_with(command: str) -> list[Command]:
    """The commands of the block that has that one, with the image of this checkout, which
    ``tests.deploy.containers`` builds as the page says.
    """
    (found,) = [
        list(typed(text.replace(IMAGE, image()), "docs/image.md", line))
        for _, text, line in given_to("tests/deploy/test_image_page.py", PAGE)
        if command in text
    ]
    return found


def test_every_page_and_file_builds_and_starts_the_image_that_tests_start():
    assert f"kept:{kept.__version__}" == IMAGE
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").iterdir(), ROOT / "README.md"]
    texts = {path: path.read_text() for path in pages if path.is_file()}
    tags = [
        (path.name, tag)
        for path, text in texts.items()
        for tag in re.findall(r"docker build[^\n`]*? -t ([^\s`]+)", text)
    ]
    assert ("image.md", IMAGE) in tags
    assert [one for one in tags if one[1] != IMAGE] == []
    started = {
        name
        for text in texts.values()
        for name in re.findall(r"\bimage: (?:\$\{IMAGE:-)?(kept:[\w.]+)", text)
    }
    assert started == {IMAGE}


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(700)
def test_its_commands_run(tmp_path):
    typed_here = block_with(f"docker run -d --name {CONTAINER}")
    assert len(typed_here) > 4
    try:
        run(typed_here, tmp_path, free_port(LOCAL_PORTS), 200)
    finally:
        docker("rm", "-f", "-v", CONTAINER, check=False)
        docker("volume", "rm", "-f", CONTAINER, check=False)


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(700)
def test_an_image_that_came_as_an_archive_is_checked_and_loaded(tmp_path):
    """With the image of this checkout in the place of a release's: it names no commit."""
    typed_here = block_with("docker load")
    text = "\n".join(command.text for command in typed_here)
    (archive,) = re.findall(r"docker load -i (\S+\.tar\.gz)$", text, re.M)
    (bill,) = re.findall(r"diff - (\S+\.cdx\.json)$", text, re.M)
    save = f"set -o pipefail; docker save {image()} | gzip -1 >{archive}"
    subprocess.run(["bash", "-c", save], cwd=tmp_path, check=True, timeout=300)
    shown = docker("run", "--rm", "--entrypoint", "cat", image(), "/opt/kept/kept.cdx.json")
    (tmp_path / bill).write_text(shown)
    write_sums(tmp_path)
    run(typed_here, tmp_path, 1, 300)
