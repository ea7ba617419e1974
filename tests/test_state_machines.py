"""Every core that docs/architecture.md lists has the shape of ``kept.state_machine``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct

from kept.storage.types import TopicPartition

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
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


def members(annotation: Any) -> Iterator[type]:
    """The classes of a union, or of a tuple of any."""
    if arguments := [each for each in get_args(annotation) if each is not ...]:
        for each in arguments:
            yield from members(each)
    else:
        yield annotation


@pytest.mark.parametrize("name", [name for name in listed() if name not in RAW_NODES])
def test_events_and_effects_are_immutable_data(name):
    hints = get_type_hints(core(name).step)
    event, effects = ([*members(hints[given])] for given in ("event", "return"))
    assert len(event) > 1 and effects
    for cls in {*event, *effects} - {TopicPartition}:
        if listed()[name].startswith("client/"):
            assert is_dataclass(cls) and cls.__dataclass_params__.frozen, cls
        else:
            assert issubclass(cls, Struct) and cls.__struct_config__.frozen, cls


def test_every_class_of_that_shape_is_on_the_page():
    """But for shells, whose methods have the names of their core's."""
    cores = {
        cls.name
        for folder in ("storage", "compaction", "replication", "cluster", "client", "node")
        for path in (ROOT / folder).rglob("*.py")
        for cls in ast.parse(path.read_text()).body
        if isinstance(cls, ast.ClassDef) and returns_effects(cls)
    }
    assert cores - {"ManifestCore"} == listed().keys() - RAW_NODES
    assert "`ManifestCore`" in LISTED


def returns_effects(cls: ast.ClassDef) -> bool:
    """Whether its ``step`` and its ``tick`` return something."""
    methods = {each.name: each for each in cls.body if isinstance(each, ast.FunctionDef)}
    found = [methods[name].returns for name in ("step", "tick") if name in methods]
    return len(found) == 2 and not any(getattr(each, "value", "") is None for each in found)


@pytest.mark.parametrize("name", sorted(RAW_NODES))
def test_a_raw_node_has_the_shape_of_etcds(name):
    cls = core(name)
    collects, concludes = ("work", "done") if name == "MetadataNode" else ("ready", "advance")
    assert parameters(cls.tick) == ["self"]
    assert parameters(getattr(cls, collects)) == ["self"]
    assert len(parameters(getattr(cls, concludes))) == 2
    assert parameters(cls.check_invariants) == ["self"]
