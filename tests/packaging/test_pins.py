"""Pins: constraints.txt has every version, release/requirements the hashes, and they agree."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.pins import FOLDER, requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = pytest.mark.parametrize("name", sorted(requirements(PROJECT)))
PINNED = re.compile(r"([A-Za-z0-9][\w.-]*)==(\S+)(?: ; (.+?))?(?: \\)?")


def constraints():
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines)}


def pins(name):
    """Version and hashes of each package of a file."""
    found = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("#"):
            continue
        if match := PINNED.fullmatch(line):
            hashes = []
            found[canonicalize_name(match[1])] = (match[2], hashes)
        else:
            match = re.fullmatch(r" +--hash=(sha256:[0-9a-f]{64})(?: \\)?", line)
            assert match, f"{name}: neither a pin nor a hash, perhaps an address: {line}"
            hashes.append(match[1])
    return found


def closure(wanted):
    """What these requirements need here, by the metadata of what is installed."""
    found, todo = set(), [Requirement(one) for one in wanted]
    while todo:
        one = todo.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in found:
            continue
        found.add(key)
        for line in importlib.metadata.requires(one.name) or []:
            needed = Requirement(line)
            extras = one.extras or {""}
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                todo.append(needed)
    return {name for name, _ in found}


def test_constraints_are_sorted_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!]+", line)] == []
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].lower())
    assert len(constraints()) == len(lines), "a package is pinned twice"


@FILES
def test_hashed_pins_are_those_of_the_constraints(name):
    pinned, found = constraints(), pins(name)
    assert {one: version for one, (version, _) in found.items()} == {
        one: pinned.get(one, "no constraint") for one in found
    }, "run release/pins.py"
    assert [one for one, (_, hashes) in found.items() if not hashes] == []


@FILES
def test_hashed_pins_have_what_is_asked_for(name):
    _, wanted = requirements(PROJECT)[name]
    asked = {canonicalize_name(Requirement(one).name) for one in wanted}
    assert asked <= set(pins(name)), "run release/pins.py"


def test_the_image_gets_the_closure_of_what_a_node_needs_and_nothing_else():
    _, wanted = requirements(PROJECT)["image.txt"]
    assert closure(wanted) == set(pins("image.txt"))


def test_the_image_installs_nothing_without_a_hash():
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [
        part
        for line in lines
        if line.startswith("RUN")
        for part in line.split("&&")
        if re.search(r"\bpip\b.* install ", part)
    ]
    assert len(installs) == 3
    assert [
        one for one in installs if "--require-hashes" not in one and "/tmp/wheel/" not in one
    ] == []
