"""Every core that docs/architecture.md lists has the shape of ``kept.state_machine``."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text()
LISTED = PAGE.split("## Pure cores, thin shells")[1].split("\n## ")[0]
RAW_NODES = {"RaftCore", "MetadataNode"}
"""In the shape of etcd's RawNode instead: docs/adr/0011-raft-as-rawnode.md."""


def listed() -> dict[str, str]:
    """The file of each core that the page names."""
    entries = re.split(r"^- ", LISTED, flags=re.M)[1:]
    return {
        name: entry.split("*File*:")[1].split("`")[1]
        for entry in entries
        for name in re.findall(r"^`(\w+)`", entry)
    }


def core(name: str) -> Any:
    module = listed()[name].removesuffix(".py").replace("/", ".")
    return getattr(import_module(f"kept.{module}"), name)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_page_lists_the_cores():
    assert len(listed()) > 10
    assert set(listed()) >= RAW_NODES


@pytest.mark.parametrize("name", [name for name in listed() if name not in RAW_NODES])
def test_a_core_has_the_one_shape(name):
    cls = core(name)
    assert parameters(cls.step) == ["self", "event", "now_ms"]
    assert parameters(cls.tick) == ["self", "now_ms"]
    assert parameters(cls.check_invariants) == ["self"]
    assert not [
        called
        for called, given in inspect.signature(cls).parameters.items()
        if "Callable" in str(given.annotation)
    ], "it keeps nothing that can be called"


@pytest.mark.parametrize("name", sorted(RAW_NODES))
def test_a_raw_node_has_the_shape_of_etcds(name):
    cls = core(name)
    collects, concludes = ("work", "done") if name == "MetadataNode" else ("ready", "advance")
    assert parameters(cls.tick) == ["self"]
    assert parameters(getattr(cls, collects)) == ["self"]
    assert len(parameters(getattr(cls, concludes))) == 2
    assert parameters(cls.check_invariants) == ["self"]
