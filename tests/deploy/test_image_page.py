"""docs/image.md: its commands run, and what it says of the image is so."""

from __future__ import annotations

import re

import pytest

import kept
from kept.testing.container import IMAGE
from kept.testing.ports import free_port
from tests.deploy.containers import docker, image
from tests.deploy.files import ROOT
from tests.docs.blocks import LOCAL_PORTS, given_to, run, typed

PAGE = ROOT / "docs" / "image.md"
BUILD = "docker build"
CONTAINER = "kept-alone"


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
    name = image()
    typed_here = [
        command._replace(text=command.text.replace(IMAGE, name))
        for _, text, line in given_to("tests/deploy/test_image_page.py", PAGE)
        for command in typed(text, "docs/image.md", line)
        if not command.text.startswith(BUILD)
    ]
    assert len(typed_here) > 4
    try:
        run(typed_here, tmp_path, free_port(LOCAL_PORTS), 200)
    finally:
        docker("rm", "-f", "-v", CONTAINER, check=False)
        docker("volume", "rm", "-f", CONTAINER, check=False)
